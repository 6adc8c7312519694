"""Latency and throughput of engines from raw requests, and whether one is faster than another, paired by round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.decide import stats
from pipelines.decide.gate import LatencyMetric, Slo, SpeedRule
from pipelines.decide.model import Interval, Latency, Promise, Speed, Throughput
from pipelines.probe.latency import percentile

METRICS: tuple[LatencyMetric, ...] = ("ttft_ms", "tpot_ms", "e2e_ms")
PERCENTILES = (50.0, 95.0, 99.0)
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Request:
    """One request that was sent to an engine; times are milliseconds, None where there is none."""

    engine: str
    profile: str
    round: int
    ok: bool
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def value(self, metric: LatencyMetric) -> float | None:
        """The figure of one metric; None for a failed request, whose time is not a latency."""
        found = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}[metric]
        return found if self.ok and found is not None and math.isfinite(found) else None


@dataclass(frozen=True, slots=True)
class Block:
    """One uninterrupted stretch of load on one engine."""

    engine: str
    profile: str
    round: int
    wall_s: float
    requests: int
    failed: int
    output_tokens_per_s: float
    peak_rss_bytes: int | None


def latencies(requests: Sequence[Request], percentiles: Sequence[float] = PERCENTILES) -> tuple[Latency, ...]:
    """Summarize one engine's requests: each profile, metric and percentile over all rounds together.

    The interval is that of the order statistics, which takes requests as independent: a lower bound of the doubt.
    """
    found = []
    for profile in dict.fromkeys(r.profile for r in requests):
        for metric in METRICS:
            values = _values(requests, profile, metric)
            found += [_latency(profile, metric, p, values) for p in percentiles]
    return tuple(found)


def _latency(profile: str, metric: LatencyMetric, p: float, values: Sequence[float]) -> Latency:
    bounds = stats.quantile_interval(values, p / 100.0, CONFIDENCE)
    interval = Interval(lower=bounds[0], upper=bounds[1], confidence=CONFIDENCE) if bounds else None
    value = percentile(values, p) if values else None
    return Latency(profile=profile, metric=metric, percentile=p, value=value, interval=interval, requests=len(values))


def throughputs(blocks: Sequence[Block]) -> tuple[Throughput, ...]:
    """Add up one engine's blocks by profile; rates are over the time under load."""
    found = []
    for profile in dict.fromkeys(b.profile for b in blocks):
        mine = [b for b in blocks if b.profile == profile]
        wall = math.fsum(b.wall_s for b in mine)
        answered = sum(b.requests - b.failed for b in mine)
        tokens = math.fsum(b.output_tokens_per_s * b.wall_s for b in mine)
        found.append(
            Throughput(
                profile=profile,
                requests=sum(b.requests for b in mine),
                failed=sum(b.failed for b in mine),
                requests_per_s=answered / wall if wall > 0 else 0.0,
                output_tokens_per_s=tokens / wall if wall > 0 else 0.0,
                peak_rss_bytes=max((b.peak_rss_bytes for b in mine if b.peak_rss_bytes is not None), default=None),
            )
        )
    return tuple(found)


def promise(requests: Sequence[Request], slo: Slo) -> Promise:
    """Hold one engine's requests against a promise: kept only where the upper bound of the percentile is within it.

    A failed request has no latency, so it counts as later than any.
    """
    mine = [r for r in requests if r.profile == slo.profile]
    values = [math.inf if (v := r.value(slo.metric)) is None else v for r in mine]
    share = slo.percentile / 100.0
    lower, upper = (None if b is None or math.isinf(b) else b for b in stats.quantile_bounds(values, share, CONFIDENCE))
    least = stats.quantile_bounds(values, share, CONFIDENCE)[0]
    kept, broken = upper is not None and upper <= slo.max_ms, least is not None and least > slo.max_ms
    value = percentile(values, slo.percentile) if values else None
    return Promise(
        profile=slo.profile, metric=slo.metric, percentile=slo.percentile, max_ms=slo.max_ms,
        value=None if value is None or math.isinf(value) else value, lower=lower, upper=upper, requests=len(values),
        requests_needed=stats.observations_needed(share, CONFIDENCE, one_sided=True),
        state="kept" if kept else "broken" if broken else "open",
    )  # fmt: skip


def goodput(requests: Sequence[Request], blocks: Sequence[Block], slos: Sequence[Slo]) -> float | None:
    """Give the requests a second that kept every promise of a profile; None where nothing was measured or promised."""
    profile = next((slo.profile for slo in slos), None)
    wall = math.fsum(b.wall_s for b in blocks if b.profile == profile)
    if profile is None or wall <= 0.0:
        return None
    mine = [r for r in requests if r.profile == profile]
    kept = sum(all((v := r.value(slo.metric)) is not None and v <= slo.max_ms for slo in slos) for r in mine)
    return kept / wall


def compare(
    reference: Sequence[Request], candidate: Sequence[Request], rule: SpeedRule, confidence: float, emulated: str = ""
) -> Speed:
    """Compare a candidate's speed with the reference's: a t interval of the mean log-ratio over common rounds.

    The round is the unit of replication, since requests of one run are not independent. Each round gives one ratio
    of percentiles. It is evidence only with two rounds, no failed request, enough requests a round for the
    percentile, and on both sides an engine that runs its own format (`emulated` says why one does not).
    """
    ours, theirs = ([r for r in side if r.profile == rule.profile] for side in (reference, candidate))
    logs, problems = _log_ratios(ours, theirs, rule)
    failed = sum(not r.ok for r in (*ours, *theirs))
    if failed:
        problems.append(f"{failed} of {len(ours) + len(theirs)} requests failed")
    if emulated:
        problems.insert(0, emulated)
    ratio = math.exp(math.fsum(logs) / len(logs)) if logs else None
    interval = None
    if len(logs) > 1:
        low, high = stats.paired_t(logs).interval(confidence)
        interval = Interval(lower=_exp(low), upper=_exp(high), confidence=round(confidence, 12))
    return Speed(
        metric=f"{rule.metric} p{rule.percentile:g}",
        profile=rule.profile,
        ratio=ratio,
        interval=interval,
        evidence=not problems,
        note="; ".join(problems) or f"paired over {len(logs)} rounds",
    )


def _log_ratios(ours: Sequence[Request], theirs: Sequence[Request], rule: SpeedRule) -> tuple[list[float], list[str]]:
    """Give one log(reference / candidate) per round that both have, and what speaks against them as evidence."""
    if not ours or not theirs:
        who = "the reference" if not ours else "the candidate"
        return [], [f"no requests of {who} under profile {rule.profile!r}"]
    rounds = sorted({r.round for r in ours} & {r.round for r in theirs})
    logs, fewest = [], min(len(ours), len(theirs))
    for one in rounds:
        mine, others = (_values([r for r in s if r.round == one], rule.profile, rule.metric) for s in (ours, theirs))
        a, b = percentile(mine, rule.percentile), percentile(others, rule.percentile)
        fewest = min(fewest, len(mine), len(others))
        if a is not None and b is not None and a > 0 and b > 0:
            logs.append(math.log(a / b))
    problems = []
    needed = stats.observations_needed(rule.percentile / 100.0, CONFIDENCE, one_sided=True)
    if fewest < needed:
        problems.append(f"{fewest} requests a round cannot bound p{rule.percentile:g}, which takes {needed}")
    if len(logs) < 2:
        problems.append(
            f"{len(logs)} round{'s' if len(logs) != 1 else ''} measured on both sides, at least 2 are needed"
        )
    return logs, problems


def _values(requests: Sequence[Request], profile: str, metric: LatencyMetric) -> list[float]:
    return [v for r in requests if r.profile == profile and (v := r.value(metric)) is not None]


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))
