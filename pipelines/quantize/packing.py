"""The integer codes of a quantized checkpoint, whatever library packed them, and their one dequantization.

Read with numpy alone, so it can contradict the libraries that wrote the files. Modules are decoded on demand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.errors import InputError, StageFailed, closest
from pipelines.quantize.codes import Codes, Quantized, Scaled, dequantize
from pipelines.quantize.layouts import (
    Reader,
    find_awq,
    find_compressed,
    find_gptq,
    find_modelopt,
    gptq_format,
    repeat,
    shape_of,
)
from pipelines.quantize.shards import Shards, quantization_config

__all__ = [
    "Codes",
    "Quantized",
    "QuantizedModules",
    "Scaled",
    "check_declared_format",
    "dequantize",
    "open_quantized",
    "read_codes",
]


class QuantizedModules(Mapping[str, Quantized]):
    """The quantized linear layers of a checkpoint by module name ("model.layers.0.mlp.up_proj")."""

    def __init__(self, shards: Shards, readers: Mapping[str, Reader], cache_scales: Collection[str] = ()) -> None:
        self.shards = shards
        self.cache_scales = frozenset(cache_scales)
        self._readers = readers

    def __getitem__(self, module: str) -> Quantized:
        return self._readers[module](self.shards, module)

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def shape(self, module: str) -> tuple[int, int]:
        """[out, in] of a layer's weight, from the sizes on file."""
        return shape_of(self.shards, module)

    def owns(self, tensor: str) -> bool:
        """Whether a tensor of the checkpoint is part of a quantized weight (its bias is not) or scales a cache."""
        module, _, part = tensor.rpartition(".")
        return (module in self._readers and part != "bias") or tensor in self.cache_scales


def open_quantized(variant: Path) -> QuantizedModules:
    """Find a checkpoint's quantized layers; nothing is decoded until one is asked for.

    Raises:
        InputError: the quantization method, or the layout of a layer, is not one that is read here.
    """
    shards = Shards(variant)
    config = quantization_config(variant)
    method = str(config.get("quant_method", ""))
    if not method:
        return QuantizedModules(shards, {})
    finders = {"compressed-tensors": find_compressed, "gptq": find_gptq, "awq": find_awq, "modelopt": find_modelopt}
    if method not in finders:
        raise InputError(f"{variant}/config.json: quant_method {method!r} cannot be read ({closest(method, finders)})")
    return QuantizedModules(shards, finders[method](shards, config), cache_scales(shards, config))


def cache_scales(shards: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """The tensors by which a checkpoint scales cached keys and values, where its config declares such a cache."""
    if not config.get("kv_cache_scheme"):
        return []
    return [name for name in shards if name.rpartition(".")[2] in ("k_scale", "v_scale")]


def read_codes(variant: Path) -> dict[str, Codes]:
    """Decode every integer-coded layer of a checkpoint at once (a byte per weight in memory)."""
    return {name: layer for name, layer in open_quantized(variant).items() if isinstance(layer, Codes)}


def check_declared_format(variant: Path) -> None:
    """Check that a GPTQ checkpoint's declared format is the one its zero-point words are in.

    Version 1 files store every zero point less one, so a reader that trusts a wrong declaration loads noise
    without an error. Only a symmetric checkpoint can be told apart: its words are all alike.

    Raises:
        StageFailed: they disagree, or a symmetric checkpoint's words are neither.
    """
    config = quantization_config(variant)
    if config.get("quant_method") != "gptq" or not config.get("sym", True):
        return
    declared = gptq_format(config)
    for name, first, found in _zero_words(Shards(variant)):
        if found != declared:
            shown = "its words are in format " + found if found else "its words are in neither format"
            raise StageFailed(
                f"{variant}: config.json declares GPTQ format {declared!r}, but {shown} "
                f"({name} starts with {first:#010x}); a reader would load noise"
            )


def format_of_words(shards: Shards) -> str:
    """The format that all zero-point words of a symmetric GPTQ checkpoint are in, "" where there is no such one."""
    found = {found for _, _, found in _zero_words(shards)}
    return found.pop() if len(found) == 1 else ""


def _zero_words(shards: Shards) -> Iterator[tuple[str, int, str]]:
    """Each tensor of zero points with its first word, and the format of a symmetric layer it is in, "" for none."""
    import numpy as np

    for name in (n for n in shards if n.endswith(".qzeros")):
        words = np.asarray(shards[name]).view(np.uint32)
        bits = words.shape[1] * 32 // shards.shape(name.removesuffix("qzeros") + "scales")[1]
        middle, first = repeat(1 << (bits - 1), bits), int(words.flat[0]) if words.size else 0
        known = {middle - repeat(1, bits): "gptq", middle: "gptq_v2"} if (words == first).all() else {}
        yield name, first, known.get(first, "")
