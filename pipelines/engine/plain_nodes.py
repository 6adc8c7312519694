"""The ONNX graph of an architecture in standard operators alone, without weights: what any compiler of ONNX can take.

It comes from mobius, Microsoft's library of model definitions. One thing is done to it here: caches leave the Attention
operator, which compilers know with one output only.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import StageFailed

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    from numpy.typing import NDArray

Later = Callable[[], "NDArray[Any]"]
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""What a test compared with transformers."""
STANDARD = "quantgate-standard"


def skeleton(variant: Path) -> ir.Model:
    """Give the graph of a variant's architecture in float32: standard operators, caches in and out, no weights yet."""
    import mobius

    if STANDARD not in mobius.ep_registry:
        mobius.register_ep(mobius.EpCapabilities(name=STANDARD, supports_skip_layer_norm=False))
    about = json.loads((variant / "config.json").read_text())
    about.pop("quantization_config", None)
    with tempfile.TemporaryDirectory(prefix="quantgate-") as bare:
        Path(bare, "config.json").write_text(json.dumps(about))
        package = mobius.build(bare, dtype="f32", load_weights=False, execution_provider=STANDARD)
    model: ir.Model = package["model"]
    model.graph.name = str(about.get("model_type", "decoder"))  # it had the temporary path
    _lift_caches(model.graph)
    return model


def narrowed(model: ir.Model, dtype: str) -> ir.Model:
    """Give the same graph computing in another type, node for node: what was float32 is of that type."""
    import onnx_ir as ir

    found, kind = model.clone(), ir.DataType.from_numpy(numpy_type(dtype))
    graph = found.graph
    for name, value in graph.initializers.items():
        if value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT:
            value.const_value = ir.tensor(value.const_value.numpy().astype(numpy_type(dtype)), name=name)
    of_nodes = [value for node in graph for value in node.outputs]
    for value in (*graph.inputs, *graph.outputs, *graph.initializers.values(), *of_nodes):
        if value.dtype == ir.DataType.FLOAT:
            value.dtype = kind
    return found


def numpy_type(dtype: str) -> np.dtype[Any]:
    """numpy's type of that name; bfloat16 is not numpy's own."""
    import ml_dtypes
    import numpy as np

    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _lift_caches(graph: ir.Graph) -> None:
    """Put each cache in front of its Attention, and the causal mask, which the operator derived from it, once for all.

    Raises:
        StageFailed: the graph has attention of another form.
    """
    import onnx_ir as ir
    from onnx_ir import tape

    found = [node for node in graph if node.op_type == "Attention"]
    odd = [n for n in found if len(n.inputs) != 6 or not n.attributes.get_int("is_causal", 0) or _softcap(n)]
    if not found or odd or len({node.inputs[3] for node in found}) != 1:
        raise StageFailed(f"{graph.name}: {len(odd)} of {len(found)} attention layers are of a form not known here")
    shared = tape.Tape()
    mask = _causal(graph, shared, found[0].inputs[3])
    graph.insert_before(found[0], shared.nodes)
    for node in found:
        steps, kept = tape.Tape(), node.attributes
        query, key, value = (
            _heads(graph, steps, node.inputs[i], kept.get_int(f"{whose}_num_heads"))
            for i, whose in enumerate(("q", "kv", "kv"))
        )
        keys = steps.op("Concat", [node.inputs[4], key], {"axis": 2})
        values = steps.op("Concat", [node.inputs[5], value], {"axis": 2})
        mixed = steps.op("Attention", [query, keys, values, mask], {"scale": kept.get_float("scale")})
        flat = steps.op("Transpose", [mixed], {"perm": [0, 2, 1, 3]})
        flat = steps.op("Reshape", [flat, _numbers(graph, "flat", [0, 0, -1])])
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], steps.nodes, list(node.outputs), [flat, keys, values]
        )


def _softcap(node: ir.Node) -> bool:
    return bool(node.attributes.get_float("softcap", 0.0))


def _causal(graph: ir.Graph, steps: Any, padding: ir.Value | None) -> ir.Value:
    """Which keys a query may look at: not padded, and not after it. Queries are the last of all positions."""
    given = {value.name: value for value in graph.inputs}
    zero, one, second = (_numbers(graph, n, v) for n, v in (("zero", 0), ("one", 1), ("second", [1])))

    def width(of: str) -> Any:
        return steps.op("Squeeze", [steps.op("Shape", [given[of]], {"start": 1, "end": 2})])

    total = width("attention_mask")
    first = steps.op("Sub", [total, width("input_ids")])
    queries = steps.op("Unsqueeze", [steps.op("Range", [first, total, one]), second])
    earlier = steps.op("LessOrEqual", [steps.op("Range", [zero, total, one]), queries])
    mask: ir.Value = steps.op("And", [padding, earlier])
    return mask


def _heads(graph: ir.Graph, steps: Any, value: ir.Value | None, count: int) -> ir.Value:
    """[batch, tokens, heads * size] -> [batch, heads, tokens, size]."""
    shaped = steps.op("Reshape", [value, _numbers(graph, f"heads_{count}", [0, 0, count, -1])])
    turned: ir.Value = steps.op("Transpose", [shaped], {"perm": [0, 2, 1, 3]})
    return turned


def _numbers(graph: ir.Graph, name: str, numbers: int | list[int]) -> ir.Value:
    """A constant of whole numbers, once per name."""
    import numpy as np

    return graph.initializers.get(f"quantgate.{name}") or constant(
        graph, f"quantgate.{name}", np.array(numbers, np.int64)
    )


def constant(graph: ir.Graph, name: str, value: NDArray[Any], later: Later | None = None) -> ir.Value:
    """Register a constant. With `later`, only type and shape of `value` are kept, and it is made again when written."""
    import onnx_ir as ir

    dtype, shape = ir.DataType.from_numpy(value.dtype), ir.Shape(value.shape)
    tensor: Any = ir.tensor(value, name=name) if later is None else lazy(name, dtype, shape, later)
    held = ir.Value(name=name, const_value=tensor, shape=shape, type=ir.TensorType(dtype))
    graph.register_initializer(held)
    return held


def lazy(name: str, dtype: ir.DataType, shape: ir.Shape, later: Later) -> ir.LazyTensor:
    """A tensor that is made when the graph is written."""
    import onnx_ir as ir

    return ir.LazyTensor(lambda: ir.tensor(later(), name=name), dtype=dtype, shape=shape, name=name)
