"""Whether a built ONNX engine is the variant it was built from: the same weights to the last bit, the same logits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.divergence.positions import Positions, exact, first
from pipelines.engine.ort_graph import EngineWeights
from pipelines.errors import StageFailed
from pipelines.quantize.packing import QuantizedModules, dequantize

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How far an engine's logits are from the reference's, over the positions of one window.

    kl_mean is the mean of KL(reference || engine) in nats; top1 the share of positions with the same best token.
    """

    max_abs_dlogit: float
    kl_mean: float
    top1: float


def differing_weights(
    engine: EngineWeights, nodes: Mapping[str, tuple[str, ...]], quantized: QuantizedModules
) -> Iterator[str]:
    """Name each matrix product whose weight, as the engine's file has it, is not the variant's to the last bit."""
    import numpy as np

    for node, modules in nodes.items():
        wanted = np.concatenate([_weight(name, quantized) for name in modules])
        if not np.array_equal(wanted, engine.of(node)):
            yield node
    if EMBEDDING in engine.initializers and not np.array_equal(quantized.shards[EMBEDDING], engine.tensor(EMBEDDING)):
        yield EMBEDDING


def _weight(module: str, quantized: QuantizedModules) -> NDArray[np.float32]:
    import numpy as np

    if module in quantized:
        return dequantize(quantized[module])
    name = f"{module}.weight"
    return np.asarray(quantized.shards[name if name in quantized.shards else EMBEDDING], dtype=np.float32)


def check_graph(engine: EngineWeights) -> None:
    """Check that the graph is closed: standard nodes well formed, inputs all made, every tensor within its file.

    onnx's own whole-model check cannot be used: it knows none of ONNX Runtime's operators.

    Raises:
        StageFailed: it is not, with what is wrong first.
    """
    import onnx

    context = onnx.checker.DEFAULT_CONTEXT
    made = {"", *engine.initializers, *(value.name for value in engine.graph.input)}
    for node in engine.graph.node:
        lost = [name for name in node.input if name not in made]
        if lost:
            raise StageFailed(f"{engine.model}: node {node.name!r} reads {lost[0]!r}, which nothing makes")
        made.update(node.output)
        if node.domain == "" and onnx.defs.has(node.op_type):
            try:
                onnx.checker.check_node(node, context)
            except onnx.checker.ValidationError as error:
                raise StageFailed(f"{engine.model}: node {node.name!r} is not valid ONNX ({error})") from error
    cut = [name for name in engine.initializers if not engine.holds(name)]
    if cut:
        raise StageFailed(f"{engine.model}: its data file ends before tensor {cut[0]!r}")


def open_engine(engine: Path, threads: int) -> Any:
    """Load an engine directory with onnxruntime_genai."""
    import onnxruntime_genai

    config = onnxruntime_genai.Config(str(engine))
    options = {"intra_op_num_threads": threads, "session.intra_op.allow_spinning": "0"}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    return onnxruntime_genai.Model(config)


def engine_logits(model: Any, ids: NDArray[np.integer]) -> NDArray[np.float32]:
    """Logits [length, vocabulary] of an opened engine at every position of one window of ids."""
    import numpy as np
    import onnxruntime_genai

    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(max_length=len(ids) + 1, do_sample=False, batch_size=1)
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens(np.ascontiguousarray(ids, dtype=np.int32))
    return np.array(generator.get_output("logits")[0], dtype=np.float32)


def compare(reference: NDArray[np.float32], engine: NDArray[np.float32]) -> Fidelity:
    """Measure how far two sets of logits [length, vocabulary] are apart."""
    import numpy as np

    return measure(reference, engine, np.zeros(len(reference), np.int64))[0]


def measure(
    reference: NDArray[np.float32], engine: NDArray[np.float32], ids: NDArray[np.integer]
) -> tuple[Fidelity, Positions]:
    """Measure how far two sets of logits of a window of ids are apart, and at each place that has a token after it."""
    import numpy as np

    if reference.shape != engine.shape:
        raise StageFailed(f"the engine's logits have shape {engine.shape}, the checkpoint's {reference.shape}")
    length = len(reference)
    found = exact(reference, engine, np.append(ids[1:length], 0), [0] * length)
    same = found.same_top if found.same_top is not None else np.zeros(length, bool)
    fidelity = Fidelity(
        max_abs_dlogit=float(np.abs(reference - engine).max()),
        kl_mean=float(found.kl.mean()),
        top1=float(same.mean()),
    )
    return fidelity, first(found, length - 1)
