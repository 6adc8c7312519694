"""The layouts in which libraries pack a layer: compressed-tensors, GPTQ (version 1 and 2), AWQ gemm, ModelOpt.

Each `find_*` looks at names, dtypes and shapes only and gives one reader per quantized module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipelines.errors import InputError, closest
from pipelines.quantize.codes import Codes, Quantized, Scaled
from pipelines.quantize.shards import FLOAT8, Shards, float4_values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORD_BITS = (2, 4, 8)

Reader = Callable[[Shards, str], Quantized]


def repeat(value: int, bits: int) -> int:
    """A 32-bit word that holds `value` in every one of its places."""
    return sum(value << shift for shift in range(0, 32, bits))


def gptq_format(config: Mapping[str, Any]) -> str:
    """The GPTQ format a quantization_config declares; version 1 is what files that say nothing are in."""
    return str(config.get("checkpoint_format") or config.get("format") or "gptq")


def shape_of(shards: Shards, module: str) -> tuple[int, int]:
    """[out, in] of a quantized layer's weight, without decoding it."""
    if f"{module}.weight_shape" in shards:
        out, columns = (int(n) for n in shards[f"{module}.weight_shape"])
        return out, columns
    if f"{module}.weight_packed" in shards:  # two 4-bit floats to a byte
        out, columns = shards.shape(f"{module}.weight_packed")
        return out, 2 * columns
    if f"{module}.weight" in shards:
        out, columns = shards.shape(f"{module}.weight")
        if shards.dtype(f"{module}.weight") == "U8":  # ModelOpt: two 4-bit floats along inputs, integers along outputs
            return (out, 2 * columns) if shards.dtype(f"{module}.weight_scale") in FLOAT8 else (2 * out, columns)
        return out, columns
    rows, width = shards.shape(f"{module}.qweight")
    out = shards.shape(f"{module}.scales")[1]
    if width != out:  # AWQ packs along the outputs
        return out, rows
    return out, rows * 32 // code_bits(shards.shape(f"{module}.qzeros")[1], out, f"{module}.qzeros")


def find_compressed(shards: Shards, config: Mapping[str, Any]) -> dict[str, Reader]:
    """Find pack-quantized, int-quantized and float-quantized layers by the tensors they have."""
    found: dict[str, Reader] = {}
    for name in shards:
        module, _, part = name.rpartition(".")
        if part == "weight_packed" and shards.dtype(name) == "U8" and f"{module}.weight_scale" in shards:
            found[module] = _read_compressed_fp4
        elif part == "weight_packed":
            if f"{module}.weight_shape" not in shards or shards.dtype(name) != "I32":
                formats = sorted({str(config.get("format"))} | {str(g.get("format")) for g in _groups(config)})
                raise InputError(f"{name}: not pack-quantized (formats in config.json: {', '.join(formats)})")
            found[module] = _read_compressed
        elif part == "weight" and f"{module}.weight_scale" in shards:
            if shards.dtype(name) in FLOAT8:
                found[module] = partial(read_float8, block=_block(config))
            elif shards.dtype(name) == "I8":
                found[module] = read_int8
            else:
                raise InputError(
                    f"{name}: has a weight_scale but dtype {shards.dtype(name)} (read: I8, F8_E4M3, F8_E5M2)"
                )
    return found


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, where config.json says so; the last block of a side may be cut."""
    declared = [(group.get("weights") or {}).get("block_structure") for group in _groups(config)]
    rows, columns = next((block for block in declared if block), (0, 0))
    return (int(rows), int(columns)) if rows and columns else None


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [g for g in (config.get("config_groups") or {}).values() if isinstance(g, Mapping)]


def _read_compressed(shards: Shards, module: str) -> Codes:
    out, columns = (int(n) for n in shards[f"{module}.weight_shape"])
    packed = shards[f"{module}.weight_packed"]
    scales = _floats(shards, f"{module}.weight_scale")
    bits = code_bits(packed.shape[1], columns, f"{module}.weight_packed")
    zeros = None
    if f"{module}.weight_zero_point" in shards:
        zeros = _unpack(shards[f"{module}.weight_zero_point"].T, bits)[:, :out].T.copy()
    index = shards.get(f"{module}.weight_g_idx")
    return _codes(_unpack(packed, bits)[:, :columns], scales, zeros, bits, index)


def _read_compressed_fp4(shards: Shards, module: str) -> Scaled:
    """NVFP4 (FP8 scales, all over one divisor) and MXFP4 (bytes that are exponents of two, plus 127)."""
    import numpy as np

    stored = shards[f"{module}.weight_scale"]
    if shards.dtype(f"{module}.weight_scale") == "U8":
        scales = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
    else:
        scales = stored.astype(np.float32) / _floats(shards, f"{module}.weight_global_scale").reshape(1, 1)
    return read_float4(shards[f"{module}.weight_packed"], scales)


def read_int8(shards: Shards, module: str) -> Codes:
    """Signed bytes, a scale for each output or one for all; codes are the bytes plus 128."""
    import numpy as np

    codes = (shards[f"{module}.weight"].astype(np.int16) + 128).astype(np.uint8)
    stored = _floats(shards, f"{module}.weight_scale").reshape(-1, 1)
    scales = np.broadcast_to(stored, (codes.shape[0], 1)).copy()
    zeros = None
    if f"{module}.weight_zero_point" in shards:
        shifted = (shards[f"{module}.weight_zero_point"].astype(np.int16) + 128).astype(np.uint8).reshape(-1, 1)
        zeros = np.broadcast_to(shifted, scales.shape).copy()
    return _codes(codes, scales, zeros, 8, None)


def read_float8(shards: Shards, module: str, block: tuple[int, int] | None = None) -> Scaled:
    """8-bit floats with one scale, one for each output, or one for each block of rows and columns."""
    import numpy as np

    values = shards[f"{module}.weight"]
    scales = _floats(shards, f"{module}.weight_scale")
    if block and scales.shape == tuple(-(-n // side) for n, side in zip(values.shape, block, strict=True)):
        spread = np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)
        return Scaled(values, spread[: values.shape[0], : values.shape[1]])
    if scales.size != 1 and scales.shape not in ((len(values),), (len(values), 1)):
        said = f"blocks of {block[0]} x {block[1]}" if block else "config.json has no block_structure"
        raise InputError(f"{module}.weight_scale: shape {scales.shape} fits no weight of shape {values.shape} ({said})")
    return Scaled(values, scales.reshape(-1, 1))


def find_gptq(shards: Shards, config: Mapping[str, Any]) -> dict[str, Reader]:
    """Find GPTQ layers; the declared format decides how their zero points are read."""
    declared = gptq_format(config)
    readers = {"gptq": _read_gptq_v1, "gptq_v2": _read_gptq_v2}
    if declared not in readers:
        raise InputError(f"GPTQ format {declared!r} cannot be read ({closest(declared, readers)})")
    return {name.removesuffix(".qweight"): readers[declared] for name in shards if name.endswith(".qweight")}


def _read_gptq_v1(shards: Shards, module: str) -> Codes:
    return _read_gptq(shards, module, stored_less=1)


def _read_gptq_v2(shards: Shards, module: str) -> Codes:
    return _read_gptq(shards, module, stored_less=0)


def _read_gptq(shards: Shards, module: str, stored_less: int) -> Codes:
    import numpy as np

    qweight, qzeros = shards[f"{module}.qweight"], shards[f"{module}.qzeros"]
    scales = _floats(shards, f"{module}.scales")
    out = scales.shape[1]
    bits = code_bits(qzeros.shape[1], out, f"{module}.qzeros")
    # The writer subtracts one from whole words, borrows and all, so whole words are what it must be added to.
    words = np.asarray(qzeros).view(np.uint32) + np.uint32(repeat(stored_less, bits))
    zeros = _unpack(words, bits)[:, :out].T.copy()
    index = shards.get(f"{module}.g_idx")
    columns = qweight.shape[0] * 32 // bits
    codes = _unpack(qweight.T, bits)[:, :columns]
    return _codes(codes, scales.T.copy(), zeros, bits, index)


def find_awq(shards: Shards, config: Mapping[str, Any]) -> dict[str, Reader]:
    """Find AWQ layers in the gemm layout."""
    version = str(config.get("checkpoint_format") or config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm" or int(config.get("bits", config.get("w_bit", 4))) != 4:
        raise InputError(f"AWQ version {version!r} with {config.get('bits')} bits cannot be read (read: gemm, 4 bits)")
    return {name.removesuffix(".qweight"): _read_awq for name in shards if name.endswith(".qweight")}


def _read_awq(shards: Shards, module: str) -> Codes:
    scales = _floats(shards, f"{module}.scales")
    zeros = _natural(_unpack(shards[f"{module}.qzeros"], 4)).T.copy()
    codes = _natural(_unpack(shards[f"{module}.qweight"], 4)).T.copy()
    return _codes(codes, scales.T.copy(), zeros, 4, None)


def find_modelopt(shards: Shards, config: Mapping[str, Any]) -> dict[str, Reader]:
    """Find ModelOpt's layers: 8-bit floats, signed bytes, and two 4-bit integers or floats to a byte."""
    del config
    readers: dict[str, Reader] = {"F8_E4M3": read_float8, "I8": read_int8, "U8": _read_modelopt_fp4}
    found: dict[str, Reader] = {}
    for name in shards:
        module, _, part = name.rpartition(".")
        if part != "weight" or f"{module}.weight_scale" not in shards:
            continue
        dtype = shards.dtype(name)
        if dtype not in readers:
            raise InputError(f"{name}: has a weight_scale but dtype {dtype} (read: {', '.join(readers)})")
        whole = dtype == "U8" and shards.dtype(f"{module}.weight_scale") not in FLOAT8
        found[module] = _with_factor(_read_modelopt_int4 if whole else readers[dtype])
    return found


def _with_factor(reader: Reader) -> Reader:
    """Give a layer the factor of its inputs, where the file has one."""

    def read(shards: Shards, module: str) -> Quantized:
        layer, name = reader(shards, module), f"{module}.pre_quant_scale"
        return replace(layer, pre_scale=_floats(shards, name).reshape(-1)) if name in shards else layer

    return read


def _read_modelopt_int4(shards: Shards, module: str) -> Codes:
    codes = signed_nibbles(shards[f"{module}.weight"])
    return _codes(codes, _floats(shards, f"{module}.weight_scale"), None, 4, None)


def signed_nibbles(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of four bits in two's complement, plus 8: a byte has an even output's (low) and the next one's."""
    import numpy as np

    codes = np.empty((2 * pairs.shape[0], pairs.shape[1]), dtype=np.uint8)
    codes[0::2], codes[1::2] = pairs & 15, pairs >> 4
    return codes ^ np.uint8(8)


def _read_modelopt_fp4(shards: Shards, module: str) -> Scaled:
    scales = _floats(shards, f"{module}.weight_scale") * _floats(shards, f"{module}.weight_scale_2").reshape(1, 1)
    return read_float4(shards[f"{module}.weight"], scales)


def read_float4(pairs: NDArray[np.uint8], scales: NDArray[np.float32]) -> Scaled:
    """4-bit floats, two to a byte along the inputs, the first one low; scales [out, groups] are complete."""
    import numpy as np

    values = float4_values()[_unpack(pairs, 4)]
    return Scaled(values, np.repeat(scales, values.shape[1] // scales.shape[1], axis=1))


def _natural(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Undo AWQ's interleaving: place i of each word of eight holds the code of column AWQ_ORDER[i]."""
    import numpy as np

    words = values.reshape(values.shape[0], -1, 8)
    ordered = np.empty_like(words)
    ordered[:, :, list(AWQ_ORDER)] = words
    return ordered.reshape(values.shape)


def _codes(
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zeros: NDArray[np.uint8] | None,
    bits: int,
    index: NDArray[Any] | None,
) -> Codes:
    """Assemble a layer; an all-middle zero point and an index in natural order say nothing, so they are dropped."""
    import numpy as np

    columns = codes.shape[1]
    group_size = -(-columns // scales.shape[1])
    if zeros is not None and (zeros == 1 << (bits - 1)).all():
        zeros = None
    if index is not None and (index < 0).any():  # written by quantizers that never reordered
        index = None
    if index is not None and np.array_equal(index, np.arange(columns) // group_size):
        index = None
    g_idx = None if index is None else np.asarray(index, dtype=np.int32)
    return Codes(np.ascontiguousarray(codes), scales, zeros, bits, group_size, g_idx)


def _unpack(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Split the 32-bit words of the last axis into codes, lowest bits first."""
    import numpy as np

    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    per_byte = 8 // bits
    codes = np.empty((*raw.shape, per_byte), dtype=np.uint8)
    for place in range(per_byte):
        codes[..., place] = (raw >> (bits * place)) & ((1 << bits) - 1)
    return codes.reshape(raw.shape[0], -1)


def code_bits(words: int, count: int, name: str) -> int:
    """The code width that packs `count` codes into `words` words of 32 bits."""
    for bits in WORD_BITS:
        if -(-count * bits // 32) == words:
            return bits
    raise InputError(
        f"{name}: {words} words for {count} codes is no width read here ({', '.join(map(str, WORD_BITS))} bits)"
    )


def _floats(shards: Shards, name: str) -> NDArray[np.float32]:
    import numpy as np

    return np.asarray(shards[name]).astype(np.float32)
