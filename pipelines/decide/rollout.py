"""The plan of a rollout: steps of traffic, how many requests each takes to be judged, how long it bakes. Pure.

Every step is judged on its own requests against a control that ran beside it, never on those of steps before: their mix
of arms was another, and so was the day.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from pipelines.config import Strict
from pipelines.decide import arms, stats
from pipelines.decide.gate import OVERALL, GateConfig, Slo
from pipelines.decide.looks import spent
from pipelines.decide.measured import CONFIDENCE
from pipelines.decide.model import Candidate, Verdict
from pipelines.decide.split import BUCKETS, FORMULA, canary_buckets

PROMISE_ALPHA = round(1.0 - CONFIDENCE, 12)


class RolloutConfig(Strict):
    """How a promoted engine reaches all users.

    steps: percent of users that meet the canary, growing, the last of them 100.
    bake_minutes: least time of a step, whatever the requests.
    requests_per_s: expected over both arms; null: not known, so nobody can say how long the requests take.
    requests_per_user: on average within a step; more than one from a user count as fewer.
    margin: loss of the production score allowed; null: the smallest that the decision was made by.
    error_margin, expected_errors: how much larger the share of failed requests may be, and how large it is thought to
    be, for planning.
    hash: sha256 lets `canary check` prove for every user that the gateway splits by the plan; other: it has a sticky
    hash of its own.
    """

    steps: tuple[float, ...] = (1.0, 5.0, 20.0, 50.0, 100.0)
    bake_minutes: float = Field(default=60.0, gt=0)
    requests_per_s: float | None = Field(default=None, gt=0)
    requests_per_user: float = Field(default=1.0, ge=1)
    margin: float | None = Field(default=None, gt=0, lt=1)
    error_margin: float = Field(default=0.01, gt=0, lt=1)
    expected_errors: float = Field(default=0.01, gt=0, lt=1)
    hash: Literal["sha256", "other"] = "sha256"

    @model_validator(mode="after")
    def _grows_to_all(self) -> Self:
        if list(self.steps) != sorted(set(self.steps)) or not self.steps or self.steps[-1] != 100:
            raise ValueError("steps: percent of users, growing, the last of them 100 (e.g. [1, 5, 20, 50, 100])")
        if canary_buckets(self.steps[0]) < 1:
            raise ValueError(f"steps: {self.steps[0]:g}% is less than one of {BUCKETS} buckets")
        return self


class Side(Strict):
    """An arm: the version in the registry ("" where it has none), its engine's key and what it is called."""

    version: str
    engine_key: str
    label: str


class Split(Strict):
    """How users are told apart. Whoever is in a bucket below a step's `buckets` meets the canary."""

    by: Literal["user"] = "user"
    hash: Literal["sha256", "other"]
    formula: str = FORMULA
    salt: str
    buckets: int = BUCKETS


class Quality(Strict):
    """What the canary's scores may lose against the control's.

    eval_set: whose margin it is, and whose score of the control (`expected_score`) the plan counts with.
    slices: margins of those that decide by themselves. pairs: how many prompts that both arms answered (shadow
    traffic) settle the margin, with `expected_flips`.
    """

    margin: float = Field(gt=0, lt=1)
    eval_set: str
    expected_score: float
    expected_flips: float
    pairs: int
    slices: dict[str, float] = Field(default_factory=dict)


class Errors(Strict):
    """How much larger the canary's share of failed requests may be."""

    margin: float = Field(gt=0, lt=1)
    expected: float


class Need(Strict):
    """How many requests of each arm one judgement takes, and why."""

    what: str
    canary: int
    control: int
    why: str


class Step(Strict):
    """One step. `requests` is over both arms; `binds` says which need makes it so many, `bake_binds` what makes it so
    long."""

    step: int
    percent: float
    buckets: int
    canary_requests: int
    control_requests: int
    requests: int
    binds: str
    needs: tuple[Need, ...]
    bake_minutes: float
    bake_binds: str

    @property
    def last(self) -> bool:
        """Whether nobody is left to compare with."""
        return self.percent >= 100.0


class Plan(Strict):
    """A rollout, with everything by which its steps are judged; `rollback` is the command that ends it."""

    version: Literal[1] = 1
    model: str
    campaign: str
    decision_key: str
    canary: Side
    control: Side
    alpha: float
    power: float
    split: Split
    quality: Quality
    errors: Errors
    promises: tuple[Slo, ...]
    steps: tuple[Step, ...]
    stop: tuple[str, ...]
    notes: tuple[str, ...]
    rollback: str

    def step(self, number: int) -> Step | None:
        return next((s for s in self.steps if s.step == number), None)


def continue_level(alpha: float, look: int) -> float:
    """The level at which a step's `look`-th ripe look may say continue.

    Every step must be passed, so a harm that is there at any of them is let through no more often than that one step
    lets it through; only looks at one step need sharing.
    """
    return spent(alpha, look)


def rollback_level(alpha: float, look: int, steps: int, judgements: int) -> float:
    """The level at which a step's `look`-th look may say roll back: shared by all steps, looks and judgements."""
    return spent(alpha, look) / (steps * judgements)


def promises(gate: GateConfig) -> tuple[Slo, ...]:
    """The gate's promises, one for each percentile of a metric.

    Production traffic is no load profile: where several profiles promise the same percentile, the widest limit holds.
    """
    found: dict[tuple[str, float], Slo] = {}
    for slo in sorted(gate.vetoes.slo, key=lambda s: s.max_ms):
        found[slo.metric, slo.percentile] = slo
    return tuple(found[key] for key in sorted(found))


def promise_name(slo: Slo) -> str:
    """A promise in words."""
    return f"{slo.metric} p{slo.percentile:g}"


def quality(candidate: Candidate, gate: GateConfig, config: RolloutConfig) -> Quality:
    """Take the margin of production scores from the verdicts that made the decision: the smallest of them."""
    decided = [v for v in candidate.verdicts if v.against == "reference" and v.higher_is_better]
    whole = sorted((v for v in decided if v.slice == OVERALL), key=lambda v: (v.margin, -_variance(v), v.eval_set))
    first = whole[0] if whole else None
    margin = config.margin or (first.margin if first else _standard(gate))
    slices: dict[str, float] = {}
    for v in decided if gate.slices == "gate" else ():
        if v.slice != OVERALL:
            slices[v.slice] = min(v.margin, slices.get(v.slice, 1.0)) if config.margin is None else margin
    return Quality(
        margin=margin,
        eval_set=first.eval_set if first else "",
        expected_score=0.5 if first is None or first.reference_score is None else first.reference_score,
        expected_flips=gate.expected_flips,
        pairs=stats.items_needed(gate.expected_flips, margin, continue_level(gate.alpha, 1), gate.power),
        slices=slices,
    )


def _standard(gate: GateConfig) -> float:
    margin = gate.margins.standard
    return margin if isinstance(margin, float) else margin.relative


def _variance(verdict: Verdict) -> float:
    score = 0.5 if verdict.reference_score is None else verdict.reference_score
    return score * (1.0 - score)


def steps(quality: Quality, slos: Sequence[Slo], gate: GateConfig, config: RolloutConfig) -> tuple[Step, ...]:
    """Plan every step: what each judgement takes, which of them binds, and how long that lasts."""
    return tuple(_step(n, percent, quality, slos, gate, config) for n, percent in enumerate(config.steps, start=1))


def _step(
    number: int, percent: float, quality: Quality, slos: Sequence[Slo], gate: GateConfig, config: RolloutConfig
) -> Step:
    buckets = canary_buckets(percent)
    share = buckets / BUCKETS
    needs = [_promised(slo) for slo in slos]
    if share < 1.0:
        score, errors = quality.expected_score, config.expected_errors
        needs = [
            _compared("quality", score * (1.0 - score), quality.margin, share, gate, config),
            _compared("errors", errors * (1.0 - errors), config.error_margin, share, gate, config),
            *needs,
        ]
    canary = max((n.canary for n in needs), default=0)
    binds = next((n.what for n in needs if n.canary == canary), "nothing")
    control = 0 if share >= 1.0 else math.ceil(canary * (1.0 - share) / share - 1e-9)
    bake, bake_binds = _bake(canary + control, config)
    return Step(
        step=number, percent=percent, buckets=buckets, canary_requests=canary, control_requests=control,
        requests=canary + control, binds=binds, needs=tuple(needs), bake_minutes=bake, bake_binds=bake_binds,
    )  # fmt: skip


def _compared(what: str, variance: float, margin: float, share: float, gate: GateConfig, config: RolloutConfig) -> Need:
    """A difference of two arms that different users met, by a first look."""
    level = continue_level(gate.alpha, 1)
    effect = 1.0 + (config.requests_per_user - 1.0) * stats.PRIOR_ICC
    canary, control = arms.requests_needed(effect * variance, effect * variance, share, margin, level, gate.power)
    users = f", {config.requests_per_user:g} requests a user count as {1 / effect:.2f} each" if effect > 1 else ""
    why = (
        f"(z {1 - level:g} + z {gate.power:g})^2 x variance {variance:.4g} x (1 + {share / (1 - share):.4g}) / "
        f"margin {margin:g}^2{users}"
    )
    return Need(what=what, canary=canary, control=control, why=why)


def _promised(slo: Slo) -> Need:
    share = slo.percentile / 100.0
    plain = stats.observations_needed(share, CONFIDENCE, one_sided=True)
    needed = stats.observations_needed(share, 1.0 - continue_level(PROMISE_ALPHA, 1), one_sided=True)
    why = f"order statistics: {plain} bound p{slo.percentile:g} at 95%, {needed} at the level of a first look"
    return Need(what=promise_name(slo), canary=needed, control=0, why=why)


def _bake(requests: int, config: RolloutConfig) -> tuple[float, str]:
    """How long a step lasts at least, and which of the two makes it so."""
    if config.requests_per_s is None:
        return config.bake_minutes, "the stated minimum; how long the requests take is not known (no requests_per_s)"
    minutes = math.ceil(requests / config.requests_per_s / 60.0)
    if minutes <= config.bake_minutes:
        return config.bake_minutes, f"the stated minimum; the requests take {minutes} min"
    return float(minutes), f"{requests} requests at {config.requests_per_s:g} a second"


def plan(
    candidate: Candidate,
    gate: GateConfig,
    config: RolloutConfig,
    *,
    campaign: str,
    decision_key: str,
    canary: Side,
    control: Side,
    model: str,
    rollback: str,
) -> Plan:
    """Plan the rollout of a candidate that was promoted."""
    wanted, slos = quality(candidate, gate, config), promises(gate)
    errors = Errors(margin=config.error_margin, expected=config.expected_errors)
    return Plan(
        model=model, campaign=campaign, decision_key=decision_key, canary=canary, control=control, alpha=gate.alpha,
        power=gate.power, split=Split(hash=config.hash, salt=canary.engine_key), quality=wanted, errors=errors,
        promises=slos, steps=steps(wanted, slos, gate, config), stop=_stop(wanted, errors, slos),
        notes=_notes(slos, wanted, {"control": control.version}), rollback=rollback,
    )  # fmt: skip


def _stop(quality: Quality, errors: Errors, slos: Sequence[Slo]) -> tuple[str, ...]:
    """What makes a check answer roll back, at any step and before its requests or its time are full."""
    return (
        f"the canary's score is shown to be more than {quality.margin:g} below the control's",
        *(f"in slice {name}: more than {margin:g} below" for name, margin in sorted(quality.slices.items())),
        f"its share of failed requests is shown to be more than {errors.margin:g} above the control's",
        *(
            f"{promise_name(s)} is shown to be above {s.max_ms:g} ms (promised at {s.profile}), and not on the control"
            for s in slos
        ),
    )


def _notes(slos: Sequence[Slo], quality: Quality, versions: Mapping[str, str]) -> tuple[str, ...]:
    found = [
        f"{quality.pairs} prompts that both arms answer (shadow traffic, one request_id) settle the same margin",
        "min. requests count what is scored, for quality; what says whether it failed, for errors",
    ]
    if not slos:
        found.append("the gate promises nothing about latency (vetoes.slo), so none is judged")
        found.append("at 100% there is no control, and nothing promised: only shadow pairs can end the last step")
    if not versions["control"]:
        found.append("nobody was champion before: the control is what serves now, and `rollback` has no version for it")
    return tuple(found)
