"""TensorRT-RTX: a plain ONNX graph compiled ahead of time, without a GPU, for consumer and workstation GPUs.

It is not TensorRT-LLM and shares no engine with it. Nothing serves its engines here, so they are built, and never
scored, probed or promoted.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from pipelines.config import Strict
from pipelines.engine import rtx_compile
from pipelines.engine.capabilities import Capabilities
from pipelines.engine.card import EngineCard, end_tokens
from pipelines.engine.plain_graph import PlainGraphConfig
from pipelines.engine.rtx_preflight import preflight
from pipelines.errors import EndpointError, Problem, StageFailed, TransientFailure
from pipelines.flow.progress import report
from pipelines.flow.store import Fact, facts
from pipelines.flow.toolchain import version_of
from pipelines.quantize.carry import carry_over
from pipelines.quantize.scheme import Scheme

__all__ = ["TensorrtRtxConfig", "build", "capabilities", "misplaced", "preflight", "redundant", "serve"]

ENGINE = "tensorrt-rtx.engine"
UNSERVED = "TensorRT-RTX has no server of its own and no engine of it has run here: built, not judged"
Capability = Literal[75, 80, 86, 89, 120, 121]
ADDR_NO_RANDOMIZE = 0x0040000  # of personality(2)


class TensorrtRtxConfig(Strict):
    """What is compiled, for which GPUs, and the shapes that it must take."""

    target: Literal["tensorrt_rtx"] = "tensorrt_rtx"
    compute_capabilities: tuple[Capability, ...] = Field(
        default=(80, 86, 89, 120), min_length=1, description="GPUs that the engine runs on; one engine for all of them"
    )
    graph: PlainGraphConfig = PlainGraphConfig()
    max_batch_size: PositiveInt = Field(default=8, description="sequences in one call")
    max_prompt: PositiveInt = Field(default=1024, description="tokens of a sequence in one call")
    max_length: int = Field(default=2048, ge=2, description="tokens of a sequence with all that came before")
    optimization_level: int | None = Field(default=None, ge=0, le=5, description="null: the library's own")

    @model_validator(mode="after")
    def _in_order(self) -> TensorrtRtxConfig:
        if list(self.compute_capabilities) != sorted(set(self.compute_capabilities)):
            raise ValueError("compute_capabilities are given once each, in ascending order")
        if self.max_prompt > self.max_length:
            raise ValueError(f"max_prompt={self.max_prompt} is above max_length={self.max_length}")
        return self


def redundant(config: TensorrtRtxConfig, scheme: Scheme) -> str | None:
    """Every scheme is an engine of its own."""
    del config, scheme
    return None


def serve(engine: Path, port: int, threads: int) -> tuple[list[str], dict[str, str]]:
    """There is no command.

    Raises:
        EndpointError: always.
    """
    del port, threads
    raise EndpointError(f"{engine}: {UNSERVED}")


def misplaced(engine: Path) -> list[Problem]:
    """Nothing runs it, so nothing says where it could not."""
    del engine
    return []


def capabilities(engine: Path) -> Capabilities:
    """What no server can do."""
    del engine
    return Capabilities(token_prompts=False, stream=False, prompt_logprobs=False, top_logprobs=0, ignore_eos=False)


def build(config: TensorrtRtxConfig, out: Path, *, variant: Path, reference: Path, graph: Path) -> dict[str, Fact]:
    """Compile the graph. Runs in the library's toolchain; two builds of the same graph on one machine are equal
    byte for byte where the fact `reproducible` says so.

    Raises:
        StageFailed: the library does not take the graph, or cannot compile it for these GPUs, with its own words.
    """
    del reference  # the graph was held to it
    known = facts(graph)
    report(0, 1, "engine")
    reproducible = _compile(config, graph, out / ENGINE)
    carry_over(variant, out)
    card = _describe(config, out, variant, str(known["native_note"] or ""))
    report(1, 1, "engine")
    return {
        "target": config.target,
        "library": "tensorrt-rtx",
        "library_version": version_of("tensorrt-rtx-cu13"),
        "compute_capabilities": ",".join(map(str, config.compute_capabilities)),
        "native": card.native,
        "native_note": card.native_note,
        "deserialized": False,
        "smoke_answers": 0,
        "precision": known["precision"],
        "weights_equal": known["weights_equal"],
        "reproducible": reproducible,
        "engine_bytes": (out / ENGINE).stat().st_size,
        "size_bytes": sum(p.stat().st_size for p in out.iterdir() if p.is_file()),
    }


def _describe(config: TensorrtRtxConfig, out: Path, variant: Path, native_note: str) -> EngineCard:
    about = json.loads((variant / "config.json").read_text())
    card = EngineCard(
        target=config.target,
        native=not native_note,
        native_note=native_note,
        max_length=config.max_length,
        eos_token_ids=end_tokens(variant),
        bos_token_id=about.get("bos_token_id"),
        vocab_size=int(about["vocab_size"]),
        model_id=f"{about.get('model_type', 'model')}-{variant.name}",
        max_prompt=config.max_prompt,
    )
    (out / "engine.json").write_text(card.model_dump_json(indent=2) + "\n")
    return card


def _compile(config: TensorrtRtxConfig, graph: Path, engine: Path) -> bool:
    """Write the engine; say whether the same graph would give the same bytes.

    Raises:
        StageFailed: the library refused, with its words.
        TransientFailure: the compiler was ended, for want of memory say.
    """
    asked = {
        "capabilities": config.compute_capabilities,
        "optimization_level": config.optimization_level,
        "limits": {"batch": config.max_batch_size, "prompt": config.max_prompt, "length": config.max_length},
    }
    argv = [sys.executable, "-I", "-c", Path(rtx_compile.__file__).read_text()]
    fixed = _addresses_can_be_fixed()
    with engine.open("wb") as out:
        done = subprocess.run(
            argv,
            input=json.dumps(asked).encode(),
            stdout=out,
            stderr=subprocess.PIPE,
            cwd=graph,
            env={"PATH": os.defpath},
            preexec_fn=_fix_addresses if fixed else None,
            check=False,
        )
    said = done.stderr.decode(errors="replace")
    print(said)
    if done.returncode == rtx_compile.REFUSED:
        sms = ", ".join(f"SM {sm}" for sm in config.compute_capabilities)
        raise StageFailed(f"TensorRT-RTX cannot compile the graph for {sms}: {said.splitlines()[-1]}")
    if done.returncode < 0:
        raise TransientFailure(f"the compiler was ended by signal {-done.returncode}; out of memory is the usual cause")
    if done.returncode:
        raise StageFailed(f"the compiler ended with exit code {done.returncode}: {said[-500:]}")
    return fixed


def _addresses_can_be_fixed() -> bool:
    """Whether a process here may ask for addresses that are not randomized; some containers forbid it."""
    if not sys.platform.startswith("linux"):
        return False
    probe = subprocess.run([sys.executable, "-I", "-c", ""], preexec_fn=_fix_addresses, check=False)
    return probe.returncode == 0


def _fix_addresses() -> None:
    """What the child does before it becomes the compiler."""
    if ctypes.CDLL(None, use_errno=True).personality(ADDR_NO_RANDOMIZE) == -1:
        os._exit(1)
