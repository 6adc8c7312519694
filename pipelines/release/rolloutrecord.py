"""The record of a rollout beside its plan: every check with its data, its answer and how often one looked. Append-only.

Each line is sealed over itself and the line before, so that no look can be taken back unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from pipelines.config import Strict
from pipelines.decide.stepanswer import Past
from pipelines.errors import EvidenceError
from pipelines.release.sealed import Chain

SUFFIX = ".record.jsonl"


class Check(Strict):
    """One check. `repeat`: the same data was judged at this step before, so it was no new look."""

    seq: int
    at: datetime
    plan_sha256: str
    step: int
    answer: Literal["continue", "hold", "roll_back", "invalid"]
    look: int
    ripe_look: int
    repeat: bool
    data: str
    data_sha256: str
    lines: int
    last_at: datetime | None
    reasons: tuple[str, ...]
    before: str
    seal: str


def record_of(plan: Path) -> Chain[Check]:
    """The file beside a plan."""
    return Chain(plan.with_suffix(SUFFIX), Check, "record")


def past(checks: Sequence[Check], plan_sha256: str, step: int, data_sha256: str) -> tuple[Past, bool]:
    """What the record says before this look, and whether the same data was judged at this step already.

    Raises:
        EvidenceError: the plan is not the one that was checked before, or the data were judged at another step.
    """
    if checks and checks[-1].plan_sha256 != plan_sha256:
        raise EvidenceError(
            f"the plan was changed after its first check ({checks[0].at.isoformat()}); a rollout is judged by the plan "
            "that it began with"
        )
    judged = [c for c in checks if c.answer != "invalid"]
    elsewhere = [c.step for c in judged if c.data_sha256 == data_sha256 and c.step != step]
    if elsewhere:
        raise EvidenceError(f"these data were judged at step {elsewhere[0]} already; a step has requests of its own")
    mine = [c for c in judged if c.step == step and not c.repeat]
    same = next((n for n, c in enumerate(mine) if c.data_sha256 == data_sha256), None)
    earlier = mine if same is None else mine[:same]
    before = [c for c in judged if c.step == step - 1]
    over = next((c for c in judged if c.answer == "roll_back" and c.data_sha256 != data_sha256), None)
    passed = bool(before) and before[-1].answer == "continue"
    said = f"its last answer is {before[-1].answer}" if before else "it was never checked"
    ended = "" if over is None else f"step {over.step} was answered with roll back at {over.at.isoformat()}"
    return (
        Past(
            looks=len(earlier),
            ripe=sum(c.ripe_look > 0 for c in earlier),
            blocked="" if step == 1 or passed else f"step {step - 1} was not passed: {said}",
            ended=ended,
            not_before=before[-1].last_at if passed else None,
        ),
        same is not None,
    )
