"""Containers of toolchains: the command line of a run, its mounts, and whether runtime and image are here.

Inside, the store lies at STORE whatever it is called outside; nothing else of this machine is there but our package
(read-only), the model cache, and, read-only and under their own paths, the files that an input only links to.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.errors import EnvironmentProblem
from pipelines.flow.tether import tethered
from pipelines.flow.toolchain import CARRIED, ContainerConfig, Toolchain

STORE = "/quantgate/store"
PACKAGES = "/quantgate/packages"
MODELS = "/quantgate/models"
_ASK_S = 30.0


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory of this machine inside a container."""

    source: Path
    target: str
    writable: bool = False

    def __str__(self) -> str:
        """As --mount takes it: one line of CSV, so that any path can be said."""
        fields = ["type=bind", f"src={self.source}", f"dst={self.target}", *([] if self.writable else ["readonly"])]
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(fields)
        return text.getvalue()


def reference(spec: ContainerConfig) -> str:
    """The image as it is run: repository@digest. A tag is for people, and runtimes differ in taking both."""
    repository, colon, tag = spec.image.rpartition(":")
    return f"{repository if colon and '/' not in tag else spec.image}@{spec.digest}"


def run_argv(
    spec: ContainerConfig,
    name: str,
    mounts: Iterable[Mount],
    env: Mapping[str, str],
    command: list[str],
    *,
    init: bool = True,
) -> list[str]:
    """The whole command line that runs `command` in a container which is gone when it ends.

    Without `init` the command itself is the container's first process, whose group can be watched from outside.
    """
    argv = [spec.runtime, "run", "--rm", *(["--init"] if init else []), "--name", name, "--pull", "never"]
    argv += ["--network", spec.network]
    argv += ["--ipc", spec.ipc, *(word for limit in spec.ulimits for word in ("--ulimit", limit))]
    argv += [*_gpus(spec), *_user(spec), "--workdir", f"{STORE}/.tmp"]
    argv += [word for mount in mounts for word in ("--mount", str(mount))]
    argv += [word for key, value in sorted(env.items()) for word in ("--env", f"{key}={value}")]
    argv += [word for key in spec.pass_env for word in ("--env", key)]
    return [*argv, *spec.options, "--entrypoint", command[0], reference(spec), *command[1:]]


def inner_env(spec: ContainerConfig, extra: Mapping[str, str]) -> dict[str, str]:
    """What a stage is told inside; the caller's own environment does not go in."""
    own = {
        "HOME": "/tmp",
        "USER": "quantgate",  # the user has no entry in the image's password file
        "HF_HOME": MODELS,
        "PYTHONPATH": PACKAGES,
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if spec.network == "none" else {}
    return own | offline | {k: v for k, v in extra.items() if k not in ("PYTHONPATH", CARRIED)} | spec.env


def mounts(spec: ContainerConfig, store: Path, package: Path, inputs: Iterable[Path]) -> list[Mount]:
    """The store, our package, the model cache where there is one, and what the inputs link to."""
    found = [Mount(store, STORE, writable=True), Mount(package, f"{PACKAGES}/{package.name}")]
    if spec.model_cache is not None:
        cache = Path(spec.model_cache).expanduser()
        if cache.is_dir():
            found.append(Mount(cache.resolve(), MODELS, writable=spec.network != "none"))
    return found + [Mount(directory, str(directory)) for directory in linked(inputs)]


def linked(inputs: Iterable[Path]) -> list[Path]:
    """The directories that absolute links in these artifacts point into; they are mounted where the links say."""
    found = {target.parent for artifact in inputs for link in artifact.rglob("*") for target in _hops(link)}
    return [path for path in sorted(found) if not any(up in found for up in path.parents)]


def _hops(path: Path) -> Iterator[Path]:
    while path.is_symlink():
        given = path.readlink()
        path = given if given.is_absolute() else path.parent / given
        if given.is_absolute():
            yield given


def state(toolchain: Toolchain, spec: ContainerConfig) -> tuple[bool, str]:
    """Say whether a run could start, and what there is or is missing."""
    problem = runtime_problem(spec.runtime)
    if problem:
        return False, problem
    if spec.digest is None:
        return False, "no digest is given"
    if _ask([spec.runtime, "image", "inspect", "--format", "{{.Size}}", reference(spec)]) is None:
        return False, f"the image is not here; fetch it: quantgate toolchain sync {toolchain.name}"
    return True, "the image is here"


def runtime_problem(runtime: str) -> str:
    """Why containers cannot be run here, or nothing."""
    if shutil.which(runtime) is None:
        return f"{runtime} is not on PATH; install it, or name the other runtime in the toolchain (docker or podman)"
    if _ask([runtime, "info", "--format", "{{.ID}}" if runtime == "docker" else "{{.Host.Hostname}}"]) is None:
        return f"{runtime} is on PATH but does not answer; is its daemon running, and may this user reach it?"
    return ""


def runtimes_of_docker() -> str:
    """The low-level runtimes docker knows, by name; NVIDIA's is among them where its GPUs can be passed on."""
    return _ask(["docker", "info", "--format", "{{range $name, $_ := .Runtimes}}{{$name}} {{end}}"]) or ""


def size_bytes(spec: ContainerConfig) -> int:
    """What the image takes on disk, 0 when it is not here."""
    said = _ask([spec.runtime, "image", "inspect", "--format", "{{.Size}}", reference(spec)]) if spec.digest else None
    return int(said) if said and said.strip().isdigit() else 0


def pull(toolchain: Toolchain, spec: ContainerConfig) -> None:
    """Fetch the image by its digest; the runtime shows its own progress.

    Raises:
        EnvironmentProblem: it could not be fetched.
    """
    problem = runtime_problem(spec.runtime)
    if problem:
        raise EnvironmentProblem(f"toolchain {toolchain.name}: {problem}")
    argv = [spec.runtime, "pull", reference(spec)]
    done = subprocess.run(tethered(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EnvironmentProblem(f"toolchain {toolchain.name}: {' '.join(argv)} failed: {said}")


def main_pid(runtime: str, name: str) -> int | None:
    """A container's first process as this machine numbers it, None where the runtime does not say."""
    said = (_ask([runtime, "inspect", "--format", "{{.State.Pid}}", name]) or "").strip()
    return int(said) if said.isdigit() and said != "0" else None


def remove(runtime: str, name: str) -> None:
    """Remove a container that may have outlived its client; one that is gone already is as good."""
    _ask([runtime, "rm", "--force", name])


def _gpus(spec: ContainerConfig) -> list[str]:
    if spec.gpus is None:
        return []
    if spec.runtime == "podman":
        return [word for one in spec.gpus.split(",") for word in ("--device", f"nvidia.com/gpu={one}")]
    return ["--gpus", "all" if spec.gpus == "all" else f'"device={spec.gpus}"']


def _user(spec: ContainerConfig) -> list[str]:
    """Whoever runs quantgate owns what comes out."""
    if spec.runtime == "podman" and os.getuid() != 0:
        return ["--userns", "keep-id"]
    return ["--user", f"{os.getuid()}:{os.getgid()}"]


def _ask(argv: list[str]) -> str | None:
    """What a short command answers, or None when it fails."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
