"""The record of promotions: an append-only file of JSON lines, each sealed by a hash over itself and the line before.

A transaction is intent, alias_set, then committed or aborted; one left open was cut short and its reader repairs it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from pipelines.config import Strict
from pipelines.errors import EnvironmentProblem, EvidenceError

FIRST = "0" * 64
State = Literal["intent", "alias_set", "committed", "aborted"]


class Change(Strict):
    """What a transaction does: the versions that champion and previous point at before, and the new champion."""

    action: Literal["promote", "rollback"]
    model: str
    version: str
    champion_before: str | None
    previous_before: str | None
    actor: str
    override_reason: str | None
    decision_key: str
    engine_key: str


class Entry(Strict):
    """One line of the ledger."""

    seq: int
    at: str
    transaction: str
    state: State
    change: Change
    note: str
    before: str
    seal: str


class Ledger:
    """The file and its lock. Whoever appends holds `locked`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self, wait_s: float = 30.0) -> Iterator[None]:
        """Be the only one who promotes or rolls back.

        Raises:
            EnvironmentProblem: another process holds the lock for longer than that, or the file cannot be written.
        """
        from filelock import FileLock, Timeout

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_name(self.path.name + ".lock"), timeout=wait_s):
                yield
        except Timeout:
            raise EnvironmentProblem(f"{self.path}: another promotion or rollback is under way; try again") from None
        except PermissionError as error:
            raise EnvironmentProblem(f"{self.path}: cannot write the ledger ({error.strerror})") from None

    def entries(self) -> list[Entry]:
        """Every entry, proved. A last line that was cut short by a crash is passed over.

        Raises:
            EvidenceError: a line was changed, removed, added or reordered; the first one is named.
        """
        if not self.path.exists():
            return []
        found: list[Entry] = []
        for number, line in enumerate(self._whole_lines(), start=1):
            entry = self._entry(number, line)
            before = found[-1].seal if found else FIRST
            if (entry.seq, entry.before, entry.seal) != (number, before, seal(entry)):
                raise EvidenceError(f"{self.path}:{number}: the ledger was changed here; its hash chain is broken")
            found.append(entry)
        return found

    def append(self, transaction: str, state: State, change: Change, note: str = "") -> Entry:
        """Add one entry and make it durable before returning."""
        past = self.entries()
        bare = Entry(
            seq=len(past) + 1,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            transaction=transaction,
            state=state,
            change=change,
            note=note,
            before=past[-1].seal if past else FIRST,
            seal="",
        )
        entry = bare.model_copy(update={"seal": seal(bare)})
        self._cut_torn_line()
        with self.path.open("ab") as f:
            f.write(entry.model_dump_json().encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
        return entry

    def open_transaction(self) -> Entry | None:
        """The last entry of a transaction that neither committed nor aborted."""
        past = self.entries()
        return past[-1] if past and past[-1].state in ("intent", "alias_set") else None

    def committed(self, model: str) -> Entry | None:
        """The entry that last committed a champion."""
        past = reversed(self.entries())
        return next((e for e in past if e.state == "committed" and e.change.model == model), None)

    def champion(self, model: str) -> str | None:
        """The version the ledger last committed as champion."""
        done = self.committed(model)
        return None if done is None else done.change.version

    def _entry(self, number: int, line: bytes) -> Entry:
        try:
            return Entry.model_validate_json(line)
        except ValidationError:
            raise EvidenceError(
                f"{self.path}:{number}: not an entry of the ledger; the file was changed here"
            ) from None

    def _whole_lines(self) -> list[bytes]:
        return self.path.read_bytes().split(b"\n")[:-1]

    def _cut_torn_line(self) -> None:
        """Drop what a crash left after the last newline; it never became an entry."""
        if not self.path.exists():
            return
        whole = sum(len(line) + 1 for line in self._whole_lines())
        if whole < self.path.stat().st_size:
            with self.path.open("r+b") as f:
                f.truncate(whole)


def seal(entry: Entry) -> str:
    """sha256 over the entry without its seal; the line before enters through `before`."""
    return hashlib.sha256(entry.model_copy(update={"seal": ""}).model_dump_json().encode()).hexdigest()
