"""The Pareto front over any number of figures, of each of which more is better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One engine. An emulated engine (`real` false) or one without a figure neither joins nor shapes the front."""

    label: str
    figures: tuple[float | None, ...]
    real: bool = True

    @property
    def counts(self) -> bool:
        """Whether this point is evidence on every axis."""
        return self.real and all(v is not None and math.isfinite(v) for v in self.figures)


def front(points: Sequence[Point]) -> frozenset[str]:
    """Give the labels that no other point beats on one axis without losing on another; equals stay together."""
    counted = [(p.label, tuple(v or 0.0 for v in p.figures)) for p in points if p.counts]
    return frozenset(label for label, mine in counted if not any(_dominates(other, mine) for _, other in counted))


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))
