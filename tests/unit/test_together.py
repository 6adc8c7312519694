"""Steps that run at once in real processes: the same artifacts, marked as made in company, and a second try alone."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from pipelines.config import Strict
from pipelines.flow.executor import Event, Outcome, Watch, execute
from pipelines.flow.plan import plan
from pipelines.flow.stage import Stage, Step
from pipelines.flow.store import Fact, Store, manifest

ROOT = str(Path(__file__).resolve().parents[2])
PLENTY = 2**40
MET_WITHIN_S = 60.0


class MeetingConfig(Strict):
    """A number to write, and what to do before: wait for `others` of them at a place, for ever, or be killed once."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"place", "do", "others"})
    value: int
    place: str = ""
    do: str = "write"
    others: int = 0


def meeting(config: MeetingConfig, out: Path, *, many: list[Path] | None = None) -> dict[str, Fact]:
    """A stage that can only end while others run, or alone."""
    here = Path(config.place) / str(config.value)
    second = here.exists()
    if config.place:
        here.write_text(str(os.getpid()))
    deadline = time.monotonic() + MET_WITHIN_S
    while config.others and len(list(here.parent.iterdir())) <= config.others:
        if time.monotonic() > deadline:
            raise ValueError("nobody came")
        time.sleep(0.02)
    if config.do == "die once" and not second:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.do == "raise":
        raise ValueError("no such luck")
    if config.do == "hang":
        time.sleep(600)
    (out / "n").write_text(str(config.value + sum(int((path / "n").read_text()) for path in many or [])))
    return {"value": config.value}


MEETING = Stage(
    "toy", "meeting", 1, "tests.unit.test_together:meeting", "tests.unit.test_together:MeetingConfig",
    shares_machine=True,
)  # fmt: skip


def step(value: int, place: Path | str = "", do: str = "write", others: int = 0, many: tuple[Step, ...] = ()) -> Step:
    config = MeetingConfig(value=value, place=str(place), do=do, others=others)
    return Step(MEETING, f"{value} {do}", config, {"many": many} if many else {}, memory_bytes=1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    made.mkdir()
    return made


def opened(path: Path) -> Store:
    store = Store(path)
    store.prepare()
    return store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return opened(tmp_path / "store")


def run(store: Store, *goals: Step, at_once: int = 2, watch: Watch = lambda _: None) -> dict[str, Outcome]:
    env = {"PYTHONPATH": ROOT}
    return execute(plan(goals, store), store, watch, env, at_once=at_once, free_bytes=lambda: PLENTY)


def test_two_steps_run_at_once_and_say_so(store: Store, place: Path) -> None:
    """Each waits for the other, so both are made only if both run; their manifests say that they had company."""
    both = step(1, place, others=1), step(2, place, others=1)
    assert ["made", "made"] == [o.state for o in run(store, *both).values()]
    assert [1, 1] == [manifest(store.path("toy", s.key)).beside for s in both]


def test_one_alone_says_nothing_of_company(store: Store, place: Path) -> None:
    """What ran one after the other has seconds of its own; what a process was told of its company is tidied away."""
    lone = step(1, place), step(2, place)
    run(store, *lone, at_once=1)
    assert [0, 0] == [manifest(store.path("toy", s.key)).beside for s in lone]
    run(store, step(3, place), step(4, place))
    assert {".json"} == {path.suffix for path in (store.root / ".requests").iterdir()}


def test_the_result_is_that_of_one_after_the_other(tmp_path: Path) -> None:
    """Keys, states and bytes are equal, in the same order, whether three run at once or none do."""
    found = []
    for at_once in (1, 3):
        a, b, c = step(1), step(2), step(3)
        bad = step(4, do="raise")
        goals = step(10, many=(a, b)), step(20, many=(b, c)), step(30, many=(bad, c)), step(40, many=(c,))
        store = opened(tmp_path / str(at_once))
        outcomes = run(store, *goals, at_once=at_once)
        files = [manifest(path).files for path in store.artifacts()]
        states = [(key, o.state, o.message) for key, o in outcomes.items()]
        found.append((states, sorted(files, key=str)))
    assert found[0] == found[1]
    assert {"made", "failed", "skipped"} == {state for _, state, _ in found[0][0]}


def test_what_was_killed_in_company_is_made_alone(store: Store, place: Path) -> None:
    """The kernel may have killed it for the memory of both: it goes again by itself, and is no failure."""
    told: list[Event] = []
    dies, other = step(1, place, do="die once", others=1), step(2, place, others=1)
    outcomes = run(store, dies, other, watch=told.append)
    assert {"made"} == {o.state for o in outcomes.values()}
    assert 0 == manifest(store.path("toy", dies.key)).beside
    assert ["1 die once"] == [event.step.label for event in told if event.what == "again"]


def test_a_process_that_always_dies_fails_after_its_second_try(store: Store, place: Path) -> None:
    """One more try, not more; the failure is one that another run may mend."""
    killer = Step(
        replace(MEETING, function="tests.unit.test_together:dying"), "dying", MeetingConfig(value=9), memory_bytes=1
    )
    outcomes = run(store, killer, step(1, place), step(2, place))
    assert ("failed", True) == (outcomes[killer.key].state, outcomes[killer.key].transient)


def dying(config: MeetingConfig, out: Path) -> dict[str, Fact]:
    """A stage that never ends well."""
    del config, out
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def test_a_failure_does_not_stop_what_runs_beside_it(store: Store, place: Path) -> None:
    """The one that is left is made; what needs the failed one is skipped."""
    bad, good = step(1, place, do="raise", others=1), step(2, place, others=1)
    outcomes = run(store, step(3, many=(bad,)), good)
    assert ["failed", "skipped", "made"] == [outcomes[s.key].state for s in (bad, step(3, many=(bad,)), good)]
