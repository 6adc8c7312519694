"""A process that runs steps for the executor: started with all that it needs, heard line by line, ended with all that
it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pipelines.errors import EnvironmentProblem
from pipelines.flow.launch import Launch, launch
from pipelines.flow.schedule import Work
from pipelines.flow.stage import Step
from pipelines.flow.store import MANIFEST, Store, manifest
from pipelines.flow.worker import company_file, request_of

QUICK_GRACE_S = 10.0
GRACE_S = 45.0  # for a stage that stops its servers and writes what it has
_PIPEFUL = 1 << 16


class Child:
    """A process with work in it. `place` is the work's place in line, `current` the step it told of last, `busy` says
    whether that one has not ended yet. `company` is the most others that ran beside it.

    Raises:
        EnvironmentProblem: the command cannot be started.
    """

    def __init__(self, work: Work, place: int, store: Store, env: Mapping[str, str], held: ExitStack) -> None:
        self.work, self.place = work, place
        self.current = work.steps[0]
        self.company = 0
        self.over = False
        self.busy = True
        self._store, self._held = store, held
        self._began = time.time()
        self._unread = b""
        self._launch, self._request = _launched(work.steps, store, env)
        company_file(self._request).unlink(missing_ok=True)
        held.callback(company_file(self._request).unlink, missing_ok=True)
        held.callback(self._launch.tidy)
        self._process, self._told = _start(self._launch, store, self.current)

    @property
    def repeat(self) -> str:
        """The command that repeats its steps, for a person."""
        return self._launch.repeat

    def fileno(self) -> int:
        """Where it is heard."""
        return self._told

    def heard(self) -> Iterator[dict[str, Any]]:
        """What it has told since; it is over when it has no more to tell."""
        got = os.read(self._told, _PIPEFUL)
        if not got:
            self._process.wait()
            self.over = True
            return
        *lines, self._unread = (self._unread + got).split(b"\n")
        for line in lines:
            event: dict[str, Any] = json.loads(line)
            self.current = next(step for step in self.work.steps if step.key == event["key"])
            self.busy = event["event"] not in ("done", "failed")
            yield event

    def joined(self, others: int) -> None:
        """Note that so many others run now: times that it records meanwhile say nothing of it alone."""
        if others > self.company:
            self.company = others
            fresh = self._request.with_suffix(".new")
            fresh.write_text(str(others))
            fresh.replace(company_file(self._request))

    @property
    def death(self) -> str:
        """How it ended, for one that ended in the middle of a step."""
        return _death(self._process.returncode)

    def kept(self) -> Path | None:
        """The part of its current step's artifact that it has left since it was started, if any."""
        step = self.current
        if not step.stage.may_be_partial or not self._store.has(step.stage.kind, step.key):
            return None
        path = self._store.path(step.stage.kind, step.key)
        fresh = (path / MANIFEST).stat().st_mtime >= self._began
        return path if fresh and manifest(path).partial else None

    def close(self) -> None:
        """Let go of what it needed; it has been ended."""
        if self._process.stdout:
            self._process.stdout.close()
        self._held.close()


def any_told(children: Collection[Child]) -> list[Child]:
    """Wait until some have told something, or are over."""
    ready = wait([child.fileno() for child in children])
    return [child for child in children if child.fileno() in ready]


def end(children: Collection[Child], *, patient: bool = False) -> None:
    """End each one's whole process group, politely first; a finished child's group may still hold its servers.

    All are asked at once. To the patient, a step that may keep what it has gets the time to write it.
    """
    now = time.monotonic()
    asked = {
        child: now + (GRACE_S if patient and child.current.stage.may_be_partial else QUICK_GRACE_S)
        for child in children
        if _signal(child._process, signal.SIGTERM)
    }
    while asked:
        for child, deadline in list(asked.items()):
            if child._process.poll() is not None or time.monotonic() >= deadline:
                _signal(child._process, signal.SIGKILL)
                del asked[child]
        if asked:
            time.sleep(0.05)
    for child in children:
        child._process.wait()


def _signal(process: subprocess.Popen[bytes], sign: signal.Signals) -> bool:
    """Whether there was anybody left to get it."""
    try:
        os.killpg(process.pid, sign)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _launched(steps: Sequence[Step], store: Store, env: Mapping[str, str]) -> tuple[Launch, Path]:
    """Write the request, with the store's path as the child will see it."""
    first = steps[0]
    path = store.root / ".requests" / f"{first.key[:16]}.json"
    inputs = [store.path(up.stage.kind, up.key) for step in steps for up in step.upstream()]
    name = f"quantgate-{first.key[:16]}-{os.getpid()}"
    made = launch(first.runs_in, path, store.root, [p for p in inputs if p.is_dir()], env, name)
    path.write_text(request_of([_by_value(step) for step in steps], made.store).model_dump_json(indent=1))
    return made, path


def _start(started: Launch, store: Store, first: Step) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the end of the pipe that its events come through."""
    try:
        with store.log_path(first.key).open("wb") as log:
            process = subprocess.Popen(
                started.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=started.env,
                start_new_session=True,
                cwd=store.root / ".tmp",  # libraries that drop files where they stand drop them here
            )
    except OSError as error:
        raise EnvironmentProblem(f"cannot start {started.argv[0]}: {error.strerror}") from None
    if process.stdout is None:
        raise EnvironmentProblem(f"cannot hear {started.argv[0]}: no pipe")
    return process, process.stdout.fileno()


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
