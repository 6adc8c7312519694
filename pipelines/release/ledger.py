"""The record of promotions: an append-only file of JSON lines, each sealed by a hash over itself and the line before.

A transaction is intent, alias_set, then committed or aborted; one left open was cut short and its reader repairs it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pipelines.config import Strict
from pipelines.release.sealed import Chain, Reading

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


class Ledger:
    """The file and its lock. Whoever appends holds `locked`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._chain = Chain(path, Entry, "ledger")

    def locked(self) -> AbstractContextManager[None]:
        """Be the only one who promotes or rolls back.

        Raises:
            EnvironmentProblem: another process holds the lock for too long, or the file cannot be written.
        """
        return self._chain.locked("promotion or rollback")

    def entries(self) -> list[Entry]:
        """Every entry, proved. A last line that was cut short by a crash is passed over.

        Raises:
            EvidenceError: a line was changed, removed, added or reordered; the first one is named.
        """
        return self._chain.entries()

    def read(self) -> Reading[Entry]:
        """Every line, and each that was changed, or that another was removed, added or moved before."""
        return self._chain.read()

    def append(self, transaction: str, state: State, change: Change, note: str = "") -> Entry:
        """Add one entry and make it durable before returning."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return self._chain.append(
            Entry(seq=0, at=at, transaction=transaction, state=state, change=change, note=note, before="", seal="")
        )

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
