"""A confidence interval as data, and the exponential of one of logarithms."""

from __future__ import annotations

import math

from pipelines.config import Strict


class Interval(Strict):
    """A confidence interval; `confidence` is two-sided (0.90 holds a one-sided 5% test)."""

    lower: float
    upper: float
    confidence: float


def exp(x: float) -> float:
    """e to the x, cut where no float is larger: ends of intervals of logarithms may lie anywhere."""
    return math.exp(min(x, 700.0))
