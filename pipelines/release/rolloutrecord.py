"""The record of a rollout beside its plan: every check with its data, its answer and how often one looked. Append-only.

Each line is sealed over itself and the line before, so that no look can be taken back unseen.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from pipelines.config import Strict
from pipelines.decide.stepanswer import Past
from pipelines.errors import EnvironmentProblem, EvidenceError

FIRST = "0" * 64
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


@dataclass(frozen=True, slots=True)
class Record:
    """The file beside a plan."""

    path: Path

    @classmethod
    def of(cls, plan: Path) -> Record:
        return cls(plan.with_suffix(SUFFIX))

    @contextmanager
    def locked(self, wait_s: float = 30.0) -> Iterator[None]:
        """Be the only one who checks.

        Raises:
            EnvironmentProblem: another check is under way for longer than that.
        """
        from filelock import FileLock, Timeout

        try:
            with FileLock(self.path.with_name(self.path.name + ".lock"), timeout=wait_s):
                yield
        except Timeout:
            raise EnvironmentProblem(f"{self.path}: another check is under way; try again") from None

    def checks(self) -> list[Check]:
        """Every check, proved. A last line that was cut short never became one.

        Raises:
            EvidenceError: a line was changed, removed, added or reordered; the first one is named.
        """
        found: list[Check] = []
        for number, line in enumerate(self._whole().splitlines(), start=1):
            try:
                check = Check.model_validate_json(line)
            except ValidationError:
                raise EvidenceError(f"{self.path}:{number}: no check; the record was changed here") from None
            before = found[-1].seal if found else FIRST
            if (check.seq, check.before, check.seal) != (number, before, _seal(check)):
                raise EvidenceError(f"{self.path}:{number}: the record was changed here; its hash chain is broken")
            found.append(check)
        return found

    def append(self, check: Check) -> Check:
        """Seal a check to those before it and make it durable; its `seq`, `before` and `seal` are set here."""
        past = self.checks()
        placed = {"seq": len(past) + 1, "before": past[-1].seal if past else FIRST, "seal": ""}
        bare = check.model_copy(update=placed)
        sealed = bare.model_copy(update={"seal": _seal(bare)})
        with self.path.open("ab") as f:
            f.truncate(len(self._whole()))
            f.write(sealed.model_dump_json().encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
        return sealed

    def _whole(self) -> bytes:
        if not self.path.exists():
            return b""
        text = self.path.read_bytes()
        return text[: text.rfind(b"\n") + 1]


def _seal(check: Check) -> str:
    return hashlib.sha256(check.model_copy(update={"seal": ""}).model_dump_json().encode()).hexdigest()


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
