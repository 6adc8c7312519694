"""Promotion and rollback by registry alias: champion is who a decision names, or a person's recorded override.

MLflow sets an alias without comparing, so every change is one transaction of the ledger, made under its lock.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from pipelines.decide.model import Candidate, Decision
from pipelines.errors import ConfigError, EvidenceError, Problem, closest
from pipelines.flow.store import MANIFEST, Store, manifest, sha256_of, verify
from pipelines.release.ledger import Change, Ledger
from pipelines.track import versions
from pipelines.track.connection import database, session
from pipelines.track.report import read

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient


@dataclass(frozen=True, slots=True)
class Registry:
    """Where releases are recorded. `model` is the registered model's name, the campaign's where empty."""

    tracking_uri: str
    ledger: Path
    model: str = ""
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Release:
    """What became champion. `changed` is false where it already was."""

    model: str
    version: str
    previous: str | None
    engine: Path
    actor: str
    overridden: bool
    changed: bool
    repaired: str


def promote(
    registry: Registry,
    decision: Path,
    store: Store,
    *,
    actor: str,
    candidate: str | None = None,
    override_reason: str | None = None,
) -> Release:
    """Make the decision's winner champion, and the champion of before `previous`.

    `override_reason` lets a person promote what the decision does not, or over a champion that the decision did
    not know of; it goes into the ledger with the actor.

    Raises:
        EvidenceError: the decision is not to promote, an engine file differs from its manifest, or the champion is
            not the one that the decision was recorded against.
        EnvironmentProblem: the registry is away; a transaction cut short is finished or undone by the next call.
    """
    made = read(decision)
    overridden = _override(actor, override_reason)
    chosen = _chosen(made, candidate, overridden)
    engine = store.path("engine", chosen.keys["engine"])
    check_files(engine)
    _check_real(engine)
    model, ledger = registry.model or made.campaign, Ledger(registry.ledger)
    with ledger.locked(), session(registry.tracking_uri, timeout_s=registry.timeout_s) as client:
        repaired = repair(client, ledger)
        tags = versions.evidence(made, chosen, decision.name, engine)
        version = client.get_model_version(model, versions.ensure(client, model, tags, None))
        champion = versions.alias(client, model, versions.CHAMPION)
        if champion is not None and champion.version == version.version:
            return Release(model, str(version.version), None, engine, actor, overridden, False, repaired)
        _check_version(version, tags)
        if not overridden:
            _check_champion(ledger, model, version, champion)
        change = Change(
            action="promote",
            model=model,
            version=str(version.version),
            champion_before=_number(champion),
            previous_before=_number(versions.alias(client, model, versions.PREVIOUS)),
            actor=actor,
            override_reason=override_reason,
            decision_key=decision.name,
            engine_key=engine.name,
        )
        _transact(client, ledger, change)
    return Release(model, change.version, change.champion_before, engine, actor, overridden, True, repaired)


def rollback(registry: Registry, *, actor: str, reason: str | None = None) -> Release:
    """Make `previous` champion again after verifying its files; the champion of now becomes `previous`.

    Raises:
        EvidenceError: there is no previous version, or its engine's files are not what they were.
    """
    _override(actor, reason)
    if not registry.model:
        raise ConfigError([Problem("tracking.registered_model", "", "rollback needs the registered model's name")])
    ledger = Ledger(registry.ledger)
    with ledger.locked(), session(registry.tracking_uri, timeout_s=registry.timeout_s) as client:
        repaired = repair(client, ledger)
        target = versions.alias(client, registry.model, versions.PREVIOUS)
        if target is None:
            raise EvidenceError(
                f"{registry.model}: no version has the alias {versions.PREVIOUS!r}; nothing to go back to"
            )
        engine = _engine_of(target)
        check_files(engine)
        _check_real(engine)
        if sha256_of(engine / MANIFEST) != target.tags.get("manifest_sha256"):
            raise EvidenceError(f"{engine / MANIFEST}: not the manifest that version {target.version} was made with")
        change = Change(
            action="rollback",
            model=registry.model,
            version=str(target.version),
            champion_before=_number(versions.alias(client, registry.model, versions.CHAMPION)),
            previous_before=str(target.version),
            actor=actor,
            override_reason=reason,
            decision_key=target.tags.get("decision_key", ""),
            engine_key=target.tags.get("engine_key", ""),
        )
        _transact(client, ledger, change)
    return Release(registry.model, change.version, change.champion_before, engine, actor, False, True, repaired)


def aliased(tracking_uri: str, timeout_s: float = 10.0) -> set[str]:
    """Names of the decisions and engines behind every alias of every model, whoever set it; empty before the first run.

    Raises:
        EnvironmentProblem: the registry is away, so nobody can say what it holds on to.
    """
    path = database(tracking_uri)
    if path is not None and not path.exists():
        return set()
    found: set[str] = set()
    with session(tracking_uri, timeout_s=timeout_s) as client:
        token: str | None = None
        while token is None or token:
            page = client.search_registered_models(max_results=100, page_token=token)
            for model in page:
                for version in {str(v) for v in model.aliases.values()}:
                    tags = client.get_model_version(model.name, version).tags
                    found |= {tags[name] for name in ("decision_key", "engine_key") if name in tags}
            token = page.token or ""
    return found


def repair(client: MlflowClient, ledger: Ledger) -> str:
    """Finish or undo a transaction that was cut short; say what was done, "" where nothing was open."""
    left = ledger.open_transaction()
    if left is None:
        return ""
    change = left.change
    champion = _number(versions.alias(client, change.model, versions.CHAMPION))
    if champion == change.version:
        _set_aliases(client, change)
        if left.state == "intent":
            ledger.append(left.transaction, "alias_set", change, "found set after a crash")
        ledger.append(left.transaction, "committed", change, "finished after a crash")
        return f"finished the {change.action} to version {change.version} that was cut short"
    why = "cut short before anything changed" if champion == change.champion_before else f"champion is now {champion}"
    ledger.append(left.transaction, "aborted", change, why)
    return f"gave up the {change.action} to version {change.version}: {why}"


def check_files(engine: Path) -> None:
    """Prove that an engine is, byte for byte, what was measured.

    Raises:
        EvidenceError: the engine is gone, or files differ from its manifest; they are named.
    """
    differing = verify(engine)
    if differing:
        listed = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
        raise EvidenceError(
            f"{engine}: not the engine that was measured; these files differ from its manifest: {listed}"
        )


def _transact(client: MlflowClient, ledger: Ledger, change: Change) -> None:
    transaction = uuid.uuid4().hex[:12]
    ledger.append(transaction, "intent", change)
    _set_aliases(client, change)
    ledger.append(transaction, "alias_set", change)
    now = _number(versions.alias(client, change.model, versions.CHAMPION))
    if now != change.version:
        ledger.append(transaction, "aborted", change, f"read back champion {now}")
        raise EvidenceError(
            f"{change.model}: champion reads back as {now}, not {change.version}; somebody else changed it"
        )
    ledger.append(transaction, "committed", change)


def _set_aliases(client: MlflowClient, change: Change) -> None:
    """Champion first: as long as it is the old one, nothing has changed."""
    client.set_registered_model_alias(change.model, versions.CHAMPION, change.version)
    if change.champion_before is not None:
        client.set_registered_model_alias(change.model, versions.PREVIOUS, change.champion_before)


def _override(actor: str, reason: str | None) -> bool:
    """Say whether a person overrides; both must be named."""
    problems = [] if actor.strip() else [Problem("actor", actor, "empty; the ledger records who did it")]
    if reason is not None and not reason.strip():
        problems.append(Problem("override", reason, "empty; the ledger records why"))
    if problems:
        raise ConfigError(problems)
    return reason is not None


def _chosen(decision: Decision, label: str | None, overridden: bool) -> Candidate:
    labels = {one.label: one for one in decision.candidates}
    if label is not None and label not in labels:
        raise ConfigError([Problem("candidate", label, "not in this decision", closest(label, labels))])
    wanted = label or decision.winner
    if not overridden and (decision.outcome != "promote" or wanted is None or labels[wanted].outcome != "promote"):
        said = decision.headline if label is None else f"{label} is {labels[label].outcome or 'the reference'}"
        raise EvidenceError(
            f"not promoted, the decision is {decision.outcome}: {said} (override needs a reason and an actor)"
        )
    if wanted is None:
        raise ConfigError([Problem("candidate", None, "this decision has no winner; name one", closest("", labels))])
    chosen = labels[wanted]
    if chosen.unjudged:
        raise EvidenceError(f"{wanted}: was built, not judged, and is never promoted: {chosen.unjudged}")
    if chosen.status == "failed" or "engine" not in chosen.keys:
        raise EvidenceError(f"{wanted}: there is no engine to promote: {chosen.failure or 'none was built'}")
    return chosen


def _check_real(engine: Path) -> None:
    """A simulated engine is a test's; no reason overrides that."""
    if manifest(engine).simulated:
        raise EvidenceError(f"{engine}: made by a simulated container, so it is no engine; it is never promoted")


def _check_version(version: ModelVersion, tags: dict[str, str]) -> None:
    said, found = version.tags.get("manifest_sha256"), tags["manifest_sha256"]
    if said != found:
        raise EvidenceError(
            f"version {version.version}: its engine's manifest is {found[:12]}, but {str(said)[:12]} was registered"
        )


def _check_champion(ledger: Ledger, model: str, version: ModelVersion, champion: ModelVersion | None) -> None:
    """The champion must be the one that the ledger left and that the candidate was recorded against."""
    now = _number(champion) or versions.NOBODY
    left = ledger.champion(model)
    if left is not None and left != now:
        raise EvidenceError(
            f"{model}: the ledger's champion is version {left}, the registry's is {now}; the alias or the version was "
            "changed outside quantgate (override once you know why)"
        )
    assumed = version.tags.get("assumed_champion", versions.NOBODY)
    if assumed != now:
        raise EvidenceError(
            f"{model}: champion is version {now}, but the decision was recorded against {assumed}; decide again "
            "against the champion of now, or override"
        )


def _engine_of(version: ModelVersion) -> Path:
    return Path(unquote(urlsplit(version.tags.get("engine_uri", "")).path))


def _number(version: ModelVersion | None) -> str | None:
    return None if version is None else str(version.version)
