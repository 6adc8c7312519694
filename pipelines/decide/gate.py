"""The gate as data: how much loss is allowed where, at which risk, and which latency decides. See conf/gate/."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipelines.config import Strict
from pipelines.decide import stats
from pipelines.errors import Problem, closest

Family = Literal["strict", "standard", "loose", "perplexity"]
LatencyMetric = Literal["ttft_ms", "tpot_ms", "e2e_ms"]
Margin = Annotated[float, Field(gt=0, lt=1)]
OVERALL = "all"


class Margins(Strict):
    """The loss allowed by task family, in the metric's own unit: 0.01 is one point of accuracy.

    Perplexity sets are scored in nats per token, so 0.05 allows a perplexity exp(0.05) = 1.051 times the reference's.
    """

    strict: Margin = 0.01
    standard: Margin = 0.02
    loose: Margin = 0.03
    perplexity: Margin = 0.05


class SetRule(Strict):
    """What one eval set, or slices of it, are allowed to lose instead."""

    margin: Margin | None = None
    slices: dict[str, Margin] = Field(default_factory=dict)


class Axis(Strict):
    """One percentile of one latency metric under one load profile."""

    profile: str
    metric: LatencyMetric = "e2e_ms"
    percentile: float = Field(default=99.0, gt=0, lt=100)


class SpeedRule(Strict):
    """How much faster a candidate must be: the interval of reference/candidate must lie above `min_speedup`."""

    profile: str
    metric: LatencyMetric = "e2e_ms"
    percentile: float = Field(default=50.0, gt=0, lt=100)
    min_speedup: float = Field(default=1.0, gt=0)


class EvalCard(Strict):
    """What the gate must know of an eval set. `filter` picks among several answers extracted from one output."""

    family: Family
    metric: str
    higher_is_better: bool = True
    binary: bool = False
    filter: str | None = None
    margin: Margin | None = None
    slices: dict[str, Margin] = Field(default_factory=dict)


class GateConfig(Strict):
    """Everything that turns evidence into verdicts and verdicts into a decision.

    alpha: one-sided risk that a variant exactly at the margin passes.
    power: chance that a lossless variant passes, when items are planned.
    expected_flips: share of items guessed to change, for planning before anything ran.
    slices: "gate" lets every slice decide, "report" only shows them.
    max_perplexity_ratio: guard on engine perplexity / reference perplexity on the fixed text; null for none.
    several_variants: "holm" keeps `alpha` over all variants of a campaign together, "none" per variant.
    latency: the axis of the Pareto front and the chart.
    """

    alpha: float = Field(default=0.05, gt=0, le=0.25)
    power: float = Field(default=0.8, ge=0.5, lt=1)
    expected_flips: float = Field(default=0.05, gt=0, le=1)
    margins: Margins = Margins()
    sets: dict[str, SetRule] = Field(default_factory=dict)
    slices: Literal["gate", "report"] = "report"
    several_variants: Literal["holm", "none"] = "holm"
    max_perplexity_ratio: float | None = Field(default=None, gt=1)
    require_speed: bool = True
    speed: SpeedRule
    latency: Axis

    @model_validator(mode="after")
    def _slice_names(self) -> Self:
        for name, rule in self.sets.items():
            if OVERALL in rule.slices:
                raise ValueError(f"sets.{name}.slices: {OVERALL!r} is the whole set; use sets.{name}.margin")
        return self

    @property
    def confidence(self) -> float:
        """Two-sided confidence of the interval that holds the one-sided test."""
        return 1.0 - 2.0 * self.alpha

    def margin(self, eval_set: str, card: EvalCard, slice_name: str = OVERALL) -> float:
        """Find the loss allowed: the gate's slice, the card's slice, the gate's set, the card, the family."""
        rule = self.sets.get(eval_set, SetRule())
        found = (rule.slices.get(slice_name), card.slices.get(slice_name), rule.margin, card.margin)
        family: float = getattr(self.margins, card.family)
        return next((m for m in found if m is not None), family)


def problems(gate: GateConfig, eval_sets: Collection[str], profiles: Collection[str]) -> list[Problem]:
    """List the names in a gate that nothing will ever match: eval sets and load profiles with a typo."""
    found = [
        Problem(f"gate.sets.{name}", name, "no such eval set", closest(name, eval_sets))
        for name in sorted(gate.sets.keys() - set(eval_sets))
    ]
    for key, profile in (("gate.speed.profile", gate.speed.profile), ("gate.latency.profile", gate.latency.profile)):
        if profile not in profiles:
            found.append(Problem(key, profile, "no such load profile", closest(profile, profiles)))
    return found


class Resolution(Strict):
    """What an eval set of this size can show, before anything is run."""

    eval_set: str
    items: int
    margin: float
    smallest_loss: float
    items_needed: int
    enough: bool


def resolution(
    eval_set: str, items: int, card: EvalCard, gate: GateConfig, *, clusters: int | None = None
) -> Resolution:
    """Say the smallest loss a set can rule out at its size, and how many items its own margin takes.

    Assumes `expected_flips`, no loss, and inside clusters the prior correlation of `stats.PRIOR_ICC`.
    """
    effect = 1.0 + (items / clusters - 1.0) * stats.PRIOR_ICC if clusters else 1.0
    margin = gate.margin(eval_set, card)
    smallest = detectable(items, gate.expected_flips, gate.alpha, gate.power, design_effect=effect)
    needed = math.ceil(effect * stats.items_needed(gate.expected_flips, margin, gate.alpha, gate.power))
    return Resolution(
        eval_set=eval_set,
        items=items,
        margin=margin,
        smallest_loss=smallest,
        items_needed=needed,
        enough=smallest <= margin,
    )


def detectable(items: int, flips: float, alpha: float, power: float, *, design_effect: float = 1.0) -> float:
    """Give the smallest loss that a set of `items` can rule out when a share of `flips` changes and none is lost."""
    return stats.smallest_loss(max(1.0, items / design_effect), flips, alpha, power) if items else math.inf
