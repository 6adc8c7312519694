"""A toolchain is a value: the interpreter a stage runs in, and the versions that enter its key.

What makes one is in venvs.py and containers.py, how a stage is started in it in launch.py.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipelines.config import Strict, find, parse
from pipelines.errors import ConfigError, EnvironmentProblem, Problem, closest
from pipelines.flow import lockfile
from pipelines.flow.store import digest_of


class CurrentConfig(Strict):
    """The interpreter quantgate itself runs in."""

    kind: Literal["current"] = "current"


class BuildConfig(Strict):
    """How distributions of a lock that come as source are compiled."""

    names: tuple[str, ...] = Field(
        min_length=1, description="distributions that are compiled here, last, and without what they ask for"
    )
    env: dict[str, str] = Field(default={}, description="variables of the build; {file} stands for the path of `file`")
    file: str | None = Field(default=None, description="a file that the build reads; its content enters keys")

    def variables(self) -> dict[str, str]:
        """The variables of the build, with the file's path in its place."""
        path = "" if self.file is None else str(find(self.file).resolve())
        return {name: value.replace("{file}", path) for name, value in self.env.items()}

    def digest(self) -> str:
        """What is compiled besides the sources, wherever the file lies."""
        content = "" if self.file is None else hashlib.sha256(find(self.file).read_bytes()).hexdigest()
        return digest_of({"names": sorted(self.names), "env": dict(self.env), "file": content})


class VenvConfig(Strict):
    """A virtual environment made on demand from a lock file."""

    kind: Literal["venv"]
    python: str = Field(
        pattern=r"^3\.(1[1-9]|[2-9]\d)$", description="the interpreter's version; the worker needs 3.11"
    )
    lock: str = Field(min_length=1, description="requirements file in which every line pins a distribution by ==")
    no_deps: tuple[str, ...] = Field(
        default=(), description="distributions of the lock that are installed last and without what they ask for"
    )
    build: BuildConfig | None = Field(default=None, description="what is compiled from source, and with which settings")
    installer: Literal["auto", "uv", "pip"] = Field(
        default="auto", description="auto: uv where it is on PATH, else pip; each reads its own index settings"
    )
    env: dict[str, str] = Field(default={}, description="additions to the environment of stages that run in it")


class ContainerConfig(Strict):
    """An image pinned by digest, with its run options."""

    kind: Literal["container"]
    runtime: Literal["docker", "podman"] = Field(default="docker", description="the command on PATH")
    image: str = Field(
        pattern=r"^[a-z0-9][^\s@]*$", description="repository, with a tag for people; the digest is what is run"
    )
    digest: str | None = Field(
        default=None, pattern=r"^sha256:[0-9a-f]{64}$", description="the image's digest; nothing runs without one"
    )
    python: str = Field(default="python3", min_length=1, description="the interpreter inside; 3.11 or later")
    gpus: str | None = Field(
        default="all", pattern=r"^(all|\d+(,\d+)*)$", description="all, or indexes such as 0,1; null: none"
    )
    ipc: Literal["host", "private"] = Field(
        default="host", description="NCCL and torch's loaders need much shared memory"
    )
    ulimits: tuple[str, ...] = Field(default=("memlock=-1", "stack=67108864"), description="as --ulimit takes them")
    network: Literal["none", "host", "bridge"] = Field(default="none", description="none: it cannot reach a hub")
    model_cache: str | None = Field(
        default="~/.cache/huggingface",
        description="model cache of this machine, mounted as the container's; null: none",
    )
    env: dict[str, str] = Field(default={}, description="additions to its environment; no secrets, they are printed")
    pass_env: tuple[str, ...] = Field(
        default=(), description="variables passed on by name, so that their values stay off the command line"
    )
    options: tuple[str, ...] = Field(default=(), description="further options of the runtime's run command")


Spec = CurrentConfig | VenvConfig | ContainerConfig
_KINDS: Mapping[str, type[Spec]] = {"current": CurrentConfig, "venv": VenvConfig, "container": ContainerConfig}


_CURRENT_SPEC = CurrentConfig()


def _told(env: Mapping[str, str]) -> dict[str, str]:
    """A toolchain's own variables, which may change what a library computes."""
    return {"env": " ".join(f"{name}={value}" for name, value in sorted(env.items()))} if env else {}


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A named interpreter. `home` is where environments are made; `pinned` what a venv's lock file pins."""

    name: str
    spec: Spec = _CURRENT_SPEC
    home: Path = Path()
    pinned: Mapping[str, str] = field(default_factory=dict)

    def versions(self, packages: Iterable[str]) -> dict[str, str]:
        """What enters a key: versions of the named distributions as far as they are known without starting it.

        An image's digest stands for all of its versions; the worker adds those it finds to the manifest.
        """
        if isinstance(self.spec, VenvConfig):
            found = {name: self.pinned.get(lockfile.canonical_name(name), "absent") for name in packages}
            built = {} if self.spec.build is None else {"build": self.spec.build.digest()[:16]}
            return {"python": self.spec.python, **found, "toolchain": self.name, **_told(self.spec.env), **built}
        if isinstance(self.spec, ContainerConfig):
            return {"toolchain": self.name, "image": self.spec.digest or "", **_told(self.spec.env)}
        return versions(packages)

    def lacks(self, packages: Iterable[str]) -> list[str]:
        """The named distributions that the lock does not hold; of other kinds that is not known beforehand."""
        if not isinstance(self.spec, VenvConfig):
            return []
        return [name for name in packages if lockfile.canonical_name(name) not in self.pinned]


CURRENT = Toolchain("current")
CARRIED = "QUANTGATE_TOOLCHAINS"  # tells a stage how engines of other toolchains are served


def carried(known: Iterable[Toolchain]) -> dict[str, str]:
    """The environment that tells a stage of toolchains that are not the current one."""
    told = {
        t.name: {"spec": t.spec.model_dump(mode="json"), "home": str(t.home), "pinned": dict(t.pinned)}
        for t in known
        if t != CURRENT
    }
    return {CARRIED: json.dumps(told, sort_keys=True)} if told else {}


def told_of(name: str) -> Toolchain:
    """A toolchain that this stage was told of, by name.

    Raises:
        EnvironmentProblem: it was not.
    """
    told = json.loads(os.environ.get(CARRIED, "{}"))
    if name == CURRENT.name:
        return CURRENT
    if name not in told:
        raise EnvironmentProblem(f"toolchain {name}: not configured here, and an engine was made in it; add it")
    one = told[name]
    return Toolchain(name, parse(_KINDS[one["spec"]["kind"]], one["spec"]), Path(one["home"]), one["pinned"])


def toolchains(given: Mapping[str, Mapping[str, Any]], home: Path, problems: list[Problem]) -> dict[str, Toolchain]:
    """The toolchains of a configuration by name; `current` is always among them. Problems are added to those known."""
    found = {CURRENT.name: CURRENT}
    for name, data in given.items():
        spec = _spec(name, data, problems)
        if isinstance(spec, VenvConfig):
            found[name] = Toolchain(name, spec, home, _pinned(name, spec, problems))
        elif spec is not None:
            found[name] = Toolchain(name, spec, home)
    return found


def _spec(name: str, data: Mapping[str, Any], problems: list[Problem]) -> Spec | None:
    key, kind = f"toolchain.{name}", str(data.get("kind", ""))
    if kind not in _KINDS:
        problems.append(Problem(f"{key}.kind", data.get("kind"), "no such kind of toolchain", closest(kind, _KINDS)))
        return None
    try:
        return parse(_KINDS[kind], dict(data), key)
    except ConfigError as error:
        problems += error.problems
    return None


def _pinned(name: str, spec: VenvConfig, problems: list[Problem]) -> dict[str, str]:
    key = f"toolchain.{name}"
    try:
        pinned = lockfile.read(find(spec.lock))
    except FileNotFoundError:
        problems.append(Problem(f"{key}.lock", spec.lock, "no such lock file"))
        return {}
    except ConfigError as error:
        problems.append(Problem(f"{key}.lock", spec.lock, str(error)))
        return {}
    compiled = () if spec.build is None else spec.build.names
    problems += [
        Problem(f"{key}.{field}", extra, "is not in the lock", closest(extra, pinned))
        for field, extras in (("no_deps", spec.no_deps), ("build.names", compiled))
        for extra in extras
        if lockfile.canonical_name(extra) not in pinned
    ]
    if spec.build is not None and spec.build.file is not None and not find(spec.build.file).is_file():
        problems.append(Problem(f"{key}.build.file", spec.build.file, "no such file"))
    if lockfile.WORKER not in pinned:
        problems.append(Problem(f"{key}.lock", spec.lock, f"does not pin {lockfile.WORKER}, which the worker needs"))
    return pinned


def unpinned(name: str, spec: ContainerConfig) -> Problem:
    """A tag may name another image tomorrow, so a container without a digest does not run; say how to find it."""
    find_it = (
        f"{spec.runtime} pull {spec.image} && {spec.runtime} image inspect --format '{{{{.RepoDigests}}}}' {spec.image}"
    )
    return Problem(
        f"toolchain.{name}.digest",
        spec.digest,
        "an image is pinned by its digest, and none is given",
        f"find it: {find_it}",
    )


@functools.cache
def version_of(distribution: str) -> str:
    """The installed version of a distribution, or "absent"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of this interpreter: Python's own and those of the named distributions."""
    found = {name: version_of(name) for name in packages}
    return {"python": f"{sys.version_info.major}.{sys.version_info.minor}", **found}
