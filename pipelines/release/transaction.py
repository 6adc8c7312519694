"""One change of the champion: the ledger and MLflow's aliases, brought to agree whatever a crash leaves behind.

MLflow sets an alias without comparing, so every change is made under the ledger's lock. The champion's alias is set
first: as long as it is the old one, nothing has changed. Last, the registry is told the ledger's last seal, so that it
remembers where the ledger ended: a chain of hashes alone cannot see that its end was cut off.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelines.errors import EvidenceError
from pipelines.release.ledger import Change, Entry, Ledger
from pipelines.track import versions
from pipelines.track.connection import database

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

MARK = "quantgate.ledger"
FINISHED = ("committed", "aborted")


def commit(client: MlflowClient, ledger: Ledger, change: Change, note: str = "") -> None:
    """Write the intent, set the aliases, read them back, commit.

    Raises:
        EvidenceError: the champion reads back as another; the change is aborted and undone as far as it is ours.
    """
    transaction = uuid.uuid4().hex[:12]
    ledger.append(transaction, "intent", change, note)
    _set_aliases(client, change)
    ledger.append(transaction, "alias_set", change)
    now = number(client, change.model, versions.CHAMPION)
    if now != change.version:
        _undo_previous(client, change)
        mark(client, ledger.append(transaction, "aborted", change, f"read back champion {now}"))
        raise EvidenceError(
            f"{change.model}: champion reads back as {now}, not {change.version}; somebody else changed it"
        )
    mark(client, ledger.append(transaction, "committed", change, note))


def repair(client: MlflowClient, ledger: Ledger, registry: str) -> str:
    """Finish or undo a transaction that was cut short; say what was done, "" where nothing was open.

    Raises:
        EvidenceError: it was made on another registry than this one.
    """
    left = ledger.open_transaction()
    if left is None:
        _catch_up(client, ledger, registry)
        return ""
    change = left.change
    if not about(change, registry):
        raise EvidenceError(
            f"{ledger.path}: a {change.action} on tracking.uri={change.registry!r} was cut short; name that registry "
            "first, so that it can be finished or undone there"
        )
    champion = number(client, change.model, versions.CHAMPION)
    if champion == change.version:
        _set_aliases(client, change)
        if left.state == "intent":
            ledger.append(left.transaction, "alias_set", change, "found set after a crash")
        mark(client, ledger.append(left.transaction, "committed", change, "finished after a crash"))
        return f"finished the {change.action} to version {change.version} that was cut short"
    untouched = champion == change.champion_before
    why = "cut short before anything changed" if untouched else f"champion is now {champion}"
    if not untouched:
        _undo_previous(client, change)
    mark(client, ledger.append(left.transaction, "aborted", change, why))
    return f"gave up the {change.action} to version {change.version}: {why}"


def mark(client: MlflowClient, entry: Entry) -> None:
    """Tell the registry where the ledger ends for this model, if it has the model still."""
    from mlflow.exceptions import MlflowException

    try:
        client.set_registered_model_tag(entry.change.model, MARK, f"{entry.seq} {entry.seal}")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise


def marked(client: MlflowClient, model: str) -> str:
    """What the registry was last told, "" where it was told nothing or has no such model."""
    from mlflow.exceptions import MlflowException

    try:
        return str(client.get_registered_model(model).tags.get(MARK, ""))
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return ""
        raise


def cut(said: str, entries: Sequence[Entry]) -> str:
    """What is missing of a ledger by what the registry was last told, "" where nothing is."""
    seq, _, sealed = said.partition(" ")
    if not said or any(entry.seal == sealed for entry in entries):
        return ""
    return (
        f"the registry was told of line {seq} with seal {sealed[:12]}..., and the ledger's {len(entries)} lines do not "
        "have it: its end was cut off, it was replaced, or this is not the ledger that the registry belongs to"
    )


def about(change: Change, registry: str) -> bool:
    """Whether a change was made on this registry: by its name, or by that of a local database which is there no more,
    so that a directory may be moved."""
    said = database(change.registry)
    return change.registry in ("", registry) or (said is not None and not said.exists())


def number(client: MlflowClient, model: str, alias: str) -> str | None:
    """The version that an alias points at."""
    found = versions.alias(client, model, alias)
    return None if found is None else str(found.version)


def _catch_up(client: MlflowClient, ledger: Ledger, registry: str) -> None:
    """Tell the registry of an end that a crash kept from it."""
    past = ledger.entries()
    last = past[-1] if past else None
    if last is None or not about(last.change, registry):
        return
    said = marked(client, last.change.model)
    if said != f"{last.seq} {last.seal}" and not cut(said, past):
        mark(client, last)


def _set_aliases(client: MlflowClient, change: Change) -> None:
    """Whatever was set already is set again; a version that is gone by now gets no alias."""
    model = change.model
    client.set_registered_model_alias(model, versions.CHAMPION, change.version)
    _point(client, model, versions.PREVIOUS, change.previous)
    if number(client, model, versions.CHALLENGER) == change.version:
        client.delete_registered_model_alias(model, versions.CHALLENGER)


def _undo_previous(client: MlflowClient, change: Change) -> None:
    """Put `previous` back where it still is as this change set it."""
    if number(client, change.model, versions.PREVIOUS) == change.previous != change.previous_before:
        _point(client, change.model, versions.PREVIOUS, change.previous_before)


def _point(client: MlflowClient, model: str, alias: str, version: str | None) -> None:
    now = number(client, model, alias)
    if version is not None and version != now and versions.exists(client, model, version):
        client.set_registered_model_alias(model, alias, version)
    elif version is None and now is not None:
        client.delete_registered_model_alias(model, alias)
