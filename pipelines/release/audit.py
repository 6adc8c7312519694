"""Does the record of promotions hold? The ledger's chain, what its entries refer to, and the registry's aliases.

The chain shows a changed line, a missing one and a moved one; that the end was cut off shows in what the registry was
told last. Neither is a signature: who can write both files can write both anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.errors import EnvironmentProblem, EvidenceError
from pipelines.flow.store import MANIFEST, Store, sha256_of, verify
from pipelines.release import transaction
from pipelines.release.evidence import DECISION
from pipelines.release.ledger import Change, Entry, Ledger
from pipelines.track import versions
from pipelines.track.connection import database, session

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from pipelines.release.registry import Registry


@dataclass(frozen=True, slots=True)
class Audit:
    """What was looked at, what is wrong with it, and what is not wrong but worth knowing."""

    entries: int
    promotions: int
    artifacts: int
    faults: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    artifacts: set[Path] = field(default_factory=set)


def audit(registry: Registry, store: Store) -> Audit:
    """Look at everything and name each fault; nothing is written or repaired."""
    ledger, found = Ledger(registry.ledger), _Found()
    read = ledger.read()
    found.faults.extend(read.faults)
    if read.torn:
        found.notes.append(f"{ledger.path}: a crash left half a line at the end; the next entry takes its place")
    found.faults.extend(_transactions(ledger.path, read.entries))
    committed = [entry for entry in read.entries if entry.state == "committed"]
    for entry in committed:
        found.faults.extend(_referred(f"{ledger.path}:{entry.seq}", entry.change, store, found.artifacts))
    try:
        _registry(registry, read.entries, found)
    except EnvironmentProblem as error:
        found.faults.append(f"the registry cannot be compared with: {error}")
    return Audit(len(read.entries), len(committed), len(found.artifacts), tuple(found.faults), tuple(found.notes))


def _transactions(path: Path, entries: Sequence[Entry]) -> Iterator[str]:
    """Each is intent, alias_set, then one end, and none begins before the one before it ended."""
    state, name = "", ""
    for entry in entries:
        fresh = entry.state == "intent" and state in ("", *transaction.FINISHED)
        next_of = {"intent": ("alias_set", "aborted"), "alias_set": transaction.FINISHED}.get(state, ())
        if not fresh and not (entry.transaction == name and entry.state in next_of):
            yield f"{path}:{entry.seq}: {entry.state} of {entry.transaction} does not follow {state or 'nothing'}"
        state, name = entry.state, entry.transaction
    if entries and state not in transaction.FINISHED:
        change = entries[-1].change
        yield (
            f"{path}:{entries[-1].seq}: the {change.action} to version {change.version} of {change.model} was cut "
            "short; the next promote, rollback or `verify-ledger --repair` finishes or undoes it"
        )


def _referred(where: str, change: Change, store: Store, known: set[Path]) -> Iterator[str]:
    """The decision and the engine of an entry are there, unchanged; those in `known` were looked at before."""
    rests_on = change.evidence
    for kind, key, file, recorded in (
        ("decision", change.decision_key, DECISION, rests_on.decision_sha256 if rests_on else ""),
        ("engine", change.engine_key, MANIFEST, rests_on.manifest_sha256 if rests_on else ""),
    ):
        path = store.path(kind, key)
        if not (path / MANIFEST).is_file() or not (path / file).is_file():
            yield f"{where}: version {change.version}: its {kind} {key} is gone from {store.root}"
            continue
        if recorded and sha256_of(path / file) != recorded:
            yield f"{where}: version {change.version}: {path / file} is not the one that was recorded"
        if path not in known:
            known.add(path)
            yield from (f"{path}: differs from its manifest: {name}" for name in _differing(path))


def _differing(path: Path) -> list[str]:
    try:
        return verify(path)
    except EvidenceError as error:
        return [str(error)]


def _registry(registry: Registry, entries: Sequence[Entry], found: _Found) -> None:
    """Each model's versions, aliases and mark agree with what the ledger committed last."""
    path = database(registry.tracking_uri)
    mine = [e for e in entries if transaction.about(e.change, registry.name)]
    elsewhere = sorted({e.change.registry for e in entries} - {e.change.registry for e in mine})
    found.notes.extend(f"entries about {name} were not compared with that registry" for name in elsewhere)
    if path is not None and not path.exists():
        if mine:
            found.faults.append(f"{path}: the registry is gone, and the ledger has entries about it")
        return
    with session(registry.tracking_uri, timeout_s=registry.timeout_s) as client:
        for model in sorted({e.change.model for e in mine} | {registry.model} - {""}):
            _model(client, model, [e for e in mine if e.change.model == model], entries, found)


def _model(client: MlflowClient, model: str, of_model: Sequence[Entry], every: Sequence[Entry], found: _Found) -> None:
    told = transaction.marked(client, model)
    if lost := transaction.cut(told, every):
        found.faults.append(f"{model}: {lost}")
    ended = [e for e in of_model if e.state in transaction.FINISHED]
    if ended and not lost and told != f"{ended[-1].seq} {ended[-1].seal}":
        found.notes.append(f"{model}: the registry was not told of the ledger's last entry yet; the next change does")
    done = [e for e in of_model if e.state == "committed"]
    found.faults.extend(_versions(client, model, done))
    open_ = bool(of_model) and of_model[-1].state not in transaction.FINISHED
    if not open_:
        found.faults.extend(_aliases(client, model, done[-1].change if done else None))


def _versions(client: MlflowClient, model: str, done: Iterable[Entry]) -> Iterator[str]:
    """Every version that was champion is still registered, as what the ledger says."""
    last = {entry.change.version: entry for entry in done}
    for number, entry in sorted(last.items(), key=lambda pair: int(pair[0])):
        if not versions.exists(client, model, number):
            yield f"{model}: version {number} was deleted from the registry (ledger line {entry.seq})"
            continue
        tags, change = client.get_model_version(model, number).tags, entry.change
        wanted = {"decision_key": change.decision_key, "engine_key": change.engine_key}
        wanted |= {"manifest_sha256": change.evidence.manifest_sha256} if change.evidence else {}
        for name, value in wanted.items():
            if tags.get(name) != value:
                yield f"{model}: version {number}: tag {name} is {tags.get(name)!r}, the ledger has {value!r}"


def _aliases(client: MlflowClient, model: str, last: Change | None) -> Iterator[str]:
    expected = {
        versions.CHAMPION: last.version if last else None,
        versions.PREVIOUS: last.previous if last else None,
    }
    for alias, wanted in expected.items():
        now = transaction.number(client, model, alias)
        if now != wanted:
            yield (
                f"{model}: alias {alias} points at {_version(now)} in the registry, by the ledger at {_version(wanted)}"
            )


def _version(number: str | None) -> str:
    return "no version" if number is None else f"version {number}"
