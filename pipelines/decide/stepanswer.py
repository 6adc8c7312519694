"""The answer about one step of a rollout: continue, hold or roll back, by the margins and promises of the gate. Pure.

Continue takes every judgement passed, enough requests and the whole bake time; roll back one harm that is shown, at any
time; whatever is missing holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pipelines.config import Strict
from pipelines.decide.canary import Finding, Levels, findings
from pipelines.decide.rollout import PROMISE_ALPHA, Plan, Step, continue_level, rollback_level
from pipelines.decide.traffic import Line, Traffic, sort_out

Word = Literal["continue", "hold", "roll_back"]


class Answer(Strict):
    """What to do after a step. `look` counts how often this step was judged, `ripe_look` how often with all of its
    requests and time; 0 where it is not ripe yet."""

    answer: Word
    step: int
    percent: float
    look: int
    ripe_look: int
    continue_alpha: float
    roll_back_alpha: float
    canary_requests: int
    control_requests: int
    pairs: int
    canary_users: int
    control_users: int
    split_p: float
    minutes: float | None
    last_at: datetime | None
    findings: tuple[Finding, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Past:
    """What the rollout's record says before this look: looks at this step and ripe ones, why this step may not go on
    (the one before was not passed), how the rollout ended, and when the data of the step before did."""

    looks: int = 0
    ripe: int = 0
    blocked: str = ""
    ended: str = ""
    not_before: datetime | None = None


def levels_of(plan: Plan, step: Step, look: int, ripe: int) -> Levels:
    """The levels of a step's `look`-th look, which is its `ripe`-th with everything there."""
    scores = 1 + len(plan.quality.slices)  # once of pairs, and of split traffic where there is a control
    judgements = len(plan.promises) + scores + (0 if step.last else scores + 1)

    def back(alpha: float) -> float:
        return rollback_level(alpha, look, len(plan.steps), judgements)

    return Levels(
        go=continue_level(plan.alpha, ripe), back=back(plan.alpha), promise_go=continue_level(PROMISE_ALPHA, ripe),
        promise_back=back(PROMISE_ALPHA),
    )  # fmt: skip


def judge_step(plan: Plan, step: Step, lines: Sequence[Line], past: Past) -> Answer:
    """Judge what came in during a step.

    Raises:
        EvidenceError: the lines are no evidence about this step.
    """
    traffic = sort_out(plan, step, lines, past.not_before)
    look, ripe = past.looks + 1, past.ripe + 1
    levels = levels_of(plan, step, look, ripe)
    found = findings(plan, step, traffic, levels)
    deciding = [f for f in found if f.gates]
    unripe = [*_lacking(deciding), *_unbaked(step, traffic), *([past.blocked] if past.blocked else [])]
    word, reasons = _answer(deciding, unripe, past.ended)
    times = [line.at for line in lines if line.at is not None]
    return Answer(
        answer=word, step=step.step, percent=step.percent, look=look, ripe_look=0 if unripe else ripe,
        continue_alpha=levels.go, roll_back_alpha=levels.back, canary_requests=len(traffic.canary),
        control_requests=len(traffic.control), pairs=len(traffic.pairs), canary_users=traffic.users("canary"),
        control_users=traffic.users("control"), split_p=traffic.split_p, minutes=traffic.minutes,
        last_at=max(times, default=None), findings=found, reasons=tuple(reasons),
    )  # fmt: skip


def _answer(deciding: Sequence[Finding], unripe: Sequence[str], ended: str) -> tuple[Word, list[str]]:
    """Harm first, then whatever holds; only what is left goes on."""
    harm, undecided = ([f.told for f in deciding if f.state == state] for state in ("fail", "open"))
    if harm or ended:
        return "roll_back", [*([ended] if ended else []), *harm]
    if unripe or undecided:
        return "hold", [*unripe, *undecided]
    return "continue", [f.told for f in deciding]


def _lacking(deciding: Sequence[Finding]) -> Iterator[str]:
    """What is not there yet, and how much of it."""
    yield from (f.told for f in deciding if f.state in ("missing", "few"))
    if not deciding:
        yield "nothing can be judged here: no control, no shadow pairs, and the gate promises nothing"


def _unbaked(step: Step, traffic: Traffic) -> Iterator[str]:
    if not traffic.canary:
        yield "no request of the canary's own traffic, so nothing has baked"
    elif traffic.minutes is None:
        yield "bake time: some canary lines do not say when they were sent (`at`)"
    elif traffic.minutes < step.bake_minutes:
        yield f"bake time: {traffic.minutes:.0f} of {step.bake_minutes:g} min are over"
