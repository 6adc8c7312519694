"""Which steps share a process and which processes run at once, on plans that nobody thought of; none is started."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from pipelines.config import Strict
from pipelines.flow import executor
from pipelines.flow.executor import Event, Outcome, Watch, execute
from pipelines.flow.plan import Plan, Planned, in_order
from pipelines.flow.schedule import FIT, Work, divided, next_of, room_bytes
from pipelines.flow.stage import Stage, Step
from pipelines.flow.store import Store

FREE = 100
SHARING = Stage("toy", "sharing", 1, "", "", shares_machine=True)
LONE = Stage("toy", "lone", 1, "", "")


class Numbered(Strict):
    """What tells steps apart."""

    number: int


@dataclass(frozen=True)
class Case:
    """Steps, upstream first; which fail, and which die, but only when others run beside them."""

    steps: tuple[Step, ...]
    failing: frozenset[str]
    crowded: frozenset[str]


@some.composite
def cases(draw: some.DrawFn) -> Case:
    """Any graph of up to nine steps, in batches or not, that share the machine or not, of any size."""
    made: list[Step] = []
    failing, crowded = set(), set()
    for number in range(draw(some.integers(1, 9))):
        ups = tuple(up for up in made if draw(some.integers(0, 3)) == 0)
        step = Step(
            SHARING if draw(some.integers(0, 3)) else LONE,
            f"step {number}",
            Numbered(number=number),
            {"many": ups},
            batch=draw(some.sampled_from([None, None, "a", "b"])),
            memory_bytes=draw(some.sampled_from([0, 10, 30, 60, 200])),
        )
        failing |= {step.key} if draw(some.integers(0, 6)) == 0 else set()
        crowded |= {step.key} if draw(some.integers(0, 6)) == 0 else set()
        made.append(step)
    return Case(tuple(in_order(made)), frozenset(failing), frozenset(crowded))


@dataclass
class World:
    """Processes that are none: what runs is here, and every rule about it is looked at whenever one more starts."""

    case: Case
    at_once: int
    running: list[FakeChild] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    together: list[tuple[str, ...]] = field(default_factory=list)
    most: int = 0

    def begins(self, child: FakeChild) -> None:
        self.running.append(child)
        self.most = max(self.most, len(self.running))
        assert len(self.running) <= self.at_once
        if len(self.running) > 1:
            steps = [step for one in self.running for step in one.work.steps]
            assert all(step.stage.shares_machine and step.memory_bytes for step in steps)
            assert sum(step.memory_bytes for step in steps) <= FIT * FREE


@dataclass(eq=False)
class FakeChild:
    """Tells one event each time it is heard."""

    world: World
    work: Work
    place: int
    company: int = 0
    over: bool = False
    busy: bool = True
    repeat: str = "again"

    def __post_init__(self) -> None:
        self.current = self.work.steps[0]
        self._left = list(self.work.steps)
        self._ran: list[str] = []
        self.world.begins(self)

    def joined(self, others: int) -> None:
        self.company = max(self.company, others)

    def heard(self) -> Iterator[dict[str, Any]]:
        if not self._left:
            self.over = True
            return
        step = self.current = self._left.pop(0)
        assert all(up.key in self.world.made for up in step.upstream()), "an input is not there yet"
        self._ran.append(step.key)
        yield {"event": "started"}
        if step.key in self.world.case.crowded and self.company:
            self.busy, self.over = True, True
            return
        self.busy = False
        if step.key in self.world.case.failing:
            self._left.clear()
            yield {"event": "failed", "message": f"{step.label} fails", "transient": False}
            return
        self.world.made.add(step.key)
        yield {"event": "done", "reused": False}

    @property
    def death(self) -> str:
        return "killed"

    def close(self) -> None:
        self.world.running.remove(self)
        self.world.together.append(tuple(self._ran))


def run(
    case: Case, at_once: int, pick: some.DataObject | None = None, watch: Watch = lambda _: None
) -> tuple[dict[str, Outcome], World]:
    """Execute the case; `pick` chooses who of those that run is heard next."""
    world = World(case, at_once)

    def any_told(children: Collection[FakeChild]) -> list[FakeChild]:
        return [pick.draw(some.sampled_from(list(children)))] if pick is not None else list(children)[:1]

    def start(work: Work, place: int, store: Store, env: Mapping[str, str], held: ExitStack) -> FakeChild:
        del store, env, held
        return FakeChild(world, work, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "Child", start)
        patch.setattr(executor, "any_told", any_told)
        patch.setattr(executor, "end", lambda children, **_: None)
        patch.setattr(executor, "ready", lambda *_: nullcontext())
        plan = Plan(tuple(Planned(step, "run", "") for step in case.steps))
        store = Store(Path("/nowhere"))
        outcomes = execute(plan, store, watch, {}, at_once=at_once, free_bytes=lambda: FREE)
    assert [] == world.running
    return outcomes, world


def by_definition(case: Case) -> dict[str, str]:
    """What becomes of each step, whatever runs when."""
    states: dict[str, str] = {}
    for step in case.steps:
        lost = any(states[up.key] != "made" for up in step.upstream())
        states[step.key] = "skipped" if lost else "failed" if step.key in case.failing else "made"
    return states


def one_after_the_other(case: Case) -> list[tuple[str, ...]]:
    """The company of each step where nothing runs at once and nothing fails: with the first that waits go those of its
    batch that need only what is there."""
    waiting = list(case.steps)
    found = []
    while waiting:
        batch = [waiting[0]]
        for step in waiting[1:]:
            elsewhere = {one.key for one in waiting if one not in batch}
            same = waiting[0].batch is not None and step.batch == waiting[0].batch
            if same and not any(up.key in elsewhere for up in step.upstream()):
                batch.append(step)
        waiting = [step for step in waiting if step not in batch]
        found.append(tuple(step.key for step in batch))
    return found


def companies(case: Case, states: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The same where steps fail: a failure ends its process, the rest of its steps gets another, what is lost none."""
    found = []
    for keys in one_after_the_other(case):
        part: list[str] = []
        for key in keys:
            part += [key] if states[key] != "skipped" else []
            if part and states[key] == "failed":
                found.append(tuple(part))
                part = []
        found += [tuple(part)] if part else []
    return found


@given(cases())
def test_one_at_a_time_keeps_order_and_company(case: Case) -> None:
    """Without more at once, processes come in the order of the plan, each with its batch, as the definition says."""
    outcomes, world = run(case, 1)
    states = by_definition(case)
    assert states == {key: o.state for key, o in outcomes.items()}
    assert companies(case, states) == world.together
    assert 1 == world.most


@settings(max_examples=300)
@given(cases(), some.integers(2, 4), some.data())
def test_more_at_once_changes_nothing_but_when(case: Case, at_once: int, pick: some.DataObject) -> None:
    """Whoever ends first: inputs come before what reads them, what does not share runs alone, memory is kept to, a
    failure skips what needs it and nothing else, and what died in company is made alone."""
    outcomes, world = run(case, at_once, pick)
    alone, _ = run(case, 1)
    assert list(alone.items()) == list(outcomes.items())
    assert by_definition(case) == {key: o.state for key, o in outcomes.items()}
    if not case.crowded:
        assert sorted(companies(case, by_definition(case))) == sorted(world.together)


def test_two_that_share_do_run_at_once() -> None:
    """Four independent steps, two at once: at some time two run, and never three."""
    steps = tuple(Step(SHARING, "", Numbered(number=n), memory_bytes=10) for n in range(4))
    assert 2 == run(Case(steps, frozenset(), frozenset()), 2)[1].most


def test_what_died_in_company_is_told_and_tried_alone() -> None:
    """The first try is told as one, with its reason, not as a failure; the second is made once nothing else runs."""
    told: list[Event] = []
    steps = tuple(Step(SHARING, f"{n}", Numbered(number=n), memory_bytes=10) for n in range(2))
    run(Case(steps, frozenset(), frozenset({steps[0].key})), 2, watch=told.append)
    assert [
        ("started", "0"), ("again", "0"), ("started", "1"), ("made", "1"), ("started", "0"), ("made", "0")
    ] == [(event.what, event.step.label) for event in told]  # fmt: skip
    assert "killed" == told[1].text


def step(number: int, *, stage: Stage = SHARING, memory: int = 10, **more: Any) -> Step:
    return Step(stage, f"{number}", Numbered(number=number), memory_bytes=memory, **more)


@pytest.mark.parametrize(
    ("one", "alone"),
    [
        (step(0), False),
        (step(0, stage=LONE), True),
        (step(0, memory=0), True),
        (step(0, stage=replace(SHARING, device_bound=True)), True),
    ],
)
def test_company_is_for_those_that_say_so_and_are_known(one: Step, alone: bool) -> None:
    """A stage that does not share, one bound to a device and one of unknown memory run alone; so does every step in a
    toolchain that would have to be made first."""
    assert [alone] == [work.alone for work in divided([one], {}, lambda _: True)]
    assert [True] == [work.alone for work in divided([one], {}, lambda _: False)]


def test_a_batch_shares_the_machine_only_if_all_of_it_does() -> None:
    """One member that starts a server keeps company away from the whole process, whose memory is theirs together."""
    (work,) = divided([step(0, batch="b"), step(1, batch="b", stage=LONE)], {}, lambda _: True)
    assert (True, 20) == (work.alone, work.memory_bytes)


def test_room_is_what_was_free_less_what_runs_and_never_more_than_is_free_now() -> None:
    """Of 100 free when nothing ran, 80 are to be had and 30 spoken for; if only 40 are free now, 32 are left."""
    running = [Work((step(0, memory=30),), alone=False)]
    assert 50 == room_bytes(100, 100, running)
    assert 32 == room_bytes(100, 40, running)


def test_a_later_step_goes_before_one_that_has_to_wait() -> None:
    """Beside what runs the first that may is started, over one that wants the machine to itself."""
    waiting = {1: Work((step(1, stage=LONE),), alone=True), 2: Work((step(2),), alone=False)}
    running = [Work((step(0),), alone=False)]
    assert 2 == next_of(waiting, running, (), 2, lambda: 50)
    assert None is next_of(waiting, running, (), 2, lambda: 5)
    assert None is next_of(waiting, running, (), 1, lambda: 50)
    assert 1 == next_of(waiting, [], (), 2, lambda: 0)
    assert None is next_of({}, [], (), 2, lambda: 50)
