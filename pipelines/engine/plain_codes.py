"""A variant's tensors put into a graph without weights: quantized layers by their own codes, as DequantizeLinear.

Scales are stored in the type the graph computes in where that holds them exactly, else in the narrowest that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipelines.engine.ort_graph import in_group_order
from pipelines.engine.plain_nodes import constant, lazy, numpy_type
from pipelines.errors import StageFailed
from pipelines.quantize.codes import Codes, Quantized, Scaled
from pipelines.quantize.packing import QuantizedModules
from pipelines.quantize.rounding import Rounding

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    from numpy.typing import NDArray

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CODES, SCALES, FACTOR = "codes", "scales", "pre_scale"
NARROWEST = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Carried:
    """A quantized weight as DequantizeLinear takes it: codes [out, in], scales, and how they go together.

    block: how many inputs share a scale; 0 where there is one per row ([out]) or one for all ([]). `columns` is the
    order that the inputs must be put in first.
    """

    codes: NDArray[Any]
    scales: NDArray[np.float32]
    block: int
    columns: NDArray[np.int64] | None = None


def carried(layer: Quantized) -> Carried:
    """Lay a layer out; not one code or scale changes its value.

    Raises:
        StageFailed: it has zero points, or floats that are not E4M3, or scales of blocks of rows.
    """
    return _floats(layer) if isinstance(layer, Scaled) else _integers(layer)


def _integers(layer: Codes) -> Carried:
    import ml_dtypes
    import numpy as np

    columns = None
    if layer.g_idx is not None:
        layer, columns = in_group_order(layer)
    if layer.zeros is not None:
        raise StageFailed("it has zero points, which weights in TensorRT do not have; quantize symmetrically")
    width = layer.codes.shape[1]
    if layer.bits not in (4, 8) or width % layer.group_size:
        raise StageFailed(f"{layer.bits} bits in groups of {layer.group_size} on {width} inputs cannot be carried")
    signed = (layer.codes.astype(np.int16) - (1 << (layer.bits - 1))).astype(np.int8)
    codes = signed.astype(ml_dtypes.int4) if layer.bits == 4 else signed
    one_a_row = layer.bits == 8 and layer.scales.shape[1] == 1
    scales = layer.scales[:, 0] if one_a_row else layer.scales
    return Carried(codes, scales, 0 if one_a_row else layer.group_size, columns)


def _floats(layer: Scaled) -> Carried:
    import ml_dtypes
    import numpy as np

    codes = layer.values.astype(ml_dtypes.float8_e4m3fn)
    if not np.array_equal(codes.astype(np.float32), layer.values):
        raise StageFailed("its floats are not E4M3")
    if layer.scales.shape not in ((1, 1), (len(codes), 1)):
        raise StageFailed(f"its scales are {'x'.join(map(str, layer.scales.shape))}, not one per row or one for all")
    return Carried(codes, layer.scales.reshape(-1) if layer.scales.size > 1 else layer.scales.reshape(()), 0)


def fill(graph: ir.Graph, quantized: QuantizedModules, dtype: str, roundings: Mapping[str, Rounding]) -> None:
    """Give every parameter of the graph its tensor, and every quantized layer its codes.

    Raises:
        StageFailed: a parameter without a tensor, a quantized layer without a place, or one that cannot be carried.
    """
    placed = set()
    for name, value in list(graph.initializers.items()):
        module = name.removesuffix(".weight")
        if value.const_value is not None:
            continue
        if module in quantized and name != module:
            _place(graph, value, module, quantized, dtype, roundings.get(module))
            placed.add(module)
        elif name in quantized.shards:
            _plain(value, name, quantized, dtype)
        elif name == HEAD and EMBEDDING in graph.initializers:
            value.replace_all_uses_with(graph.initializers[EMBEDDING])
            del graph.initializers[name]
        else:
            raise StageFailed(f"the graph has a parameter {name!r}, and the checkpoint no such tensor")
    lost = sorted(set(quantized) - placed)
    if lost:
        raise StageFailed(f"{len(lost)} quantized layers have no place in the graph: {', '.join(lost[:5])}")


def exact(values: NDArray[np.float32], first: str) -> str:
    """The type that holds these numbers exactly: the first choice if it does, else the narrowest."""
    import numpy as np

    for dtype in (first, *NARROWEST):
        if np.array_equal(values.astype(numpy_type(dtype)).astype(np.float32), values):
            return dtype
    return "float32"


def _plain(value: ir.Value, name: str, quantized: QuantizedModules, dtype: str) -> None:
    import numpy as np
    import onnx_ir as ir

    shape = tuple(quantized.shards.shape(name))
    if value.shape is None or tuple(value.shape.numpy()) != shape:
        raise StageFailed(f"{name}: the graph has shape {value.shape}, the checkpoint {list(shape)}")
    kind = ir.DataType.from_numpy(numpy_type(dtype))
    value.const_value = lazy(
        name, kind, ir.Shape(shape), lambda: np.asarray(quantized.shards[name]).astype(numpy_type(dtype))
    )
    value.dtype = kind


@dataclass(slots=True)
class _Steps:
    """Nodes about one layer, and the constants they read."""

    graph: ir.Graph
    module: str
    dtype: str
    nodes: list[ir.Node] = field(default_factory=list)

    def op(self, kind: str, inputs: Sequence[ir.Value], attributes: Mapping[str, Any] | None = None) -> ir.Value:
        import onnx_ir as ir

        name = f"{self.module}/{len(self.nodes)}/{kind}"
        node = ir.node(kind, list(inputs), dict(attributes or {}), name=name)
        node.outputs[0].name = f"{name}_output"
        self.nodes.append(node)
        return node.outputs[0]

    def cast(self, value: ir.Value, given: str, wanted: str) -> ir.Value:
        import onnx_ir as ir

        if given == wanted:
            return value
        return self.op("Cast", [value], {"to": int(ir.DataType.from_numpy(numpy_type(wanted)))})

    def exactly(self, part: str, values: NDArray[np.float32]) -> tuple[ir.Value, str]:
        """A constant that is exactly these numbers, and the name of its type."""
        dtype = exact(values, self.dtype)
        return constant(self.graph, f"{self.module}/{part}", values.astype(numpy_type(dtype))), dtype

    def rounded(self, value: ir.Value, scale: float) -> ir.Value:
        """Round to E4M3 at a fixed scale and multiply out again, which a compiler moves into the product."""
        import ml_dtypes
        import numpy as np

        held, kind = self.exactly("input_scale", np.array(scale, np.float32))
        zero = constant(self.graph, f"{self.module}/input_zero", np.array(0, ml_dtypes.float8_e4m3fn))
        low = self.op("QuantizeLinear", [self.cast(value, self.dtype, kind), held, zero])
        return self.cast(self.op("DequantizeLinear", [low, held]), kind, self.dtype)


def _place(
    graph: ir.Graph, weight: ir.Value, module: str, quantized: QuantizedModules, dtype: str, how: Rounding | None
) -> None:
    """Put DequantizeLinear where a weight was, and in front of its product what the layer does to its input."""
    turn, product = _product(weight, module)
    layer, steps = quantized[module], _Steps(graph, module, dtype)
    try:
        held = carried(layer)
    except StageFailed as error:
        raise StageFailed(f"{module}: {error}") from None
    codes = constant(graph, f"{module}/{CODES}", held.codes, lambda: carried(quantized[module]).codes)
    scales, kind = steps.exactly(SCALES, held.scales)
    attributes = {"axis": 1, "block_size": held.block} if held.block else {"axis": 0}
    weight.replace_all_uses_with(steps.cast(steps.op("DequantizeLinear", [codes, scales], attributes), kind, dtype))
    del graph.initializers[f"{module}.weight"]
    given = product.inputs[0]
    if given is None:
        raise StageFailed(f"{module}: its product has no input")
    if layer.pre_scale is not None:
        factor, kind = steps.exactly(FACTOR, layer.pre_scale)
        given = steps.cast(steps.op("Mul", [steps.cast(given, dtype, kind), factor]), kind, dtype)
    if held.columns is not None:
        given = steps.op("Gather", [given, constant(graph, f"{module}/columns", held.columns)], {"axis": -1})
    if how is not None and how.kind == "float8":
        given = steps.rounded(given, how.scale)
    product.replace_input_with(0, given)
    graph.insert_before(turn, steps.nodes)


def _product(weight: ir.Value, module: str) -> tuple[ir.Node, ir.Node]:
    """The one MatMul that multiplies with this weight, and the Transpose before it."""
    turns = [use.node for use in weight.uses()]
    products = [use.node for turn in turns for use in turn.outputs[0].uses()]
    if [n.op_type for n in turns] != ["Transpose"] or [n.op_type for n in products] != ["MatMul"]:
        raise StageFailed(f"{module}: its weight is not multiplied with once, so its codes have no place")
    return turns[0], products[0]
