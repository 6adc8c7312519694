"""Promises about latency, each held against the requests of every group of its profile. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipelines.decide import stats
from pipelines.decide.gate import Slo
from pipelines.decide.measured import CONFIDENCE, Group, Measured, Request, groups
from pipelines.decide.model import Promise
from pipelines.probe.latency import percentile

FORMULAS = {
    "promise": "kept where the one-sided 95% upper bound of the percentile by order statistics is within the limit, in "
    "every phase and bucket of the profile; p99 takes 299 requests for such a bound, and a failed request counts as "
    "later than any",
}


def promises(measured: Measured, slo: Slo) -> tuple[Promise, ...]:
    """Hold one engine against a promise, group by group; only blocks that are evidence can keep or break it."""
    found = dict(groups(measured.of(slo.profile).sound.requests))
    return tuple(promise(found.get(g, []), slo, g) for g in found or [Group(slo.profile)])


def promise(
    requests: Sequence[Request], slo: Slo, group: Group | None = None, confidence: float = CONFIDENCE
) -> Promise:
    """Hold requests against a promise: kept only where the upper bound of the percentile is within it.

    A failed request has no latency, so it counts as later than any; one that the probe interrupted is left out.
    """
    mine = [r for r in requests if r.profile == slo.profile and (r.ok or r.failed)]
    values = [math.inf if (v := r.value(slo.metric)) is None else v for r in mine]
    share = slo.percentile / 100.0
    least, most = stats.quantile_bounds(values, share, confidence)
    lower, upper = (None if b is None or math.isinf(b) else b for b in (least, most))
    kept, broken = upper is not None and upper <= slo.max_ms, least is not None and least > slo.max_ms
    value = percentile(values, slo.percentile) if values else None
    return Promise(
        profile=slo.profile, metric=slo.metric, percentile=slo.percentile, max_ms=slo.max_ms,
        phase=group.phase if group else 0, bucket=group.bucket if group else "",
        value=None if value is None or math.isinf(value) else value, lower=lower, upper=upper, requests=len(values),
        requests_needed=stats.observations_needed(share, confidence, one_sided=True),
        state="kept" if kept else "broken" if broken else "open",
    )  # fmt: skip
