"""The Pareto front over score (higher is better) and latency (lower is better)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One engine. An emulated engine (`native` false) or one without a figure neither joins nor shapes the front."""

    label: str
    score: float | None
    latency: float | None
    native: bool = True

    @property
    def counts(self) -> bool:
        """Whether this point is evidence on both axes."""
        return self.native and all(v is not None and math.isfinite(v) for v in (self.score, self.latency))


def front(points: Sequence[Point]) -> frozenset[str]:
    """Give the labels that no other point beats on one axis without losing on the other; equals stay together."""
    ordered = sorted(
        (p.latency, -p.score, p.label) for p in points if p.counts and p.latency is not None and p.score is not None
    )
    kept: set[str] = set()
    best = (math.inf, math.inf)
    for latency, negative, label in ordered:
        if negative < best[1] or (latency, negative) == best:
            kept.add(label)
            best = (latency, negative)
    return frozenset(kept)
