"""The stage that makes a plain ONNX graph of a variant, for targets that compile one: standard operators, own codes.

One graph serves engines for several devices, and needs other libraries than their compilers do.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from pipelines.config import Strict
from pipelines.engine.ort_check import Fidelity, compare
from pipelines.engine.plain_check import Runner, differing
from pipelines.engine.plain_codes import fill
from pipelines.engine.plain_nodes import narrowed, skeleton
from pipelines.errors import StageFailed
from pipelines.flow.progress import report
from pipelines.flow.store import Fact
from pipelines.intake.lean import without_unused
from pipelines.quantize.codes import Codes
from pipelines.quantize.packing import QuantizedModules, check_declared_format, open_quantized
from pipelines.quantize.reference import load_tokens
from pipelines.quantize.rounding import Rounding, rounding_of
from pipelines.quantize.shards import quantization_config
from pipelines.quantize.stored import scheme_of

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    from numpy.typing import NDArray

MODEL, DATA = "model.onnx", "model.onnx.data"
STEPS = 4


class PlainGraphConfig(Strict):
    """What the graph computes in, and how close it must stay to the checkpoint."""

    dtype: Literal["bfloat16", "float16"] = Field(
        default="bfloat16",
        description="of what is not quantized; float16 holds no number above 65504, which some models need",
    )
    max_abs_dlogit: float = Field(
        default=1e-3, gt=0, description="from the checkpoint's logits, where inputs of layers are not rounded"
    )
    max_kl: float = Field(default=1e-2, gt=0, description="mean divergence in nats, where inputs of layers are rounded")
    check_tokens: int = Field(default=512, ge=4, description="of the first held-out window")


@without_unused()
def run(config: PlainGraphConfig, out: Path, *, variant: Path, reference: Path) -> dict[str, Fact]:
    """Write model.onnx, and hold it to the variant.

    Its logits are checked on the same graph in float32; the one written has the same nodes and computes in `dtype`.

    Raises:
        StageFailed: a layer cannot be carried, a constant differs in one bit, logits are out of bounds.
    """
    check_declared_format(variant)
    quantized = open_quantized(variant)
    roundings = _roundings(variant, quantized)
    report(0, STEPS, "graph")
    plain = skeleton(variant)
    report(1, STEPS, "graph")
    with tempfile.TemporaryDirectory(prefix=".check-", dir=out) as scratch:
        wide = Path(scratch) / MODEL
        _write(plain.clone(), wide, quantized, "float32", roundings)
        report(2, STEPS, "graph")
        fidelity = _compare(config, wide, variant, load_tokens(reference)[0], rounds=bool(roundings))
    report(3, STEPS, "graph")
    _write(narrowed(plain, config.dtype), out / MODEL, quantized, config.dtype, roundings)
    report(STEPS, STEPS, "graph")
    return {
        "dtype": config.dtype,
        "opset": plain.opset_imports[""],
        "nodes": plain.graph.num_nodes(),
        "quantized_modules": len(quantized),
        "rounded_modules": len(roundings),
        "precision": _precision(config, quantized, roundings),
        "native_note": _native_note(variant, roundings),
        "weights_equal": True,
        **asdict(fidelity),
        "size_bytes": sum((out / name).stat().st_size for name in (MODEL, DATA)),
    }


def _write(
    model: ir.Model, file: Path, quantized: QuantizedModules, dtype: str, roundings: dict[str, Rounding]
) -> None:
    import onnx_ir as ir

    fill(model.graph, quantized, dtype, roundings)
    ir.save(model, str(file), external_data=DATA)
    wrong = sorted(differing(file, quantized, dtype))
    if wrong:
        raise StageFailed(f"{file}: {len(wrong)} tensors differ from the variant's: {', '.join(wrong[:5])}")


def _roundings(variant: Path, quantized: QuantizedModules) -> dict[str, Rounding]:
    """The layers whose inputs are rounded to 8-bit floats at a fixed scale; graphs say no other rounding."""
    config = quantization_config(variant)
    found = {name: rounding_of(quantized.shards, name, scheme_of(quantized.shards, name, config)) for name in quantized}
    return {name: how for name, how in found.items() if how is not None and how.kind == "float8"}


def _compare(config: PlainGraphConfig, file: Path, variant: Path, ids: NDArray[np.int32], *, rounds: bool) -> Fidelity:
    """Run the graph with and without cache, and hold it to the checkpoint's logits."""
    from pipelines.quantize.reload import load, load_dense, logits

    window = ids[0, : config.check_tokens]
    wanted = logits(load(variant) if rounds else load_dense(variant, lazily=True), window[None])[0]
    runner = Runner(file, len(os.sched_getaffinity(0)))
    for how, found in (("", runner.logits(window)), (" in three calls with cache", runner.logits_by_cache(window))):
        fidelity = compare(wanted, found)
        far = fidelity.kl_mean > config.max_kl if rounds else not fidelity.max_abs_dlogit <= config.max_abs_dlogit
        if far:
            bound = "engine.graph.max_kl" if rounds else "engine.graph.max_abs_dlogit"
            raise StageFailed(
                f"the graph's logits{how} differ from the checkpoint's by up to {fidelity.max_abs_dlogit:.3g} "
                f"(KL {fidelity.kl_mean:.3g}, same top token {fidelity.top1:.1%}; bound: {bound})"
            )
    return fidelity


def _precision(config: PlainGraphConfig, quantized: QuantizedModules, roundings: dict[str, Rounding]) -> str:
    """Stored weights of the quantized layers x what they are multiplied with."""
    kinds = {f"int{layer.bits}" if isinstance(layer, Codes) else "float8" for layer in quantized.values()}
    inputs = {"float8"} if roundings else set()
    inputs |= {config.dtype} if len(roundings) < len(quantized) or not quantized else set()
    return f"{'/'.join(sorted(kinds)) or config.dtype} x {'/'.join(sorted(inputs))}"


def _native_note(variant: Path, roundings: dict[str, Rounding]) -> str:
    """What of the scheme the graph does not say, "" where it says all."""
    config = quantization_config(variant)
    groups = (config.get("config_groups") or {}).values()
    asked = any((group or {}).get("input_activations") for group in groups)
    return "activations are not quantized, though the scheme asks for it" if asked and not roundings else ""
