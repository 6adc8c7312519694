"""What there is of a toolchain on this machine, for `plan`, `toolchain list` and `doctor`. It only looks."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipelines.errors import EnvironmentProblem
from pipelines.flow import containers
from pipelines.flow.lockfile import Drift
from pipelines.flow.toolchain import ContainerConfig, Toolchain, VenvConfig, unpinned
from pipelines.flow.venvs import Venv, interpreter, venv


@dataclass(frozen=True, slots=True)
class Found:
    """A toolchain as it is here. `missing` is made by a run that needs it; `unusable` and `drifted` stop one."""

    name: str
    kind: str
    state: Literal["ready", "missing", "drifted", "unusable"]
    what: str
    to_do: str = ""
    where: str = ""
    size_bytes: int = 0
    drift: tuple[Drift, ...] = ()


def look(toolchain: Toolchain, *, measure: bool = False) -> Found:
    """Look at a toolchain; with `measure` also at the disk it takes, which reads every directory of it."""
    spec = toolchain.spec
    if isinstance(spec, VenvConfig):
        return _venv(toolchain, spec, venv(toolchain, spec), measure=measure)
    if isinstance(spec, ContainerConfig):
        return _container(toolchain, spec)
    return Found(toolchain.name, spec.kind, "ready", f"Python {sys.version.split()[0]}", where=sys.prefix)


def hindrances(wanted: Iterable[Toolchain]) -> list[str]:
    """What would stop stages in these toolchains, each with what to do; one that is only missing gets made."""
    found = [look(toolchain) for toolchain in wanted]
    return [f"toolchain {f.name}: {f.what}; {f.to_do}" for f in found if f.state in ("drifted", "unusable")]


def _venv(toolchain: Toolchain, spec: VenvConfig, wanted: Venv, *, measure: bool) -> Found:
    name, sync = toolchain.name, f"quantgate toolchain sync {toolchain.name}"
    if not wanted.made:
        try:
            if spec.installer == "pip" or shutil.which("uv") is None:
                interpreter(name, spec.python)
        except EnvironmentProblem as error:
            what, _, to_do = str(error).partition("; ")
            return Found(name, spec.kind, "unusable", what, to_do)
        return Found(name, spec.kind, "missing", f"not made yet, {len(toolchain.pinned)} distributions", sync)
    size = size_of(wanted.path) if measure else 0
    drift = tuple(wanted.drift())
    if drift:
        told = ", ".join(str(d) for d in drift)
        return Found(name, spec.kind, "drifted", told, f"make it anew: {sync}", str(wanted.path), size, drift)
    beyond = wanted.beyond()
    what = f"Python {spec.python}, {len(toolchain.pinned)} distributions as locked"
    what += f" and {len(beyond)} beyond the lock" if beyond else ""
    return Found(name, spec.kind, "ready", what, where=str(wanted.path), size_bytes=size)


def _container(toolchain: Toolchain, spec: ContainerConfig) -> Found:
    name = toolchain.name
    if spec.digest is None:
        problem = unpinned(name, spec)
        return Found(name, spec.kind, "unusable", problem.message, problem.allowed, spec.image)
    where = containers.reference(spec)
    hindered = containers.runtime_problem(spec.runtime)
    if hindered:
        what, _, to_do = hindered.partition("; ")
        return Found(name, spec.kind, "unusable", what, to_do, where)
    size = containers.size_bytes(spec)
    if not size:
        return Found(name, spec.kind, "missing", "the image is not here", f"quantgate toolchain sync {name}", where)
    return Found(name, spec.kind, "ready", "the image is here", where=where, size_bytes=size)


def size_of(directory: Path) -> int:
    """What a directory takes on disk; a file with several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for top, _, files in os.walk(directory):
        for file in files:
            at = os.lstat(os.path.join(top, file))  # noqa: PTH118 - tens of thousands of files
            seen[at.st_dev, at.st_ino] = at.st_blocks * 512
    return sum(seen.values())
