"""A confidence interval as data."""

from __future__ import annotations

from pipelines.config import Strict


class Interval(Strict):
    """A confidence interval; `confidence` is two-sided (0.90 holds a one-sided 5% test)."""

    lower: float
    upper: float
    confidence: float
