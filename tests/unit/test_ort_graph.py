"""Codes laid out for MatMulNBits, against a dequantization written out by hand and the operator itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.engine.ort_graph import Blocks, block_size_for, carriable, from_blocks, stack_rows, stackable, to_blocks
from pipelines.errors import StageFailed
from pipelines.quantize.codes import Codes, dequantize


def a_layer(bits: int, group: int, out: int, groups: int, seed: int = 0, symmetric: bool = False) -> Codes:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (out, group * groups), dtype=np.uint8)
    zeros = None if symmetric else rng.integers(0, 1 << bits, (out, groups), dtype=np.uint8)
    return Codes(codes, rng.uniform(1e-4, 1, (out, groups)).astype(np.float32), zeros, bits, group)


layers = st.builds(
    a_layer,
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([16, 32, 48, 64, 128, 192, 576]),
    out=st.integers(1, 5),
    groups=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    symmetric=st.booleans(),
)


@given(layers)
def test_no_weight_changes_on_its_way_into_blocks_and_back(layer: Codes) -> None:
    """Dequantizing the operator's inputs gives the layer's own dequantization to the last bit."""
    np.testing.assert_array_equal(dequantize(layer), from_blocks(to_blocks(layer)))


@given(layers, st.integers(0, 2**32 - 1))
def test_reordered_columns_come_back_in_the_order_of_the_input(layer: Codes, seed: int) -> None:
    """A layer whose quantizer reordered columns is carried sorted by group, with the order its input must take."""
    groups = layer.scales.shape[1]
    index = np.random.default_rng(seed).permutation(np.repeat(np.arange(groups), layer.group_size)).astype(np.int32)
    shuffled = Codes(layer.codes, layer.scales, layer.zeros, layer.bits, layer.group_size, index)
    blocks = to_blocks(shuffled)
    assert blocks.columns is not None
    np.testing.assert_array_equal(dequantize(shuffled), from_blocks(blocks))
    unordered = Blocks(blocks.weight, blocks.scales, blocks.zeros, blocks.bits, blocks.block_size, blocks.shape)
    np.testing.assert_array_equal(dequantize(shuffled)[:, blocks.columns], from_blocks(unordered))


@given(layers, st.integers(0, 2**32 - 1))
def test_a_factor_on_the_input_is_carried_beside_the_codes(layer: Codes, seed: int) -> None:
    """A layer that multiplies its input keeps its codes as they are; the weight it stands for has the factor."""
    factor = np.random.default_rng(seed).uniform(0.1, 10, layer.codes.shape[1]).astype(np.float32)
    scaled = replace(layer, pre_scale=factor)
    blocks = to_blocks(scaled)
    np.testing.assert_array_equal(dequantize(layer) * factor, from_blocks(blocks))
    np.testing.assert_array_equal(dequantize(layer), from_blocks(replace(blocks, pre_scale=None)))


def test_four_bit_codes_lie_lowest_bits_first() -> None:
    """The layout of the operator's documentation: byte 0 of a block holds codes 0 (low) and 1 (high)."""
    codes = np.arange(16, dtype=np.uint8)[None, :]
    layer = Codes(codes, np.ones((1, 1), np.float32), np.array([[9]], np.uint8), 4, 16)
    blocks = to_blocks(layer)
    assert [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] == blocks.weight[0, 0].tolist()
    assert blocks.zeros is not None
    assert [[9]] == blocks.zeros.tolist()


@pytest.mark.parametrize(
    ("group", "columns", "block"),
    [
        (64, 576, 64),
        (32, 576, 32),
        (576, 576, 64),
        (1536, 1536, 128),
        (128, 200, 128),
        (24, 576, 0),
        (8, 64, 0),
        (576, 600, 0),
    ],
)
def test_the_block_is_a_power_of_two_that_divides_the_group(group: int, columns: int, block: int) -> None:
    """A group that is no power of two is carried in the largest one that divides it; 0 where none is allowed."""
    assert block == block_size_for(group, columns)


def test_what_cannot_be_carried_says_why() -> None:
    """Three bits, or a group that no block divides, is refused with the reason."""
    assert "" == carriable(4, 64, 576)
    assert "3-bit codes" in carriable(3, 64, 576)
    assert "group size 24" in carriable(4, 24, 576)
    with pytest.raises(StageFailed, match="cannot be carried"):
        to_blocks(a_layer(4, 24, 2, 2))


def test_rows_of_q_k_and_v_stack_in_order() -> None:
    """Stacked layers dequantize to their own rows, also where only some have zero points."""
    parts = [a_layer(4, 32, 4, 2, seed=1), a_layer(4, 32, 2, 2, seed=2, symmetric=True), a_layer(4, 32, 2, 2, seed=3)]
    assert stackable(parts)
    np.testing.assert_array_equal(np.concatenate([dequantize(p) for p in parts]), dequantize(stack_rows(parts)))


def test_layers_of_different_widths_or_groups_do_not_stack() -> None:
    """Bits and groups must be the same, and what the input is multiplied by."""
    factor = np.full(64, 2, np.float32)
    assert not stackable([a_layer(4, 32, 2, 2), replace(a_layer(4, 32, 2, 2), pre_scale=factor)])
    assert not stackable([a_layer(4, 32, 2, 2), a_layer(8, 32, 2, 2)])
    assert not stackable([a_layer(4, 32, 2, 2), a_layer(4, 64, 2, 1)])


@settings(max_examples=20, deadline=None)
@given(layers)
def test_the_operator_computes_with_the_weights_carried(layer: Codes) -> None:
    """ONNX Runtime's MatMulNBits on these inputs equals a product with the dequantized weight, up to rounding."""
    ort = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    blocks = to_blocks(layer)
    out, columns = blocks.shape
    names = ["B", "scales"] + (["zeros"] if blocks.zeros is not None else [])
    values = [blocks.weight, blocks.scales] + ([blocks.zeros] if blocks.zeros is not None else [])
    sizes = {"K": columns, "N": out, "bits": blocks.bits, "block_size": blocks.block_size, "accuracy_level": 1}
    node = onnx.helper.make_node("MatMulNBits", ["A", *names], ["Y"], domain="com.microsoft", **sizes)
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info("A", onnx.TensorProto.FLOAT, [2, columns])],
        [onnx.helper.make_tensor_value_info("Y", onnx.TensorProto.FLOAT, [2, out])],
        [onnx.numpy_helper.from_array(v, n) for n, v in zip(names, values, strict=True)],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    a = np.random.default_rng(0).standard_normal((2, columns)).astype(np.float32)
    wanted = a.astype(np.float64) @ dequantize(layer).astype(np.float64).T
    bound = 1e-5 * float((np.abs(a) @ np.abs(dequantize(layer)).T).max())
    np.testing.assert_allclose(session.run(None, {"A": a})[0], wanted, rtol=0, atol=bound)
