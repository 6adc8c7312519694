"""What a person sees while a run goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipelines import terminal
from pipelines.config import Strict
from pipelines.flow.executor import Event
from pipelines.flow.stage import Stage, Step

STEP = Step(Stage("latency", "latency", 1, "", ""), "latency of all engines", Strict())


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Where a terminal of 200 columns writes."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=200, highlight=False)
    monkeypatch.setattr(terminal, "console", lambda *, stderr=False: console)
    return written


def shown(screen: io.StringIO, *events: Event) -> str:
    with terminal.Watcher(1, 100.0) as watch:
        for event in events:
            watch(event)
        watch._bars.refresh()
    return screen.getvalue()


@pytest.mark.parametrize(("left_s", "words"), [(75.0, "75 s left"), (600.0, "10 min left"), (9000.0, "2.5 h left")])
def test_a_step_that_knows_its_time_left_is_believed(screen: io.StringIO, left_s: float, words: str) -> None:
    """Requests done, of how many, and the time left that the step tells, not one by their number."""
    seen = shown(screen, Event(STEP, "started"), Event(STEP, "progress", 40, 420, "requests", left_s))
    assert "latency of all engines: requests" in seen
    assert "40/420" in seen
    assert words in seen


def test_what_an_interrupted_step_kept_is_said(screen: io.StringIO) -> None:
    """The line names the place and how the step ended."""
    kept = "what was measured is in engines_out/latency/0123, marked partial"
    seen = shown(screen, Event(STEP, "started"), Event(STEP, "interrupted", text=kept))
    assert f"interrupted latency of all engines: {kept}" in seen


def test_steps_that_run_at_once_are_told_apart(screen: io.StringIO) -> None:
    """Each has a bar; the second line to start says beside what; each line at the end has its own step's name."""
    other = Step(STEP.stage, "variant gptq", Strict(), pinned="other")
    first = [Event(STEP, "started"), Event(other, "started")]
    moved = [Event(STEP, "progress", 1, 4, "layers"), Event(other, "progress", 2, 8, "columns")]
    seen = shown(screen, *first, *moved)
    assert "start   variant gptq (beside latency of all engines)" in seen
    assert "latency of all engines: layers" in seen
    assert "variant gptq: columns" in seen
    screen.truncate(0)
    ended = shown(screen, *first, Event(STEP, "made"), Event(other, "again", text="killed"), Event(other, "started"))
    assert "made    latency of all engines (" in ended
    assert "again   variant gptq, alone: killed" in ended
    assert (2, 1) == (ended.count("start   variant gptq"), ended.count("(beside"))
