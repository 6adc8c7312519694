"""Promotion and rollback by registry alias: champion is who a decision names, or a person's recorded override.

What takes long (hashing, starting the engine) is done first; then the ledger's lock is taken, and what may have changed
since is looked at again before anything is set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from pipelines.decide.model import Candidate, Decision
from pipelines.errors import ConfigError, EvidenceError, Problem
from pipelines.flow.store import MANIFEST, Store, sha256_of
from pipelines.release import conditions, evidence, transaction
from pipelines.release.ledger import Change, Evidence, Ledger
from pipelines.track import versions
from pipelines.track.connection import database, session
from pipelines.track.masking import masked_text
from pipelines.track.report import read

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

Answers = Callable[[Path], str]
"""Starts an engine, has it answer, and says what came; raises where nothing does."""


@dataclass(frozen=True, slots=True)
class Registry:
    """Where releases are recorded. `model` is the registered model's name, the campaign's where empty."""

    tracking_uri: str
    ledger: Path
    model: str = ""
    timeout_s: float = 10.0

    @property
    def name(self) -> str:
        """The tracking URI as it may be written down."""
        return masked_text(self.tracking_uri)


@dataclass(frozen=True, slots=True)
class Person:
    """Who acts, and why against what is decided (or why back)."""

    actor: str
    reason: str | None = None

    @property
    def overrides(self) -> bool:
        return self.reason is not None


@dataclass(frozen=True, slots=True)
class Release:
    """What is champion now, by which decision. `changed` is false where it already was; `noted` is what a person
    overrode, `repaired` what an earlier crash had left."""

    model: str
    version: str
    previous: str | None
    candidate: str
    engine: Path
    decision: Path
    actor: str
    overridden: bool
    changed: bool
    repaired: str
    noted: str = ""


@dataclass(frozen=True, slots=True)
class _Subject:
    """Who is to be promoted, to which model, by whom."""

    model: str
    made: Decision
    decision: Path
    chosen: Candidate
    engine: Path
    person: Person

    def release(self, version: str, previous: str | None, repaired: str, *, changed: bool, noted: str = "") -> Release:
        by = self.person
        return Release(
            self.model, version, previous, self.chosen.label, self.engine, self.decision, by.actor, by.overrides,
            changed, repaired, noted,
        )  # fmt: skip

    def tags(self) -> dict[str, str]:
        return versions.evidence(self.made, self.chosen, self.decision.name, self.engine)


@dataclass(frozen=True, slots=True)
class _Ready:
    """What was proved without the lock: the engine's files as they were seen, the evidence, what a person overrode."""

    seen: evidence.Seen
    rests_on: Evidence
    noted: str


def promote(
    registry: Registry,
    decision: Path,
    store: Store,
    person: Person,
    answers: Answers,
    *,
    candidate: str | None = None,
    tell: evidence.Tell | None = None,
) -> Release:
    """Make the decision's winner champion, and the champion of before `previous`.

    A person with a reason may promote what the decision does not, over a champion that the decision did not know of,
    under a licence that the gate does not allow, or on from a ledger whose end is gone; it goes into the ledger with
    the name. Nothing overrides files that differ, an engine that does not answer, an unknown licence, evidence that is
    gone, or another promotion that was quicker.

    Raises:
        EvidenceError: the decision is not to promote, something that it rests on is gone or was changed, the engine
            does not answer, or the champion is not the one that the decision was made against.
        EnvironmentProblem: the registry is away, or the engine cannot run here; a transaction cut short is finished or
            undone by the next call.
    """
    made = read(decision)
    conditions.named(person.actor, person.reason)
    chosen = conditions.chosen(made, candidate, overridden=person.overrides)
    engine = store.path("engine", chosen.keys["engine"])
    subject = _Subject(registry.model or made.campaign, made, decision, chosen, engine, person)
    ledger = Ledger(registry.ledger)
    with session(registry.tracking_uri, timeout_s=registry.timeout_s) as client:
        with ledger.locked():
            repaired = transaction.repair(client, ledger, registry.name)
            before, known = transaction.number(client, subject.model, versions.CHAMPION), ledger.champion(subject.model)
        if before is not None and before == known and _stands_for(client, subject, before):
            evidence.check_files(engine, tell)
            previous = transaction.number(client, subject.model, versions.PREVIOUS)
            return subject.release(before, previous, repaired, changed=False)
        ready = _prepare(subject, store, answers, tell)
        with ledger.locked():
            again = transaction.repair(client, ledger, registry.name)
            return _promote(client, ledger, registry.name, subject, ready, before, repaired or again)


def rollback(registry: Registry, store: Store, person: Person, *, tell: evidence.Tell | None = None) -> Release:
    """Make `previous` champion again after verifying its files; the champion of now becomes `previous`.

    Nothing is evaluated or started again. A ledger whose end was cut off does not stop it, and is noted; with a reason
    neither does a licence that the gate of its decision does not allow.

    Raises:
        EvidenceError: there is no previous version, or its engine's files are not what they were.
    """
    conditions.named(person.actor, person.reason)
    model = registry.model
    if not model:
        raise ConfigError([Problem("tracking.registered_model", "", "rollback needs the registered model's name")])
    ledger = Ledger(registry.ledger)
    with session(registry.tracking_uri, timeout_s=registry.timeout_s) as client:
        with ledger.locked():
            repaired = transaction.repair(client, ledger, registry.name)
            before, target = conditions.champion_and_previous(client, model)
        engine = _engine_of(target)
        seen = _unchanged(engine, target, tell)
        noted = conditions.still_licensed(target, engine, store, overridden=person.overrides)
        with ledger.locked():
            repaired = transaction.repair(client, ledger, registry.name) or repaired
            now, previous = conditions.champion_and_previous(client, model)
            if (now, previous.version) != (before, target.version):
                raise EvidenceError(f"{model}: somebody changed the champion while files were verified; look again")
            seen.check()
            lost = transaction.cut(transaction.marked(client, model), ledger.entries())
            change = Change(
                action="rollback",
                model=model,
                version=str(target.version),
                champion_before=now,
                previous_before=str(target.version),
                actor=person.actor,
                override_reason=person.reason,
                decision_key=target.tags.get("decision_key", ""),
                engine_key=target.tags.get("engine_key", ""),
                registry=registry.name,
                evidence=evidence.recorded(target.tags),
            )
            told = "; ".join(filter(None, (noted, lost)))
            transaction.commit(client, ledger, change, told)
    return Release(
        model=model,
        version=change.version,
        previous=change.previous,
        candidate=target.tags.get("candidate", ""),
        engine=engine,
        decision=store.path("decision", change.decision_key),
        actor=person.actor,
        overridden=False,
        changed=True,
        repaired=repaired,
        noted=told,
    )


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


def repair(registry: Registry) -> str:
    """Finish or undo what a crash left, as the next promotion or rollback would; say what was done."""
    ledger = Ledger(registry.ledger)
    with ledger.locked(), session(registry.tracking_uri, timeout_s=registry.timeout_s) as client:
        return transaction.repair(client, ledger, registry.name)


def _stands_for(client: MlflowClient, subject: _Subject, version: str) -> bool:
    """Whether a version is this engine by this decision."""
    found = versions.find(client, subject.model, subject.engine.name, subject.decision.name)
    return found is not None and str(found.version) == version


def _prepare(subject: _Subject, store: Store, answers: Answers, tell: evidence.Tell | None) -> _Ready:
    """Prove everything that takes long and needs no lock."""
    engine, chosen = subject.engine, subject.chosen
    conditions.real(engine)
    under, noted = conditions.licensed(subject.made, chosen, engine, overridden=subject.person.overrides)
    evidence.check_judged(subject.decision, chosen, store)
    seen = evidence.check_files(engine, tell)
    if tell is not None:
        tell(f"starting {engine}")
    answered = answers(engine)
    found = evidence.gathered(subject.made, subject.decision, chosen, engine, store)
    return _Ready(seen, found.model_copy(update={"licence": under, "answered": answered}), noted)


def _promote(
    client: MlflowClient,
    ledger: Ledger,
    registry: str,
    subject: _Subject,
    ready: _Ready,
    before: str | None,
    repaired: str,
) -> Release:
    """Look again at what may have changed, and change the champion. Under the lock."""
    model, person = subject.model, subject.person
    version = client.get_model_version(model, versions.ensure(client, model, subject.tags(), None))
    now = transaction.number(client, model, versions.CHAMPION)
    previous = transaction.number(client, model, versions.PREVIOUS)
    if now is not None and now == str(version.version) == ledger.champion(model):  # the same, by somebody quicker
        return subject.release(now, previous, repaired, changed=False)
    if now != before:
        raise EvidenceError(
            f"{model}: version {now} became champion (before: {before or versions.NOBODY}) while this promotion was "
            "being prepared; decide again against it"
        )
    ready.seen.check()
    _registered(version, ready.rests_on)
    noted = conditions.undisturbed(client, ledger, version, subject.decision, overridden=person.overrides)
    change = Change(
        action="promote",
        model=model,
        version=str(version.version),
        champion_before=now,
        previous_before=previous,
        actor=person.actor,
        override_reason=person.reason,
        decision_key=subject.decision.name,
        engine_key=subject.engine.name,
        registry=registry,
        evidence=_linked(client, version, subject, ready.rests_on),
    )
    told = "; ".join(filter(None, (ready.noted, noted)))
    transaction.commit(client, ledger, change, told)
    return subject.release(change.version, change.previous, repaired, changed=True, noted=told)


def _linked(client: MlflowClient, version: ModelVersion, subject: _Subject, rests_on: Evidence) -> Evidence:
    """The evidence with its runs in MLflow, written onto the version as tags."""
    run, parent = evidence.runs(client, version, subject.decision.name, subject.chosen.label)
    found = rests_on.model_copy(update={"run_id": run, "parent_run_id": parent})
    versions.link(client, version, found.model_dump())
    return found


def _registered(version: ModelVersion, rests_on: Evidence) -> None:
    said, found = version.tags.get("manifest_sha256"), rests_on.manifest_sha256
    if said != found:
        raise EvidenceError(
            f"version {version.version}: its engine's manifest is {found[:12]}, but {str(said)[:12]} was registered"
        )


def _unchanged(engine: Path, version: ModelVersion, tell: evidence.Tell | None) -> evidence.Seen:
    """Prove that an engine is the one that a version was made with, without starting it."""
    seen = evidence.check_files(engine, tell)
    conditions.real(engine)
    if sha256_of(engine / MANIFEST) != version.tags.get("manifest_sha256"):
        raise EvidenceError(f"{engine / MANIFEST}: not the manifest that version {version.version} was made with")
    return seen


def _engine_of(version: ModelVersion) -> Path:
    return Path(unquote(urlsplit(version.tags.get("engine_uri", "")).path))
