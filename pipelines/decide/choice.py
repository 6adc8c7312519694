"""Choice among candidates that pass: the Pareto front, then weights by role, and how much the weights matter. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from pipelines.decide.gate import DIMENSIONS, GateConfig
from pipelines.decide.latencies import at
from pipelines.decide.model import Candidate, Choice, Standing
from pipelines.decide.pareto import Point, front
from pipelines.decide.resources import peak_memory

SEED = 20260101


def quality_bound(one: Candidate) -> float | None:
    """The mean score that a candidate has at least: on each set the reference's less the upper bound of its loss.

    A reference stands at its own mean. Sets where lower is better are left out, as they are of the mean score.
    """
    if one.reference:
        return one.mean_score
    whole = [v for v in one.verdicts if v.slice == "all" and v.against == "reference" and v.higher_is_better]
    bounds = [v.reference_score - v.interval.upper for v in whole if v.interval and v.reference_score is not None]
    return math.fsum(bounds) / len(bounds) if bounds and len(bounds) == len(whole) else None


def latency_of(one: Candidate, gate: GateConfig) -> float | None:
    """The figure of the gate's latency axis, where it is evidence."""
    axis = gate.latency
    found = at(one.latency, axis.profile, axis.metric, axis.percentile)
    return found.value if found and found.evidence else None


def throughput_of(one: Candidate) -> float | None:
    """Output tokens per second under the load that gives the most."""
    found = (t.output_tokens_per_s for t in one.throughput if t.evidence)
    return max((rate for rate in found if rate > 0), default=None)


def cost_of(one: Candidate, gate: GateConfig) -> float | None:
    """What 1,000 output tokens cost: the price of a device-hour over the tokens of an hour."""
    price, rate = gate.choice.price_per_device_hour, throughput_of(one)
    return None if price is None or rate is None else 1000.0 * price / (3600.0 * rate)


def figures(one: Candidate, gate: GateConfig) -> dict[str, float | None]:
    """A candidate's figures by dimension, turned so that more is better; costs and sizes as their inverses."""
    rss = max((t.peak_rss_bytes for t in one.throughput if t.peak_rss_bytes is not None), default=None)
    memory = peak_memory(one.probed.resources, rss)
    latency = latency_of(one, gate)
    return {
        "quality": quality_bound(one),
        "latency": one.goodput if gate.choice.load == "goodput" else _inverse(latency),
        "cost": throughput_of(one),
        "memory": _inverse(memory),
        "size": _inverse(one.engine_bytes),
    }


def on_front(candidates: Sequence[Candidate], gate: GateConfig) -> frozenset[str]:
    """The Pareto front on quality bound, latency or goodput, throughput and size; an axis nobody has is left out."""
    real = {c.label: c.native and c.status == "ok" and not c.simulated and not c.unjudged for c in candidates}
    found = {c.label: figures(c, gate) for c in candidates}
    axes = [a for a in ("quality", "latency", "cost", "size") if any(f[a] is not None for f in found.values())]
    if not {"quality", "latency"} <= set(axes):
        return frozenset()
    return front([Point(name, tuple(f[a] for a in axes), real[name]) for name, f in found.items()])


def choose(candidates: Sequence[Candidate], reference: Candidate, gate: GateConfig) -> Choice | None:
    """Rank candidates that may be promoted by their weighted log-ratios to the reference; None where there is none.

    Those off the front of their own are not ranked: another passes that is as good in everything.
    """
    on = on_front(candidates, gate)
    pool = [c for c in candidates if c.label in on] or list(candidates)
    if not pool:
        return None
    base = figures(reference, gate)
    ratios = {c.label: _ratios(figures(c, gate), base) for c in pool}
    usable = [d for d in DIMENSIONS if all(d in found for found in ratios.values())]
    weights = gate.choice.roles[gate.choice.role].model_dump()
    firsts = _firsts(ratios, usable, gate.choice.draws)
    standings = [
        Standing(
            label=c.label,
            score=_score(ratios[c.label], weights, usable),
            ratios={d: math.exp(ratios[c.label][d]) for d in usable},
            first_share=firsts[c.label] / gate.choice.draws,
            cost_per_1000_tokens=cost_of(c, gate),
        )
        for c in pool
    ]
    return Choice(
        role=gate.choice.role,
        weights={d: weights[d] for d in usable},
        left_out=tuple(d for d in DIMENSIONS if d not in usable),
        off_front=tuple(c.label for c in candidates if c not in pool),
        standings=tuple(sorted(standings, key=lambda s: (-round(s.score, 12), s.label))),
        currency=gate.choice.currency,
    )


def _ratios(found: Mapping[str, float | None], base: Mapping[str, float | None]) -> dict[str, float]:
    return {d: math.log(v / b) for d, v in found.items() if v is not None and (b := base[d]) and v > 0 and b > 0}


def _score(ratios: Mapping[str, float], weights: Mapping[str, float], usable: Sequence[str]) -> float:
    return math.fsum(weights[d] * ratios[d] for d in usable)


def _firsts(ratios: Mapping[str, Mapping[str, float]], usable: Sequence[str], draws: int) -> dict[str, int]:
    """How often each comes first under weights drawn from the flat Dirichlet distribution."""
    rng, count = random.Random(SEED), dict.fromkeys(sorted(ratios), 0)
    for _ in range(draws):
        weights = {d: rng.expovariate(1.0) for d in usable}  # their common scale changes no order
        count[max(count, key=lambda name: _score(ratios[name], weights, usable))] += 1
    return count


def _inverse(value: float | None) -> float | None:
    return 1.0 / value if value else None
