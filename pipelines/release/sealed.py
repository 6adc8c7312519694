"""An append-only file of JSON lines, each sealed by a hash over itself and the line before: what cannot be taken back.

A changed line, a missing one and a moved one are found; that the end was cut off no chain can see.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from pydantic import ValidationError

from pipelines.errors import EnvironmentProblem, EvidenceError

FIRST = "0" * 64
"""What the first line has for the seal before it."""


class Line(Protocol):
    """A strict model with these three fields. A seal is over what was written, so a new field needs a default."""

    @property
    def seq(self) -> int: ...
    @property
    def before(self) -> str: ...
    @property
    def seal(self) -> str: ...
    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...
    def model_dump_json(self, *, exclude_unset: bool = False) -> str: ...
    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray) -> Self: ...


L = TypeVar("L", bound=Line)


@dataclass(frozen=True, slots=True)
class Reading(Generic[L]):
    """A file as it stands: its readable lines, what is wrong with them, and whether a crash cut the last."""

    entries: tuple[L, ...]
    faults: tuple[str, ...]
    torn: bool


@dataclass(frozen=True, slots=True)
class Chain(Generic[L]):
    """The file and its lock. Whoever appends holds `locked`. `what` is what errors call the file."""

    path: Path
    kind: type[L]
    what: str

    @contextmanager
    def locked(self, busy: str, wait_s: float = 30.0) -> Iterator[None]:
        """Be the only one who writes; `busy` says in words what somebody else is doing.

        Raises:
            EnvironmentProblem: another process holds the lock for longer than that, or the file cannot be written.
        """
        from filelock import FileLock, Timeout

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_name(self.path.name + ".lock"), timeout=wait_s):
                yield
        except Timeout:
            raise EnvironmentProblem(f"{self.path}: another {busy} is under way; try again") from None
        except PermissionError as error:
            raise EnvironmentProblem(f"{self.path}: cannot write the {self.what} ({error.strerror})") from None

    def entries(self) -> list[L]:
        """Every line, proved. A last line that was cut short by a crash is passed over.

        Raises:
            EvidenceError: a line was changed, removed, added or reordered; the first one is named.
        """
        found = self.read()
        if found.faults:
            raise EvidenceError(found.faults[0])
        return list(found.entries)

    def read(self) -> Reading[L]:
        """Every line, and each that was changed, or that another was removed, added or moved before."""
        if not self.path.exists():
            return Reading((), (), torn=False)
        *lines, rest = self.path.read_bytes().split(b"\n")
        entries: list[L] = []
        faults: list[str] = []
        seq, before = 0, FIRST
        for number, line in enumerate(lines, start=1):
            where, entry = f"{self.path}:{number}", self._entry(line)
            if entry is None:
                faults.append(f"{where}: not an entry of the {self.what}; the file was changed here")
                seq, before = seq + 1, ""
                continue
            if entry.seal != seal(entry) or line != _text(entry).encode():
                faults.append(f"{where}: the {self.what} was changed here; the line does not match its seal")
            elif before and (entry.seq, entry.before) != (seq + 1, before):
                faults.append(f"{where}: the {self.what} was changed here; its hash chain is broken before this line")
            entries.append(entry)
            seq, before = entry.seq, entry.seal
        return Reading(tuple(entries), tuple(faults), torn=bool(rest))

    def append(self, entry: L) -> L:
        """Seal a line to those before it and make it durable; its `seq`, `before` and `seal` are set here."""
        past = self.entries()
        placed = {"seq": len(past) + 1, "before": past[-1].seal if past else FIRST, "seal": ""}
        bare = entry.model_copy(update=placed)
        sealed = bare.model_copy(update={"seal": seal(bare)})
        self._cut_torn_line()
        first = not self.path.exists()
        with self.path.open("ab") as f:
            f.write(_text(sealed).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
        if first:
            _sync_directory(self.path.parent)
        return sealed

    def _entry(self, line: bytes) -> L | None:
        try:
            return self.kind.model_validate_json(line)
        except ValidationError:
            return None

    def _cut_torn_line(self) -> None:
        """Drop what a crash left after the last newline; it never became a line."""
        if not self.path.exists():
            return
        rest = self.path.read_bytes().rpartition(b"\n")[2]
        if rest:
            with self.path.open("r+b") as f:
                f.truncate(self.path.stat().st_size - len(rest))


def seal(entry: Line) -> str:
    """sha256 over the line as it was written, without its seal; the line before enters through `before`."""
    return hashlib.sha256(_text(entry.model_copy(update={"seal": ""})).encode()).hexdigest()


def _text(entry: Line) -> str:
    """A line's text: fields that it was made without are not in it."""
    return entry.model_dump_json(exclude_unset=True)


def _sync_directory(path: Path) -> None:
    """Make a new file's name durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
