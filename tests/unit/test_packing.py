"""Codes of quantized checkpoints, packed here by hand in each library's layout."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.errors import InputError, StageFailed
from pipelines.quantize.codes import Codes, Scaled, dequantize
from pipelines.quantize.packing import check_declared_format, open_quantized, read_codes
from pipelines.quantize.shards import Shards, float8_values

MODULE = "model.layers.0.mlp.up_proj"
NAMES = {"int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32", "int8": "I8", "uint8": "U8"}


def write(directory: Path, tensors: Mapping[str, NDArray[Any]], quantization: object, **dtypes: str) -> Path:
    """Write a one-shard checkpoint; `dtypes` renames a tensor's dtype (bytes given as they shall lie)."""
    header, offset = {}, 0
    for name, value in tensors.items():
        dtype = dtypes.get(name) or dtypes.get(name.rpartition(".")[2], NAMES.get(value.dtype.name, ""))
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [offset, offset + value.nbytes]}
        offset += value.nbytes
    text = json.dumps(header).encode()
    body = b"".join(np.ascontiguousarray(v).tobytes() for v in tensors.values())
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    config = {"quantization_config": quantization} if quantization else {}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack the last axis into 32-bit words, lowest bits first, by plain addition."""
    per = 32 // bits
    total = sum(codes[:, place::per].astype(np.uint64) << (bits * place) for place in range(per))
    return np.asarray(total, dtype=np.uint64).astype(np.uint32).view(np.int32)


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32 values that bfloat16 holds exactly."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def a_layer(bits: int = 4, group: int = 32, out: int = 16, groups: int = 2, seed: int = 0) -> Codes:
    """A layer with scales that float16 and bfloat16 both hold exactly."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (out, group * groups), dtype=np.uint8)
    zeros = rng.integers(1, 1 << bits, (out, groups), dtype=np.uint8)
    scales = (rng.integers(1, 128, (out, groups)) / 4096).astype(np.float32)
    return Codes(codes, scales, zeros, bits, group)


def expected(layer: Codes) -> NDArray[np.float32]:
    """(code - zero) * scale, one weight at a time."""
    out, columns = layer.codes.shape
    weight = np.empty((out, columns), dtype=np.float32)
    for o in range(out):
        for i in range(columns):
            g = i // layer.group_size if layer.g_idx is None else int(layer.g_idx[i])
            zero = 1 << (layer.bits - 1) if layer.zeros is None else int(layer.zeros[o, g])
            weight[o, i] = np.float32(int(layer.codes[o, i]) - zero) * layer.scales[o, g]
    return weight


def gptq(directory: Path, layer: Codes, stored_less: int, config: Mapping[str, object], **extra: NDArray[Any]) -> Path:
    """Write a layer as GPTQ libraries do: zero points less `stored_less`, whole words at a time."""
    zeros = layer.zeros if layer.zeros is not None else np.full(layer.scales.shape, 1 << (layer.bits - 1), np.uint8)
    ones = np.uint32(sum(stored_less << s for s in range(0, 32, layer.bits)))
    tensors = {
        f"{MODULE}.qweight": words(layer.codes, layer.bits).T,
        f"{MODULE}.qzeros": (words(np.ascontiguousarray(zeros.T), layer.bits).view(np.uint32) - ones).view(np.int32),
        f"{MODULE}.scales": layer.scales.T.astype(np.float16),
    } | {f"{MODULE}.{name}": value for name, value in extra.items()}
    return write(directory, tensors, {"quant_method": "gptq", "bits": layer.bits} | dict(config))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("declared", "stored_less"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq_zero_points_are_read_as_the_declared_format_says(
    tmp_path: Path, bits: int, declared: str, stored_less: int
) -> None:
    """Version 1 files store zero points less one, version 2 as they are; both give the same layer."""
    layer = a_layer(bits)
    read = read_codes(gptq(tmp_path, layer, stored_less, {"checkpoint_format": declared, "sym": False}))[MODULE]
    np.testing.assert_array_equal(layer.codes, read.codes)
    np.testing.assert_array_equal(layer.zeros, read.zeros)
    np.testing.assert_array_equal(expected(layer), dequantize(read))


def test_a_borrow_between_stored_zero_points_is_undone(tmp_path: Path) -> None:
    """A zero point of 0 stored less one borrows from its neighbour in the word; reading gives both back."""
    layer = a_layer()
    assert layer.zeros is not None
    layer.zeros[:, :] = 0
    layer.zeros[1::2, :] = 9
    read = read_codes(gptq(tmp_path, layer, 1, {"sym": False}))[MODULE]
    np.testing.assert_array_equal(layer.zeros, read.zeros)


def test_reordered_columns_keep_their_groups(tmp_path: Path) -> None:
    """Where g_idx is not in order, each column takes the scale and zero point of its own group."""
    layer = a_layer()
    order = np.random.default_rng(1).permutation(np.repeat(np.arange(2), 32)).astype(np.int32)
    read = read_codes(gptq(tmp_path, layer, 1, {"sym": False, "desc_act": True}, g_idx=order))[MODULE]
    shuffled = Codes(layer.codes, layer.scales, layer.zeros, 4, 32, order)
    np.testing.assert_array_equal(expected(shuffled), dequantize(read))


def test_a_group_index_in_natural_order_is_dropped(tmp_path: Path) -> None:
    """Files that write g_idx without having reordered anything read as plain groups."""
    order = np.repeat(np.arange(2), 32).astype(np.int32)
    read = read_codes(gptq(tmp_path, a_layer(), 1, {"sym": False}, g_idx=order))[MODULE]
    assert read.g_idx is None


def test_awq_columns_come_back_in_natural_order(tmp_path: Path) -> None:
    """The gemm layout puts outputs 0,2,4,6,1,3,5,7 of every eight into a word; reading undoes it."""
    layer = a_layer()
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(values: NDArray[np.uint8]) -> NDArray[np.int32]:
        return words(values.reshape(len(values), -1, 8)[:, :, order].reshape(values.shape), 4)

    assert layer.zeros is not None
    tensors = {
        f"{MODULE}.qweight": packed(np.ascontiguousarray(layer.codes.T)),
        f"{MODULE}.qzeros": packed(np.ascontiguousarray(layer.zeros.T)),
        f"{MODULE}.scales": layer.scales.T.astype(np.float16),
    }
    read = read_codes(write(tmp_path, tensors, {"quant_method": "awq", "version": "gemm", "bits": 4}))[MODULE]
    np.testing.assert_array_equal(expected(layer), dequantize(read))


def test_pack_quantized_asymmetric_zero_points_are_packed_along_the_outputs(tmp_path: Path) -> None:
    """compressed-tensors packs codes along inputs and zero points along outputs."""
    layer = a_layer()
    assert layer.zeros is not None
    tensors = {
        f"{MODULE}.weight_packed": words(layer.codes, 4),
        f"{MODULE}.weight_scale": bf16(layer.scales),
        f"{MODULE}.weight_shape": np.array(layer.codes.shape, dtype=np.int64),
        f"{MODULE}.weight_zero_point": words(np.ascontiguousarray(layer.zeros.T), 4).T,
    }
    variant = write(tmp_path, tensors, {"quant_method": "compressed-tensors"}, weight_scale="BF16")
    read = open_quantized(variant)
    np.testing.assert_array_equal(expected(layer), dequantize(read[MODULE]))
    assert (16, 64) == read.shape(MODULE)


def test_pack_quantized_per_channel_is_one_group_as_wide_as_the_layer(tmp_path: Path) -> None:
    """Without groups there is one scale per output and the middle code is zero."""
    layer = a_layer(8, group=64, groups=1)
    tensors = {
        f"{MODULE}.weight_packed": words(layer.codes, 8),
        f"{MODULE}.weight_scale": layer.scales,
        f"{MODULE}.weight_shape": np.array(layer.codes.shape, dtype=np.int64),
    }
    read = read_codes(write(tmp_path, tensors, {"quant_method": "compressed-tensors"}))[MODULE]
    assert (8, 64, None) == (read.bits, read.group_size, read.zeros)
    np.testing.assert_array_equal((layer.codes.astype(np.float32) - 128) * layer.scales, dequantize(read))


def test_int8_weights_read_as_codes(tmp_path: Path) -> None:
    """int-quantized layers store signed bytes; their codes are those plus 128."""
    weight = np.array([[-128, -1], [0, 127]], dtype=np.int8)
    tensors = {f"{MODULE}.weight": weight, f"{MODULE}.weight_scale": np.array([[0.5], [0.25]], dtype=np.float32)}
    read = read_codes(write(tmp_path, tensors, {"quant_method": "compressed-tensors"}))[MODULE]
    np.testing.assert_array_equal([[0, 127], [128, 255]], read.codes)
    np.testing.assert_array_equal([[-64, -0.5], [0, 31.75]], dequantize(read))


def test_float8_weights_are_values_times_scales(tmp_path: Path) -> None:
    """float-quantized layers hold E4M3 codes: 0x38 is 1, 0x7e 448, 0x01 2**-9, and the top bit the sign."""
    weight = np.array([[0x38, 0x7E], [0x01, 0xB8]], dtype=np.uint8)
    tensors = {f"{MODULE}.weight": weight, f"{MODULE}.weight_scale": np.array([[2], [1]], dtype=np.float32)}
    read = open_quantized(write(tmp_path, tensors, {"quant_method": "compressed-tensors"}, weight="F8_E4M3"))[MODULE]
    assert isinstance(read, Scaled)
    np.testing.assert_array_equal([[2, 896], [2**-9, -1]], dequantize(read))


MODELOPT = {"quant_method": "modelopt"}


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""The magnitudes of a 4-bit float, by its lower three bits (OCP Microscaling Formats 1.0); the fourth is the sign."""


def test_compressed_nvfp4_scales_are_divided_by_the_one_of_the_tensor(tmp_path: Path) -> None:
    """The first of two weights lies low in a byte; 0x38 is 1.0 in E4M3, so 1.0 / 4 times each E2M1 value."""
    pairs = np.tile(np.arange(0, 16, 2, dtype=np.uint8) | (np.arange(1, 16, 2, dtype=np.uint8) << 4), (2, 1))
    tensors = {
        f"{MODULE}.weight_packed": pairs,
        f"{MODULE}.weight_scale": np.array([[0x38], [0x40]], np.uint8),
        f"{MODULE}.weight_global_scale": np.array([4], np.float32),
    }
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    held = open_quantized(write(tmp_path, tensors, config, weight_scale="F8_E4M3"))
    values = np.array([*E2M1, *(-v for v in E2M1)], np.float32)
    np.testing.assert_array_equal(np.stack([values / 4, values / 2]), dequantize(held[MODULE]))
    assert (2, 16) == held.shape(MODULE)


def test_compressed_mxfp4_scales_are_powers_of_two(tmp_path: Path) -> None:
    """A scale byte is an exponent plus 127: 126 halves, 129 is times four."""
    tensors = {
        f"{MODULE}.weight_packed": np.full((1, 32), 0x7A, np.uint8),
        f"{MODULE}.weight_scale": np.array([[126, 129]], np.uint8),
    }
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    read = dequantize(open_quantized(write(tmp_path, tensors, config))[MODULE])
    np.testing.assert_array_equal([-0.5, 3.0, -4.0, 24.0], read[0, [0, 1, 32, 33]])


def test_blocks_that_are_cut_at_the_edge_keep_their_size(tmp_path: Path) -> None:
    """In blocks of 4 x 4 a 6 x 10 weight has 2 x 3 scales; the last ones cover what is left, not an equal share."""
    scales = np.array([[1, 2, 4], [8, 16, 32]], np.float32)
    tensors = {f"{MODULE}.weight": np.full((6, 10), 0x38, np.uint8), f"{MODULE}.weight_scale": scales}
    groups = {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "block_structure": [4, 4]}}}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    read = dequantize(open_quantized(write(tmp_path, tensors, config, weight="F8_E4M3"))[MODULE])
    np.testing.assert_array_equal([1, 1, 1, 1, 2, 2, 2, 2, 4, 4], read[3])
    np.testing.assert_array_equal([8, 8, 8, 8, 16, 16, 16, 16, 32, 32], read[4])


def test_block_scales_without_a_block_size_are_refused(tmp_path: Path) -> None:
    """Where config.json does not say how large blocks are, dividing would be a guess."""
    tensors = {f"{MODULE}.weight": np.zeros((6, 10), np.uint8), f"{MODULE}.weight_scale": np.ones((2, 3), np.float32)}
    held = open_quantized(write(tmp_path, tensors, {"quant_method": "compressed-tensors"}, weight="F8_E4M3"))
    with pytest.raises(InputError, match="has no block_structure"):
        held[MODULE]


def test_cache_scales_belong_to_the_scheme_where_it_is_declared(tmp_path: Path) -> None:
    """The scales of cached keys and values are no parameters of the model; undeclared they are unknown tensors."""
    scale = "model.layers.0.self_attn.k_scale"
    tensors = {scale: np.ones(1, np.float32), "model.norm.weight": np.ones(4, np.float32)}
    declared: dict[str, object] = {"quant_method": "compressed-tensors"}
    assert not open_quantized(write(tmp_path, tensors, declared)).owns(scale)
    held = open_quantized(write(tmp_path, tensors, declared | {"kv_cache_scheme": {"num_bits": 8}}))
    assert (True, False) == (held.owns(scale), held.owns("model.norm.weight"))


def test_modelopt_packs_signed_codes_of_two_outputs_into_a_byte(tmp_path: Path) -> None:
    """The byte 0x8f holds -1 for the even output, in its low half, and -8 for the odd one; 0x70 holds 0 and 7."""
    tensors = {
        f"{MODULE}.weight": np.array([[0x8F, 0x70]], dtype=np.uint8),
        f"{MODULE}.weight_scale": np.array([[0.5], [0.25]], dtype=np.float32),
    }
    read = open_quantized(write(tmp_path, tensors, MODELOPT))
    assert (2, 2) == read.shape(MODULE)
    np.testing.assert_array_equal([[-0.5, 0], [-2, 1.75]], dequantize(read[MODULE]))


def test_what_inputs_are_multiplied_by_belongs_to_the_weight(tmp_path: Path) -> None:
    """A layer with pre_quant_scale computes W(x * s), so the weight it stands for has s on its columns."""
    tensors = {
        f"{MODULE}.weight": np.array([[0x11, 0x22]], dtype=np.uint8),
        f"{MODULE}.weight_scale": np.ones((2, 1), dtype=np.float32),
        f"{MODULE}.pre_quant_scale": np.array([3, 0.5], dtype=np.float32),
    }
    read = open_quantized(write(tmp_path, tensors, MODELOPT))[MODULE]
    assert isinstance(read, Codes)
    np.testing.assert_array_equal([[9, 10], [9, 10]], read.codes)
    np.testing.assert_array_equal([[3, 1], [3, 1]], dequantize(read))


def test_modelopt_int4_groups_lie_along_the_inputs(tmp_path: Path) -> None:
    """A layer packed by hand, pair by pair of outputs, reads as its codes with the middle code for zero."""
    layer = a_layer()
    signed = layer.codes.astype(np.int16) - 8
    nibbles = (signed & 15).astype(np.uint8)
    tensors = {
        f"{MODULE}.weight": nibbles[0::2] + 16 * nibbles[1::2],
        f"{MODULE}.weight_scale": layer.scales,
        f"{MODULE}.weight_scale_2": np.float32(7).reshape(()),  # of the FP8 step of W4A8: no part of the weight
        f"{MODULE}.input_scale": np.float32(0.1).reshape(()),
    }
    read = open_quantized(write(tmp_path, tensors, MODELOPT))
    assert (16, 64) == read.shape(MODULE)
    np.testing.assert_array_equal(
        expected(Codes(layer.codes, layer.scales, None, 4, layer.group_size)), dequantize(read[MODULE])
    )


def test_nvfp4_weights_have_a_scale_per_sixteen_and_one_for_all(tmp_path: Path) -> None:
    """Codes 1 to 7 are 0.5 to 6, 8 more their negatives; each group's E4M3 scale is multiplied by the tensor's own."""
    pairs = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=np.uint8)
    tensors = {
        f"{MODULE}.weight": pairs,
        f"{MODULE}.weight_scale": np.array([[0x38, 0x40]], dtype=np.uint8),  # 1 and 2
        f"{MODULE}.weight_scale_2": np.array(0.25, dtype=np.float32),
    }
    read = open_quantized(write(tmp_path, tensors, MODELOPT, weight_scale="F8_E4M3"))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert (1, 32) == read.shape(MODULE)
    np.testing.assert_array_equal([np.concatenate([values / 4, values / 2])], dequantize(read[MODULE]))


def test_modelopt_bytes_and_8_bit_floats_read_like_those_of_others(tmp_path: Path) -> None:
    """Signed bytes have a scale per output, 8-bit floats one for all."""
    tensors = {
        "a.weight": np.array([[-128], [127]], dtype=np.int8),
        "a.weight_scale": np.array([0.5, 0.25], dtype=np.float32),
        "b.weight": np.array([[0x38, 0xB8]], dtype=np.uint8),
        "b.weight_scale": np.array(3, dtype=np.float32),
    }
    read = open_quantized(write(tmp_path, tensors, MODELOPT, **{"b.weight": "F8_E4M3"}))
    np.testing.assert_array_equal([[-64], [31.75]], dequantize(read["a"]))
    np.testing.assert_array_equal([[3, -3]], dequantize(read["b"]))


def test_the_float8_tables_have_the_limits_of_their_specification() -> None:
    """E4M3 reaches 448 and has no infinity; E5M2 reaches 57344 and has one of each sign."""
    e4m3, e5m2 = float8_values("F8_E4M3"), float8_values("F8_E5M2")
    assert (448, 2) == (np.nanmax(e4m3), int(np.isnan(e4m3).sum()))
    assert (57344, 2) == (np.max(e5m2[np.isfinite(e5m2)]), int(np.isinf(e5m2).sum()))


@pytest.mark.parametrize(("declared", "stored"), [("gptq", 0), ("gptq_v2", 1)])
def test_a_declaration_that_the_words_contradict_fails(tmp_path: Path, declared: str, stored: int) -> None:
    """0x77777777 is version 1 and 0x88888888 version 2; a file that says otherwise would load as noise."""
    layer = Codes(a_layer().codes, a_layer().scales, None, 4, 32)
    variant = gptq(tmp_path, layer, stored, {"checkpoint_format": declared, "sym": True})
    with pytest.raises(StageFailed, match="declares GPTQ format"):
        check_declared_format(variant)


@pytest.mark.parametrize(("declared", "stored", "word"), [("gptq", 1, 0x77777777), ("gptq_v2", 0, 0x88888888)])
def test_a_true_declaration_passes(tmp_path: Path, declared: str, stored: int, word: int) -> None:
    """A symmetric file whose words are those of its declared format is accepted."""
    layer = Codes(a_layer().codes, a_layer().scales, None, 4, 32)
    variant = gptq(tmp_path, layer, stored, {"checkpoint_format": declared, "sym": True})
    assert word == int(Shards(variant)[f"{MODULE}.qzeros"].view(np.uint32)[0, 0])
    check_declared_format(variant)


def test_words_of_no_format_fail(tmp_path: Path) -> None:
    """Zero points all over the place in a file that says it is symmetric are not believed."""
    with pytest.raises(StageFailed, match="neither format"):
        check_declared_format(gptq(tmp_path, a_layer(), 1, {"sym": True}))


def test_an_unknown_method_is_named(tmp_path: Path) -> None:
    """A method that is not read here is an error that lists what is."""
    tensors = {f"{MODULE}.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(InputError, match="'bitsandbytes' cannot be read"):
        open_quantized(write(tmp_path, tensors, {"quant_method": "bitsandbytes"}))


def test_an_unquantized_checkpoint_has_no_quantized_modules(tmp_path: Path) -> None:
    """Without a quantization_config there is nothing to find."""
    assert {} == read_codes(write(tmp_path, {f"{MODULE}.weight": np.zeros((2, 2), np.float32)}, None))


def test_a_truncated_shard_is_an_input_error(tmp_path: Path) -> None:
    """A file that ends before its last tensor is said to be cut short."""
    variant = write(tmp_path, {f"{MODULE}.weight": np.zeros((8, 8), np.float32)}, None)
    file = variant / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InputError, match="cut short"):
        Shards(variant)


@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8]), st.sampled_from([16, 32, 64]), st.booleans())
def test_dequantization_is_one_subtraction_and_one_product_in_float32(
    seed: int, bits: int, group: int, symmetric: bool
) -> None:
    """Whatever the codes, each weight is exactly float32(code - zero) * scale."""
    layer = a_layer(bits, group, out=3, seed=seed)
    layer = Codes(layer.codes, layer.scales, None if symmetric else layer.zeros, bits, group)
    np.testing.assert_array_equal(expected(layer), dequantize(layer))
