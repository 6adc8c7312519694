"""The embedded target: ONNX Runtime GenAI on this machine's CPU, with the variant's own codes in its graph.

The engine is held to the checkpoint it came from before it counts as built.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pipelines.config import Strict
from pipelines.divergence import figures
from pipelines.divergence.figures import Arithmetic, Row, summarize
from pipelines.divergence.positions import Positions
from pipelines.engine.capabilities import Capabilities
from pipelines.engine.card import EngineCard
from pipelines.engine.ort_builder import build_graph, copy_tokenizer
from pipelines.engine.ort_check import Fidelity, check_graph, differing_weights, engine_logits, measure, open_engine
from pipelines.engine.ort_graph import EngineWeights, carriable
from pipelines.engine.ort_preflight import preflight, redundant
from pipelines.errors import Problem, StageFailed
from pipelines.flow.progress import report
from pipelines.flow.store import Fact, facts
from pipelines.intake.lean import without_unused
from pipelines.quantize.packing import Codes, QuantizedModules, check_declared_format, open_quantized
from pipelines.quantize.reference import load_tokens
from pipelines.quantize.shards import quantization_config
from pipelines.quantize.stored import rounds_inputs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["OrtGenaiConfig", "build", "capabilities", "misplaced", "preflight", "redundant", "serve"]

MODEL = "model.onnx"
STEPS = 5


class OrtGenaiConfig(Strict):
    """How the graph computes, and how close it must stay to the checkpoint."""

    target: Literal["ort_genai"] = "ort_genai"
    accuracy_level: Literal[1, 4] = 1
    max_length: int = Field(2048, ge=16)
    threads: int | None = Field(None, ge=1)
    max_abs_dlogit: float = Field(1e-3, gt=0)
    check_tokens: int = Field(512, ge=2)
    max_ppl_ratio: float = Field(3.0, gt=1)
    max_ppl_drift: float = Field(1.1, gt=1)


@dataclass(frozen=True, slots=True)
class Survey:
    """What a variant's quantized layers are: widths of integer codes, and how many hold floats."""

    layers: int
    bits: tuple[int, ...]
    floats: int


@dataclass(frozen=True, slots=True)
class Perplexities:
    """On the same held-out windows: the engine, the variant as transformers ran it, and the base.

    An engine that leaves roundings out (of activations, say) may come out anywhere between base and variant.
    """

    engine: float
    variant: float
    base: float
    emulated: bool

    def drift(self) -> float:
        """How far the engine is from the variant, as a factor of at least 1."""
        near = min(max(self.engine, min(self.base, self.variant)), self.variant) if self.emulated else self.variant
        return max(self.engine / near, near / self.engine)


def serve(engine: Path, port: int, threads: int) -> tuple[list[str], dict[str, str]]:
    """The command of the OpenAI-compatible server for an engine, and what it adds to the environment."""
    where = ["--host", "127.0.0.1", "--port", str(port)]
    argv = [sys.executable, "-m", "pipelines.engine.host", str(engine), *where, "--threads", str(threads)]
    return argv, {"OMP_NUM_THREADS": str(threads)}


def misplaced(engine: Path) -> list[Problem]:
    """The runtime chooses kernels when it loads, so an engine runs wherever its toolchain does."""
    del engine
    return []


def capabilities(engine: Path) -> Capabilities:
    """Our own host can do all that an endpoint may."""
    del engine
    return Capabilities(logprob_start=True, token_ids=True, metrics="/metrics")


@without_unused()
def build(config: OrtGenaiConfig, out: Path, *, variant: Path, reference: Path) -> dict[str, Fact]:
    """Export a variant with its own codes, then hold the engine to it.

    Memory peaks at the unquantized tensors in float32 plus, per quantized layer, one decoded copy and all scales;
    for a 7-billion-parameter model in W4 that is about 5 GB, unquantized about 28 GB. Written: the engine, once.

    Raises:
        StageFailed: a layer cannot be carried, a weight differs in one bit, logits or perplexity are out of bounds.
    """
    from pipelines.quantize.reload import load_dense, logits

    check_declared_format(variant)
    quantized = open_quantized(variant)
    survey = _survey(variant, quantized)
    ids = load_tokens(reference)[0]
    report(0, STEPS, "engine")
    loaded = load_dense(variant, lazily=True)
    wanted = logits(loaded, ids[:1, : config.check_tokens])[0]
    report(1, STEPS, "engine")
    nodes = build_graph(variant, out, loaded.model, quantized, config.accuracy_level)
    del loaded
    card = _describe(config, out, variant, survey)
    report(2, STEPS, "engine")
    weights = EngineWeights(out / MODEL)
    check_graph(weights)
    _refuse_differing(out, sorted(differing_weights(weights, nodes, quantized)))
    report(3, STEPS, "engine")
    return {
        "target": config.target,
        "native": card.native,
        "native_note": card.native_note,
        "weights_equal": True,
        **_measure(config, out, ids, wanted, reference, emulated=not card.native),
        "size_bytes": sum(p.stat().st_size for p in out.iterdir() if p.is_file()),
        "bytes_per_token": weights.bytes_per_token(),
        "accuracy_level": config.accuracy_level,
        "arithmetic": _arithmetic(config),
        "precision": _precision(config, survey),
        "carried_modules": survey.layers - survey.floats,
    }


def _measure(
    config: OrtGenaiConfig,
    out: Path,
    ids: NDArray[np.int32],
    wanted: NDArray[np.float32],
    reference: Path,
    *,
    emulated: bool,
) -> dict[str, float]:
    """Run the engine on the held-out windows and hold it to its bounds. `wanted` are logits of the first's start."""
    engine = open_engine(out, config.threads or len(os.sched_getaffinity(0)))
    first = engine_logits(engine, ids[0])
    fidelity, positions = measure(wanted, first[: len(wanted)], ids[0])
    _refuse_far(config, fidelity)
    figures.write(out, [_engine_loss(config, positions)])
    report(4, STEPS, "engine")
    own, of_base = _fact(reference, "perplexity"), _fact(reference, "base_perplexity")
    found = Perplexities(_perplexity(engine, ids, first), own, of_base, emulated)
    _refuse_noise(config, found)
    report(STEPS, STEPS, "engine")
    return {**asdict(fidelity), "perplexity": found.engine, "base_perplexity": found.base}


def _engine_loss(config: OrtGenaiConfig, positions: Positions) -> Row:
    """The engine against the checkpoint as it is read here: weights dequantized, activations as computed."""
    between = "variant checkpoint, dequantized, transformers float32, and engine, full logits"
    found = summarize(positions, exact=True)
    return Row(loss="engine", text="held_out", between=between, arithmetic=_arithmetic(config), figures=found)


def _arithmetic(config: OrtGenaiConfig) -> Arithmetic:
    return "int8_activations" if config.accuracy_level == 4 else "float32"


def _describe(config: OrtGenaiConfig, out: Path, variant: Path, survey: Survey) -> EngineCard:
    """Write engine.json and the tokenizer, and set lengths and end tokens in the runtime's own configuration."""
    runtime_path = out / "genai_config.json"
    runtime = json.loads(runtime_path.read_text())
    ends = _end_tokens(variant, runtime["model"]["eos_token_id"])
    length = min(config.max_length, runtime["model"]["context_length"])
    runtime["model"]["eos_token_id"] = ends
    runtime["search"] |= {"max_length": length, "do_sample": False}
    runtime_path.write_text(json.dumps(runtime, indent=2) + "\n")
    copy_tokenizer(variant, out, length)
    note = _native_note(variant, survey)
    card = EngineCard(
        target=config.target,
        native=not note,
        native_note=note,
        max_length=length,
        eos_token_ids=ends,
        bos_token_id=json.loads((variant / "config.json").read_text()).get("bos_token_id"),
        vocab_size=runtime["model"]["vocab_size"],
        model_id=f"{runtime['model']['type']}-{variant.name}",
    )
    (out / "engine.json").write_text(card.model_dump_json(indent=2) + "\n")
    return card


def _end_tokens(variant: Path, otherwise: int | list[int]) -> list[int]:
    """The checkpoint's own end tokens: generation_config.json first, as transformers has it, then config.json."""
    for name in ("generation_config.json", "config.json"):
        path = variant / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return [int(i) for i in found] if isinstance(found, list) else [int(found)]
    return list(otherwise) if isinstance(otherwise, list) else [otherwise]


def _native_note(variant: Path, survey: Survey) -> str:
    """What of the scheme this engine only emulates, "" where it computes as the scheme says."""
    notes = ["float weights of 4 or 8 bits are stored and multiplied as float32"] if survey.floats else []
    config = quantization_config(variant)
    if rounds_inputs(config):
        notes.append("activations are not quantized, though the scheme asks for it")
    if config.get("kv_cache_scheme"):
        notes.append("keys and values are cached in float32, though the scheme asks for FP8")
    return "; ".join(notes)


def _precision(config: OrtGenaiConfig, survey: Survey) -> str:
    """Stored weights of the quantized layers x what they are multiplied with."""
    widths = "/".join(map(str, survey.bits))
    return f"int{widths} x {'int8' if config.accuracy_level == 4 else 'float32'}" if widths else "float32 x float32"


def _survey(variant: Path, quantized: QuantizedModules) -> Survey:
    """Look at every quantized layer once.

    Raises:
        StageFailed: some cannot be carried, with the reasons.
    """
    told, bits, floats = [], set(), 0
    for name in quantized:
        layer = quantized[name]
        if not isinstance(layer, Codes):
            floats += 1
            continue
        bits.add(layer.bits)
        if reason := carriable(layer.bits, layer.group_size, layer.codes.shape[1]):
            told.append(f"{name}: {reason}")
    if told:
        raise StageFailed(f"{variant}: {len(told)} layers cannot be carried into MatMulNBits; {'; '.join(told[:5])}")
    return Survey(len(quantized), tuple(sorted(bits)), floats)


def _refuse_differing(out: Path, nodes: list[str]) -> None:
    if nodes:
        raise StageFailed(f"{out}: {len(nodes)} weights differ from the variant's: {', '.join(nodes[:5])}")


def _refuse_far(config: OrtGenaiConfig, fidelity: Fidelity) -> None:
    if config.accuracy_level == 1 and not fidelity.max_abs_dlogit <= config.max_abs_dlogit:
        raise StageFailed(
            f"logits differ from the checkpoint's by up to {fidelity.max_abs_dlogit:.3g} with exact products, "
            f"more than {config.max_abs_dlogit:g} (KL {fidelity.kl_mean:.3g}, same top token {fidelity.top1:.1%}; "
            "bound: engine.max_abs_dlogit)"
        )


def _refuse_noise(config: OrtGenaiConfig, found: Perplexities) -> None:
    shown = (
        f"perplexity {found.engine:.4g} of the engine, {found.variant:.4g} of the variant, {found.base:.4g} of the base"
    )
    if not found.engine <= config.max_ppl_ratio * found.base:
        raise StageFailed(f"{shown}: more than {config.max_ppl_ratio:g} times the base's (bound: engine.max_ppl_ratio)")
    if not found.drift() <= config.max_ppl_drift:
        raise StageFailed(
            f"{shown}: engine and variant differ by more than a factor {config.max_ppl_drift:g} "
            "(bound: engine.max_ppl_drift)"
        )


def _perplexity(engine: Any, ids: NDArray[np.int32], first: NDArray[np.float32]) -> float:
    import numpy as np

    from pipelines.quantize.reload import next_token_logprobs, perplexity

    rest = [next_token_logprobs(engine_logits(engine, row), row) for row in ids[1:]]
    return perplexity(np.stack([next_token_logprobs(first, ids[0]), *rest]))


def _fact(artifact: Path, name: str) -> float:
    value = facts(artifact)[name]
    if not isinstance(value, int | float):
        raise StageFailed(f"{artifact}: fact {name} is {value!r}, not a number")
    return float(value)
