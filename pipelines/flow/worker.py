"""Run the steps of a request, one after another, in this process: `python -m pipelines.flow.worker request.json`.

Events go to stdout as JSON lines; whatever the stage's libraries print goes to each step's log.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from pipelines.config import Strict, parse
from pipelines.errors import EnvironmentProblem, QuantgateError, TransientFailure
from pipelines.flow import progress
from pipelines.flow.lockfile import agrees
from pipelines.flow.stage import resolve
from pipelines.flow.store import Manifest, Store, handed_on, hash_tree, manifest, relink
from pipelines.flow.tether import die_with_parent
from pipelines.flow.toolchain import versions

SIMULATED = "QUANTGATE_SIMULATED"  # set to 1 by stand-ins for a container runtime, and by nothing else
_TRANSIENT_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


class StepRequest(Strict):
    """One step, by value: all a worker needs, in whatever interpreter or container it runs."""

    kind: str
    stage: str
    version: int
    key: str
    label: str
    function: str
    config_type: str
    config: dict[str, Any]
    inputs: dict[str, str | list[str]]
    toolchain: dict[str, str]
    packages: tuple[str, ...]
    device: dict[str, str] | None


class Request(Strict):
    """Steps that share one process, in order."""

    store: str
    steps: tuple[StepRequest, ...]


def main(argv: list[str]) -> int:
    """Run a request file; exit 0 when every step is made or was there, 1 when one failed."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    request = parse(Request, json.loads(Path(argv[0]).read_text()))
    store = Store(Path(request.store))
    with os.fdopen(os.dup(1), "w", buffering=1) as events:
        for step in request.steps:
            if not _run(step, store, events, company_file(Path(argv[0]))):
                return 1
    return 0


def company_file(request: Path) -> Path:
    """Where it is told how many others ran beside a request's process, if any did."""
    return request.with_suffix(".beside")


def _run(step: StepRequest, store: Store, events: IO[str], company: Path) -> bool:
    def tell(event: str, **more: object) -> None:
        events.write(json.dumps({"event": event, "key": step.key, **more}) + "\n")

    def moved_on(done: int, total: int, what: str, left_s: float | None) -> None:
        tell("progress", done=done, total=total, what=what, left_s=left_s)

    progress.install(moved_on)
    tell("started")
    with store.lock(step.key):
        _redirect(store.log_path(step.key))
        if _is_there(step, store):
            tell("done", reused=True)
            return True
        try:
            _make(step, store, company)
        except Exception as error:  # noqa: BLE001 - the one place where whatever a stage raises becomes a record
            traceback.print_exc()
            tell("failed", type=type(error).__name__, message=_message(error), transient=_is_transient(error))
            return False
    tell("done", reused=False)
    return True


def _is_there(step: StepRequest, store: Store) -> bool:
    """Whether the artifact is there, whole; a simulated one is none to a run that is not itself simulated."""
    if not store.has(step.kind, step.key):
        return False
    there = manifest(store.path(step.kind, step.key))
    return not there.partial and (not there.simulated or _simulated(step, store))


def _simulated(step: StepRequest, store: Store) -> bool:
    """Whether a stand-in for a container runtime started this worker, or made what the step reads."""
    return os.environ.get(SIMULATED) == "1" or any(manifest(path).simulated for path in _inputs(step, store))


def _inputs(step: StepRequest, store: Store) -> list[Path]:
    return [path for given in step.inputs.values() for path in _listed(_paths(store, given))]


def _listed(given: Path | list[Path]) -> list[Path]:
    return [given] if isinstance(given, Path) else given


def _real_versions(step: StepRequest) -> dict[str, str]:
    """The step's toolchain with the versions found here: builds such as 2.13.0+cpu, and those only an image knows.

    Raises:
        EnvironmentProblem: a version is not the one the step's key says.
    """
    found = versions(step.packages)
    wrong = [
        f"{name} is {version}, not {step.toolchain[name]}"
        for name, version in found.items()
        if name in step.toolchain and not agrees(step.toolchain[name], version)
    ]
    if wrong:
        name = step.toolchain.get("toolchain", "current")
        again = f"; make it anew: quantgate toolchain sync {name}" if name != "current" else ""
        raise EnvironmentProblem(f"toolchain {name} is not what the plan was made for: {', '.join(wrong)}{again}")
    return step.toolchain | found


def _make(step: StepRequest, store: Store, company: Path) -> None:
    actual = _real_versions(step)
    config = parse(resolve(step.config_type), step.config)  # type: ignore[arg-type]
    inputs = {name: _paths(store, step.inputs[name]) for name in step.inputs}
    read = [manifest(path) for path in _inputs(step, store)]
    started, clock = datetime.now(UTC), time.monotonic()
    with store.staging(step.kind, step.key) as out:
        facts = handed_on(read) | resolve(step.function)(config, out, **inputs)
        relink(out, store.root)
        store.commit(
            out,
            Manifest(
                kind=step.kind,
                stage=step.stage,
                version=step.version,
                key=step.key,
                config=step.config,
                inputs={name: _keys(given) for name, given in step.inputs.items()},
                toolchain=actual,
                device=step.device,
                facts=facts,
                files=hash_tree(out),
                started=started.isoformat(timespec="seconds"),
                seconds=round(time.monotonic() - clock, 3),
                simulated=_simulated(step, store) or facts.get("simulated") is True,
                partial=facts.get("partial") is True or any(one.partial for one in read),
                beside=int(company.read_text()) if company.is_file() else 0,
                peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            ),
        )


def _paths(store: Store, given: str | list[str]) -> Path | list[Path]:
    """Inputs travel as "kind/key" so that a request means the same in a container with another mount."""
    if isinstance(given, str):
        kind, _, key = given.partition("/")
        return store.path(kind, key)
    return [p for g in given if isinstance(p := _paths(store, g), Path)]


def _keys(given: str | list[str]) -> str | list[str]:
    return given.partition("/")[2] if isinstance(given, str) else [g.partition("/")[2] for g in given]


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, QuantgateError) else f"{type(error).__name__}: {error}"


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT_ERRNO
    return isinstance(error, (TransientFailure, MemoryError))


def _redirect(log: Path) -> None:
    """Send what libraries and their C code print to the step's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def request_of(steps: list[Mapping[str, Any]], store: str) -> Request:
    """Put step requests into one request, with their store's path as the worker sees it."""
    return parse(Request, {"store": store, "steps": steps})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
