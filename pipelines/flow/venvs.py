"""Virtual environments of toolchains: made from a lock file, complete or absent, compared with their lock before use.

An environment's directory is named by what goes in, and a note is written into it last: without it there is none.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pipelines.config import find
from pipelines.errors import EnvironmentProblem
from pipelines.flow import lockfile, surroundings
from pipelines.flow.locks import Held, locked
from pipelines.flow.store import digest_of
from pipelines.flow.tether import tethered
from pipelines.flow.toolchain import Toolchain, VenvConfig, version_of

NOTE = "quantgate.json"
LAST_LINES = 8
PIP_FOR_OTHERS = 23  # from here on pip installs into another environment reliably; it saves putting a pip into each
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Venv:
    """Where a toolchain's environment is, or will be."""

    toolchain: Toolchain
    spec: VenvConfig
    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return self.path / "lib" / f"python{self.spec.python}" / "site-packages"

    @property
    def made(self) -> bool:
        return (self.path / NOTE).is_file()

    def drift(self) -> list[lockfile.Drift]:
        """How the environment differs from its lock."""
        return lockfile.drift(self.toolchain.pinned, lockfile.installed(self.site_packages))

    def beyond(self) -> list[str]:
        """What it holds besides its lock, but for the installer itself."""
        found = lockfile.installed(self.site_packages)
        return sorted(found.keys() - self.toolchain.pinned.keys() - {"pip", "setuptools", "wheel"})


def venv(toolchain: Toolchain, spec: VenvConfig) -> Venv:
    """Name the environment of a toolchain by its interpreter, lock and build, so that a changed lock is another one."""
    inside = {"python": spec.python, "lock": dict(toolchain.pinned), "no_deps": sorted(spec.no_deps)}
    inside |= {} if spec.build is None else {"build": spec.build.digest()}
    return Venv(toolchain, spec, toolchain.home / f"{toolchain.name}-{digest_of(inside)[:12]}")


def drifted(name: str, drift: list[lockfile.Drift]) -> str:
    """One sentence a distribution, and what to do."""
    return f"toolchain {name} is not as its lock says:\n" + "\n".join(
        [*(f"  {d}" for d in drift), f"make it anew: quantgate toolchain sync {name}"]
    )


@contextmanager
def in_use(wanted: Venv) -> Iterator[None]:
    """Keep an environment from being made anew while a stage runs in it.

    Raises:
        EnvironmentProblem: it is not there, or is not as its lock says.
    """
    name = wanted.toolchain.name
    wanted.path.parent.mkdir(parents=True, exist_ok=True)
    with locked(_lock(wanted), shared=True):
        if not wanted.made:
            raise EnvironmentProblem(f"toolchain {name} is not there; make it: quantgate toolchain sync {name}")
        if drift := wanted.drift():
            raise EnvironmentProblem(drifted(name, drift))
        yield


def make(wanted: Venv, tell: Tell, *, repair: bool = False) -> Literal["made", "there"]:
    """Make an environment unless it is there; with `repair` also when it is not as its lock says.

    Raises:
        EnvironmentProblem: no interpreter of that version, or the installer failed; nothing half-made is left.
    """
    if _good(wanted, repair=repair):  # without its lock, which a stage that runs in it may hold for hours
        return "there"
    try:
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"paths.toolchains={str(wanted.path.parent)!r}: {error.strerror}") from None
    with _alone(wanted, tell):
        if _good(wanted, repair=repair):
            return "there"
        shutil.rmtree(wanted.path, ignore_errors=True)
        try:
            _fill(wanted, tell)
        except BaseException:
            shutil.rmtree(wanted.path, ignore_errors=True)
            raise
    return "made"


def _good(wanted: Venv, *, repair: bool) -> bool:
    return wanted.made and not (repair and wanted.drift())


def _lock(wanted: Venv) -> Path:
    return wanted.path.with_name(f".{wanted.path.name}.lock")


@contextmanager
def _alone(wanted: Venv, tell: Tell) -> Iterator[None]:
    try:
        with locked(_lock(wanted), wait_s=0):
            yield
    except Held:
        tell(0, 1, "waiting for another run that makes or uses it")
        with locked(_lock(wanted)):
            yield


def _fill(wanted: Venv, tell: Tell) -> None:
    total = len(wanted.toolchain.pinned)
    installer, creating, installing = _commands(wanted)
    first, last, compiled = (wanted.path.with_name(f".{wanted.path.name}.{n}.txt") for n in ("first", "last", "built"))
    try:
        apart, built = _split(wanted, first, last, compiled)
        tell(0, total, "making the environment")
        _call(wanted, creating, lambda _: None)
        _call(wanted, [*installing, "-r", str(first)], _counting(tell, total))
        if apart:
            _call(wanted, [*installing, "--no-deps", "-r", str(last)], lambda _: None)
        if built and wanted.spec.build is not None:
            tell(total, total, f"compiling {', '.join(sorted(built))}, which takes minutes")
            # a cache would give what was compiled with other settings
            argv = [*installing, "--no-deps", "--no-cache-dir", "-r", str(compiled)]
            _call(wanted, argv, lambda _: None, wanted.spec.build.variables())
    finally:
        for file in (first, last, compiled):
            file.unlink(missing_ok=True)
    if drift := wanted.drift():
        raise EnvironmentProblem(drifted(wanted.toolchain.name, drift))
    _note(wanted, installer)


def _split(wanted: Venv, first: Path, last: Path, compiled: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Write the lock as three files in the order of installing; give the names in the second and the third."""
    spec = wanted.spec
    text = find(spec.lock).read_text(encoding="utf-8")
    built = frozenset(lockfile.canonical_name(name) for name in (() if spec.build is None else spec.build.names))
    apart = frozenset(lockfile.canonical_name(name) for name in spec.no_deps) - built
    parts = {
        first: lockfile.split(text, apart | built)[0],
        last: lockfile.split(text, apart)[1],
        compiled: lockfile.split(text, built)[1],
    }
    for file, lines in parts.items():
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return apart, built


def _commands(wanted: Venv) -> tuple[str, list[str], list[str]]:
    """The installer, how it makes an environment, and how it installs into one: uv, our own pip, or one put there."""
    spec, name, python = wanted.spec, wanted.toolchain.name, str(wanted.python)
    uv = None if spec.installer == "pip" else shutil.which("uv")
    if uv is not None:
        return "uv", [uv, "venv", "--no-project", "--python", spec.python, str(wanted.path)], [
            uv, "pip", "install", "--python", python
        ]  # fmt: skip
    if spec.installer == "uv":
        raise EnvironmentProblem(
            f"toolchain.{name}.installer='uv': uv is not on PATH; install it, or choose auto or pip"
        )
    creating = [interpreter(name, spec.python), "-m", "venv", str(wanted.path)]
    quietly = ["install", "--disable-pip-version-check", "--progress-bar", "off"]
    ours = version_of("pip")
    if ours != "absent" and int(ours.partition(".")[0]) >= PIP_FOR_OTHERS:
        return "pip", [*creating, "--without-pip"], [sys.executable, "-m", "pip", "--python", python, *quietly]
    return "pip", creating, [python, "-m", "pip", *quietly]


def _counting(tell: Tell, total: int) -> Callable[[str], None]:
    """pip names a distribution as it starts on it; uv is done before one could read its names."""
    seen = 0

    def line(text: str) -> None:
        nonlocal seen
        doing, _, what = text.strip().partition(" ")
        if doing in ("Collecting", "Processing"):
            seen += 1
            tell(min(seen, total), total, Path(what.split(" (")[0]).name)
        elif text.startswith("Installing collected"):
            tell(total, total, "installing")

    return line


def _call(wanted: Venv, argv: list[str], line: Callable[[str], None], env: Mapping[str, str] | None = None) -> None:
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        child = subprocess.Popen(
            tethered(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**surroundings.installing(), **(env or {})},
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise EnvironmentProblem(f"cannot start {argv[0]}: {error.strerror}") from None
    with child:
        try:
            for text in child.stdout or ():
                last.append(text.rstrip())
                line(text)
        except BaseException:
            child.terminate()
            raise
    if child.returncode:
        said = "\n  ".join(text for text in last if text)
        raise EnvironmentProblem(f"toolchain {wanted.toolchain.name}: {' '.join(argv)} failed:\n  {said}")


def _note(wanted: Venv, installer: str) -> None:
    note = {
        "toolchain": wanted.toolchain.name,
        "python": wanted.spec.python,
        "installer": installer,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "installed": lockfile.installed(wanted.site_packages),
    }
    with (wanted.path / NOTE).open("w") as f:
        json.dump(note, f, indent=1)
        f.flush()
        os.fsync(f.fileno())


def interpreter(name: str, version: str) -> str:
    """An interpreter of that version which really runs: the one quantgate runs in, or `pythonX.Y` on PATH.

    Raises:
        EnvironmentProblem: there is none.
    """
    named = f"python{version}"
    for candidate in (str(Path(sys.base_prefix) / "bin" / named), shutil.which(named)):
        if candidate and _version(candidate) == version:
            return candidate
    raise EnvironmentProblem(
        f"toolchain.{name}.python={version!r}: no {named} on PATH that runs; install it, or put uv on PATH, which "
        f"fetches interpreters itself (uv python install {version})"
    )


def _version(python: str) -> str:
    ask = [python, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
