"""Phases of load profiles in words, and the curve that they draw: what was offered against what came of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.decide.model import Candidate
from pipelines.decide.probed import MetricName, Throughput

Names = Mapping[tuple[str, int], str]


def names(candidates: Sequence[Candidate]) -> Names:
    """What each phase offered; profiles of one phase have none to name."""
    found = {(t.profile, t.phase): t for c in candidates for t in reversed(c.throughput)}
    several = {profile for profile, phase in found if any(p == profile and n != phase for p, n in found)}
    return {at: _name(at[1], t) for at, t in sorted(found.items()) if at[0] in several}


def _name(phase: int, figure: Throughput) -> str:
    if figure.rate is not None:
        return f"{phase + 1}: {figure.rate:.4g}/s"
    return f"{phase + 1}: {figure.concurrency} in flight" if figure.concurrency is not None else f"{phase + 1}"


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a load curve: all that a phase delivered, and a percentile of one bucket of it.

    latency is None where there are not enough requests for the percentile.
    """

    phase: int
    bucket: str
    throughput: Throughput
    latency: float | None


def curve(one: Candidate, profile: str, metric: MetricName, percentile: float) -> list[Load]:
    """A candidate's phases of a profile, in the order of what was offered, apart by bucket."""
    whole: dict[int, Throughput] = {}
    for t in one.throughput:
        if t.profile == profile:
            whole.setdefault(t.phase, t)  # the row of all buckets comes first
    mine = [f for f in one.latency if f.profile == profile and f.phase in whole]
    at = {(f.phase, f.bucket): f.value for f in mine if (f.metric, f.percentile) == (metric, percentile)}
    places = dict.fromkeys((f.phase, f.bucket) for f in mine)
    return [Load(phase, bucket, whole[phase], at.get((phase, bucket))) for phase, bucket in sorted(places, key=_phase)]


def _phase(place: tuple[int, str]) -> int:
    return place[0]
