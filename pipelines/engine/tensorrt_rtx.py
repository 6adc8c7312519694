"""TensorRT-RTX: a plain ONNX graph compiled ahead of time, without a GPU, for consumer and workstation GPUs.

It is not TensorRT-LLM and shares no engine with it. Nothing serves its engines here, so they are built, and never
scored, probed or promoted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from pipelines.config import Strict
from pipelines.engine.capabilities import Capabilities
from pipelines.engine.card import EngineCard, end_tokens
from pipelines.engine.plain_graph import MODEL, PlainGraphConfig
from pipelines.engine.rtx_preflight import preflight
from pipelines.errors import EndpointError, Problem, StageFailed
from pipelines.flow.progress import report
from pipelines.flow.store import Fact, facts
from pipelines.quantize.carry import carry_over
from pipelines.quantize.scheme import Scheme

__all__ = ["TensorrtRtxConfig", "build", "capabilities", "misplaced", "preflight", "redundant", "serve"]

ENGINE = "tensorrt-rtx.engine"
UNSERVED = "TensorRT-RTX has no server of its own and no engine of it has run here: built, not judged"
Capability = Literal[75, 80, 86, 89, 120, 121]
Shapes = tuple[list[int], list[int], list[int]]


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
    """Compile the graph. Runs in the library's toolchain; two builds of the same graph are equal byte for byte.

    Raises:
        StageFailed: the library does not take the graph, or cannot compile it for these GPUs, with its own words.
    """
    import tensorrt_rtx

    del reference  # the graph was held to it
    known = facts(graph)
    report(0, 1, "engine")
    compiled = _compile(config, graph / MODEL)
    (out / ENGINE).write_bytes(compiled)
    carry_over(variant, out)
    card = _describe(config, out, variant, str(known["native_note"] or ""))
    report(1, 1, "engine")
    return {
        "target": config.target,
        "library": "tensorrt-rtx",
        "library_version": tensorrt_rtx.__version__,
        "compute_capabilities": ",".join(map(str, config.compute_capabilities)),
        "native": card.native,
        "native_note": card.native_note,
        "deserialized": False,
        "smoke_answers": 0,
        "precision": known["precision"],
        "weights_equal": known["weights_equal"],
        "engine_bytes": compiled.nbytes,
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


def _compile(config: TensorrtRtxConfig, model: Path) -> Any:
    """The engine as the library holds it, a buffer of `nbytes`."""
    import tensorrt_rtx as trt

    logger = _logger()
    builder = trt.Builder(logger)
    network = builder.create_network()
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        said = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise StageFailed(f"{model}: TensorRT-RTX does not take this graph: {said or logger.said()}")
    options = builder.create_builder_config()
    options.num_compute_capabilities = len(config.compute_capabilities)
    for index, sm in enumerate(config.compute_capabilities):
        options.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
    if config.optimization_level is not None:
        options.builder_optimization_level = config.optimization_level
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        given = network.get_input(index)
        profile.set_shape(given.name, *shapes(config, given.name, list(given.shape)))
    options.add_optimization_profile(profile)
    compiled = builder.build_serialized_network(network, options)
    if compiled is None:
        sms = ", ".join(f"SM {sm}" for sm in config.compute_capabilities)
        raise StageFailed(f"TensorRT-RTX cannot compile {model} for {sms}: {logger.said()}")
    return compiled


def shapes(config: TensorrtRtxConfig, name: str, shape: Sequence[int]) -> Shapes:
    """The least, usual and largest shape of an input: decoding one token after half a sequence is the usual case.

    Free dimensions are -1: batch first, then tokens, or of a cache the tokens before.
    """
    tokens = {"least": 1, "usual": 1, "most": config.max_prompt}
    before = {"least": 0, "usual": config.max_length // 2, "most": config.max_length - 1}
    batch = {"least": 1, "usual": 1, "most": config.max_batch_size}

    def at(corner: str) -> list[int]:
        if name.startswith("past_key_values."):
            free = [batch[corner], before[corner]]
        elif name == "attention_mask":
            free = [batch[corner], tokens[corner] + before[corner]]
        else:
            free = [batch[corner], tokens[corner]]
        return [free.pop(0) if size == -1 else size for size in shape]

    return at("least"), at("usual"), at("most")


def _logger() -> Any:
    """A logger that keeps errors for our own message; warnings and less go to the step's log."""
    import tensorrt_rtx as trt

    class Keeping(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)
            if severity != trt.ILogger.Severity.VERBOSE:
                print(message)

        def said(self) -> str:
            return "; ".join(self.errors) or "it did not say why"

    return Keeping()
