"""Phases of load profiles in words, and the curve that they draw: what was offered against what came of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.decide.model import Candidate
from pipelines.decide.probed import Latency, MetricName, Throughput

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
    """One point of a load curve. `latency` is None where the phase has not enough requests for the percentile."""

    phase: int
    bucket: str
    throughput: Throughput
    latency: float | None


def curve(one: Candidate, profile: str, metric: MetricName, percentile: float) -> list[Load]:
    """A candidate's phases of a profile, in the order of what was offered, apart by bucket."""
    mine = [t for t in one.throughput if t.profile == profile]
    several = {t.phase for t in mine if sum(o.phase == t.phase for o in mine) > 1}
    found = []
    for t in mine:
        if t.bucket or t.phase not in several:
            at = next((f for f in one.latency if _is(f, t, metric, percentile)), None)
            found.append(Load(t.phase, t.bucket, t, at.value if at else None))
    return sorted(found, key=lambda p: p.phase)


def _is(figure: Latency, t: Throughput, metric: MetricName, percentile: float) -> bool:
    place = (figure.profile, figure.phase, figure.bucket, figure.metric, figure.percentile)
    return place == (t.profile, t.phase, t.bucket, metric, percentile)
