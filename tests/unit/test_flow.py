"""Keys, order, child processes: reuse, failure, death, resumption."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as some

from pipelines.config import Strict
from pipelines.errors import TransientFailure
from pipelines.flow import progress
from pipelines.flow.executor import Event, Outcome, Watch, execute
from pipelines.flow.plan import in_order, plan
from pipelines.flow.stage import Stage, Step
from pipelines.flow.store import Fact, Store, manifest


class ToyConfig(Strict):
    """A number to write, and what to do instead of writing it."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"where"})
    value: int = 0
    do: str = "write"
    where: str = ""


def toy(config: ToyConfig, out: Path, *, source: Path | None = None, many: list[Path] | None = None) -> dict[str, Fact]:
    """A stage for these tests: adds its inputs' numbers to its own, or fails in the way asked for."""
    progress.report(1, 2, "half way")
    match config.do:
        case "raise":
            raise ValueError("no such luck")
        case "transient":
            raise TransientFailure("try again")
        case "full":
            raise OSError(28, "No space left on device")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            (Path(config.where) / "hanging").touch()
            time.sleep(600)
        case "keep":
            asked: list[int] = []
            signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
            progress.report(2, 2, "ready to be stopped", 12.5)
            while not asked:  # a pause would miss a signal that is quicker than it
                time.sleep(0.01)
    total = config.value + sum(int((p / "n").read_text()) for p in [*([source] if source else []), *(many or [])])
    (out / "n").write_text(str(total))
    return {"total": total, "pid": os.getpid(), "partial": config.do in ("lose", "keep")}


TOY = Stage("toy", "toy", 1, "tests.unit.test_flow:toy", "tests.unit.test_flow:ToyConfig")
FRAGILE = replace(TOY, name="fragile", may_be_partial=True)


def step(
    value: int = 0,
    do: str = "write",
    batch: str | None = None,
    where: str = "",
    stage: Stage = TOY,
    **inputs: Step | tuple[Step, ...],
) -> Step:
    return Step(stage, f"toy {value} {do}", ToyConfig(value=value, do=do, where=where), inputs, batch=batch)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.prepare()
    return made


def run(store: Store, *goals: Step, watch: Watch = lambda _: None) -> dict[str, Outcome]:
    root = str(Path(__file__).resolve().parents[2])
    # The toy stage lives in the tests, which a clean child cannot see unless it is told where.
    return execute(plan(goals, store), store, watch, {"PYTHONPATH": root})


def test_facts_flow_down_and_the_manifest_records_where_from(store: Store) -> None:
    """Three steps add up, and each manifest names its inputs by key."""
    a, b = step(1), step(2)
    c = step(10, many=(a, b))
    outcomes = run(store, c)
    assert {"made"} == {o.state for o in outcomes.values()}
    record = manifest(store.path("toy", c.key))
    assert 13 == record.facts["total"]
    assert {"many": [a.key, b.key]} == record.inputs


def test_a_second_run_reuses_everything(store: Store) -> None:
    """Nothing is made twice."""
    run(store, step(1))
    assert ["reused"] == [o.state for o in run(store, step(1)).values()]


def test_each_step_has_its_own_process_unless_batched(store: Store) -> None:
    """Two lone steps run in two processes, two of one batch in one."""
    lone, batched = (step(1), step(2)), (step(3, batch="b"), step(4, batch="b"))
    run(store, *lone, *batched)
    pids = {s.key: manifest(store.path("toy", s.key)).facts["pid"] for s in (*lone, *batched)}
    assert 2 == len({pids[s.key] for s in lone})
    assert 1 == len({pids[s.key] for s in batched})


def test_a_failure_is_a_record_and_ends_only_what_needs_it(store: Store) -> None:
    """The failed step tells its message and command; its dependant is skipped, its neighbour made."""
    bad = step(1, "raise")
    needs, beside = step(2, source=bad), step(3)
    outcomes = run(store, needs, beside)
    assert ("failed", "skipped", "made") == tuple(outcomes[s.key].state for s in (bad, needs, beside))
    assert "no such luck" in outcomes[bad.key].message
    assert "-m pipelines.flow.worker" in outcomes[bad.key].command
    assert not outcomes[bad.key].transient


def test_the_printed_command_repeats_the_failed_step(store: Store) -> None:
    """Running the command again fails in the same way, outside any run."""
    bad = step(1, "raise")
    outcome = run(store, bad)[bad.key]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    again = subprocess.run(
        outcome.command.split(), env=env, capture_output=True, text=True, check=False, cwd=store.root
    )
    assert 1 == again.returncode
    assert "no such luck" in again.stdout


@pytest.mark.parametrize("how", ["transient", "full", "die"])
def test_transient_failures_are_told_apart(store: Store, how: str) -> None:
    """Memory, disk and kills are worth another try, and say so."""
    bad = step(1, how)
    assert run(store, bad)[bad.key].transient


def test_a_batch_goes_on_after_one_of_it_died(store: Store) -> None:
    """The step that killed its process failed; those after it are made in a new one."""
    batch = [step(1, batch="b"), step(2, "die", batch="b"), step(3, batch="b")]
    outcomes = run(store, *batch)
    assert ["made", "failed", "made"] == [outcomes[s.key].state for s in batch]


def test_a_step_may_share_a_process_with_what_it_reads(store: Store) -> None:
    """A chain in one batch runs in one process; when its first link fails, the rest is skipped."""
    first = step(1, batch="b")
    second = step(2, batch="b", source=first)
    assert ["made", "made"] == [o.state for o in run(store, second).values()]
    assert 1 == len({manifest(store.path("toy", s.key)).facts["pid"] for s in (first, second)})
    bad = step(3, "raise", batch="c")
    outcomes = run(store, step(4, batch="c", source=bad))
    assert ["failed", "skipped"] == [o.state for o in outcomes.values()]


def test_progress_reaches_the_watcher(store: Store) -> None:
    """What a stage reports arrives with its step."""
    events: list[Event] = []
    root = str(Path(__file__).resolve().parents[2])
    execute(plan([step(1)], store), store, events.append, {"PYTHONPATH": root})
    assert ["started", "progress", "made"] == [e.what for e in events]
    assert (1, 2, "half way") == (events[1].done, events[1].total, events[1].text)


def test_a_killed_run_leaves_nothing_that_hinders_the_next(store: Store, tmp_path: Path) -> None:
    """kill -9 of the parent ends the child too; the next run makes what was being made."""
    code = (
        "import sys; from pathlib import Path; from tests.unit.test_flow import run, step, Store\n"
        f"run(Store(Path({str(store.root)!r})), step(1, 'hang', where={str(tmp_path)!r}))"
    )
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    while not (tmp_path / "hanging").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    with store.lock(step(1, "hang").key, wait_s=20):  # the child's lock is free once it is gone
        pass
    store.sweep()
    assert [] == list((store.root / ".tmp").glob("toy-*"))
    assert ["made"] == [o.state for o in run(store, step(1)).values()]


def test_a_partial_artifact_serves_its_run_and_is_made_anew_by_the_next(store: Store) -> None:
    """What lost a part is used by what follows it, which is partial too; the next run makes both again, no others."""
    whole = step(1)
    lossy = step(2, do="lose", stage=FRAGILE, source=whole)
    last = step(3, source=lossy)
    assert {"made"} == {outcome.state for outcome in run(store, last).values()}
    assert [False, True, True] == [manifest(store.path("toy", s.key)).partial for s in (whole, lossy, last)]
    assert ["reuse", "run", "run"] == [p.state for p in plan([last], store).steps]
    assert "made before, but only in part" == plan([last], store).steps[1].why
    before = (store.path("toy", last.key) / "manifest.json").stat().st_mtime_ns
    assert ["reused", "made", "made"] == [outcome.state for outcome in run(store, last).values()]
    assert before < (store.path("toy", last.key) / "manifest.json").stat().st_mtime_ns


def test_a_stopped_stage_keeps_what_it_has_marked_partial(store: Store) -> None:
    """Ctrl-C gives the stage its time to end; what it keeps is named, and is no whole artifact."""
    told: list[Event] = []

    def stop(event: Event) -> None:
        told.append(event)
        if event.text == "ready to be stopped":
            raise KeyboardInterrupt

    stopped = step(7, do="keep", stage=FRAGILE)
    with pytest.raises(KeyboardInterrupt):
        run(store, stopped, watch=stop)
    artifact = store.path("toy", stopped.key)
    assert (True, "7") == (manifest(artifact).partial, (artifact / "n").read_text())
    assert ["started", "progress", "progress", "interrupted"] == [event.what for event in told]
    assert 12.5 == told[2].left_s
    assert f"{artifact}, marked partial" in told[-1].text
    assert ["run"] == [p.state for p in plan([stopped], store).steps]


def test_what_a_stopped_stage_did_not_keep_is_not_spoken_of(store: Store) -> None:
    """A stage that just ends leaves no artifact, and nobody is told of one."""
    told: list[Event] = []

    def stop(event: Event) -> None:
        told.append(event)
        if event.what == "progress":
            raise KeyboardInterrupt

    stopped = step(8, do="hang", where=str(store.root), stage=FRAGILE)
    with pytest.raises(KeyboardInterrupt):
        run(store, stopped, watch=stop)
    assert not store.has("toy", stopped.key)
    assert ["started", "progress"] == [event.what for event in told]


def test_two_runs_at_once_make_one_artifact(store: Store) -> None:
    """The second waits for the first and reuses what it made."""
    code = (
        "from pathlib import Path; from tests.unit.test_flow import run, step, Store\n"
        f"print(*[o.state for o in run(Store(Path({str(store.root)!r})), step(1), step(2)).values()])"
    )
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], cwd=root, env=env, stdout=subprocess.PIPE, text=True)
        for _ in "ab"
    ]
    states = [s for p in both for s in p.communicate()[0].split()]
    assert 4 == len(states)
    assert {"made": 2, "reused": 2} == {s: states.count(s) for s in set(states)}


def test_a_key_depends_on_what_matters_only() -> None:
    """Config, inputs, version, toolchain and device change a key; label, path and batch do not."""
    plain = step(1)
    assert plain.key == Step(TOY, "other label", ToyConfig(value=1, where="/elsewhere"), batch="x").key
    later = Stage("toy", "toy", 2, TOY.function, TOY.config_type)
    others = [
        step(2),
        step(1, source=step(5)),
        Step(later, "", ToyConfig(value=1)),
        Step(TOY, "", ToyConfig(value=1), toolchain={"torch": "2"}),
        Step(TOY, "", ToyConfig(value=1), device={"gpu": "none"}),
    ]
    assert 6 == len({plain.key, *(o.key for o in others)})


@given(some.lists(some.integers(0, 5), min_size=1, max_size=8))
def test_order_is_upstream_first_and_each_key_once(values: list[int]) -> None:
    """Every step comes after what it reads, and equal steps come once."""
    chain: list[Step] = []
    for v in values:
        chain.append(step(v, **({"source": chain[-1]} if chain else {})))
    ordered = [s.key for s in in_order(reversed(chain))]
    assert len(set(ordered)) == len(ordered)
    for earlier, later in itertools.pairwise(chain):
        assert ordered.index(earlier.key) < ordered.index(later.key)
