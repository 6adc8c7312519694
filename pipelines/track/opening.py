"""What is known of a campaign before any work: the plan, what it runs with, and the state of the user's files."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from pipelines import __version__
from pipelines.config import Strict
from pipelines.flow.device import describe
from pipelines.flow.plan import Plan
from pipelines.flow.toolchain import version_of
from pipelines.track.masking import masked_text

GIT_S = 5.0
DISTRIBUTION = "quantgate"


class PlannedStep(Strict):
    """A line of the plan: what is reused or to do, why, and how long it may take."""

    step: str
    artifact: str
    state: str
    why: str
    seconds: float
    toolchain: str


class Opening(Strict):
    """The state of things as a campaign begins.

    packages: versions of what the pipeline itself depends on. git: the commit, branch and remote of the directory the
    command was given in, and whether tracked files differ from the commit; empty where it is no repository.
    """

    started: str
    plan: tuple[PlannedStep, ...]
    python: str
    platform: str
    packages: dict[str, str]
    device: dict[str, str]
    git: dict[str, str]

    @property
    def to_do(self) -> int:
        return sum(step.state == "run" for step in self.plan)


def look(planned: Plan, here: Path) -> Opening:
    """Look at a plan, this interpreter, this machine and the repository `here` is in."""
    rows = [
        PlannedStep(
            step=p.step.label, artifact=f"{p.step.stage.kind}/{p.step.key[:16]}", state=p.state, why=p.why,
            seconds=round(p.step.seconds, 1), toolchain=p.step.runs_in.name,
        )
        for p in planned.steps
    ]  # fmt: skip
    return Opening(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        plan=tuple(rows),
        python=platform.python_version(),
        platform=platform.platform(),
        packages=_packages(),
        device=dict(describe()),
        git=git_state(here),
    )


def _packages() -> dict[str, str]:
    """The pipeline's own version, and those of what it asks for and finds."""
    try:
        asked = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        asked = []
    names = sorted({re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0] for text in asked})
    found = {name: version for name in names if (version := version_of(name)) != "absent"}
    return {DISTRIBUTION: __version__} | found


def git_state(here: Path) -> dict[str, str]:
    """The commit that the files in a directory are of; empty where git or a repository is missing."""
    commit = _git(here, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    found = {
        "commit": commit,
        "dirty": "unknown" if changed is None else str(bool(changed)).lower(),
        "branch": _git(here, "rev-parse", "--abbrev-ref", "HEAD") or "",
        "remote": masked_text(_git(here, "config", "--get", "remote.origin.url") or ""),
    }
    return {name: text for name, text in found.items() if text}


def _git(here: Path, *words: str) -> str | None:
    """What git says, without touching its index; None where it says nothing in time or fails."""
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", *words], cwd=here, env=env, capture_output=True, text=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
