"""What an engine delivered: rates, goodput under promises made jointly, and the highest rate that keeps them. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipelines.decide import stats
from pipelines.decide.interval import Interval, exp
from pipelines.decide.measured import CONFIDENCE, Block, Measured, Request, groups
from pipelines.decide.probed import MetricName, Saturation, Throughput

FORMULAS = {
    "rates of a phase": "answers, or their tokens, over (last answer - first request due) of each round, added up; a "
    "profile of one phase takes the time under load",
    "input and total tokens/s": "prompt tokens, or prompt and output tokens, of requests answered, over the same",
    "goodput": "requests that kept every promise of their profile at once, a second; a failed request keeps none",
    "success rate": "requests answered in full / requests sent, those aside that the probe itself interrupted",
    "saturation": "by round the highest rate searched at which the share asked for kept every promise (and below the "
    "lowest at which it did not); geometric mean over rounds, t interval of the logarithms",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What is promised of each request of a profile, and of what share of them."""

    max_ms: Mapping[MetricName, float] = field(default_factory=dict)
    share: float = 1.0

    def kept(self, request: Request) -> bool:
        """Whether it was answered within every limit; a limit on a time it does not have (TPOT of one token) holds."""
        return request.ok and all((request.value(metric) or 0.0) <= most for metric, most in self.max_ms.items())

    @property
    def text(self) -> str:
        told = ", ".join(f"{m.removesuffix('_ms').upper()} <= {most:g} ms" for m, most in self.max_ms.items())
        return f"{self.share:.1%} within {told}"


def throughputs(measured: Measured, limits: Mapping[str, Limits]) -> tuple[Throughput, ...]:
    """Rates of each phase: over all its requests, and of each bucket where there are several."""
    found: list[Throughput] = []
    for profile in measured.profiles:
        everything, (rows, evidence) = measured.of(profile), measured.shown(profile)
        for phase in sorted({r.phase for r in everything.requests}):
            found += _phase(everything, rows, phase, limits.get(profile, Limits()), evidence)
    return tuple(found)


def _phase(everything: Measured, rows: Measured, phase: int, limits: Limits, evidence: bool) -> Iterator[Throughput]:
    """One row for all requests of a phase, then one for each bucket where there are several."""
    sent = [r for r in everything.requests if r.phase == phase]
    counted = [r for r in rows.requests if r.phase == phase]
    alone = len({r.phase for r in everything.requests}) == 1
    wall_s = math.fsum(b.wall_s for b in rows.blocks) if alone else _walls_s(counted)
    buckets = list(dict.fromkeys(group.bucket for group, _ in groups(sent)))
    peak = max((b.peak_rss_bytes for b in rows.blocks if b.peak_rss_bytes is not None), default=None)
    for bucket in buckets if len(buckets) == 1 else ["", *buckets]:
        whole = len(buckets) > 1 and not bucket
        mine, theirs = ([r for r in side if whole or r.bucket == bucket] for side in (counted, sent))
        answered = [r for r in mine if r.ok]
        kept = sum(limits.kept(r) for r in mine) if limits.max_ms else None
        yield Throughput(
            profile=sent[0].profile, phase=phase, bucket=bucket, requests=len(theirs),
            failed=sum(r.failed for r in theirs), rate=sent[0].rate, concurrency=sent[0].concurrency,
            requests_per_s=_rate(len(answered), wall_s),
            input_tokens_per_s=_rate(sum(r.input_tokens for r in answered), wall_s),
            output_tokens_per_s=_rate(sum(r.output_tokens for r in answered), wall_s),
            errors=dict(sorted(Counter(r.error or "unknown" for r in theirs if not r.ok).items())),
            goodput_per_s=None if kept is None or wall_s <= 0.0 else kept / wall_s,
            within_slo=None if kept is None or not mine else kept / len(mine),
            peak_rss_bytes=peak, evidence=evidence,
        )  # fmt: skip


def _rate(count: int, wall_s: float) -> float:
    return count / wall_s if wall_s > 0.0 else 0.0


def _walls_s(requests: Sequence[Request]) -> float:
    """From the first request due to the last answer, round by round, added up."""
    by_round: dict[int, list[Request]] = {}
    for r in requests:
        by_round.setdefault(r.round, []).append(r)
    return math.fsum(_wall_s(mine) for mine in by_round.values())


def _wall_s(requests: Sequence[Request]) -> float:
    ends = [r.start_s + r.e2e_ms / 1e3 for r in requests if r.ok and r.e2e_ms is not None]
    return max(ends) - min(r.start_s for r in requests) if ends else 0.0


def goodput(
    requests: Sequence[Request], blocks: Sequence[Block], profile: str, max_ms: Mapping[MetricName, float]
) -> float | None:
    """Give the requests a second that kept every promise of a profile; None where nothing was measured or promised."""
    wall_s = math.fsum(b.wall_s for b in blocks if b.profile == profile)
    if not max_ms or wall_s <= 0.0:
        return None
    limits = Limits(max_ms)
    return sum(limits.kept(r) for r in requests if r.profile == profile) / wall_s


def saturation(measured: Measured, profile: str, limits: Limits) -> Saturation | None:
    """Find the highest rate of a search that kept the promise; None where nothing was searched.

    A rate that fails caps the round: a higher one that happens to keep the promise does not count.
    """
    counted, evidence = measured.shown(profile)
    rows = [r for r in counted.requests if r.mode == "search"]
    if not rows or not limits.max_ms:
        return None
    rounds = sorted({r.round for r in rows})
    found = [_highest([r for r in rows if r.round == one], limits) for one in rounds]
    rates = [rate for rate, _ in found]
    known = [math.log(rate) for rate in rates if rate is not None]
    complete = len(known) == len(rates)
    interval = None
    if complete and len(known) > 1:
        low, high = stats.paired_t(known).interval(CONFIDENCE)
        interval = Interval(lower=math.exp(low), upper=exp(high), confidence=CONFIDENCE)
    return Saturation(
        profile=profile,
        by_round=tuple(rates),
        failed_by_round=tuple(failed for _, failed in found),
        rate=math.exp(math.fsum(known) / len(known)) if complete and known else None,
        interval=interval,
        at_least=any(failed is None for _, failed in found),
        promise=limits.text,
        evidence=evidence,
    )


def _highest(requests: Sequence[Request], limits: Limits) -> tuple[float | None, float | None]:
    """The highest rate of one round below the first that failed, and that one; None where there is none."""
    by_rate: dict[float, list[bool]] = {}
    for r in requests:
        if r.rate is not None:
            by_rate.setdefault(r.rate, []).append(limits.kept(r))
    best = None
    for rate in sorted(by_rate):
        if sum(by_rate[rate]) < limits.share * len(by_rate[rate]) - 1e-9:
            return best, rate
        best = rate
    return best, None
