"""Lock files, and what an environment really holds: both as canonical name -> version, and how they differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pipelines.errors import ConfigError

WORKER = "pydantic"  # all the worker needs besides the standard library
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*([^\s;#*]+)")


@dataclass(frozen=True, slots=True)
class Drift:
    """One distribution whose installed version is not the locked one; "absent" where it is not installed."""

    name: str
    locked: str
    installed: str

    def __str__(self) -> str:
        return f"{self.name} is locked at {self.locked}, installed: {self.installed}"


def canonical_name(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lines(text: str) -> list[str]:
    """The lines that say something, continued ones joined, comments removed."""
    joined = text.replace("\\\n", " ").splitlines()
    return [line for raw in joined if (line := re.sub(r"(^|\s)#.*$", "", raw).strip())]


def read(path: Path) -> dict[str, str]:
    """What a lock file pins; lines that are options of the installer are passed over.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: lines that pin nothing, which would install another version tomorrow.
    """
    pinned, loose = {}, []
    for line in lines(path.read_text(encoding="utf-8")):
        if line.startswith("-") and not line.startswith(("-r", "--requirement", "-e", "--editable")):
            continue
        pin = _PIN.match(line)
        if pin is None:
            loose.append(line)
        else:
            pinned[canonical_name(pin[1])] = pin[2]
    if loose:
        more = f" and {len(loose) - 3} more" if len(loose) > 3 else ""
        raise ConfigError(f"every line must pin a distribution by ==, and these do not: {', '.join(loose[:3])}{more}")
    return pinned


def split(text: str, apart: frozenset[str]) -> tuple[list[str], list[str]]:
    """The lines of a lock without and with the distributions named apart; options of the installer go with both."""
    kept: list[str] = []
    taken: list[str] = []
    for line in lines(text):
        pin = _PIN.match(line)
        if pin is None:
            kept.append(line)
            taken.append(line)
        else:
            (taken if canonical_name(pin[1]) in apart else kept).append(line)
    return kept, taken


def installed(site_packages: Path) -> dict[str, str]:
    """What an environment holds, read from its metadata; nothing is started."""
    return {
        canonical_name(name): dist.version
        for dist in metadata.distributions(path=[str(site_packages)])
        if (name := dist.metadata["Name"])
    }


def drift(locked: Mapping[str, str], found: Mapping[str, str]) -> list[Drift]:
    """Every distribution that is not as locked."""
    return [
        Drift(name, version, found.get(name, "absent"))
        for name, version in sorted(locked.items())
        if not agrees(version, found.get(name, "absent"))
    ]


def agrees(locked: str, found: str) -> bool:
    """Say whether an installed version is the locked one; a build such as 2.13.0+cpu also meets a lock of 2.13.0."""
    return found == locked or ("+" not in locked and found.partition("+")[0] == locked)
