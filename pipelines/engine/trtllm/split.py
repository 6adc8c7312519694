"""What is left of each layer on one tensor-parallel rank, and whether its groups and packed words still fit. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.engine.trtllm import rules
from pipelines.engine.trtllm.case import Case
from pipelines.errors import Problem
from pipelines.quantize.scheme import Misfit, folded, matches

SHOWN = 6
HEAD = "lm_head"


def layers(case: Case) -> Iterator[Problem]:
    """Every layer that cannot be shared out, or whose share no kernel takes."""
    yield from _group_size(case)
    uneven, groups, packed = [], [], []
    for name, (out, into) in case.pairing.linear_shapes.items():
        over = _split_side(name)
        width = out if over == "out" else into
        if over and width % case.tp:
            uneven.append(Misfit(name, width, case.tp))
            continue
        rows, columns = (out // case.tp if over == "out" else out), (into // case.tp if over == "in" else into)
        if not _quantized(case, name):
            continue
        groups += [Misfit(name, n, size) for n, size in _grouped(case, rows, columns) if n % size][:1]
        packed += [Misfit(name, n, bits) for n, bits in _words(case, rows, columns) if n * bits // 8 % rules.ROW_BYTES][
            :1
        ]
    share = f" after the split over tp {case.tp}" if case.tp > 1 else ""
    smaller = "a smaller tp or group" if case.tp > 1 else "a smaller group"
    yield from _told(uneven, f"tp {case.tp} does not divide the width of", "engine.tp", case.tp, "a smaller tp")
    what = f"groups of {case.scheme.group_size if case.scheme else 0} do not divide the width{share} of"
    yield from _told(groups, what, "variant.scheme", case.named, smaller)
    what = f"packed rows and columns are multiples of {rules.ROW_BYTES} bytes{share} (#894), but not in"
    yield from _told(packed, what, "variant.scheme", case.named, "a smaller tp" if case.tp > 1 else "")


def _group_size(case: Case) -> Iterator[Problem]:
    """Engines have kernels for few group sizes."""
    scheme = case.scheme
    if case.backend != "tensorrt" or scheme is None or scheme.granularity != "group":
        return
    allowed = rules.W4A8_GROUPS if case.algo == "W4A8_AWQ" else rules.ENGINE_GROUPS
    if case.algo in rules.PACKED_BITS and scheme.group_size not in allowed:
        message = f"engines have kernels of {case.algo} for certain group sizes only (#988, #1770)"
        yield Problem("variant.scheme", case.named, message, f"allowed: {', '.join(f'G{size}' for size in allowed)}")


def _split_side(layer: str) -> str:
    """Which side of a layer is shared out: out, in, or neither."""
    last = layer.rpartition(".")[2]
    return "out" if last in rules.COLUMN_PARALLEL else "in" if last in rules.ROW_PARALLEL else ""


def _quantized(case: Case, layer: str) -> bool:
    if case.scheme is None or not case.scheme.quantized or layer.rpartition(".")[2] == HEAD:
        return False
    return not matches(layer, case.pairing.ignored)


def _grouped(case: Case, rows: int, columns: int) -> list[tuple[int, int]]:
    """The sides that groups have to divide: columns, and of blocks rows as well."""
    scheme = case.scheme
    if scheme is None or scheme.group_size is None:
        return []
    sides = (columns, rows) if scheme.granularity == "block" else (columns,)
    return [(side, scheme.group_size) for side in sides]


def _words(case: Case, rows: int, columns: int) -> list[tuple[int, int]]:
    """The sides that are packed, with bits a weight; the PyTorch backend packs otherwise."""
    bits = rules.PACKED_BITS.get(case.algo or "") if case.backend == "tensorrt" else None
    return [] if bits is None else [(rows, bits), (columns, bits)]


def _told(found: list[Misfit], what: str, key: str, value: object, allowed: str) -> Iterator[Problem]:
    if found:
        lines = folded(found)
        shown = ", ".join(f"{name} ({width})" for name, width in lines[:SHOWN])
        more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        yield Problem(key, value, f"{what} {len(found)} layers: {shown}{more}", allowed)
