"""Traces: requests as they once arrived, one JSON object a line.

`timestamp` in seconds, counted from anywhere, never falling. Optional: the prompt itself (`prompt`, `text` or
`messages`) or its `input_length` in tokens, and `output_length`. Other keys are left alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ConfigDict, Field

from pipelines.config import Strict, parse
from pipelines.errors import ConfigError, Problem
from pipelines.probe.prompts import Item, Message

SHOWN = 20
SOURCES = ("prompt", "text", "messages", "input_length")


class Recorded(Strict):
    """One line. At most one of `prompt`, `text`, `messages` and `input_length` says what is asked."""

    model_config = ConfigDict(extra="ignore")

    timestamp: float
    prompt: str | None = Field(default=None, min_length=1)
    text: str | None = Field(default=None, min_length=1)
    messages: tuple[Message, ...] = ()
    input_length: int | None = Field(default=None, ge=2)
    output_length: int | None = Field(default=None, ge=1)

    @property
    def item(self) -> Item | None:
        """The prompt, if the trace has it."""
        text = self.prompt or self.text
        return Item(text=text, messages=self.messages) if text or self.messages else None


def read(path: Path, key: str, sha256: str = "", most: int | None = None) -> tuple[Recorded, ...]:
    """Read the first `most` lines of a trace; `key` is what the configuration calls it.

    Raises:
        ConfigError: every problem of the file (the first twenty), each with its line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError([Problem(key, str(path), f"cannot be read ({error.strerror})")]) from None
    found = hashlib.sha256(data).hexdigest()
    if sha256 and found != sha256:
        raise ConfigError([Problem(key, str(path), f"sha256 is {found}, expected {sha256}; the file has changed")])
    lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()][:most]
    if not lines:
        raise ConfigError([Problem(key, str(path), "holds no requests")])
    problems: list[Problem] = []
    recorded = [(number, _line(key, number, line, problems)) for number, line in lines]
    kept = [(number, one) for number, one in recorded if one is not None]
    problems += _out_of_order(key, kept)
    if problems:
        more = [Problem(key, str(path), f"and {len(problems) - SHOWN} more problems")] if len(problems) > SHOWN else []
        raise ConfigError([*problems[:SHOWN], *more])
    return tuple(one for _, one in kept)


def _line(key: str, number: int, line: bytes, problems: list[Problem]) -> Recorded | None:
    where = f"{key}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        problems.append(Problem(where, line[:60].decode(errors="replace"), f"is not JSON ({error})"))
        return None
    if not isinstance(row, dict):
        problems.append(Problem(where, row, "must be an object with a timestamp"))
        return None
    try:
        recorded = parse(Recorded, row, where)
    except ConfigError as error:
        problems += error.problems
        return None
    told = [name for name in SOURCES if row.get(name)]
    if len(told) > 1:
        problems.append(Problem(where, ", ".join(told), "says what is asked more than once", f"one of {_listed()}"))
    return recorded


def _listed() -> str:
    return ", ".join(SOURCES)


def _out_of_order(key: str, lines: Sequence[tuple[int, Recorded]]) -> Iterator[Problem]:
    for (before, earlier), (number, later) in itertools.pairwise(lines):
        if later.timestamp < earlier.timestamp:
            yield Problem(
                f"{key}, line {number}",
                later.timestamp,
                f"is before line {before} ({earlier.timestamp}); sort by timestamp",
            )
