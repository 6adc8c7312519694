"""Heat maps of layers as SVG text: one after another, on one scale of shades."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.track import drawing
from pipelines.track.axes import Box, text_width

STEP, GAP = 16.0, 1.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One square: a shade from 0 (least) on, or what is known instead; `told` is shown when it is pointed at."""

    row: int
    column: int
    shade: int | Literal["kept", "unknown"]
    told: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One variant's squares, its rows named; `note` stands below its name."""

    label: str
    note: str
    rows: tuple[str, ...]
    columns: int
    cells: tuple[Cell, ...]


def draw(maps: Sequence[HeatMap], *, bounds: Sequence[str], title: str, width: float = 860) -> str:
    """Draw the maps below each other; `bounds` are the texts between shades, one less than there are shades."""
    narrow = width < 560
    parts, top = _legend(bounds, narrow)
    longest = max((text_width(name, 12) for one in maps for name in one.rows), default=0.0)
    left = min(longest + 12, width * 0.3)
    for one in maps:
        found, top = _map(one, left, top, width, narrow)
        parts += found
    return drawing.svg(parts, width, top, title)


def _map(one: HeatMap, left: float, top: float, width: float, narrow: bool) -> tuple[list[str], float]:
    parts = [drawing.text(2, top + 14, drawing.cut(one.label, width), "strong")]
    for line in one.note.split("; ") if narrow else [one.note]:
        parts.append(drawing.text(2, top + 31, drawing.cut(line, width, 12), "soft small"))
        top += 16
    top += 24
    parts += [
        drawing.text(left - 6, top + STEP * n + 12, drawing.cut(name, left - 6, 12), "soft small", anchor="end")
        for n, name in enumerate(one.rows)
    ]
    across = (width - left - 2) / one.columns
    parts += [_cell(cell, left, top, across, "" if narrow else cell.told) for cell in one.cells]
    bottom = top + STEP * len(one.rows)
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if n * across >= 26)
    for column in range(0, one.columns, every):
        parts.append(
            drawing.text(left + across * (column + 0.5), bottom + 14, str(column), "soft small", anchor="middle")
        )
    parts.append(drawing.text(left - 6, bottom + 14, "layer", "soft small", anchor="end"))
    return parts, bottom + 34


def _cell(cell: Cell, left: float, top: float, across: float, told: str) -> str:
    gap = min(GAP, across * 0.1)
    at = Box(left + across * cell.column, top + STEP * cell.row, 0, 0)
    box = Box(at.left, at.top, at.left + across - gap, at.top + STEP - GAP)
    return _square(box, cell.shade, told)


def _square(box: Box, shade: int | str, told: str = "") -> str:
    """A shade; an outline where a layer is as it was, a dot of grey where nobody said how far it is off."""
    if shade == "kept":
        inner = Box(box.left + 0.5, box.top + 0.5, box.right - 0.5, box.bottom - 0.5)
        return drawing.rect(inner, "var(--paper)", ' stroke="var(--line)" stroke-width="1"', told)
    return drawing.rect(box, "var(--line)" if shade == "unknown" else f"var(--h{shade})", "", told)


def _legend(bounds: Sequence[str], narrow: bool) -> tuple[list[str], float]:
    """The shades with the values between them, then the two kinds of squares that have none."""
    wide = 34.0
    parts = [drawing.text(2, 14, "error, times the variant's own median", "soft small")]
    for n in range(len(bounds) + 1):
        parts.append(drawing.rect(Box(2 + wide * n, 22, 1 + wide * (n + 1), 36), f"var(--h{n})"))
    parts += [
        drawing.text(wide * (n + 1) + 1.5, 50, text, "soft small", anchor="middle") for n, text in enumerate(bounds)
    ]
    x, y = (2.0, 70.0) if narrow else (wide * (len(bounds) + 1) + 24, 34.0)
    for shade, words in (("kept", "left as it was"), ("unknown", "no figure given")):
        parts.append(_square(Box(x, y - 12, x + 16, y + 2), shade))
        parts.append(drawing.text(x + 22, y, words, "soft small"))
        x += 22 + text_width(words, 12) + 22
    return parts, 88.0 if narrow else 68.0
