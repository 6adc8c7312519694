"""The technology radar: what each quantizer, target, library and format is worth today, with a reason and a date.

Tools age: `plan` warns of what is to be avoided, the report shows the entries that a campaign uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from pipelines.config import CONF_DIR, Strict, parse
from pipelines.errors import ConfigError, Problem

FILE = "radar.yaml"
FRESH = timedelta(days=365)
RINGS = ("avoid", "watch", "proven", "adopted")
"""As they are shown: what needs attention comes first."""

Ring = Literal["adopted", "proven", "watch", "avoid"]
Kind = Literal["quantizer", "target", "library", "format"]


class Entry(Strict):
    """What one thing is worth. `since` is the day on which its ring was given or last confirmed; `instead` what to use
    in place of what is to be avoided."""

    name: str = Field(min_length=1)
    ring: Ring
    kind: Kind
    since: date
    reason: str = Field(min_length=1)
    source: str = Field(min_length=1)
    instead: str = ""

    @model_validator(mode="after")
    def _avoiding_names_another(self) -> Self:
        if (self.ring == "avoid") != bool(self.instead):
            raise ValueError("instead: what to use in place of it, for entries to avoid and no others")
        return self


class RadarEntry(Entry):
    """An entry that a campaign uses; `stale` where nobody has confirmed it for a year."""

    stale: bool = False


class Radar(Strict):
    """The whole file; `reviewed` is the day on which somebody last went through it."""

    reviewed: date
    entries: tuple[Entry, ...] = Field(min_length=1)


def read(path: Path) -> Radar:
    """Read a radar.

    Raises:
        ConfigError: every problem of the file, each with its entry.
    """
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    radar = parse(Radar, data, str(path))
    problems = list(_problems(radar, str(path)))
    if problems:
        raise ConfigError(problems)
    return radar


def of_campaigns(config_dir: Path | None) -> Radar:
    """The radar of a conf/ directory; the shipped one where that has none."""
    own = None if config_dir is None else config_dir / FILE
    return read(own if own is not None and own.is_file() else CONF_DIR / FILE)


def _problems(radar: Radar, path: str) -> Iterator[Problem]:
    seen: set[tuple[str, str]] = set()
    for n, one in enumerate(radar.entries):
        if (one.kind, one.name) in seen:
            yield Problem(f"{path}.entries.{n}.name", one.name, f"there is another {one.kind} of this name")
        seen.add((one.kind, one.name))
        if one.since > radar.reviewed:
            yield Problem(f"{path}.entries.{n}.since", str(one.since), f"later than reviewed, {radar.reviewed}")


def used(radar: Radar, names: Mapping[Kind, Collection[str]], today: date) -> tuple[RadarEntry, ...]:
    """The entries of what a campaign uses, given by kind: what needs attention first, then by name."""
    found = [
        RadarEntry(**one.model_dump(), stale=today - one.since > FRESH)
        for one in radar.entries
        if one.name in names.get(one.kind, ())
    ]
    return tuple(sorted(found, key=lambda one: (RINGS.index(one.ring), not one.stale, one.kind, one.name)))


def warnings(entries: Iterable[RadarEntry]) -> Iterator[str]:
    """What `plan` says of entries: those to avoid, and that some are stale."""
    entries = tuple(entries)
    for one in entries:
        if one.ring == "avoid":
            yield f"{one.kind} {one.name} is to be avoided ({one.reason}); use {one.instead}"
    stale = [one.name for one in entries if one.stale]
    if stale:
        yield f"nobody has confirmed these entries of the radar for a year: {', '.join(stale)}"
