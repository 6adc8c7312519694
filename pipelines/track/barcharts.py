"""Stacked level bars as SVG text, from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.track import drawing
from pipelines.track.axes import Box, Scale, text_width, ticks


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar: what it is, by its place in the legend, and how much."""

    kind: int
    value: float


@dataclass(frozen=True, slots=True)
class Bar:
    """Pieces end to end, named; `estimate` is drawn as a dashed frame from one value to another."""

    label: str
    parts: tuple[Part, ...]
    estimate: tuple[float, float] | None = None

    @property
    def end(self) -> float:
        return sum(part.value for part in self.parts)


FILLS = ("var(--h5)", "var(--h3)", "var(--c2)", "var(--c0)")
"""Of kinds in order: apart in lightness, so that they are told apart without colour too."""


def stacked(bars: Sequence[Bar], kinds: Sequence[str], *, estimate: str, unit: str, title: str, width: float) -> str:
    """Draw bars from zero on, longest known end first in the scale; `estimate` names the dashed frames."""
    narrow = width < 560
    used = {part.kind for bar in bars for part in bar.parts}
    shown = {n: words for n, words in enumerate(kinds) if n in used}
    parts, top = _legend(shown, estimate if any(b.estimate for b in bars) else "", width)
    step = 44.0 if narrow else 30.0
    left = 4.0 if narrow else min(width * 0.34, 16 + max((text_width(b.label, 13) for b in bars), default=0.0))
    most = max((v for b in bars for v in (b.end, b.estimate[1] if b.estimate else 0.0)), default=1.0) or 1.0
    x = Scale(0.0, most * 1.02, left, width - 62)
    bottom = top + step * len(bars)
    for tick in ticks(0.0, most, 4 if narrow else 7):
        parts.append(drawing.line(x(tick), top, x(tick), bottom, "var(--line)", 1))
        parts.append(drawing.text(x(tick), bottom + 16, drawing.number(tick), "soft small", anchor="middle"))
    for n, bar in enumerate(bars):
        parts += _bar(bar, x, top + step * n, kinds, unit, narrow, left)
    parts.append(drawing.text(width - 4, bottom + 16, unit, "soft small", anchor="end"))
    return drawing.svg(parts, width, bottom + 24, title)


def _bar(bar: Bar, x: Scale, top: float, kinds: Sequence[str], unit: str, narrow: bool, left: float) -> list[str]:
    room = x.end - x.start if narrow else left - 12
    label = drawing.text(4, top + (14 if narrow else 20), drawing.cut(bar.label, room), "halo")
    above, below = top + (19 if narrow else 6), top + (37 if narrow else 24)
    parts, at = [label], 0.0
    for part in bar.parts:
        told = f"{bar.label}: {kinds[part.kind]} {drawing.number(round(part.value, 1))} {unit}"
        parts.append(drawing.rect(Box(x(at), above, x(at + part.value), below), FILLS[part.kind], "", told))
        at += part.value
    if bar.estimate is not None:
        box = Box(x(bar.estimate[0]), above - 2.5, x(bar.estimate[1]), below + 2.5)
        frame = ' stroke="var(--ink)" stroke-width="1.4" stroke-dasharray="4 3"'
        parts.append(drawing.rect(box, "none", frame))
    end = x(max(at, bar.estimate[1] if bar.estimate else 0.0))
    parts.append(drawing.text(end + 7, (above + below) / 2 + 4.5, drawing.number(round(at)), "halo"))
    return parts


def _legend(kinds: Mapping[int, str], estimate: str, width: float) -> tuple[list[str], float]:
    keys = [(FILLS[n], "", words) for n, words in kinds.items()]
    if estimate:
        keys.append(("none", ' stroke="var(--ink)" stroke-width="1.4" stroke-dasharray="4 3"', estimate))
    parts, x, y = [], 4.0, 16.0
    for fill, more, words in keys:
        wide = 22 + text_width(words, 13) + 18
        if x + wide > width and x > 4:
            x, y = 4.0, y + 21
        parts.append(drawing.rect(Box(x, y - 11, x + 16, y + 2), fill, more))
        parts.append(drawing.text(x + 22, y, words))
        x += wide
    return parts, y + 16
