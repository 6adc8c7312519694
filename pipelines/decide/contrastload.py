"""The difference between two engines under load: paired by request and by block where one probe measured both. Pure.

The round is the unit of replication, as in `speed`. Of two probes rounds are no pairs, so they are set apart by Welch's
t; that is only done against all reasons.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipelines.decide import alike, speed, stats, throughput
from pipelines.decide.compared import Delta, Kind, Refusal
from pipelines.decide.contrast import Asked
from pipelines.decide.interval import Interval, exp
from pipelines.decide.measured import CONFIDENCE, METRICS, OF_A_REQUEST, Block, Group, Measured, Request, groups, named
from pipelines.decide.probed import Difference, MetricName
from pipelines.decide.resources import resources
from pipelines.decide.throughput import Limits
from pipelines.flow.store import Manifest
from pipelines.probe.latency import percentile

FORMULAS = {
    "ratio of a latency": "other / base, below 1 is faster: by request, the geometric mean over the same request of "
    "the same round, averaged by round; p50 and p99, the percentile of each round's block. t interval over rounds, of "
    "logarithms",
    "ratio of two probes": "rounds of different probes are no pairs: difference of the mean logarithms over rounds, "
    "Welch's t interval. Only where it was asked for against the reasons",
    "rates": "output tokens a second, mean of blocks; ratio and interval over rounds as for latencies. Cost: price of "
    "a device-hour over the tokens of an hour, under the profile in which the base delivers most",
    "memory": "the highest sample under load; a highest value has no interval here",
}


@dataclass(frozen=True, slots=True)
class Load:
    """What a probe showed of one engine. `price`: of a device-hour, with its currency."""

    engine: Manifest
    probe: Manifest
    measured: Measured
    searched: Mapping[str, Limits]
    price: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class _Profile:
    """One profile of both sides, as far as its rows may be used; `paired` where one probe measured both."""

    name: str
    ours: Measured
    theirs: Measured
    asked: Asked
    paired: bool
    marks: tuple[str, ...]


def loads(base: Load, other: Load, asked: Asked) -> list[Delta | Refusal]:
    """Compare latencies, rates, memory, energy and cost, profile by profile."""
    general = [
        *alike.about_engines(base.engine, other.engine, asked.names),
        *alike.about_probes(base.probe, other.probe),
    ]
    found: list[Delta | Refusal] = []
    for profile in dict.fromkeys((*base.measured.profiles, *other.measured.profiles)):
        sides = dict(zip(asked.names, (base.measured, other.measured), strict=True))
        absent = [name for name, side in sides.items() if profile not in side.profiles]
        if absent:
            told = f"{absent[0]} was not measured under it"
            found.append(asked.refuse("load", profile, [told], missing=True))
            continue
        mine, others = base.measured.of(profile), other.measured.of(profile)
        reasons = [
            *general,
            *alike.about_profile(base.probe, other.probe, profile),
            *alike.about_rows(mine, others, asked.names),
        ]
        if reasons and not asked.anyway:
            found.append(asked.refuse("load", profile, reasons))
            continue
        rows = (mine.shown(profile)[0], others.shown(profile)[0])
        one = _Profile(profile, *rows, asked, base.probe.key == other.probe.key, tuple(reasons))
        found += [*_latencies(one), *_rates(one, base, other), *_taken(one)]
    return [*found, *_cost(found, base, other, asked)]


def _latencies(one: _Profile) -> Iterator[Delta | Refusal]:
    theirs = dict(groups([r for r in one.theirs.requests if r.mode != "search"]))
    for group, ours in groups([r for r in one.ours.requests if r.mode != "search"]):
        others = theirs.get(group, [])
        place = named(group.profile, group.phase, group.bucket)
        lengths = _lengths(ours, others, one)
        for metric in METRICS:
            reasons = [lengths] if lengths and metric == "e2e_ms" else []
            if reasons and not one.asked.anyway:
                yield one.asked.refuse("latency", f"{place}: E2E", reasons)
                continue
            wanted = (None, *speed.BY_BLOCK) if metric in OF_A_REQUEST else speed.BY_BLOCK[-1:]
            for p in wanted:
                yield from _latency(one, group, ours, others, metric, p, reasons)


def _lengths(ours: Sequence[Request], theirs: Sequence[Request], one: _Profile) -> str:
    """Why E2E is no measure of speed: one side's answers are longer."""
    a, b = (sum(r.output_tokens for r in side if r.ok) / max(1, sum(r.ok for r in side)) for side in (ours, theirs))
    if not a or not b or abs(b / a - 1.0) <= speed.SAME_LENGTH:
        return ""
    return f"answers of {one.asked.other} are {b / a:.3f} times as long, so E2E is no measure of speed"


def _latency(
    one: _Profile,
    group: Group,
    ours: Sequence[Request],
    theirs: Sequence[Request],
    metric: MetricName,
    p: float | None,
    reasons: Sequence[str],
) -> Iterator[Delta]:
    """One metric by request (no p) or by block; nothing where a side has no such figure."""
    confidence = one.asked.confidence
    if one.paired:
        paired = (
            speed.by_request(group, ours, theirs, metric, confidence)
            if p is None
            else speed.by_block(group, ours, theirs, metric, p, confidence)
        )
        found = None if paired is None else _turned(paired)
    else:
        found = _unpaired(_by_round(ours, metric, p), _by_round(theirs, metric, p), confidence)
    if found is None:
        return
    ratio, interval, step, steps, rounds = found
    base, other = (_over_all(side, metric, p) for side in (ours, theirs))
    yield Delta(
        side=one.asked.other, kind="latency", name=named(group.profile, group.phase, group.bucket),
        part=f"{metric.removesuffix('_ms').upper()} {'by request' if p is None else f'p{p:g}'}", unit="ms",
        higher_is_better=False, base=base, other=other, difference=step, interval=steps, ratio=ratio,
        ratio_interval=interval, count=rounds,
        method=f"{'paired' if one.paired else 'Welch t'} over {rounds} rounds, logarithms",
        note=_few(ours, theirs, metric, p), marks=(*one.marks, *reasons),
    )  # fmt: skip


def _turned(found: Difference) -> tuple[float, Interval | None, float, Interval | None, int]:
    """`speed` gives base / other; here a ratio is other / base."""
    turned = None
    if found.interval is not None:
        low, high = found.interval.upper, found.interval.lower
        turned = Interval(lower=1.0 / low, upper=_over(high), confidence=found.interval.confidence)
    return 1.0 / found.ratio, turned, found.difference_ms, found.difference_interval, found.rounds


def _over(value: float) -> float:
    return 1.0 / value if value > 1e-300 else 1e300


def _by_round(requests: Sequence[Request], metric: MetricName, p: float | None) -> list[float]:
    """One figure a round: its percentile, or the geometric mean of its requests."""
    found = []
    for values in _values(requests, metric):
        if p is not None:
            found.append(percentile(values, p) or 0.0)
        else:
            found.append(math.exp(math.fsum(math.log(v) for v in values) / len(values)) if min(values) > 0 else 0.0)
    return [value for value in found if value > 0.0]


def _values(requests: Sequence[Request], metric: MetricName) -> list[list[float]]:
    """The values of each round that has any."""
    rounds: dict[int, list[float]] = {}
    for r in requests:
        mine = list(r.itl_ms) if metric == "itl_ms" and r.ok else [v] if (v := r.value(metric)) is not None else []
        if mine:
            rounds.setdefault(r.round, []).extend(mine)
    return [rounds[n] for n in sorted(rounds)]


def _over_all(requests: Sequence[Request], metric: MetricName, p: float | None) -> float | None:
    everything = [v for values in _values(requests, metric) for v in values]
    if p is not None:
        return percentile(everything, p)
    return math.fsum(everything) / len(everything) if everything else None


def _few(ours: Sequence[Request], theirs: Sequence[Request], metric: MetricName, p: float | None) -> str:
    """Say where a round has too few requests for the percentile that is taken of it."""
    if p is None:
        return ""
    needed = stats.observations_needed(p / 100.0, CONFIDENCE, one_sided=True)
    fewest = min((len(v) for side in (ours, theirs) for v in _values(side, metric)), default=0)
    what = "gaps" if metric == "itl_ms" else "requests"
    return f"{fewest} {what} a round, and {needed} would bound it" if fewest < needed else ""


def _unpaired(
    ours: Sequence[float], theirs: Sequence[float], confidence: float
) -> tuple[float, Interval | None, float, Interval | None, int] | None:
    """Ratio and difference of two samples of rounds that are no pairs."""
    if not ours or not theirs:
        return None
    shift, bounds = welch([math.log(v) for v in ours], [math.log(v) for v in theirs], confidence)
    step, steps = welch(ours, theirs, confidence)
    ratio = None if bounds is None else _interval(exp(bounds[0]), exp(bounds[1]), confidence)
    return (
        exp(shift), ratio, step, None if steps is None else _interval(*steps, confidence), min(len(ours), len(theirs))
    )  # fmt: skip


def welch(
    ours: Sequence[float], theirs: Sequence[float], confidence: float
) -> tuple[float, tuple[float, float] | None]:
    """Estimate the difference of two means, theirs - ours, by Welch's t (1947); no interval from a sample of one.

    Degrees of freedom by Satterthwaite: (a + b)^2 / (a^2 / (m - 1) + b^2 / (n - 1)), a and b squared standard errors.
    """
    means = [math.fsum(side) / len(side) for side in (ours, theirs)]
    at = means[1] - means[0]
    if min(len(ours), len(theirs)) < 2:
        return at, None
    a, b = (stats.paired_t(side).se ** 2 for side in (ours, theirs))
    if a + b == 0.0:
        return at, None
    df = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(theirs) - 1))
    half = stats.critical(confidence, df) * math.sqrt(a + b)
    return at, (at - half, at + half)


def _rates(one: _Profile, base: Load, other: Load) -> Iterator[Delta]:
    """Output tokens a second; of a search the highest rate that kept the promise."""
    if one.name not in base.searched:
        yield from _rate(one, _speeds(one.ours.blocks), _speeds(one.theirs.blocks), "output tokens/s", "tokens/s")
        return
    both = [
        throughput.saturation(side.measured, one.name, side.searched[one.name])
        for side in (base, other)
        if one.name in side.searched
    ]
    known = [s for s in both if s is not None]
    if len(known) == 2:
        ours, theirs = ({n: rate for n, rate in enumerate(s.by_round) if rate} for s in known)
        note = (
            "the highest rate searched was kept, so the true one may be higher"
            if any(s.at_least for s in known)
            else ""
        )
        for delta in _rate(one, ours, theirs, "saturation", "requests/s"):
            yield delta.model_copy(update={"note": note})


def _speeds(blocks: Sequence[Block]) -> dict[int, float]:
    return {b.round: b.output_tokens_per_s for b in blocks if b.output_tokens_per_s > 0.0}


def _rate(
    one: _Profile, ours: Mapping[int, float], theirs: Mapping[int, float], part: str, unit: str
) -> Iterator[Delta]:
    confidence, common = one.asked.confidence, sorted(ours.keys() & theirs.keys())
    if one.paired:
        ratio, interval = speed.ratio_of([math.log(theirs[n] / ours[n]) for n in common], confidence)
        rounds = len(common)
    else:
        found = _unpaired(list(ours.values()), list(theirs.values()), confidence)
        ratio, interval, rounds = (None, None, 0) if found is None else (found[0], found[1], found[4])
    if ratio is None:
        return
    base, other = (math.fsum(side.values()) / len(side) for side in (ours, theirs))
    yield _load_delta(
        one, "throughput", part, unit, base, other, higher=True, ratio=ratio, ratio_interval=interval, count=rounds,
        method=f"{'paired' if one.paired else 'Welch t'} over {rounds} rounds, logarithms",
    )  # fmt: skip


def _taken(one: _Profile) -> Iterator[Delta]:
    """What serving took: the memory of the server and the GPU, and energy."""
    ours, theirs = (next(iter(resources(side)), None) for side in (one.ours, one.theirs))
    if ours is None or theirs is None:
        return
    for part, kind, unit, a, b in (
        ("peak memory of the server", "memory", "bytes", ours.peak_rss_bytes, theirs.peak_rss_bytes),
        ("peak memory of the GPU", "memory", "bytes", ours.gpu_memory_peak_bytes, theirs.gpu_memory_peak_bytes),
        (
            "energy an output token", "energy", "J",
            ours.energy_per_output_token_j, theirs.energy_per_output_token_j,
        ),
    ):  # fmt: skip
        if a and b:
            named_kind: Kind = "memory" if kind == "memory" else "energy"
            yield _load_delta(one, named_kind, part, unit, float(a), float(b), higher=False, method="no interval")


def _load_delta(
    one: _Profile, kind: Kind, part: str, unit: str, base: float, other: float, *, higher: bool,
    ratio: float | None = None, ratio_interval: Interval | None = None, count: int | None = None, method: str,
) -> Delta:  # fmt: skip
    return Delta(
        side=one.asked.other, kind=kind, name=one.name, part=part, unit=unit, higher_is_better=higher, base=base,
        other=other, difference=other - base, ratio=other / base if ratio is None else ratio,
        ratio_interval=ratio_interval, count=count, method=method, marks=one.marks,
    )  # fmt: skip


def _cost(found: Sequence[Delta | Refusal], base: Load, other: Load, asked: Asked) -> Iterator[Delta | Refusal]:
    """What 1,000 output tokens cost, under the profile in which the base delivers most of them."""
    rates = [d for d in found if isinstance(d, Delta) and d.kind == "throughput" and d.unit == "tokens/s" and d.base]
    if (base.price is None and other.price is None) or not rates:
        return
    if base.price is None or other.price is None or base.price != other.price:
        told = ["no price" if p is None else f"{p[0]:g} {p[1]} a device-hour" for p in (base.price, other.price)]
        yield asked.refuse("cost", "1,000 output tokens", [f"other prices: {told[0]} and {told[1]}"], missing=True)
        return
    price, currency = base.price
    best = max(rates, key=lambda d: d.base or 0.0)
    a, b = (1000.0 * price / (3600.0 * rate) for rate in (best.base or math.nan, best.other or math.nan))
    turned = best.ratio_interval
    yield best.model_copy(
        update={
            "kind": "cost", "part": "1,000 output tokens", "unit": currency, "higher_is_better": False, "base": a,
            "other": b, "difference": b - a, "ratio": 1.0 / best.ratio if best.ratio else None,
            "ratio_interval": None if turned is None else _interval(_over(turned.upper), _over(turned.lower),
                                                                    turned.confidence),
        }
    )  # fmt: skip


def _interval(lower: float, upper: float, confidence: float) -> Interval:
    return Interval(lower=lower, upper=upper, confidence=confidence)
