"""Quantized weights in the form ONNX Runtime's MatMulNBits takes, written from codes and read back from a file.

The layout is that of the operator's documentation (com.microsoft.MatMulNBits, version 1): B uint8
[N, blocks, block_size * bits / 8] with the lowest bits first, scales [N, blocks], zero points uint8 packed per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import StageFailed
from pipelines.quantize.packing import Codes

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray

BITS = (4, 8)
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 128
DOMAIN = "com.microsoft"
CARRIER = "MatMulNBits"


@dataclass(frozen=True, slots=True)
class Blocks:
    """MatMulNBits' constant inputs, and what its own input goes through first.

    `pre_scale` (float32 [K]) is set where inputs are multiplied, `columns` (int64 [K]) where they are then reordered.
    """

    weight: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8] | None
    bits: int
    block_size: int
    shape: tuple[int, int]
    columns: NDArray[np.int64] | None = None
    pre_scale: NDArray[np.float32] | None = None


def block_size_for(group_size: int, columns: int) -> int:
    """The block that carries a group: the group itself, or the largest power of two that divides it.

    A group wider than a block gets its scale once per block. 0: no allowed block divides it.
    """
    if group_size & (group_size - 1) == 0 and group_size <= LARGEST_BLOCK:
        return group_size if group_size >= SMALLEST_BLOCK else 0
    if columns % group_size:
        return 0
    block = min(group_size & -group_size, LARGEST_BLOCK)
    return block if block >= SMALLEST_BLOCK else 0


def carriable(bits: int, group_size: int, columns: int) -> str:
    """Why a layer's codes cannot be carried into MatMulNBits as they are, "" where they can."""
    if bits not in BITS:
        return f"{bits}-bit codes (carried: {', '.join(map(str, BITS))} bits)"
    if not block_size_for(group_size, columns):
        return (
            f"group size {group_size} on {columns} inputs (a power of two from {SMALLEST_BLOCK} must divide the group)"
        )
    return ""


def to_blocks(layer: Codes) -> Blocks:
    """Lay a layer's codes out for MatMulNBits; not one code, scale or zero point changes its value."""
    import numpy as np

    columns = None
    if layer.g_idx is not None:
        layer, columns = in_group_order(layer)
    out, width = layer.codes.shape
    block = block_size_for(layer.group_size, width)
    reason = carriable(layer.bits, layer.group_size, width)
    if reason:
        raise StageFailed(f"codes cannot be carried: {reason}")
    spread = max(1, layer.group_size // block)
    blocks = -(-width // block)
    codes = np.zeros((out, blocks * block), dtype=np.uint8)
    codes[:, :width] = layer.codes
    scales = np.repeat(layer.scales, spread, axis=1)
    zeros = None if layer.zeros is None else _pack(np.repeat(layer.zeros, spread, axis=1), layer.bits)
    weight = _pack(codes, layer.bits).reshape(out, blocks, -1)
    return Blocks(weight, scales, zeros, layer.bits, block, (out, width), columns, layer.pre_scale)


def from_blocks(blocks: Blocks) -> NDArray[np.float32]:
    """Dequantize what MatMulNBits holds, float32 [N, K], columns in the order the layer's input has them."""
    import numpy as np

    out, width = blocks.shape
    count = blocks.scales.shape[1]
    codes = _unpack(blocks.weight.reshape(out, -1), blocks.bits).reshape(out, count, blocks.block_size)
    middle = np.full((out, count), 1 << (blocks.bits - 1), dtype=np.uint8)
    zeros = middle if blocks.zeros is None else _unpack(blocks.zeros, blocks.bits)[:, :count]
    values = (codes.astype(np.float32) - zeros[:, :, None].astype(np.float32)) * blocks.scales[:, :, None]
    flat = values.reshape(out, -1)[:, :width]
    if blocks.columns is not None:
        restored = np.empty_like(flat)
        restored[:, blocks.columns] = flat
        flat = restored
    return flat if blocks.pre_scale is None else flat * blocks.pre_scale


def stack_rows(layers: Sequence[Codes]) -> Codes:
    """Join layers that read the same input into one with all their outputs (q, k and v, say)."""
    import numpy as np

    first = layers[0]
    if len(layers) == 1:
        return first
    zeros = None
    if any(layer.zeros is not None for layer in layers):
        middle = 1 << (first.bits - 1)
        held = [np.full(x.scales.shape, middle, np.uint8) if x.zeros is None else x.zeros for x in layers]
        zeros = np.concatenate(held)
    codes = np.concatenate([layer.codes for layer in layers])
    return replace(first, codes=codes, scales=np.concatenate([layer.scales for layer in layers]), zeros=zeros)


def stackable(layers: Sequence[Codes]) -> bool:
    """Whether layers share bits, groups, column order and input factors, so that their rows can be stacked."""
    first = layers[0]
    return all(
        (x.bits, x.group_size, x.codes.shape[1]) == (first.bits, first.group_size, first.codes.shape[1])
        and _alike(x.g_idx, first.g_idx)
        and _alike(x.pre_scale, first.pre_scale)
        for x in layers
    )


def _alike(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    import numpy as np

    return one is other is None or (one is not None and other is not None and np.array_equal(one, other))


class EngineWeights:
    """The constant inputs of a saved graph's nodes, mapped from its external data file."""

    def __init__(self, model: Path) -> None:
        import onnx

        self.model = model
        self.graph = onnx.load(str(model), load_external_data=False).graph
        self.nodes = {node.name: node for node in self.graph.node}
        self.producers = {name: node for node in self.graph.node for name in node.output}
        self.initializers = {tensor.name: tensor for tensor in self.graph.initializer}

    def of(self, node_name: str) -> NDArray[np.float32]:
        """The weight of a MatMulNBits, MatMul or FusedMatMul node as float32 [out, in].

        Raises:
            StageFailed: the graph has no such node, or it is of another kind.
        """
        node = self.nodes.get(node_name)
        if node is None:
            raise StageFailed(f"{self.model}: no node {node_name!r} in the graph")
        held = {a.name: a.i for a in node.attribute}
        if node.op_type == CARRIER:
            return from_blocks(self._blocks(node, held))
        if node.op_type in ("MatMul", "FusedMatMul"):
            stored = self.tensor(node.input[1])
            return stored if held.get("transB") else stored.T
        raise StageFailed(f"{self.model}: node {node_name!r} is a {node.op_type}, not a matrix product")

    def tensor(self, name: str) -> NDArray[Any]:
        """One initializer, mapped from disk."""
        import numpy as np
        import onnx

        tensor = self.initializers[name]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        at = {entry.key: entry.value for entry in tensor.external_data}
        if not at:
            return np.asarray(onnx.numpy_helper.to_array(tensor))
        file = self.model.parent / at["location"]
        return np.memmap(file, dtype=dtype, mode="r", offset=int(at.get("offset", 0)), shape=tuple(tensor.dims))

    def holds(self, name: str) -> bool:
        """Whether an initializer's bytes are within its file."""
        at = {entry.key: entry.value for entry in self.initializers[name].external_data}
        if not at:
            return True
        file = self.model.parent / str(at["location"])
        return file.is_file() and int(at.get("offset", 0)) + int(at["length"]) <= file.stat().st_size

    def bytes_per_token(self) -> int:
        """Weight bytes one decoded token reads: every initializer once as stored, but of a looked-up table one row."""
        whole = {n for node in self.graph.node for i, n in enumerate(node.input) if not _is_looked_up(node, i)}
        sizes = {name: self.tensor(name).nbytes for name in self.initializers}
        rows = {name: max(1, tensor.dims[0] if tensor.dims else 1) for name, tensor in self.initializers.items()}
        return sum(size if name in whole else size // rows[name] for name, size in sizes.items())

    def _blocks(self, node: onnx.NodeProto, held: dict[str, int]) -> Blocks:
        constants = [self.tensor(name) if name else None for name in node.input[1:]]
        weight, scales = constants[0], constants[1]
        zeros = constants[2] if len(constants) > 2 else None
        columns, rest = self._second_input(node.input[0], "Gather", held["K"])
        pre_scale, _ = self._second_input(rest, "Mul", held["K"])
        shape = (held["N"], held["K"])
        if weight is None or scales is None:
            raise StageFailed(f"{self.model}: node {node.name!r} has no constant weight")
        return Blocks(weight, scales, zeros, held["bits"], held["block_size"], shape, columns, pre_scale)

    def _second_input(self, value: str, operator: str, width: int) -> tuple[NDArray[Any] | None, str]:
        """The constant, one number per column, that an operator made a value with, and from what; else the value."""
        before = self.producers.get(value)
        constant = None if before is None or before.op_type != operator else self.initializers.get(before.input[1])
        if before is None or constant is None or list(constant.dims) != [width]:
            return None, value
        return self.tensor(before.input[1]), str(before.input[0])


def _is_looked_up(node: onnx.NodeProto, place: int) -> bool:
    """Whether a node reads single rows of this input: a table it gathers from, or positions' sines and cosines."""
    return (node.op_type == "Gather" and place == 0) or node.op_type in ("GroupQueryAttention", "RotaryEmbedding")


def in_group_order(layer: Codes) -> tuple[Codes, NDArray[np.int64]]:
    """Sort columns by their group, so that groups lie side by side; give the order the input must then take."""
    import numpy as np

    index = layer.g_idx
    if index is None:
        raise StageFailed("a layer without g_idx has nothing to sort")
    sizes = np.bincount(index, minlength=layer.scales.shape[1])
    if (sizes[:-1] != layer.group_size).any() or sizes[-1] > layer.group_size:
        raise StageFailed(
            f"g_idx has groups of {sorted(set(sizes.tolist()))} columns; all must have {layer.group_size}"
        )
    columns = np.argsort(index, kind="stable").astype(np.int64)
    return replace(layer, codes=layer.codes[:, columns], g_idx=None), columns


def _pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack the last axis, lowest bits first; an odd end is filled with zero bits."""
    import numpy as np

    if bits == 8:
        return np.ascontiguousarray(values)
    even = np.pad(values, [(0, 0), (0, values.shape[1] % 2)])
    packed: NDArray[np.uint8] = np.bitwise_or(even[:, 0::2], np.left_shift(even[:, 1::2], 4))
    return packed


def _unpack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    import numpy as np

    if bits == 8:
        return values
    packed = np.ascontiguousarray(values)
    codes = np.empty((*packed.shape, 2), dtype=np.uint8)
    codes[..., 0] = packed & 0x0F
    codes[..., 1] = packed >> 4
    return codes.reshape(packed.shape[0], -1)
