"""How a request is started in its toolchain: one command line and environment for each kind, and how to repeat it."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipelines.errors import EnvironmentProblem
from pipelines.flow import containers, surroundings
from pipelines.flow.store import MANIFEST, manifest
from pipelines.flow.tether import tethered
from pipelines.flow.toolchain import CURRENT, ContainerConfig, CurrentConfig, Toolchain, VenvConfig, told_of
from pipelines.flow.venvs import Tell, in_use, make, venv

PACKAGE = Path(__file__).resolve().parents[1]
WORKER = ("-P", "-m", "pipelines.flow.worker")


@dataclass(frozen=True, slots=True)
class Launch:
    """A child to start: `store` is the store's path as the child sees it; `repeat` is for a person's shell.

    `tidy` ends what may outlive the child; `pid` is who does the work where that is not the child itself.
    """

    argv: list[str]
    env: dict[str, str]
    repeat: str
    store: str
    tidy: Callable[[], None] = field(default=lambda: None)
    pid: Callable[[], int | None] = field(default=lambda: None)


@contextmanager
def ready(toolchain: Toolchain, tell: Tell) -> Iterator[None]:
    """A toolchain that can be started in, made first if it is not there, and kept as it is inside the block.

    Raises:
        EnvironmentProblem: it could not be made, or is not what its lock says.
    """
    spec = toolchain.spec
    if isinstance(spec, VenvConfig):
        wanted = venv(toolchain, spec)
        if not wanted.made:
            make(wanted, tell)
        with in_use(wanted):
            yield
        return
    if isinstance(spec, ContainerConfig):
        there, what = containers.state(toolchain, spec)
        if not there:
            if containers.runtime_problem(spec.runtime):
                raise EnvironmentProblem(f"toolchain {toolchain.name}: {what}")
            tell(0, 1, f"fetching {containers.reference(spec)}")
            containers.pull(toolchain, spec)
    yield


def at_hand(toolchain: Toolchain) -> bool:
    """Whether a child can be started in it without a wait: what runs already is not listened to meanwhile. A container
    is never said to be: its runtime may take its time to answer."""
    spec = toolchain.spec
    return venv(toolchain, spec).made if isinstance(spec, VenvConfig) else isinstance(spec, CurrentConfig)


def launch(
    toolchain: Toolchain, request: Path, root: Path, inputs: list[Path], env: Mapping[str, str], name: str
) -> Launch:
    """The child that runs a request. `inputs` are the artifacts it reads; `name` is unlike any other child's."""
    spec = toolchain.spec
    if isinstance(spec, CurrentConfig):
        argv = [sys.executable, *WORKER, str(request)]
        return Launch(argv, surroundings.environment(env), shlex.join(argv), str(root))
    if isinstance(spec, VenvConfig):
        return _in_venv(toolchain, spec, request, root, env)
    return _in_container(spec, request, root, inputs, env, name)


@contextmanager
def serving(artifact: Path, argv: list[str], extra: Mapping[str, str]) -> Iterator[Launch]:
    """An engine's server in the toolchain that made the engine, which is kept as it is inside the block.

    A container has this machine's network, so that the server answers on loopback here and no forwarding is measured.

    Raises:
        EnvironmentProblem: the toolchain is unknown here, not there, or not as its lock says.
    """
    made = manifest(artifact).toolchain if (artifact / MANIFEST).is_file() else {}
    toolchain = told_of(made.get("toolchain", CURRENT.name))
    spec, root = toolchain.spec, artifact.resolve().parents[1]
    if isinstance(spec, VenvConfig):
        wanted = venv(toolchain, spec)
        env = surroundings.foreign({**extra, **spec.env}, package_path(root), wanted.python.parent)
        with in_use(wanted):
            yield Launch(argv, env, shlex.join(argv), str(root))
    elif isinstance(spec, ContainerConfig):
        yield _served_in_container(spec, artifact.resolve(), root, argv, extra)
    else:
        yield Launch(argv, {**os.environ, **extra}, shlex.join(argv), str(root))


def _served_in_container(
    spec: ContainerConfig, artifact: Path, root: Path, argv: list[str], extra: Mapping[str, str]
) -> Launch:
    def inside(word: str) -> str:
        return word.replace(str(root), containers.STORE)

    name = f"quantgate-serve-{artifact.name}-{os.getpid()}-{time.monotonic_ns()}"  # a second try is another one
    seen = [replace(m, writable=False) for m in containers.mounts(spec, root, PACKAGE, [artifact])]
    env = containers.inner_env(spec, {k: inside(v) for k, v in extra.items()})
    network = spec.model_copy(update={"network": "host"})
    command = containers.run_argv(network, name, seen, env, [inside(word) for word in argv], init=False)
    return Launch(
        tethered(command),
        surroundings.environment({}),
        shlex.join(command),
        containers.STORE,
        lambda: containers.remove(spec.runtime, name),
        lambda: containers.main_pid(spec.runtime, name),
    )


def package_path(root: Path) -> Path:
    """A directory that holds a link to our package and nothing else, so that no other of our modules can be found."""
    place = root / ".package"
    link = place / PACKAGE.name
    place.mkdir(exist_ok=True)
    if not link.is_symlink() or link.readlink() != PACKAGE:
        fresh = place / f".{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(PACKAGE)
        fresh.replace(link)
    return place


def _in_venv(toolchain: Toolchain, spec: VenvConfig, request: Path, root: Path, env: Mapping[str, str]) -> Launch:
    python = venv(toolchain, spec).python
    given = surroundings.foreign({**env, **spec.env}, package_path(root), python.parent)
    argv = [str(python), *WORKER, str(request)]
    told = [f"{name}={given[name]}" for name in ("PYTHONPATH", "PYTHONNOUSERSITE", *spec.env)]
    return Launch(argv, given, shlex.join(["env", "-u", "PYTHONHOME", *told, *argv]), str(root))


def _in_container(
    spec: ContainerConfig, request: Path, root: Path, inputs: list[Path], env: Mapping[str, str], name: str
) -> Launch:
    inside = f"{containers.STORE}/{request.relative_to(root)}"
    argv = containers.run_argv(
        spec,
        name,
        containers.mounts(spec, root, PACKAGE, inputs),
        containers.inner_env(spec, env),
        [spec.python, *WORKER, inside],
    )
    return Launch(
        tethered(argv),
        surroundings.environment({}),
        shlex.join(argv),
        containers.STORE,
        lambda: containers.remove(spec.runtime, name),
    )
