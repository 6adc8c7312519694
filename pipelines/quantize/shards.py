"""The tensors of a safetensors checkpoint, mapped and decoded one at a time with numpy alone.

numpy has no bfloat16 and no float8, so both arrive as float32, which holds every one of their values exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INDEX = "model.safetensors.index.json"
PLAIN = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
WIDENED = {"BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1"}
FLOAT8 = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class Shards(Mapping[str, "NDArray[Any]"]):
    """Every tensor of a checkpoint directory by name; reading one maps its file and decodes only that tensor."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.entries = {name: entry for file in shard_files(directory) for name, entry in _header(file)}

    @classmethod
    def of_file(cls, file: Path) -> Shards:
        """The tensors of one file alone."""
        found = cls.__new__(cls)
        found.directory, found.entries = file.parent, dict(_header(file))
        return found

    def __getitem__(self, name: str) -> NDArray[Any]:
        import numpy as np

        entry = self.entries[name]
        stored = PLAIN.get(entry.dtype) or WIDENED.get(entry.dtype)
        if stored is None:
            raise InputError(f"{entry.file}: tensor {name} has dtype {entry.dtype}, which is not read here")
        count = entry.size // np.dtype(stored).itemsize
        if not count:
            return np.zeros(entry.shape, dtype=stored)
        flat = np.memmap(entry.file, dtype=stored, mode="r", offset=entry.start, shape=(count,))
        return _widen(flat, entry.dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def dtype(self, name: str) -> str:
        """The dtype as the file names it, "" where there is no such tensor."""
        entry = self.entries.get(name)
        return entry.dtype if entry else ""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape as the file has it, without reading the tensor."""
        return self.entries[name].shape


def shard_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those its index names, else every one in the directory.

    Raises:
        InputError: there is none, or the index names a file that is not there.
    """
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise InputError(f"{index}: not a safetensors index ({error})") from None
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [f.name for f in files if not f.is_file()]
    if missing or not files:
        what = f"shards missing: {', '.join(missing)}" if missing else "no *.safetensors file"
        raise InputError(f"{directory}: {what}")
    return files


def quantization_config(directory: Path) -> dict[str, Any]:
    """The checkpoint's own `quantization_config`, {} where it has none."""
    path = directory / "config.json"
    try:
        found = json.loads(path.read_text()).get("quantization_config") or {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    return dict(found)


def _header(file: Path) -> Iterator[tuple[str, Entry]]:
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 0 < length <= size - 8:
            raise InputError(
                f"{file}: header of {length} bytes in a file of {size}; the file is cut short or no safetensors"
            )
        try:
            header = json.loads(f.read(length))
        except ValueError as error:
            raise InputError(f"{file}: header is not JSON ({error})") from None
    header.pop("__metadata__", None)
    for name, at in header.items():
        start, end = at["data_offsets"]
        if 8 + length + end > size:
            raise InputError(
                f"{file}: tensor {name} ends at byte {8 + length + end}, the file at {size}; it is cut short"
            )
        yield name, Entry(file, at["dtype"], tuple(at["shape"]), 8 + length + start, end - start)


def _widen(flat: NDArray[Any], dtype: str) -> NDArray[Any]:
    import numpy as np

    if dtype == "BF16":
        wide: NDArray[Any] = (flat.astype(np.uint32) << 16).view(np.float32)
        return wide
    return float8_values(dtype)[flat] if dtype in FLOAT8 else flat


def float8_values(dtype: str) -> NDArray[np.float32]:
    """The 256 values of an 8-bit float format (OCP 8-bit Floating Point Specification 1.0), by code.

    E4M3 ("FN") has no infinities and one NaN per sign; E5M2 follows IEEE 754.
    """
    import numpy as np

    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == "F8_E4M3" else (5, 2, 15)
    code = np.arange(256)
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if dtype == "F8_E4M3":
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    else:
        value = np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), value)
    return np.where(code & 0x80, -value, value).astype(np.float32)


def float4_values() -> NDArray[np.float32]:
    """The 16 values of E2M1 (OCP Microscaling Formats Specification 1.0), by code: the upper half is negative."""
    import numpy as np

    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
    return np.concatenate([magnitude, -magnitude])
