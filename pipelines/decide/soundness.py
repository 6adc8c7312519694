"""Whether a probe's figures can be believed: the client's lateness, counts of tokens, cache hits. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pipelines.decide.gate import LagRule
from pipelines.decide.measured import Measured, Request
from pipelines.decide.probed import Soundness
from pipelines.probe.latency import percentile

FORMULAS = {
    "client too slow": "p99 of the schedule lag (the maximum where fewer than 100 requests have one) above both "
    "gate.lag.ms and gate.lag.share of the median TTFT of the profile: its latencies are no evidence",
    "prefix hits": "cached input tokens by the server's usage / input tokens; else the mean hit rate in its metrics; "
    "two engines whose rates differ by more than one point are not compared",
    "token counts": "an answer is a mismatch where the server's usage and the ids in its stream, or the prompt tokens "
    "it says and those it was sent, disagree",
}
HITS_APART = 0.01


def soundness(measured: Measured, rule: LagRule) -> tuple[Soundness, ...]:
    """Look at every profile, over all its blocks."""
    return tuple(_of_profile(measured.of(profile), profile, rule) for profile in measured.profiles)


def _of_profile(measured: Measured, profile: str, rule: LagRule) -> Soundness:
    answered = [r for r in measured.requests if r.ok]
    lags = [(r.sent_s - r.scheduled_s) * 1e3 for r in measured.requests if r.scheduled and r.ok]
    medians = [v for r in answered if (v := r.value("ttft_ms")) is not None]
    median = percentile(medians, 50.0) or 0.0
    compared = [r for r in answered if r.usage_output_tokens is not None and r.counted_tokens is not None]
    hits, source = _prefix_hits(measured, answered)
    return Soundness(
        profile=profile,
        lag_p50_ms=percentile(lags, 50.0),
        lag_p99_ms=percentile(lags, 99.0),
        lag_max_ms=max(lags, default=None),
        lag_limit_ms=max(rule.ms, rule.share * median) if lags else None,
        answered=len(answered),
        token_mismatches=sum(r.usage_output_tokens != r.counted_tokens for r in compared),
        compared_tokens=len(compared),
        input_mismatches=sum(r.usage_input_tokens not in (None, r.input_tokens) for r in answered),
        other_lengths=sum(r.output_tokens != r.asked_tokens for r in answered if r.asked_tokens),
        blocks=len(measured.blocks),
        steady_blocks=sum(b.steady is True for b in measured.blocks),
        prefix_hits=hits,
        prefix_source=source,
    )


def _prefix_hits(measured: Measured, answered: Sequence[Request]) -> tuple[float | None, str]:
    """The share of input tokens taken from a cache, and who says so."""
    told = [r for r in answered if r.cached_tokens is not None]
    tokens = sum(r.input_tokens for r in told)
    if tokens:
        return sum(r.cached_tokens or 0 for r in told) / tokens, "usage"
    rates = [b.prefix_hit_rate for b in measured.blocks if b.prefix_hit_rate is not None]
    return (math.fsum(rates) / len(rates), "metrics") if rates else (None, "")


def against(reference: Soundness | None, candidate: Soundness | None) -> Iterator[str]:
    """What speaks against comparing two engines under a profile."""
    for who, one in (("reference", reference), ("candidate", candidate)):
        if one is not None and one.late:
            lag = one.lag_max_ms if one.lag_p99_ms is None else one.lag_p99_ms
            what = "at most" if one.lag_p99_ms is None else "p99"
            yield (
                f"the client was too slow with the {who}: sent {what} {lag:.1f} ms late, allowed {one.lag_limit_ms:.1f}"
            )
    hits = [one.prefix_hits for one in (reference, candidate) if one is not None]
    if len(hits) == 2 and hits[0] is not None and hits[1] is not None and abs(hits[0] - hits[1]) > HITS_APART:
        yield f"prefix-cache hits differ ({hits[0]:.1%} and {hits[1]:.1%} of input tokens)"
