"""What the probe's charts show, drawn from a decision: latency against load, and drift over blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pipelines.decide import phases
from pipelines.decide.loadsections import METRIC
from pipelines.decide.model import Candidate, Decision
from pipelines.decide.probed import Drift, MetricName
from pipelines.track import figures
from pipelines.track.loadcharts import Dot, Line, lines

PERCENTILES = (99.0, 95.0, 90.0, 50.0)


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines of all candidates with the names of their axes."""

    title: str
    x_title: str
    y_title: str
    given: tuple[Line, ...]
    level: float | None = None

    def draw(self, width: float) -> str:
        return lines(
            self.given, x_title=self.x_title, y_title=self.y_title, title=self.title, width=width, level=self.level
        )


def load_curves(decision: Decision, metric: MetricName) -> Iterator[Chart]:
    """Each profile of several phases, apart by bucket: requests/s delivered against the highest percentile that most
    of its points have, p99 where they do."""
    named = phases.names(decision.candidates)
    for profile in dict.fromkeys(profile for profile, _ in named):
        mine = [f for c in decision.candidates for f in c.latency if f.profile == profile]
        for bucket in dict.fromkeys(f.bucket for f in mine):
            percentile = max(PERCENTILES, key=lambda p: _known(decision, profile, bucket, metric, p))
            found = tuple(
                line
                for one in decision.candidates
                if (line := _curve(one, decision, profile, bucket, metric, percentile)) is not None
            )
            if found:
                what = f"p{percentile:g} {METRIC[metric]}"
                inputs = f", {bucket} tokens in" if bucket else ""
                yield Chart(f"{what} against load, {profile}{inputs}", "requests/s answered", f"{what}, ms", found)


def _points(one: Candidate, profile: str, bucket: str, metric: MetricName, p: float) -> list[phases.Load]:
    points = phases.curve(one, profile, metric, p)
    return sorted((at for at in points if at.bucket == bucket), key=lambda at: at.phase)


def _known(decision: Decision, profile: str, bucket: str, metric: MetricName, p: float) -> int:
    points = [at for c in decision.candidates for at in _points(c, profile, bucket, metric, p)]
    return sum(at.latency is not None for at in points)


def _curve(one: Candidate, decision: Decision, profile: str, bucket: str, metric: MetricName, p: float) -> Line | None:
    dots = tuple(
        Dot(at.throughput.requests_per_s, at.latency, hollow=not at.throughput.evidence)
        for at in _points(one, profile, bucket, metric, p)
        if at.latency is not None
    )
    return Line(one.label, dots, figures.colours(decision)[one.label], dashed=not one.native) if dots else None


def drift(decision: Decision, profile: str) -> Chart | None:
    """Medians of a profile's blocks over the minutes of the probe, each over its candidate's mean; None without any."""
    found = []
    for one in decision.candidates:
        mine = next((d for d in one.probed.drifts if d.profile == profile and d.spots), None)
        if mine is not None:
            dots = tuple(_dots(mine))
            found.append(Line(one.label, dots, figures.colours(decision)[one.label], dashed=not one.native))
    if not found:
        return None
    metric = METRIC[next(d.metric for c in decision.candidates for d in c.probed.drifts)]
    title = f"Median {metric} of each block over the candidate's mean, {profile}"
    return Chart(title, "minutes since the probe began", "times the candidate's mean", tuple(found), level=1.0)


def _dots(mine: Drift) -> Iterator[Dot]:
    counted = [s.value for s in mine.spots if not s.left_out] or [s.value for s in mine.spots]
    mean = math.exp(math.fsum(map(math.log, counted)) / len(counted))
    yield from (Dot(s.hours * 60.0, s.value / mean, hollow=bool(s.left_out)) for s in mine.spots)
