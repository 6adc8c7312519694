"""Run a plan on this machine: each step, or batch of steps, in a child process that takes its memory with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.errors import EnvironmentProblem
from pipelines.flow.launch import Launch, launch, ready
from pipelines.flow.plan import Plan
from pipelines.flow.stage import Step
from pipelines.flow.store import MANIFEST, Store, manifest
from pipelines.flow.worker import request_of

QUICK_GRACE_S = 10.0
GRACE_S = 45.0  # for a stage that stops its servers and writes what it has
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

    An interrupted one kept what it had. `left_s` is told where the step itself knows how long it will take.
    """

    step: Step
    what: Literal["preparing", "started", "progress", "reused", "made", "failed", "skipped", "interrupted"]
    done: int = 0
    total: int = 0
    text: str = ""
    left_s: float | None = None


Watch = Callable[[Event], None]


def execute(
    plan: Plan, store: Store, watch: Watch, env: Mapping[str, str], before: Mapping[str, Outcome] | None = None
) -> dict[str, Outcome]:
    """Run what must run, in order, and say what became of every step by key. One failure ends only what needs it.

    `before` holds the outcomes of steps that an earlier call took care of.
    """
    outcomes: dict[str, Outcome] = dict(before or {})
    waiting: dict[str, Step] = {}
    for planned in plan.steps:
        if planned.state == "reuse":
            outcomes[planned.step.key] = Outcome(planned.step, "reused")
            watch(Event(planned.step, "reused"))
        else:
            waiting[planned.step.key] = planned.step
    while waiting:
        first = next(iter(waiting.values()))
        lost = _lost_input(first, outcomes)
        if lost is not None:
            outcomes[first.key] = Outcome(first, "skipped", f"needs {lost.step.label}, which {lost.state}")
            watch(Event(first, "skipped", text=outcomes[first.key].message))
            del waiting[first.key]
            continue
        for outcome in _run_child(_batch(first, waiting.values(), outcomes), store, watch, env):
            outcomes[outcome.step.key] = outcome
            del waiting[outcome.step.key]
    return outcomes


def _lost_input(step: Step, outcomes: Mapping[str, Outcome]) -> Outcome | None:
    return next((o for up in step.upstream() if (o := outcomes[up.key]).state in ("failed", "skipped")), None)


def _batch(first: Step, waiting: Iterable[Step], outcomes: Mapping[str, Outcome]) -> list[Step]:
    """The steps that go into one child with the first: those of its batch that need only what is there by then."""
    batch = [first]
    if first.batch is None:
        return batch
    there = {key for key, o in outcomes.items() if o.state in ("made", "reused")} | {first.key}
    for step in waiting:
        together = step.batch == first.batch and step.runs_in == first.runs_in
        if step is not first and together and all(up.key in there for up in step.upstream()):
            batch.append(step)
            there.add(step.key)
    return batch


def _run_child(steps: Sequence[Step], store: Store, watch: Watch, env: Mapping[str, str]) -> Iterator[Outcome]:
    """Run steps in one child in their toolchain; yield an outcome for each the child came to, at least one."""
    first = steps[0]

    def tell(done: int, total: int, what: str) -> None:
        watch(Event(first, "preparing", done, total, f"toolchain {first.runs_in.name}: {what}"))

    with ExitStack() as held:
        try:
            held.enter_context(ready(first.runs_in, tell))
        except EnvironmentProblem as error:
            watch(Event(first, "failed", text=str(error)))
            yield Outcome(first, "failed", str(error), True, f"quantgate toolchain sync {first.runs_in.name}")
            return
        yield from _run_ready(steps, store, watch, env)


def _run_ready(steps: Sequence[Step], store: Store, watch: Watch, env: Mapping[str, str]) -> Iterator[Outcome]:
    by_key = {step.key: step for step in steps}
    started = _launched(steps, store, env)
    current = steps[0]
    ended, began = False, time.time()
    child = _start(started, store, current)
    try:
        for line in child.stdout or ():
            event: dict[str, Any] = json.loads(line)
            current = by_key[event["key"]]
            match event["event"]:
                case "started":
                    ended = False
                    watch(Event(current, "started"))
                case "progress":
                    told = (event[name] for name in ("done", "total", "what", "left_s"))
                    watch(Event(current, "progress", *told))
                case "done":
                    ended = True
                    state: Literal["reused", "made"] = "reused" if event["reused"] else "made"
                    watch(Event(current, state))
                    yield Outcome(current, state)
                case "failed":
                    ended = True
                    yield _failed(current, event["message"], event["transient"], started.repeat, store, watch)
        child.wait()
    except (KeyboardInterrupt, SystemExit):
        _end(child, GRACE_S if current.stage.may_be_partial else QUICK_GRACE_S)
        if _kept(current, store, began):
            where = store.path(current.stage.kind, current.key)
            watch(Event(current, "interrupted", text=f"what was measured is in {where}, marked partial"))
        raise
    finally:
        _end(child, QUICK_GRACE_S)
        started.tidy()
    if not ended:
        yield _failed(current, _death(child.returncode), True, started.repeat, store, watch)


def _launched(steps: Sequence[Step], store: Store, env: Mapping[str, str]) -> Launch:
    """Write the request, with the store's path as the child will see it."""
    first = steps[0]
    path = store.root / ".requests" / f"{first.key[:16]}.json"
    inputs = [store.path(up.stage.kind, up.key) for step in steps for up in step.upstream()]
    name = f"quantgate-{first.key[:16]}-{os.getpid()}"
    made = launch(first.runs_in, path, store.root, [p for p in inputs if p.is_dir()], env, name)
    path.write_text(request_of([_by_value(step) for step in steps], made.store).model_dump_json(indent=1))
    return made


def _start(started: Launch, store: Store, first: Step) -> subprocess.Popen[str]:
    try:
        with store.log_path(first.key).open("wb") as log:
            return subprocess.Popen(
                started.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=started.env,
                start_new_session=True,
                cwd=store.root / ".tmp",  # libraries that drop files where they stand drop them here
                text=True,
            )
    except OSError as error:
        raise EnvironmentProblem(f"cannot start {started.argv[0]}: {error.strerror}") from None


def _failed(step: Step, message: str, transient: bool, command: str, store: Store, watch: Watch) -> Outcome:
    watch(Event(step, "failed", text=message))
    log = store.log_path(step.key)
    return Outcome(step, "failed", message, transient, command, str(log))


def _by_value(step: Step) -> dict[str, Any]:
    return {
        "kind": step.stage.kind,
        "stage": step.stage.name,
        "version": step.stage.version,
        "key": step.key,
        "label": step.label,
        "function": step.stage.function,
        "config_type": step.stage.config_type,
        "config": step.config_data,
        "inputs": {
            name: _address(given) if isinstance(given, Step) else [_address(g) for g in given]
            for name, given in step.inputs.items()
        },
        "toolchain": dict(step.toolchain),
        "packages": list(step.stage.packages),
        "device": dict(step.device) if step.device is not None else None,
    }


def _address(step: Step) -> str:
    return f"{step.stage.kind}/{step.key}"


def _death(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; out of memory is the usual cause" if name == "SIGKILL" else ""
        return f"the stage's process was ended by {name}{hint}"
    return f"the stage's process ended with exit code {code} before it finished"


def _kept(step: Step, store: Store, since: float) -> bool:
    """Whether a step that was stopped has left a part of its artifact, now."""
    if not step.stage.may_be_partial or not store.has(step.stage.kind, step.key):
        return False
    path = store.path(step.stage.kind, step.key)
    return manifest(path).partial and (path / MANIFEST).stat().st_mtime >= since


def _end(child: subprocess.Popen[str], grace_s: float) -> None:
    """End the child's whole process group, politely first; a finished child's group may still hold its servers."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sig)
        except (ProcessLookupError, PermissionError):
            break
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.05)
    child.wait()
    if child.stdout:
        child.stdout.close()


def log_tail(path: str, lines: int = 12) -> str:
    """The last lines of a log, for an error message."""
    try:
        return "\n".join(Path(path).read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
