"""What came in during one step of a rollout, a line a request, and whether it is the split that was planned. Pure.

A request id on both arms is a shadow prompt that both answered: a pair, judged as pairs and part of no split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, Field, StringConstraints, model_validator

from pipelines.config import Strict
from pipelines.decide.gate import OVERALL, LatencyMetric
from pipelines.decide.rollout import Plan, Step
from pipelines.decide.split import BUCKETS, UNLIKELY, bucket, mismatch_p
from pipelines.errors import EvidenceError

Arm = Literal["control", "canary"]
Name = Annotated[str, StringConstraints(min_length=1)]
Milliseconds = Annotated[float, Field(ge=0)]
SHOWN = 5


class Line(Strict):
    """One answered or failed request.

    score: in [0, 1], higher is better; correct: right or wrong; a file has one of the two. error: null or false where
    it was answered, else true or what went wrong; a line without the key does not say. tpot_ms: null where the answer
    has one token only. at: when it was sent, with its time zone.
    """

    arm: Arm
    user: Name | None = None
    request_id: Name | None = None
    slice: Name = OVERALL
    score: float | None = Field(default=None, ge=0, le=1)
    correct: bool | Literal[0, 1] | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None
    error: bool | str | None = None
    at: AwareDatetime | None = None

    @model_validator(mode="after")
    def _one_kind_of_score(self) -> Self:
        if self.score is not None and self.correct is not None:
            raise ValueError("score and correct: one of the two")
        return self

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def graded(self) -> float | None:
        """The score, whichever kind; None where it was not scored."""
        return self.score if self.correct is None else float(self.correct)

    @property
    def as_pair(self) -> float | None:
        """The score of a shadow prompt's answer: a failed one is wrong."""
        return 0.0 if self.failed and self.graded is None else self.graded

    def says(self, name: str) -> bool:
        """Whether the line has this key at all."""
        return name in self.model_fields_set

    def latency(self, metric: LatencyMetric) -> float | None:
        return {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}[metric]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The lines of a step: split traffic by arm, and pairs (control, canary) of shadow prompts.

    split_p: chance of a split as unlike the planned one as this.
    """

    control: tuple[Line, ...]
    canary: tuple[Line, ...]
    pairs: tuple[tuple[Line, Line], ...]
    binary: bool
    split_p: float

    def users(self, arm: Arm) -> int:
        """How many users an arm met, of those that are named."""
        return len({line.user for line in (self.canary if arm == "canary" else self.control) if line.user})

    @property
    def minutes(self) -> float | None:
        """From the first canary request to the last; None where some do not say when they were sent."""
        times = [line.at for line in self.canary]
        known = [at for at in times if at is not None]
        if not known or len(known) < len(times):
            return None
        return (max(known) - min(known)).total_seconds() / 60.0


def sort_out(plan: Plan, step: Step, lines: Sequence[Line], not_before: datetime | None = None) -> Traffic:
    """Tell split traffic from pairs, and prove that the split is the planned one.

    `not_before`: when the data ended by which the step before was passed; nothing of this step is older.

    Raises:
        EvidenceError: it is not; every reason is told, with the numbers of lines.
    """
    found = list(_twice(lines))
    if found:
        raise EvidenceError("\n".join(found))
    by_id: dict[str, list[Line]] = {}
    for line in lines:
        if line.request_id is not None:
            by_id.setdefault(line.request_id, []).append(line)
    both = {name: sorted(two, key=lambda one: one.arm != "control") for name, two in by_id.items() if len(two) == 2}
    live = [(n, line) for n, line in enumerate(lines, start=1) if line.request_id not in both]
    control, canary = (tuple(line for _, line in live if line.arm == arm) for arm in ("control", "canary"))
    split_p = _split_p(step, control, canary)
    found = [*_pairs_apart(both), *_two_kinds(lines), *_early(lines, not_before), *_misplaced(plan, step, live)]
    if not found and split_p < UNLIKELY:
        found = [_mismatch(step, control, canary, split_p)]
    if found:
        raise EvidenceError("\n".join(found))
    return Traffic(
        control,
        canary,
        tuple((a, b) for a, b in both.values()),
        any(line.correct is not None for line in lines),
        split_p,
    )


def _twice(lines: Sequence[Line]) -> Iterator[str]:
    seen: dict[tuple[str, str], int] = {}
    twice = []
    for n, line in enumerate(lines, start=1):
        if line.request_id is None:
            continue
        first = seen.setdefault((line.arm, line.request_id), n)
        if first != n:
            twice.append(f"{line.request_id!r} (lines {first} and {n})")
    if twice:
        yield f"request ids that one arm has twice: {_listed(twice)}"


def _two_kinds(lines: Sequence[Line]) -> Iterator[str]:
    scored = [n for n, line in enumerate(lines, start=1) if line.score is not None]
    right = [n for n, line in enumerate(lines, start=1) if line.correct is not None]
    if scored and right:
        yield f"some lines have `score` (line {scored[0]}), others `correct` (line {right[0]}): one measure, not two"


def _early(lines: Sequence[Line], not_before: datetime | None) -> Iterator[str]:
    if not_before is None:
        return
    early = [str(n) for n, line in enumerate(lines, start=1) if line.at is not None and line.at <= not_before]
    if early:
        at = not_before.isoformat()
        yield f"older than the data by which the step before was passed ({at}): line {_listed(early)}"


def _pairs_apart(both: dict[str, list[Line]]) -> Iterator[str]:
    apart = [name for name, (a, b) in both.items() if (a.user, a.slice) != (b.user, b.slice)]
    if apart:
        yield f"request ids on both arms with another user or slice, so no pairs: {_listed(apart)}"
    half = [n for n, (a, b) in both.items() if (a.as_pair is None) != (b.as_pair is None)]
    if half:
        yield f"pairs of which one side alone is scored: {_listed(half)}"


def _misplaced(plan: Plan, step: Step, live: Sequence[tuple[int, Line]]) -> Iterator[str]:
    """Users whom the split did not send where it should."""
    arms: dict[str, dict[Arm, int]] = {}
    for n, line in live:
        if line.user is not None:
            arms.setdefault(line.user, {}).setdefault(line.arm, n)
    both = [f"{user!r} (lines {a['control']} and {a['canary']})" for user, a in arms.items() if len(a) == 2]
    if both:
        yield f"users that met both arms, so the split is broken: {_listed(both)}"
    elif plan.split.hash == "sha256":
        wrong = [
            f"{user!r} (line {n}, bucket {at}, on the {arm})"
            for user, first in arms.items()
            for arm, n in first.items()
            if ((at := bucket(plan.split.salt, user)) < step.buckets) != (arm == "canary")
        ]
        if wrong:
            yield (
                f"users on the arm that the plan's split does not give them (buckets below {step.buckets} are the "
                f"canary's): {_listed(wrong)}; where the gateway has a hash of its own, plan with rollout.hash=other"
            )


def _units(control: Sequence[Line], canary: Sequence[Line]) -> tuple[str, int, int]:
    """What was split at random: users where every line names one, else requests."""
    if all(line.user for line in (*control, *canary)):
        return "users", len({line.user for line in canary}), len({line.user for line in control})
    return "requests", len(canary), len(control)


def _split_p(step: Step, control: Sequence[Line], canary: Sequence[Line]) -> float:
    _, mine, theirs = _units(control, canary)
    return mismatch_p(mine, theirs, step.buckets / BUCKETS)


def _mismatch(step: Step, control: Sequence[Line], canary: Sequence[Line], p: float) -> str:
    what, mine, theirs = _units(control, canary)
    seen = mine / (mine + theirs)
    return (
        f"the canary has {seen:.2%} of the {what} ({mine} of {mine + theirs}), planned is {step.percent:g}%: so unlike "
        f"it by chance with p = {p:.2g} (below {UNLIKELY}); requests are lost, or the gateway splits otherwise"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
