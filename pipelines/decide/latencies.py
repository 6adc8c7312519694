"""Percentiles of latencies in each group, with intervals that assume no distribution. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pipelines.decide import stats
from pipelines.decide.interval import Interval
from pipelines.decide.measured import CONFIDENCE, METRICS, Group, Measured, Request, groups
from pipelines.decide.probed import Latency, MetricName
from pipelines.probe.latency import PERCENTILES, percentile

FORMULAS = {
    "interval of a percentile": "order statistics, distribution-free, 95%: ranks from the binomial distribution (p95 "
    "takes 72 requests, p99 368, p99.9 3,688). Requests of one run are not quite independent, so it is a lower bound "
    "of the doubt; a dash where there are too few requests",
    "interval of an ITL percentile": "the same over n / design effect gaps, since gaps of one answer resemble each "
    "other; the design effect is that of the share of gaps at or below the percentile, clustered by request",
    "buckets": "input lengths are summed up apart; a profile with several buckets has no latency over all of them",
}


def latencies(measured: Measured, percentiles: Iterable[float] = PERCENTILES) -> tuple[Latency, ...]:
    """Summarize one engine's requests: every metric and percentile in each group, over all rounds together."""
    wanted = sorted(set(percentiles))
    found: list[Latency] = []
    for profile in measured.profiles:
        rows, evidence = measured.shown(profile)
        for group, requests in groups(rows.requests):
            for metric in METRICS:
                found += of_group(group, requests, metric, wanted, evidence)
    return tuple(found)


def of_group(
    group: Group, requests: Sequence[Request], metric: MetricName, percentiles: Sequence[float], evidence: bool = True
) -> list[Latency]:
    """Every percentile of one metric over the requests of a group; of ITL over their gaps."""
    clusters = _samples(requests, metric)
    values = sorted(v for cluster in clusters for v in cluster)
    found = []
    for p in percentiles:
        bounds = (
            gaps_interval(clusters, values, p / 100.0, CONFIDENCE)
            if metric == "itl_ms"
            else stats.quantile_interval(values, p / 100.0, CONFIDENCE)
        )
        found.append(
            Latency(
                profile=group.profile, phase=group.phase, bucket=group.bucket, metric=metric, percentile=p,
                value=percentile(values, p), requests=len(values), evidence=evidence,
                interval=Interval(lower=bounds[0], upper=bounds[1], confidence=CONFIDENCE) if bounds else None,
            )
        )  # fmt: skip
    return found


def _samples(requests: Sequence[Request], metric: MetricName) -> list[Sequence[float]]:
    """The values of each request: its gaps, or its one figure."""
    if metric == "itl_ms":
        return [r.itl_ms for r in requests if r.ok and len(r.itl_ms)]
    return [(v,) for r in requests if (v := r.value(metric)) is not None]


def gaps_interval(
    clusters: Sequence[Sequence[float]], ordered: Sequence[float], quantile: float, confidence: float
) -> tuple[float, float] | None:
    """Bound a quantile of values that come in clusters, given also in order; None where they cannot support it.

    The ranks are those of an independent sample of n / design effect values (Woodruff's interval of a sample quantile,
    with the binomial's ranks), where the design effect is that of the indicator `value <= sample quantile`.
    """
    from scipy.stats import binom

    n, k = len(ordered), len(clusters)
    if k < 2 or n < stats.observations_needed(quantile, confidence):
        return None
    at = ordered[max(0, math.ceil(n * quantile - 1e-9) - 1)]
    inside = [sum(v <= at for v in cluster) for cluster in clusters]
    share = sum(inside) / n
    between = k / (k - 1) * math.fsum((c - share * len(x)) ** 2 for c, x in zip(inside, clusters, strict=True))
    independent = n * share * (1.0 - share)
    effective = n if independent <= 0.0 else int(n / max(1.0, between / independent))
    if effective < stats.observations_needed(quantile, confidence):
        return None
    tail = (1.0 - confidence) / 2.0
    lower = math.floor(binom.ppf(tail, effective, quantile) * n / effective)
    upper = math.ceil((binom.ppf(1.0 - tail, effective, quantile) + 1) * n / effective)
    return (ordered[lower - 1], ordered[upper - 1]) if lower >= 1 and upper <= n else None


def at(found: Iterable[Latency], profile: str, metric: str, p: float) -> Latency | None:
    """The figure that stands for a profile: of several groups the slowest, and of those that lack it, one that does."""
    mine = [f for f in found if (f.profile, f.metric, f.percentile) == (profile, metric, p)]
    return max(mine, key=lambda f: math.inf if f.value is None else f.value, default=None)
