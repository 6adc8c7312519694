"""The record of promotions: an append-only file of JSON lines, each sealed by a hash over itself and the line before.

A transaction is intent, alias_set, then committed or aborted; one left open was cut short and its reader repairs it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from pipelines.config import Strict
from pipelines.errors import EnvironmentProblem, EvidenceError

FIRST = "0" * 64
State = Literal["intent", "alias_set", "committed", "aborted"]


class Evidence(Strict):
    """What a promotion rests on, by reference: where it is, how to see that it was not changed, and what was found.

    decision_sha256: of decision.json. outcome: what the decision says of the candidate. run_id and parent_run_id: its
    run in MLflow and the campaign's. answered: what the engine answered when it was started for this promotion.
    """

    candidate: str
    outcome: str
    engine_uri: str
    manifest_sha256: str
    decision_uri: str
    decision_sha256: str
    report_uri: str = ""
    run_id: str = ""
    parent_run_id: str = ""
    licence: str = ""
    answered: str = ""


class Change(Strict):
    """What a transaction does: the versions that champion and previous point at before, and the new champion.

    registry: the tracking URI whose aliases it sets, without secrets. Entries made before there were such fields lack
    them, and a seal is over what was written, so a new field needs a default.
    """

    action: Literal["promote", "rollback"]
    model: str
    version: str
    champion_before: str | None
    previous_before: str | None
    actor: str
    override_reason: str | None
    decision_key: str
    engine_key: str
    registry: str = ""
    evidence: Evidence | None = None

    @property
    def previous(self) -> str | None:
        """The version that `previous` points at afterwards: the champion of before, and never the champion itself."""
        before = (self.champion_before, self.previous_before)
        return next((one for one in before if one not in (None, self.version)), None)


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


@dataclass(frozen=True, slots=True)
class Reading:
    """A ledger as it stands: its readable entries, what is wrong with its lines, and whether a crash cut the last."""

    entries: tuple[Entry, ...]
    faults: tuple[str, ...]
    torn: bool


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
        found = self.read()
        if found.faults:
            raise EvidenceError(found.faults[0])
        return list(found.entries)

    def read(self) -> Reading:
        """Every line, and each that was changed, or that another was removed, added or moved before."""
        if not self.path.exists():
            return Reading((), (), torn=False)
        *lines, rest = self.path.read_bytes().split(b"\n")
        entries: list[Entry] = []
        faults: list[str] = []
        seq, before = 0, FIRST
        for number, line in enumerate(lines, start=1):
            where, entry = f"{self.path}:{number}", _entry(line)
            if entry is None:
                faults.append(f"{where}: not an entry of the ledger; the file was changed here")
                seq, before = seq + 1, ""
                continue
            if entry.seal != seal(entry) or line != _text(entry).encode():
                faults.append(f"{where}: the ledger was changed here; the line does not match its seal")
            elif before and (entry.seq, entry.before) != (seq + 1, before):
                faults.append(f"{where}: the ledger was changed here; its hash chain is broken before this line")
            entries.append(entry)
            seq, before = entry.seq, entry.seal
        return Reading(tuple(entries), tuple(faults), torn=bool(rest))

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
        first = not self.path.exists()
        with self.path.open("ab") as f:
            f.write(_text(entry).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
        if first:
            _sync_directory(self.path.parent)
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

    def _cut_torn_line(self) -> None:
        """Drop what a crash left after the last newline; it never became an entry."""
        if not self.path.exists():
            return
        rest = self.path.read_bytes().rpartition(b"\n")[2]
        if rest:
            with self.path.open("r+b") as f:
                f.truncate(self.path.stat().st_size - len(rest))


def seal(entry: Entry) -> str:
    """sha256 over the entry as it was written, without its seal; the line before enters through `before`."""
    return hashlib.sha256(_text(entry.model_copy(update={"seal": ""})).encode()).hexdigest()


def _text(entry: Entry) -> str:
    """An entry's line: fields that it was made without are not in it."""
    return entry.model_dump_json(exclude_unset=True)


def _entry(line: bytes) -> Entry | None:
    try:
        return Entry.model_validate_json(line)
    except ValidationError:
        return None


def _sync_directory(path: Path) -> None:
    """Make a new file's name durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
