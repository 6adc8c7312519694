"""What a scheme says about weights and activations, its name (W4A16_G64), and which layers it does not fit. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from pipelines.errors import Problem

NumberType = Literal["int", "float", "bfloat"]
Granularity = Literal["channel", "group", "tensor", "block"]
USUAL_GROUPS = (16, 32, 64, 128, 256)
"""Group sizes that kernels are written for."""

_PLAIN: dict[str, tuple[int, NumberType]] = {"FP32": (32, "float"), "FP16": (16, "float"), "BF16": (16, "bfloat")}
_DTYPES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
_FP4_GROUPS = {"NVFP4": 16, "MXFP4": 32}
"""4-bit floats (E2M1) come in two formats, told apart by their groups: NVFP4 scales are FP8 numbers times one float32
of the whole tensor; MXFP4 scales are powers of two (OCP Microscaling Formats 1.0)."""
_GGUF: dict[str, tuple[int, int | None]] = {
    "Q8_0": (8, 32), "Q6_K": (6, None), "Q5_K_M": (5, None), "Q4_K_M": (4, None), "Q4_0": (4, 32)
}  # fmt: skip
"""llama.cpp's file types: bits of most weights, and what a layer's width must be a multiple of. Those in K mix types,
and take another one for layers whose width their blocks of 256 do not divide."""
_NAME = re.compile(
    r"W(?P<w>\d+)A(?P<a>\d+)"
    r"(?:_(?P<kind>INT8|FP8|NVFP4|MXFP4))?"
    r"(?:_(?P<when>DYNAMIC|STATIC))?"
    r"(?:_(?P<per>G(?P<group>\d+)|TENSOR|BLOCK(?P<block>\d+)))?"
    r"(?P<asym>_ASYM)?"
    r"(?:_KV(?P<kv>FP8))?"
)
_GRAMMAR = (
    "W<bits>A<bits>[_INT8|_FP8|_NVFP4|_MXFP4][_DYNAMIC|_STATIC][_G<size>|_TENSOR|_BLOCK<size>][_ASYM][_KVFP8], as in "
    "W4A16_G64, W8A16, W4A16_G64_ASYM, W8A8_FP8_DYNAMIC, W8A8_INT8, W4A4_NVFP4; or BF16, FP16, FP32; or a file type of "
    f"llama.cpp: {', '.join(_GGUF)}"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights and activations are stored; `activation_bits` is None where activations stay as they are.

    `kv` is the format of the cache of keys and values, None where it stays as activations are. `gguf` is the file type
    of llama.cpp that this stands for, "" where it is none.
    """

    weight_bits: int
    weight_type: NumberType = "int"
    granularity: Granularity = "channel"
    group_size: int | None = None
    activation_bits: int | None = None
    activation_type: Literal["int", "float"] | None = None
    dynamic: bool = True
    symmetric: bool = True
    kv: Literal["FP8"] | None = None
    gguf: str = ""

    @property
    def quantized(self) -> bool:
        """Whether anything is stored in fewer bits than the base has."""
        return self.weight_bits < 16

    def __str__(self) -> str:
        if self.gguf:
            return self.gguf
        for name, plain in _PLAIN.items():
            if plain == (self.weight_bits, self.weight_type):
                return name
        parts = [f"W{self.weight_bits}A{self.activation_bits or 16}"]
        if self.fp4:
            parts.append(self.fp4)
        else:
            parts += self._kind_and_scales()
        parts += [] if self.symmetric else ["ASYM"]
        return "_".join([*parts, f"KV{self.kv}"] if self.kv else parts)

    @property
    def fp4(self) -> str:
        """NVFP4 or MXFP4, "" where weights are no 4-bit floats."""
        if (self.weight_bits, self.weight_type) != (4, "float"):
            return ""
        return next((name for name, size in _FP4_GROUPS.items() if size == self.group_size), "")

    def _kind_and_scales(self) -> list[str]:
        kind = self.activation_type or ("float" if self.weight_type == "float" else None)
        parts = [] if kind is None else ["FP8" if kind == "float" else "INT8"]
        if self.activation_bits:
            parts.append("DYNAMIC" if self.dynamic else "STATIC")
        if self.granularity != "channel":
            prefix = {"group": "G", "block": "BLOCK", "tensor": "TENSOR"}[self.granularity]
            parts.append(f"{prefix}{self.group_size or ''}")
        return parts


def parse(name: str) -> Scheme:
    """Read a scheme's name.

    Raises:
        ValueError: the name is not one, with the grammar.
    """
    text = name.upper()
    if text in _PLAIN:
        return Scheme(*_PLAIN[text])
    if text in _GGUF:
        bits, size = _GGUF[text]
        return Scheme(bits, granularity="group", group_size=size, gguf=text)
    found = _NAME.fullmatch(text)
    if found is None:
        raise ValueError(f"not the name of a scheme; write {_GRAMMAR}")
    return _checked(found)


def _checked(found: re.Match[str]) -> Scheme:
    weight, activation, kind = int(found["w"]), int(found["a"]), found["kind"]
    size = int(found["group"] or found["block"] or 0)
    if kind in _FP4_GROUPS:
        return _checked_fp4(found)
    if not 2 <= weight <= 8 or activation not in (8, 16) or weight > activation:
        raise ValueError("weights take 2 to 8 bits, activations 8 or 16, and weights no more than activations")
    if activation == 8 and kind is None:
        raise ValueError(f"8-bit activations are INT8 or FP8; write W{weight}A8_INT8 or W{weight}A8_FP8")
    if activation == 16 and (found["when"] or kind == "INT8"):
        raise ValueError("with 16-bit activations there is no INT8, DYNAMIC or STATIC to say")
    if kind == "FP8" and found["asym"]:
        raise ValueError("FP8 has no zero points, so there is no ASYM to say")
    if kind == "FP8" and activation == 16 and weight != 8:
        raise ValueError("FP8 weights take 8 bits; with FP8 activations, weights of fewer bits are integers")
    if found["per"] and found["per"] != "TENSOR" and size == 0:
        raise ValueError("a group or block size is a positive number")
    return Scheme(
        weight_bits=weight,
        weight_type="float" if kind == "FP8" and weight == 8 else "int",
        granularity=_granularity(found),
        group_size=size or None,
        activation_bits=8 if activation == 8 else None,
        activation_type=None if activation == 16 else ("float" if kind == "FP8" else "int"),
        dynamic=found["when"] != "STATIC",
        symmetric=not found["asym"],
        kv="FP8" if found["kv"] else None,
    )


def _checked_fp4(found: re.Match[str]) -> Scheme:
    kind = found["kind"]
    if found["w"] != "4" or found["a"] not in ("4", "16") or found["when"] or found["per"] or found["asym"]:
        raise ValueError(
            f"{kind} fixes bits, groups and scales; write W4A4_{kind}, or W4A16_{kind} where activations stay"
        )
    both = found["a"] == "4"
    return Scheme(
        weight_bits=4,
        weight_type="float",
        granularity="group",
        group_size=_FP4_GROUPS[kind],
        activation_bits=4 if both else None,
        activation_type="float" if both else None,
        kv="FP8" if found["kv"] else None,
    )


def _granularity(found: re.Match[str]) -> Granularity:
    if found["group"]:
        return "group"
    if found["block"]:
        return "block"
    return "tensor" if found["per"] else "channel"


def of_dtype(dtype: str) -> Scheme:
    """The scheme of a checkpoint that is not quantized, from its dtype's name in config.json.

    Raises:
        ValueError: a dtype that is not a plain floating-point one.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not a plain one; known: {', '.join(_DTYPES)}")
    return parse(_DTYPES[dtype])


def matches(name: str, entries: Iterable[str]) -> bool:
    """Whether a module is named by a list of targets or ignored ones; `re:` entries are regular expressions."""
    return any(
        re.match(entry.removeprefix("re:"), name) is not None if entry.startswith("re:") else entry == name
        for entry in entries
    )


@dataclass(frozen=True, slots=True)
class Misfit:
    """A layer whose width the group size does not divide."""

    layer: str
    width: int
    group_size: int


def misfits(scheme: Scheme, linear_shapes: Mapping[str, tuple[int, int]], ignore: Iterable[str] = ()) -> list[Misfit]:
    """Find every layer that a scheme does not fit. Shapes are (out_features, in_features), as torch stores them."""
    size = scheme.group_size
    if size is None:
        return []
    skip = tuple(ignore)
    return [
        Misfit(name, width, size)
        for name, shape in linear_shapes.items()
        if not matches(name, skip)
        for width in dict.fromkeys(shape if scheme.granularity == "block" else shape[1:])
        if width % size
    ]


def fitting_groups(linear_shapes: Mapping[str, tuple[int, int]], ignore: Iterable[str] = ()) -> tuple[int, ...]:
    """The usual group sizes that divide the width of every layer not ignored."""
    skip = tuple(ignore)
    widths = {shape[1] for name, shape in linear_shapes.items() if not matches(name, skip)}
    return tuple(size for size in USUAL_GROUPS if all(width % size == 0 for width in widths))


def misfit_problems(
    key: str, scheme: Scheme, linear_shapes: Mapping[str, tuple[int, int]], ignore: Sequence[str] = ()
) -> list[Problem]:
    """Say which layers a scheme does not fit and what would, as at most one problem for the configuration key."""
    found = misfits(scheme, linear_shapes, ignore)
    if not found:
        return []
    layers = ", ".join(f"{name} ({width})" for name, width in folded(found))
    count = len({misfit.layer for misfit in found})
    if scheme.granularity == "block":
        message = f"{found[0].group_size} does not divide both sides of {count} layers: {layers}"
        allowed = "would fit all: one scale per channel, without _BLOCK; or name these layers in `ignore`"
        return [Problem(key, str(scheme), message, allowed)]
    if scheme.gguf:
        mixed = ", ".join(name for name, (_, size) in _GGUF.items() if size is None)
        message = f"blocks of {found[0].group_size} do not divide the width of {count} layers: {layers}"
        return [Problem(key, str(scheme), message, f"file types that take another type for such layers: {mixed}")]
    fitting = () if scheme.fp4 else fitting_groups(linear_shapes, ignore)
    allowed = "would fit all: " + (", ".join(f"G{g}" for g in fitting) or "only one scale per channel, without _G")
    message = f"{found[0].group_size} does not divide the width of {count} layers: {layers}"
    return [Problem(key, str(scheme), message, allowed)]


def folded(found: Sequence[Misfit]) -> list[tuple[str, int]]:
    """Put layers that differ only in their number on one line: model.layers.{0-29}.mlp.up_proj."""
    groups: dict[tuple[str, int], list[int]] = {}
    for misfit in found:
        number = re.search(r"\.(\d+)\.", misfit.layer)
        pattern = misfit.layer if number is None else re.sub(r"\.\d+\.", ".{}.", misfit.layer, count=1)
        numbers = groups.setdefault((pattern, misfit.width), [])
        if number is not None:
            numbers.append(int(number[1]))
    return [
        (pattern.replace("{}", "{" + _ranges(numbers) + "}"), width) for (pattern, width), numbers in groups.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


KV = "*_KV"
"""A quantizer's pattern that begins so adds a cache format to each of its schemes: "*_KVFP8"."""


def supported(scheme: Scheme, patterns: Iterable[str]) -> bool:
    """Whether a scheme's name matches one of a quantizer's patterns, such as W4A16_G*."""
    plain, known = str(replace(scheme, kv=None)), tuple(patterns)
    fits = any(fnmatchcase(plain, pattern) for pattern in known if not pattern.startswith(KV))
    return fits and (scheme.kv is None or f"{KV}{scheme.kv}" in known)


def one_of(patterns: tuple[str, ...]) -> Callable[[str], str]:
    """A validator that gives a scheme's full name, or says which schemes a quantizer has."""

    def check(name: str) -> str:
        scheme = parse(name)
        if not supported(scheme, patterns):
            raise ValueError(f"this quantizer has no {scheme}; it has {', '.join(map(readable, patterns))}")
        return str(scheme)

    return check


def readable(pattern: str) -> str:
    """A pattern as people write it: W[248]A16_G*[0-9] is W2|4|8A16_G<size>."""
    if pattern.startswith(KV):
        return f"each also with {pattern.removeprefix('*')}"
    return re.sub(r"\[(\d+)\]", lambda m: "|".join(m[1]), pattern.replace("*[0-9]", "<size>"))
