"""The gate as data: how much loss is allowed where, at which risk, and which latency decides. See conf/gate/."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from pipelines.config import Strict
from pipelines.decide import looks
from pipelines.decide.engineloss import EngineLoss
from pipelines.errors import Problem, closest
from pipelines.intake import spdx

Family = Literal["strict", "standard", "loose", "perplexity"]
LatencyMetric = Literal["ttft_ms", "tpot_ms", "e2e_ms"]
OVERALL = "all"


class Relative(Strict):
    """A loss allowed as a share of the reference's own score: 0.02 asks for a recovery of at least 98%."""

    relative: float = Field(gt=0, lt=1)


def _kind_of_margin(value: object) -> str:
    return "[relative]" if isinstance(value, Mapping | Relative) else "float"


Margin = Annotated[
    Annotated[float, Field(gt=0, lt=1), Tag("float")] | Annotated[Relative, Tag("[relative]")],
    Discriminator(_kind_of_margin),
]
Alpha = Annotated[float, Field(gt=0, le=0.25)]
Power = Annotated[float, Field(ge=0.5, lt=1)]


class Margins(Strict):
    """The loss allowed by task family: a number in the metric's own unit (0.01 is one point of accuracy), or
    `{relative: 0.02}` for a share of the reference's score.

    Perplexity sets are scored in nats per token, so 0.05 allows a perplexity exp(0.05) = 1.051 times the reference's.
    """

    strict: Margin = 0.01
    standard: Margin = 0.02
    loose: Margin = 0.03
    perplexity: Margin = 0.05


class SliceRule(Strict):
    """What one slice is judged by instead; a bare number is its margin."""

    margin: Margin | None = None
    alpha: Alpha | None = None
    power: Power | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_margin(cls, data: object) -> object:
        bare = not isinstance(data, SliceRule) and (not isinstance(data, Mapping) or set(data) == {"relative"})
        return {"margin": data} if bare else data


class SetRule(Strict):
    """What one eval set, or slices of it, are judged by instead."""

    margin: Margin | None = None
    alpha: Alpha | None = None
    power: Power | None = None
    slices: dict[str, SliceRule] = Field(default_factory=dict)


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


class Slo(Strict):
    """A promise about latency: a percentile under a load profile, held where its 95% upper bound is within `max_ms`."""

    profile: str
    metric: LatencyMetric = "e2e_ms"
    percentile: float = Field(default=99.0, gt=0, lt=100)
    max_ms: float = Field(gt=0)


class LagRule(Strict):
    """How late the client may send requests that are due (p99 of the schedule lag): `ms`, or `share` of the median TTFT
    where that is more. A client that is later measures itself."""

    ms: float = Field(default=5.0, ge=0)
    share: float = Field(default=0.05, ge=0)


class Vetoes(Strict):
    """What rules a candidate out before any statistic.

    empty, loops: shares of answers that may be empty, or end in a loop, where the reference's are not.
    length: how many times as long as the reference's answers may be, least and most.
    max_memory_gib: peak memory of the engine's server under load; null for no cap.
    max_kl: mean KL to the reference engine, in nats, on held-out text and eval prompts each; null for no cap.
    slo: promises about latency.
    """

    empty: float = Field(default=0.02, ge=0, lt=1)
    loops: float = Field(default=0.02, ge=0, lt=1)
    length: tuple[float, float] = (0.9, 1.1)
    max_memory_gib: float | None = Field(default=None, gt=0)
    max_kl: float | None = Field(default=None, gt=0)
    slo: tuple[Slo, ...] = ()

    @model_validator(mode="after")
    def _length_holds_one(self) -> Self:
        if not 0 < self.length[0] < 1 < self.length[1]:
            raise ValueError(f"length: {list(self.length)} must be a share below 1 and one above it, e.g. [0.9, 1.1]")
        return self


class Constraints(Strict):
    """What a candidate must be before it is scored against others.

    licences: allowed licences of the base checkpoint, as SPDX ids; null allows every one that is known.
    labels: allowed values of an engine's labels (conf/engine: `labels: {residency: eu, hardware: l4}`).
    """

    licences: tuple[str, ...] | None = None
    labels: dict[str, tuple[str, ...]] = Field(default_factory=dict)

    @field_validator("licences")
    @classmethod
    def _are_licences(cls, given: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if given is None:
            return None
        if unclear := [name for name in given if not spdx.canonical(name)]:
            raise ValueError(f"{unclear[0]!r} is no SPDX id ({closest(unclear[0], spdx.known())})")
        return tuple(spdx.canonical(name) for name in given)


DIMENSIONS = ("quality", "latency", "cost", "memory", "size")


class Weights(Strict):
    """How much each figure counts for a role; together 1."""

    quality: float = Field(default=0.0, ge=0)
    latency: float = Field(default=0.0, ge=0)
    cost: float = Field(default=0.0, ge=0)
    memory: float = Field(default=0.0, ge=0)
    size: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _make_one(self) -> Self:
        total = sum(getattr(self, name) for name in DIMENSIONS)
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"weights sum to {total:g}, not to 1")
        return self


ROLES = {
    "product": Weights(quality=0.2, latency=0.5, cost=0.1, memory=0.1, size=0.1),
    "finance": Weights(quality=0.2, latency=0.1, cost=0.5, memory=0.1, size=0.1),
    "ops": Weights(quality=0.2, latency=0.1, cost=0.1, memory=0.4, size=0.2),
}


class ChoiceRule(Strict):
    """How one of those that pass is chosen: weighted log-ratios to the reference, weights by role.

    load: what stands for speed: the gate's latency percentile, or goodput (requests a second that keep every promise).
    price_per_device_hour: what the device costs; null where no cost is to be shown.
    """

    role: str = "product"
    roles: dict[str, Weights] = Field(default=ROLES, min_length=1)
    load: Literal["latency", "goodput"] = "latency"
    price_per_device_hour: float | None = Field(default=None, gt=0)
    currency: str = "EUR"
    draws: int = Field(default=10_000, ge=100, le=1_000_000)

    @model_validator(mode="after")
    def _role_is_known(self) -> Self:
        if self.role not in self.roles:
            raise ValueError(f"role: there is no {self.role!r} ({closest(self.role, self.roles)})")
        return self


class Looks(Strict):
    """The plan of looks at growing data, made before the first one: at which shares of the items, and which it is now.

    Each look is judged at Pocock's level, so that looking again does not raise the risk.
    """

    at: tuple[float, ...] = (1.0,)
    number: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _is_a_plan(self) -> Self:
        if not 1 <= len(self.at) <= looks.MOST:
            raise ValueError(f"at: {len(self.at)} looks are planned; 1 to {looks.MOST} are allowed")
        if list(self.at) != sorted(set(self.at)) or self.at[0] <= 0 or self.at[-1] != 1:
            raise ValueError("at: shares of the items, growing, the last of them 1 (e.g. [0.5, 1])")
        if self.number > len(self.at):
            raise ValueError(f"number: look {self.number} of {len(self.at)}; the plan made beforehand has no such look")
        return self


class EvalCard(Strict):
    """What the gate must know of an eval set. `filter` picks among several answers extracted from one output."""

    family: Family
    metric: str
    higher_is_better: bool = True
    binary: bool = False
    filter: str | None = None
    margin: Margin | None = None
    slices: dict[str, Margin] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """What one comparison is judged by. `alpha` is the level of this look."""

    margin: float | Relative
    alpha: float
    power: float

    @property
    def confidence(self) -> float:
        """Two-sided confidence of the interval that holds the one-sided test."""
        return 1.0 - 2.0 * self.alpha

    def points(self, reference_score: float) -> float:
        """The margin in the metric's own unit."""
        return self.margin.relative * abs(reference_score) if isinstance(self.margin, Relative) else self.margin


class GateConfig(Strict):
    """Everything that turns evidence into verdicts and verdicts into a decision.

    alpha: one-sided risk that a variant exactly at the margin passes.
    power: chance that a lossless variant passes, when items are planned.
    expected_flips: share of items guessed to change, for planning before anything ran.
    slices: "gate" lets every slice decide, "report" only shows them.
    max_perplexity_ratio: guard on engine perplexity / reference perplexity on the fixed text; null for none.
    several_variants: "holm" keeps `alpha` over all variants of a campaign together, "none" per variant.
    champion: "gate" lets the comparison with the champion decide too, so that small losses do not add up over releases.
    latency: the axis of the Pareto front and the chart.

    Where a profile has several phases or buckets of input lengths, the slowest stands for it, in `speed`, `latency` and
    promises alike.
    """

    alpha: Alpha = 0.05
    power: Power = 0.8
    expected_flips: float = Field(default=0.05, gt=0, le=1)
    margins: Margins = Margins()
    sets: dict[str, SetRule] = Field(default_factory=dict)
    looks: Looks = Looks()
    slices: Literal["gate", "report"] = "report"
    several_variants: Literal["holm", "none"] = "holm"
    champion: Literal["gate", "report"] = "gate"
    max_perplexity_ratio: float | None = Field(default=None, gt=1)
    vetoes: Vetoes = Vetoes()
    engine_loss: EngineLoss = EngineLoss()
    constraints: Constraints = Constraints()
    choice: ChoiceRule = ChoiceRule()
    require_speed: bool = True
    speed: SpeedRule
    lag: LagRule = LagRule()
    latency: Axis

    @model_validator(mode="after")
    def _slice_names(self) -> Self:
        for name, rule in self.sets.items():
            if OVERALL in rule.slices:
                raise ValueError(f"sets.{name}.slices: {OVERALL!r} is the whole set; use sets.{name}.margin")
        return self

    @model_validator(mode="after")
    def _goodput_has_a_promise(self) -> Self:
        if self.choice.load == "goodput" and not self.goodput_slos:
            raise ValueError(f"choice.load: goodput needs a promise at {self.latency.profile} (vetoes.slo)")
        return self

    @property
    def goodput_slos(self) -> tuple[Slo, ...]:
        """The promises under the load profile of the latency axis, by which goodput is counted."""
        return tuple(slo for slo in self.vetoes.slo if slo.profile == self.latency.profile)

    @property
    def confidence(self) -> float:
        """Two-sided confidence of the interval that holds the one-sided test."""
        return 1.0 - 2.0 * self.alpha

    def rule(self, eval_set: str, card: EvalCard, slice_name: str = OVERALL) -> Rule:
        """Find what a slice is judged by: the gate's word on it, the card's, the gate's on the set, the card's, the
        family's; then the level of this look."""
        of_set = self.sets.get(eval_set, SetRule())
        of_slice = of_set.slices.get(slice_name, SliceRule())
        margins = (of_slice.margin, card.slices.get(slice_name), of_set.margin, card.margin)
        family: float | Relative = getattr(self.margins, card.family)
        alpha = next((a for a in (of_slice.alpha, of_set.alpha) if a is not None), self.alpha)
        return Rule(
            margin=next((m for m in margins if m is not None), family),
            alpha=looks.nominal_alpha(alpha, self.looks.at),
            power=next((p for p in (of_slice.power, of_set.power) if p is not None), self.power),
        )


def problems(gate: GateConfig, eval_sets: Mapping[str, Collection[str]], profiles: Collection[str]) -> list[Problem]:
    """List the names in a gate that nothing will ever match: eval sets (given with their slices, of which none may be
    known) and load profiles with a typo."""
    return [*_unknown_sets(gate, eval_sets), *_unknown_profiles(gate, profiles)]


def _unknown_sets(gate: GateConfig, eval_sets: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    for name, rule in sorted(gate.sets.items()):
        if name not in eval_sets:
            yield Problem(f"gate.sets.{name}", name, "no such eval set", closest(name, eval_sets))
            continue
        known = eval_sets[name]
        for part in sorted(rule.slices.keys() - set(known)) if known else ():
            yield Problem(f"gate.sets.{name}.slices.{part}", part, "no such slice", closest(part, known))


def _unknown_profiles(gate: GateConfig, profiles: Collection[str]) -> Iterator[Problem]:
    asked = [("gate.speed.profile", gate.speed.profile), ("gate.latency.profile", gate.latency.profile)]
    asked += [(f"gate.vetoes.slo[{n}].profile", slo.profile) for n, slo in enumerate(gate.vetoes.slo)]
    for key, profile in asked:
        if profile not in profiles:
            yield Problem(key, profile, "no such load profile", closest(profile, profiles))
