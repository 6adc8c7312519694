"""What the probe's charts show, drawn from a decision: latency against load, and drift over blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from pipelines.decide import latencies, phases
from pipelines.decide.loadsections import METRIC
from pipelines.decide.model import Candidate, Decision
from pipelines.decide.probed import Drift, MetricName, Throughput
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


def load_curves(decision: Decision, metric: MetricName, drawn: Sequence[Candidate]) -> Iterator[Chart]:
    """Each profile of several phases, apart by bucket: requests/s delivered against the highest percentile that most
    of its points have, p99 where they do."""
    named, colour = phases.names(decision.candidates), figures.colours(decision, drawn)
    for profile in dict.fromkeys(profile for profile, _ in named):
        mine = [f for c in drawn for f in c.latency if f.profile == profile]
        for bucket in dict.fromkeys(f.bucket for f in mine):
            percentile = max(PERCENTILES, key=lambda p: _known(drawn, profile, bucket, metric, p))
            found = tuple(
                Line(one.label, dots, colour[one.label], dashed=not one.native)
                for one in drawn
                if (dots := _curve(one, named, profile, bucket, metric, percentile))
            )
            if found:
                what = f"p{percentile:g} {METRIC[metric]}"
                inputs = f", {bucket} tokens in" if bucket else ""
                yield Chart(f"{what} against load, {profile}{inputs}", "requests/s answered", f"{what}, ms", found)


def _points(one: Candidate, profile: str, bucket: str, metric: MetricName, p: float) -> list[phases.Load]:
    points = phases.curve(one, profile, metric, p)
    return sorted((at for at in points if at.bucket == bucket), key=lambda at: at.phase)


def _known(drawn: Sequence[Candidate], profile: str, bucket: str, metric: MetricName, p: float) -> int:
    points = [at for c in drawn for at in _points(c, profile, bucket, metric, p)]
    return sum(at.latency is not None for at in points)


def _curve(
    one: Candidate, named: phases.Names, profile: str, bucket: str, metric: MetricName, p: float
) -> tuple[Dot, ...]:
    return tuple(
        Dot(at.throughput.requests_per_s, at.latency, not at.throughput.evidence, named.get((profile, at.phase), ""))
        for at in _points(one, profile, bucket, metric, p)
        if at.latency is not None
    )


def across(decision: Decision, metric: MetricName, drawn: Sequence[Candidate]) -> Chart | None:
    """Output tokens/s against a percentile over profiles of one phase each, closed loops and open loads apart, each in
    the order of what was offered; of several buckets the slowest. None where there is one such profile or none."""
    steps = {profile for profile, _ in phases.names(decision.candidates)}
    known = {f.profile for c in drawn for f in c.latency} - steps
    if len(known) < 2:
        return None
    colour = figures.colours(decision, drawn)
    percentile = max(PERCENTILES, key=lambda p: sum(len(_over(one, known, metric, p)) for one in drawn))
    found = []
    for one in drawn:
        dots = _over(one, known, metric, percentile)
        for closed in (True, False):
            mine = tuple(dot for _, is_closed, dot in sorted(dots, key=lambda d: d[0]) if is_closed == closed)
            if mine:
                found.append(Line(one.label, mine, colour[one.label], not one.native, named=one is drawn[0]))
    what = f"p{percentile:g} {METRIC[metric]}"
    return (
        Chart(f"{what} against throughput, all loads", "output tokens/s", f"{what}, ms", tuple(found))
        if found
        else None
    )


def _over(one: Candidate, profiles: Set[str], metric: MetricName, p: float) -> list[tuple[float, bool, Dot]]:
    """What was offered, whether in a closed loop, and the point, of each profile that has one."""
    whole: dict[str, Throughput] = {}
    for t in one.throughput:
        whole.setdefault(t.profile, t)  # the row of all buckets comes first
    found = []
    for profile in profiles & whole.keys():
        at, t = latencies.at(one.latency, profile, metric, p), whole[profile]
        if at is not None and at.value is not None:
            offered = t.concurrency if t.concurrency is not None else t.rate
            dot = Dot(t.output_tokens_per_s, at.value, not (t.evidence and at.evidence), profile)
            found.append((float(offered or 0.0), t.concurrency is not None, dot))
    return found


def drift(decision: Decision, profile: str, drawn: Sequence[Candidate]) -> Chart | None:
    """Medians of a profile's blocks over the minutes of the probe, each over its candidate's mean; None without any."""
    found, colour = [], figures.colours(decision, drawn)
    for one in drawn:
        mine = next((d for d in one.probed.drifts if d.profile == profile and d.spots), None)
        if mine is not None:
            found.append(Line(one.label, tuple(_dots(mine)), colour[one.label], dashed=not one.native))
    if not found:
        return None
    metric = METRIC[next(d.metric for c in decision.candidates for d in c.probed.drifts)]
    title = f"Median {metric} of each block over the candidate's mean, {profile}"
    return Chart(title, "minutes since the probe began", "times the candidate's mean", tuple(found), level=1.0)


def _dots(mine: Drift) -> Iterator[Dot]:
    counted = [s.value for s in mine.spots if not s.left_out] or [s.value for s in mine.spots]
    mean = math.exp(math.fsum(map(math.log, counted)) / len(counted))
    yield from (Dot(s.hours * 60.0, s.value / mean, bool(s.left_out), s.left_out) for s in mine.spots)
