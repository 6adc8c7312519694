"""What a person sees while and after a run: one line as a stage starts, is reused or ends; bars only on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pipelines.flow.executor import Event

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

MOST_LINES = 100
"""Longer tables are told in short, unless every line is asked for."""


def console(*, stderr: bool = False) -> Console:
    """A console that wraps nothing when its output is not a terminal, so that lines can be searched."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=180, soft_wrap=True)


class Watcher:
    """Shows a run's events on stderr. `seconds` is the plan's estimate, shown as time left."""

    def __init__(self, total: int, seconds: float) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._estimate = seconds
        self._total, self._ended = total, 0
        self._all: TaskID | None = None
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, tuple[str, float]] = {}
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        if self._total:
            self._all = self._bars.add_task("campaign", total=self._total, left="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, event: Event) -> None:
        label = event.step.label
        match event.what:
            case "preparing":
                self._prepare(event)
            case "started":
                beside = " and ".join(other for other, _ in self._began.values())
                self._say(f"start   {label}" + (f" (beside {beside})" if beside else ""))
                self._began[event.step.key] = label, time.monotonic()
                self._end_bar(event)
                self._tasks[event.step.key] = self._bars.add_task(label, total=None, left="")
            case "progress":
                self._progress(event)
            case "reused" if event.step.key not in self._began:
                return  # counted in the summary; a line each would bury the news
            case "again":
                self._began.pop(event.step.key, None)
                self._end_bar(event)
                self._say(f"again   {label}, alone: {event.text.splitlines()[0] if event.text else ''}")
            case "failed" | "skipped" | "interrupted":
                self._end(event, f"{event.what:7} {label}: {event.text.splitlines()[0] if event.text else ''}")
            case _:
                self._end(event, f"{event.what:7} {label}")

    def _progress(self, event: Event) -> None:
        task = self._tasks.get(event.step.key)
        if task is None:
            return
        left_s = event.left_s
        if left_s is None and event.done:
            took = time.monotonic() - self._began.get(event.step.key, ("", self._start))[1]
            left_s = took / event.done * (event.total - event.done)
        left = "" if left_s is None else f"{duration(left_s)} left"
        text = f"{event.step.label}: {event.text}"
        self._bars.update(task, description=text, total=event.total, completed=event.done, left=left)

    def _end(self, event: Event, line: str) -> None:
        began = self._began.pop(event.step.key, None)
        self._say(line + (f" ({time.monotonic() - began[1]:.1f} s)" if began is not None else ""))
        self._end_bar(event)
        self._ended += 1
        if self._all is not None:
            spent = time.monotonic() - self._start
            left = max(0.0, self._estimate - spent)
            self._bars.update(self._all, completed=min(self._ended, self._total), left=f"about {left:.0f} s left")

    def _prepare(self, event: Event) -> None:
        """A toolchain is being made: a line as that begins, and a bar until the step starts."""
        if event.step.key not in self._tasks:
            self._say(f"prepare {event.text}")
            self._tasks[event.step.key] = self._bars.add_task(event.text, total=event.total, left="")
        self._bars.update(self._tasks[event.step.key], description=event.text, total=event.total, completed=event.done)

    def _end_bar(self, event: Event) -> None:
        task = self._tasks.pop(event.step.key, None)
        if task is not None:
            self._bars.remove_task(task)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False)


class Steps:
    """The progress of one long thing on stderr: a line as it begins, a bar on a terminal, a line with its time."""

    def __init__(self, label: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._label, self._console = label, console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal, transient=True)
        self._task: TaskID | None = None
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
        if kind is None and self._task is not None:
            self._console.print(f"{self._label}: done ({time.monotonic() - self._start:.1f} s)", markup=False)

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._task is None:
            self._console.print(f"{self._label}: {what}", markup=False)
            self._task = self._bars.add_task(self._label, total=total)
        self._bars.update(self._task, description=f"{self._label}: {what}", total=total, completed=done)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout."""
    from rich import box
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*[str(cell) for cell in row])
    console().print(shown, markup=False)


def size(count: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
