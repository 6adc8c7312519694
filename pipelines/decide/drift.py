"""How figures moved over the blocks of a probe: the machine's own drift, on which comparisons must not rest. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pipelines.decide import stats
from pipelines.decide.interval import Interval
from pipelines.decide.measured import CONFIDENCE, Measured, Request
from pipelines.decide.probed import Drift, MetricName, Spot

FORMULAS = {
    "drift": "slope of ln(median of each block that counts) over time, by least squares, as exp(slope * time from the "
    "first of them to the last) - 1; t interval with blocks - 2 degrees of freedom (three blocks at least)",
}


def drifts(measured: Measured, metric: MetricName) -> tuple[Drift, ...]:
    """The drift of each profile; a median is taken over the whole block, since every block of a profile sends alike.

    A search sends what its results ask for, so it has none.
    """
    first_s = min((b.started_s for b in measured.blocks), default=0.0)
    found = []
    for profile in measured.profiles:
        mine = measured.of(profile)
        if mine.requests[0].mode == "search":
            continue
        medians = _medians(mine.requests, metric)
        spots = tuple(
            Spot(hours=(b.started_s - first_s) / 3600.0, value=medians[b.round], left_out=b.left_out)
            for b in sorted(mine.blocks, key=lambda b: b.started_s)
            if b.round in medians
        )
        change, interval = growth([s for s in spots if not s.left_out])
        found.append(Drift(profile=profile, metric=metric, spots=spots, change=change, interval=interval))
    return tuple(found)


def growth(spots: Sequence[Spot]) -> tuple[float | None, Interval | None]:
    """The growth from the first block to the last on the fitted line, as a share; None with fewer than three blocks."""
    n = len(spots)
    hours, logs = [s.hours for s in spots], [math.log(s.value) for s in spots if s.value > 0]
    if n < 3 or len(logs) < n:
        return None, None
    x, y = math.fsum(hours) / n, math.fsum(logs) / n
    spread = math.fsum((h - x) ** 2 for h in hours)
    if spread <= 0.0:
        return None, None
    slope = math.fsum((h - x) * (v - y) for h, v in zip(hours, logs, strict=True)) / spread
    rest = math.fsum((v - y - slope * (h - x)) ** 2 for h, v in zip(hours, logs, strict=True))
    half = stats.critical(CONFIDENCE, n - 2) * math.sqrt(rest / (n - 2) / spread)
    span = max(hours) - min(hours)
    lower, upper = _share((slope - half) * span), _share((slope + half) * span)
    return _share(slope * span), Interval(lower=lower, upper=upper, confidence=CONFIDENCE)


def _share(logarithm: float) -> float:
    return math.expm1(max(-700.0, min(logarithm, 700.0)))


def _medians(requests: Sequence[Request], metric: MetricName) -> Mapping[int, float]:
    """The median of each round, halfway between the two middle values where there are two."""
    by_round: dict[int, list[float]] = {}
    for r in requests:
        if (v := r.value(metric)) is not None:
            by_round.setdefault(r.round, []).append(v)
    return {one: _median(sorted(values)) for one, values in by_round.items()}


def _median(ordered: Sequence[float]) -> float:
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2.0
