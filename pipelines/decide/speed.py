"""Whether one engine is faster than another: paired by request and by block. The round is the unit of replication.

Requests of one round share its luck (queues, drift, the machine), so they are averaged before any interval is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from pipelines.decide import stats
from pipelines.decide.gate import SpeedRule
from pipelines.decide.interval import Interval, exp
from pipelines.decide.measured import CONFIDENCE, METRICS, OF_A_REQUEST, Group, Request, groups
from pipelines.decide.probed import Difference, MetricName, Speed
from pipelines.probe.latency import percentile

FORMULAS = {
    "speed": "exp(mean over rounds of ln(reference percentile / candidate percentile)), t interval over rounds; all "
    "engines meet the same requests in every round. Of several phases or buckets, the one with the least gain decides",
    "by request": "ln(reference / candidate) of each request that both answered, averaged within its round; then the "
    "mean over rounds and its t interval, since requests of one round are not independent. Milliseconds: candidate - "
    "reference likewise",
    "by block": "the same of the percentile of each round's block, where both blocks have it",
    "same answers": "E2E is compared only where answers are as long: the candidate's output tokens within 1% of the "
    "reference's over all pairs",
}
SAME_LENGTH = 0.01
BY_BLOCK = (50.0, 99.0)
Pair = tuple[Request, Request]


def compare(
    reference: Sequence[Request],
    candidate: Sequence[Request],
    rule: SpeedRule,
    confidence: float,
    against: Sequence[str] = (),
) -> Speed:
    """Compare a candidate's speed with the reference's: a t interval of the mean log-ratio over common rounds.

    Each round gives one ratio of percentiles. It is evidence only with two rounds, no failed request, the same prompts,
    enough requests a round for the percentile, answers of one length where E2E is compared, and nothing else `against`
    it. Where the profile has several groups every one must be evidence, and the one with the least gain is given.
    """
    ours, theirs = ([r for r in side if r.profile == rule.profile] for side in (reference, candidate))
    problems = list(against)
    if not ours or not theirs:
        who = "the reference" if not ours else "the candidate"
        problems.append(f"no requests of {who} under profile {rule.profile!r} that count")
    if any(r.mode == "search" for r in (*ours, *theirs)):
        problems.append(f"{rule.profile!r} searches: it tries other rates with each engine, and has a rate to compare")
    failed = sum(r.failed for r in (*ours, *theirs))
    if failed:
        problems.append(f"{failed} of {len(ours) + len(theirs)} requests failed")
    mine, others = dict(groups(ours)), dict(groups(theirs))
    if ours and theirs:
        problems += _unlike(mine, others, rule)
    found = [_of_group(g, mine[g], others.get(g, []), rule, confidence) for g in mine]
    found = found or [_of_group(Group(rule.profile), [], [], rule, confidence)]
    slowest = min(found, key=lambda f: f[0].interval.lower if f[0].interval else -math.inf)[0]
    problems += dict.fromkeys(problem for _, told in found for problem in told) if ours and theirs else []
    told = f"; the slowest of {len(found)} groups" if len(found) > 1 else ""
    return slowest.model_copy(
        update={"evidence": not problems, "note": "; ".join(problems) or f"{slowest.note}{told}"},
    )


def _unlike(
    mine: Mapping[Group, Sequence[Request]], others: Mapping[Group, Sequence[Request]], rule: SpeedRule
) -> Iterator[str]:
    """What makes two sides no comparison of the same work."""
    everywhere = [pair for g in mine for pair in _meetings(mine[g], others.get(g, []))]
    other = sum(a.prompt_id != b.prompt_id for a, b in everywhere)
    if other:
        yield f"{other} of {len(everywhere)} requests ask another prompt of one side than of the other"
    ours = sum(a.output_tokens for a, b in everywhere if a.ok and b.ok)
    theirs = sum(b.output_tokens for a, b in everywhere if a.ok and b.ok)
    if rule.metric == "e2e_ms" and ours and abs(theirs / ours - 1.0) > SAME_LENGTH:
        yield f"answers are {theirs / ours:.3f} times as long as the reference's, so E2E is no measure of speed"


def _of_group(
    group: Group, ours: Sequence[Request], theirs: Sequence[Request], rule: SpeedRule, confidence: float
) -> tuple[Speed, list[str]]:
    """One group's speed, and what speaks against it as evidence."""
    blocks = list(_blocks(ours, theirs, rule.metric, rule.percentile))
    logs = [math.log(a / b) for a, b, _ in blocks if a is not None and b is not None]
    fewest = min((n for _, _, n in blocks), default=0)
    needed = stats.observations_needed(rule.percentile / 100.0, CONFIDENCE, one_sided=True)
    problems = []
    if blocks and fewest < needed:
        problems.append(f"{fewest} requests a round cannot bound p{rule.percentile:g}, which takes {needed}")
    if len(logs) < 2:
        rounds = f"{len(logs)} round{'s' if len(logs) != 1 else ''}"
        problems.append(f"{rounds} measured on both sides, at least 2 are needed")
    ratio, interval = ratio_of(logs, confidence)
    speed = Speed(
        metric=f"{rule.metric} p{rule.percentile:g}", profile=group.profile, phase=group.phase, bucket=group.bucket,
        ratio=ratio, interval=interval, evidence=not problems, note=f"paired over {len(logs)} rounds",
    )  # fmt: skip
    return speed, problems


def differences(
    reference: Sequence[Request], candidate: Sequence[Request], confidence: float = CONFIDENCE
) -> tuple[Difference, ...]:
    """Every metric of every group that both sides have: by request, then by block at p50 and p99.

    A search is left out: which rates it tries depends on the engine, and its figure is the saturation.
    """
    others, found = dict(groups(candidate)), []
    for group, ours in groups([r for r in reference if r.mode != "search"]):
        theirs = others.get(group, [])
        for metric in METRICS:
            if metric in OF_A_REQUEST:
                found.append(by_request(group, ours, theirs, metric, confidence))
            wanted = BY_BLOCK if metric in OF_A_REQUEST else BY_BLOCK[-1:]  # the median gap is about TPOT
            found += [by_block(group, ours, theirs, metric, p, confidence) for p in wanted]
    return tuple(one for one in found if one is not None)


def by_request(
    group: Group, ours: Sequence[Request], theirs: Sequence[Request], metric: MetricName, confidence: float = CONFIDENCE
) -> Difference | None:
    """Compare request with request of the same number, prompt and round; None where no pair has the figure."""
    rounds: dict[int, list[tuple[float, float]]] = {}
    for a, b in _meetings(ours, theirs):
        x, y = a.value(metric), b.value(metric)
        if a.prompt_id == b.prompt_id and x is not None and y is not None and x > 0 and y > 0:
            rounds.setdefault(a.round, []).append((x, y))
    logs = [_mean([math.log(x / y) for x, y in pairs]) for pairs in rounds.values()]
    steps = [_mean([y - x for x, y in pairs]) for pairs in rounds.values()]
    return _difference(group, metric, "request", logs, steps, sum(map(len, rounds.values())), confidence)


def by_block(
    group: Group,
    ours: Sequence[Request],
    theirs: Sequence[Request],
    metric: MetricName,
    p: float,
    confidence: float = CONFIDENCE,
) -> Difference | None:
    """Compare a percentile of each round's block; None where no round has it on both sides."""
    known = [(a, b) for a, b, _ in _blocks(ours, theirs, metric, p) if a is not None and b is not None]
    logs, steps = [math.log(a / b) for a, b in known], [b - a for a, b in known]
    return _difference(group, metric, f"p{p:g}", logs, steps, len(known), confidence)


def _difference(
    group: Group,
    metric: MetricName,
    by: str,
    logs: Sequence[float],
    steps: Sequence[float],
    pairs: int,
    confidence: float,
) -> Difference | None:
    ratio, interval = ratio_of(logs, confidence)
    if ratio is None:
        return None
    bounds = stats.paired_t(steps).interval(confidence) if len(steps) > 1 else None
    return Difference(
        profile=group.profile, phase=group.phase, bucket=group.bucket, metric=metric, by=by, ratio=ratio,
        interval=interval, difference_ms=_mean(steps), rounds=len(logs), pairs=pairs,
        difference_interval=_interval(*bounds, confidence) if bounds else None,
    )  # fmt: skip


def _meetings(ours: Sequence[Request], theirs: Sequence[Request]) -> Iterator[Pair]:
    """The same request of the same round on both sides."""
    others = {(r.round, r.request): r for r in theirs}
    yield from ((r, others[r.round, r.request]) for r in ours if (r.round, r.request) in others)


def _blocks(
    ours: Sequence[Request], theirs: Sequence[Request], metric: MetricName, p: float
) -> Iterator[tuple[float | None, float | None, int]]:
    """Of each round that both have: both percentiles (None where not to be had, or 0) and the smaller sample."""
    for one in sorted({r.round for r in ours} & {r.round for r in theirs}):
        a, b = (_values([r for r in side if r.round == one], metric) for side in (ours, theirs))
        yield percentile(a, p) or None, percentile(b, p) or None, min(len(a), len(b))


def _values(requests: Sequence[Request], metric: MetricName) -> list[float]:
    if metric == "itl_ms":
        return [gap for r in requests if r.ok for gap in r.itl_ms]
    return [v for r in requests if (v := r.value(metric)) is not None]


def ratio_of(logs: Sequence[float], confidence: float) -> tuple[float | None, Interval | None]:
    """The geometric mean of ratios given by their logarithms, and its t interval where there are two."""
    if not logs:
        return None, None
    if len(logs) < 2:
        return math.exp(logs[0]), None
    low, high = stats.paired_t(logs).interval(confidence)
    return math.exp(_mean(logs)), _interval(exp(low), exp(high), confidence)


def _interval(lower: float, upper: float, confidence: float) -> Interval:
    return Interval(lower=lower, upper=upper, confidence=round(confidence, 12))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
