"""Which steps go into one process, and which processes may run at once. Pure.

With one at a time the order is that of the plan. More at once changes when a step runs, never with whom it shares a
process, nor what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from pipelines.flow.stage import Step
from pipelines.flow.toolchain import Toolchain

FIT = 0.8
"""The part of free memory that estimates may fill together: they are estimates, and others live here too."""


@dataclass(frozen=True, slots=True)
class Work:
    """Steps that share a process, in order; `alone` where nothing may run beside them."""

    steps: tuple[Step, ...]
    alone: bool

    @property
    def memory_bytes(self) -> int:
        """What they may take: a process need not give back what its earlier steps took."""
        return sum(step.memory_bytes for step in self.steps)


def divided(steps: Sequence[Step], there: Container[str], at_hand: Callable[[Toolchain], bool]) -> list[Work]:
    """Steps, upstream first, as processes: each with those of its batch that need only what is there by then.

    `there` are keys that need not be waited for. A process may have company where every step of it shares the machine,
    is bound to no device, has an estimate of its memory, and runs in a toolchain that is `at_hand`.
    """
    kin: dict[tuple[str, str], list[Step]] = {}
    for step in steps:
        if step.batch is not None:
            kin.setdefault((step.batch, step.runs_in.name), []).append(step)
    placed: set[str] = set()
    found = []
    for first in steps:
        if first.key in placed:
            continue
        together = [first]
        placed.add(first.key)
        for step in kin.get((first.batch, first.runs_in.name), ()) if first.batch is not None else ():
            if step.key not in placed and all(up.key in placed or up.key in there for up in step.upstream()):
                together.append(step)
                placed.add(step.key)
        found.append(Work(tuple(together), not all(_shares(step) and at_hand(step.runs_in) for step in together)))
    return found


def _shares(step: Step) -> bool:
    return step.stage.shares_machine and not step.stage.device_bound and step.memory_bytes > 0


def next_of(
    waiting: Mapping[int, Work],
    running: Collection[Work],
    ended: Container[str],
    at_once: int,
    room_bytes: Callable[[], float],
) -> int | None:
    """The place in line of the work to start now, None while all that waits has to wait for what runs.

    Where nothing runs it is the first, whatever it takes. Beside others it is the first that may have company, whose
    inputs have `ended`, and whose memory finds room.
    """
    if not running:
        return min(waiting, default=None)
    if len(running) >= at_once or any(work.alone for work in running):
        return None
    for place in sorted(waiting):
        work = waiting[place]
        if not work.alone and _has_inputs(work, ended) and work.memory_bytes <= room_bytes():
            return place
    return None


def _has_inputs(work: Work, ended: Container[str]) -> bool:
    inside = {step.key for step in work.steps}
    return all(up.key in ended or up.key in inside for step in work.steps for up in step.upstream())


def room_bytes(idle_bytes: int, free_bytes: int, running: Collection[Work]) -> float:
    """Memory for one more: what was free when nothing ran, less what the running may take; and no more than is free."""
    return min(FIT * idle_bytes - sum(work.memory_bytes for work in running), FIT * free_bytes)
