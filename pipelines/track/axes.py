"""Scales, ticks and label placement for the hand-made charts: arithmetic only, all lengths in SVG units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LOG_FROM_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle by its corners."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """The shared area; 0 where they only touch."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return wide * high if wide > 0 and high > 0 else 0.0

    def outside(self, frame: Box) -> float:
        """How far this box reaches beyond a frame."""
        over = (frame.left - self.left, frame.top - self.top, self.right - frame.right, self.bottom - frame.bottom)
        return sum(max(0.0, one) for one in over)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps `low..high` to `start..end`, evenly or by ratio."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int) -> list[float]:
        """Round values inside the range, about so many."""
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, about)


def scale(values: Iterable[float], start: float, end: float, *, room: float = 0.08, log_allowed: bool = False) -> Scale:
    """Fit a scale around values with some room at both ends; by ratio where they span more than twenty times."""
    found = list(values)
    low, high = min(found), max(found)
    if log_allowed and low > 0 and high / low >= LOG_FROM_RATIO:
        spread = (high / low) ** room
        return Scale(low / spread, high * spread, start, end, log=True)
    spread = (high - low) * room or abs(high) * room or 1.0
    return Scale(low - spread, high + spread, start, end)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within a range."""
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times each power of ten within a range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]


def text_width(text: str, size: float) -> float:
    """About how wide a line of sans-serif text is."""
    return sum(0.34 if c in "iljtfr.,:;|!'()[] " else 0.92 if c in "mwMW@%" else 0.62 for c in text) * size


def place(
    anchors: Sequence[tuple[float, float]], texts: Sequence[str], frame: Box, size: float, taken: Sequence[Box] = ()
) -> list[tuple[float, float]]:
    """Find where each label starts (its left end and baseline), clear of points, bars, the frame and each other.

    Each label takes the free place nearest to its point; where none is free, the one that overlaps least.
    """
    placed: list[Box] = [Box(x - 8, y - 8, x + 8, y + 8) for x, y in anchors]
    placed += taken
    found: list[tuple[float, float]] = []
    for (x, y), text in zip(anchors, texts, strict=True):
        wide = text_width(text, size)
        options = [Box(left, top, left + wide, top + size * 1.15) for left, top in _around(x, y, wide, size)]
        best = min(options, key=lambda box: sum(box.overlap(one) for one in placed) + 40 * box.outside(frame))
        placed.append(best)
        found.append((best.left, best.top + size * 0.9))
    return found


def _around(x: float, y: float, wide: float, size: float) -> list[tuple[float, float]]:
    """Places for a label around a point, near ones first."""
    found = []
    for away in (0, 1, 2, 3, 4):
        gap, rise = 11 + 3 * away, size * 1.25 * away
        lefts = (x + gap, x - gap - wide, x - wide / 2)
        tops = (y - size * 0.6 - rise, y - size * 0.6 + rise)
        found += [(left, top) for top in tops for left in lefts[:2]]
        found += [(lefts[2], y - size * 1.6 - 4 - rise), (lefts[2], y + size * 0.5 + 4 + rise)]
    return found
