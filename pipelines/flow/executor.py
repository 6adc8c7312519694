"""Run a plan on this machine: each step, or batch of steps, in a child process that takes its memory with it. Several
run at once where they may."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from pipelines.errors import EnvironmentProblem
from pipelines.flow.child import Child, any_told, end
from pipelines.flow.device import free_memory
from pipelines.flow.launch import at_hand, ready
from pipelines.flow.plan import Plan
from pipelines.flow.schedule import Work, divided, next_of, room_bytes
from pipelines.flow.stage import Step
from pipelines.flow.store import Store

State = Literal["reused", "made", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step. `command` repeats a failed one; `transient` says another try may do."""

    step: Step
    state: State
    message: str = ""
    transient: bool = False
    command: str = ""
    log: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something a person may want to see: a step's toolchain is being made, or it started, moved on, or ended.

    An interrupted one kept what it had; one that goes again could not be made beside others, and will be tried alone.
    `left_s` is told where the step itself knows how long it will take.
    """

    step: Step
    what: Literal["preparing", "started", "progress", "reused", "made", "failed", "skipped", "interrupted", "again"]
    done: int = 0
    total: int = 0
    text: str = ""
    left_s: float | None = None


Watch = Callable[[Event], None]


def execute(
    plan: Plan,
    store: Store,
    watch: Watch,
    env: Mapping[str, str],
    before: Mapping[str, Outcome] | None = None,
    *,
    at_once: int = 1,
    free_bytes: Callable[[], int] = free_memory,
) -> dict[str, Outcome]:
    """Run what must run, in order, and say what became of every step by key. One failure ends only what needs it.

    `before` holds the outcomes of steps that an earlier call took care of. At most `at_once` processes run beside each
    other, of stages that share the machine, while their estimates fit what memory is free.
    """
    run = _Run(store, watch, env, dict(before or {}), at_once, free_bytes)
    for planned in plan.steps:
        if planned.state == "reuse":
            run.outcomes[planned.step.key] = Outcome(planned.step, "reused")
            watch(Event(planned.step, "reused"))
    run.through([planned.step for planned in plan.to_run])
    order = dict.fromkeys([*(before or {}), *(planned.step.key for planned in plan.steps)])
    return {key: _settled(run.outcomes[key], run.outcomes) for key in order}


class _Run:
    """What waits, what runs and what became of the rest. All of it in one thread, which also starts the children: they
    are ended with the thread that started them."""

    def __init__(
        self,
        store: Store,
        watch: Watch,
        env: Mapping[str, str],
        outcomes: dict[str, Outcome],
        at_once: int,
        free_bytes: Callable[[], int],
    ) -> None:
        self.outcomes = outcomes
        self._store, self._watch, self._env = store, watch, env
        self._at_once, self._free_bytes, self._idle_bytes = at_once, free_bytes, 0
        self._waiting: dict[int, Work] = {}
        self._running: list[Child] = []
        self._again: set[str] = set()

    def through(self, steps: Sequence[Step]) -> None:
        """Run steps, upstream first, to the last."""
        self._waiting = dict(enumerate(divided(steps, self.outcomes, at_hand)))
        self._skip_lost()
        try:
            while self._waiting or self._running:
                while (place := self._next()) is not None:
                    self._start(place)
                for child in any_told(self._running) if self._running else ():
                    self._hear(child)
        except (KeyboardInterrupt, SystemExit):
            self._interrupt()
            raise
        finally:
            self._end(self._running)

    def _next(self) -> int | None:
        works = [child.work for child in self._running]
        return next_of(
            self._waiting, works, self.outcomes, self._at_once,
            lambda: room_bytes(self._idle_bytes, self._free_bytes(), works),
        )  # fmt: skip

    def _start(self, place: int) -> None:
        if self._at_once > 1 and not self._running:
            self._idle_bytes = self._free_bytes()
        work = self._waiting.pop(place)
        first, held = work.steps[0], ExitStack()

        def tell(done: int, total: int, what: str) -> None:
            self._watch(Event(first, "preparing", done, total, f"toolchain {first.runs_in.name}: {what}"))

        try:
            held.enter_context(ready(first.runs_in, tell))
        except EnvironmentProblem as error:
            self._fail(first, str(error), True, f"quantgate toolchain sync {first.runs_in.name}")
            self._wait_again(place, work)
            return
        try:
            self._running.append(Child(work, place, self._store, self._env, held))
        except BaseException:
            held.close()
            raise
        for child in self._running:
            child.joined(len(self._running) - 1)

    def _hear(self, child: Child) -> None:
        for event in child.heard():
            step = child.current
            match event["event"]:
                case "started":
                    self._watch(Event(step, "started"))
                case "progress":
                    told = (event[name] for name in ("done", "total", "what", "left_s"))
                    self._watch(Event(step, "progress", *told))
                case "done":
                    state: Literal["reused", "made"] = "reused" if event["reused"] else "made"
                    self._watch(Event(step, state))
                    self.outcomes[step.key] = Outcome(step, state)
                case "failed":
                    self._failed_in(child, event["message"], event["transient"])
        if child.over:
            if child.busy:
                self._failed_in(child, child.death, True)
            self._running.remove(child)
            self._end([child])
            self._wait_again(child.place, child.work)

    def _failed_in(self, child: Child, message: str, transient: bool) -> None:
        """Record a failure; what another try may mend, and company may have caused, is tried once more, alone."""
        step = child.current
        if transient and child.company and step.key not in self._again:
            self._again.add(step.key)
            self._watch(Event(step, "again", text=message))
            return
        self._fail(step, message, transient, child.repeat, str(self._store.log_path(step.key)))

    def _fail(self, step: Step, message: str, transient: bool, command: str, log: str = "") -> None:
        self._watch(Event(step, "failed", text=message))
        self.outcomes[step.key] = Outcome(step, "failed", message, transient, command, log)
        self._skip_lost()

    def _wait_again(self, place: int, work: Work) -> None:
        """Put what a process did not come to back into its place in line."""
        left = tuple(step for step in work.steps if step.key not in self.outcomes)
        if left:
            self._waiting[place] = Work(left, work.alone or any(step.key in self._again for step in left))
            self._skip_lost()

    def _skip_lost(self) -> None:
        """Take out what needs a step that failed."""
        for place in sorted(self._waiting):
            work = self._waiting.pop(place)
            for step in work.steps:
                lost = _lost_input(step, self.outcomes)
                if lost is not None:
                    self.outcomes[step.key] = _skipped(step, lost)
                    self._watch(Event(step, "skipped", text=self.outcomes[step.key].message))
            left = tuple(step for step in work.steps if step.key not in self.outcomes)
            if left:
                self._waiting[place] = replace(work, steps=left)

    def _interrupt(self) -> None:
        """End all at once, and tell what they kept."""
        end(self._running, patient=True)
        for child in self._running:
            where = child.kept()
            if where is not None:
                text = f"what was measured is in {where}, marked partial"
                self._watch(Event(child.current, "interrupted", text=text))

    def _end(self, children: Sequence[Child]) -> None:
        with ExitStack() as closing:
            for child in children:
                closing.callback(child.close)
            end(children)


def _skipped(step: Step, lost: Outcome) -> Outcome:
    return Outcome(step, "skipped", f"needs {lost.step.label}, which {lost.state}")


def _settled(outcome: Outcome, outcomes: Mapping[str, Outcome]) -> Outcome:
    """An outcome as it reads once all are known: of several lost inputs the first one counts, not the quickest."""
    lost = _lost_input(outcome.step, outcomes) if outcome.state == "skipped" else None
    return outcome if lost is None else _skipped(outcome.step, lost)


def _lost_input(step: Step, outcomes: Mapping[str, Outcome]) -> Outcome | None:
    ups = (outcomes.get(up.key) for up in step.upstream())
    return next((o for o in ups if o is not None and o.state in ("failed", "skipped")), None)
