"""safetensors shards: headers read and checked against file sizes without loading a weight."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.errors import InputError

INDEX = "model.safetensors.index.json"
_BYTES = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as its shard's header declares it."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def shard_files(checkpoint: Path) -> list[Path]:
    """The shards of a checkpoint: those of its index, or else every safetensors file.

    Raises:
        InputError: the index names a shard that is not there, or there are no safetensors at all.
    """
    index = checkpoint / INDEX
    if not index.is_file():
        found = sorted(checkpoint.glob("*.safetensors"))
        if not found:
            others = ", ".join(sorted(p.name for p in checkpoint.iterdir() if p.suffix in (".bin", ".pt", ".pth"))[:3])
            tail = (
                f"; only pickle weights ({others}), which can run code: convert them to safetensors" if others else ""
            )
            raise InputError(f"{checkpoint}: no .safetensors weights{tail}")
        return found
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(f"{index}: not a readable index ({error})") from None
    missing = [name for name in names if not (checkpoint / name).is_file()]
    if missing:
        raise InputError(f"{index}: names {len(missing)} shard(s) that are not there: {', '.join(missing[:5])}")
    return [checkpoint / name for name in names]


def read_headers(checkpoint: Path) -> dict[str, TensorHeader]:
    """Every tensor of a checkpoint by name, from headers alone.

    Raises:
        InputError: a shard is truncated or its header is not readable, or the index and the shards disagree.
    """
    tensors = {name: header for shard in shard_files(checkpoint) for name, header in _read(shard)}
    index = checkpoint / INDEX
    if index.is_file():
        absent = sorted(set(json.loads(index.read_text())["weight_map"]) - tensors.keys())
        if absent:
            raise InputError(f"{index}: {len(absent)} tensor(s) are in no shard: {', '.join(absent[:5])}")
    return tensors


def _read(shard: Path) -> Iterator[tuple[str, TensorHeader]]:
    actual = shard.stat().st_size
    try:
        with shard.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > min(_MAX_HEADER, actual):
                raise InputError(f"{shard}: truncated: its header needs {length} bytes, the file has {actual}")
            header = json.loads(f.read(length))
    except (struct.error, ValueError) as error:
        raise InputError(f"{shard}: not a readable safetensors file ({error})") from None
    try:
        header.pop("__metadata__", None)
        declared = [_tensor(shard, name, entry) for name, entry in header.items()]
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{shard}: its header is not one of safetensors ({type(error).__name__}: {error})") from None
    expected = 8 + length + sum(tensor.size_bytes for _, tensor in declared)
    if actual != expected:
        raise InputError(f"{shard}: truncated or padded: its header declares {expected} bytes, the file has {actual}")
    yield from declared


def _tensor(shard: Path, name: str, entry: dict[str, Any]) -> tuple[str, TensorHeader]:
    start, end = entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    wanted = math.prod(shape) * _BYTES.get(entry["dtype"], 0)
    if entry["dtype"] in _BYTES and wanted != end - start:
        raise InputError(f"{shard}: {name} declares {wanted} bytes but spans {end - start}")
    return name, TensorHeader(shard.name, entry["dtype"], shape, end - start)


def nonfinite(checkpoint: Path) -> list[str]:
    """Name every floating-point tensor that holds a NaN or an infinity, reading one tensor at a time."""
    import torch
    from safetensors import safe_open

    bad = []
    for shard in shard_files(checkpoint):
        with safe_open(shard, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                tensor = f.get_tensor(name)
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
                    bad.append(name)
    return bad
