"""What has to hold before a champion changes, and which of it a named person may override with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.decide.model import Candidate, Decision
from pipelines.errors import ConfigError, EvidenceError, LicenceUnknown, Problem, closest
from pipelines.flow.store import Store, manifest
from pipelines.release import licence, transaction
from pipelines.release.evidence import DECISION
from pipelines.release.ledger import Ledger
from pipelines.track import versions
from pipelines.track.report import read

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient


def named(actor: str, reason: str | None) -> None:
    """Who acts has a name, and a reason that is given says something.

    Raises:
        ConfigError: one of them is empty.
    """
    problems = [] if actor.strip() else [Problem("actor", actor, "empty; the ledger records who did it")]
    if reason is not None and not reason.strip():
        problems.append(Problem("override", reason, "empty; the ledger records why"))
    if problems:
        raise ConfigError(problems)


def chosen(decision: Decision, label: str | None, *, overridden: bool) -> Candidate:
    """The candidate that may be promoted: the decision's winner, or whom a person who overrides names.

    Raises:
        ConfigError: there is no such candidate, or no winner and nobody named.
        EvidenceError: the decision is not to promote it; or, whoever overrides, it has no engine or was not judged.
    """
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
    found = labels[wanted]
    if found.unjudged:
        raise EvidenceError(f"{wanted}: was built, not judged, and is never promoted: {found.unjudged}")
    if found.status == "failed" or "engine" not in found.keys:
        raise EvidenceError(f"{wanted}: there is no engine to promote: {found.failure or 'none was built'}")
    return found


def real(engine: Path) -> None:
    """A simulated engine is a test's; no reason overrides that.

    Raises:
        EvidenceError: this is one.
    """
    if manifest(engine).simulated:
        raise EvidenceError(f"{engine}: made by a simulated container, so it is no engine; it is never promoted")


def licensed(made: Decision, candidate: Candidate, engine: Path, *, overridden: bool) -> tuple[str, str]:
    """The licence that an engine is released under, and what a person overrode to release it.

    Raises:
        LicenceUnknown: whoever overrides.
        EvidenceError: the gate does not allow it, or the artifacts disagree about it, and nobody overrides.
    """
    try:
        return licence.check(made, candidate, engine), ""
    except LicenceUnknown:
        raise
    except EvidenceError as error:
        if not overridden:
            raise EvidenceError(f"{error} (a named person may override this with a reason)") from None
        return made.base.get("licence", ""), f"overridden: {error}"


def still_licensed(version: ModelVersion, engine: Path, store: Store, *, overridden: bool) -> str:
    """Hold a version to its licence by its decision, where that is still in the store; give what was overridden.

    Going back from harm must not wait for a licence to be looked up, so here a person overrides an unknown one too:
    decisions from before licences were asked for know none.

    Raises:
        EvidenceError: as `licensed`, but never where a person overrides.
    """
    decision = store.path("decision", version.tags.get("decision_key", ""))
    if not (decision / DECISION).is_file():
        return ""
    made = read(decision)
    about = next((c for c in made.candidates if c.label == version.tags.get("candidate")), None)
    try:
        return "" if about is None else licensed(made, about, engine, overridden=overridden)[1]
    except LicenceUnknown as error:
        if not overridden:
            raise EvidenceError(f"{error}; or go back all the same, with a reason (--reason)") from None
        return f"overridden: {error}"


def undisturbed(
    client: MlflowClient, ledger: Ledger, version: ModelVersion, decision: Path, *, overridden: bool
) -> str:
    """Champion and ledger are as the decision and the registry have them; give what a person overrode of that.

    Raises:
        EvidenceError: they are not, and nobody overrides.
    """
    model = version.name
    found = [
        _unlike_ledger(client, ledger, model),
        _unlike_decision(client, version, decision),
        transaction.cut(transaction.marked(client, model), ledger.entries()),
    ]
    wrong = "; ".join(filter(None, found))
    if wrong and not overridden:
        raise EvidenceError(f"{model}: {wrong} (override once you know why)")
    return f"overridden: {wrong}" if wrong else ""


def champion_and_previous(client: MlflowClient, model: str) -> tuple[str | None, ModelVersion]:
    """The champion's version, and the version to go back to.

    Raises:
        EvidenceError: there is none.
    """
    target = versions.alias(client, model, versions.PREVIOUS)
    champion = transaction.number(client, model, versions.CHAMPION)
    if target is None or str(target.version) == champion:
        raise EvidenceError(
            f"{model}: no version but the champion has the alias {versions.PREVIOUS!r}; nothing to go back to"
        )
    return champion, target


def _unlike_ledger(client: MlflowClient, ledger: Ledger, model: str) -> str:
    left, now = ledger.champion(model), transaction.number(client, model, versions.CHAMPION) or versions.NOBODY
    if left is None or left == now:
        return ""
    return (
        f"the ledger's champion is version {left}, the registry's is {now}; the alias or the version was changed "
        "outside quantgate"
    )


def _unlike_decision(client: MlflowClient, version: ModelVersion, decision: Path) -> str:
    """The champion of now must be the one that the candidate was compared with, or knew not to be comparable."""
    champion = versions.alias(client, version.name, versions.CHAMPION)
    now = versions.NOBODY if champion is None else str(champion.version)
    compared = manifest(decision).config.get("champion")
    if not isinstance(compared, dict):  # no decision of a campaign: what was so when it was recorded has to do
        assumed, engine = version.tags.get("assumed_champion", versions.NOBODY), ""
    else:
        assumed, engine = compared.get("version") or versions.NOBODY, str(compared.get("engine_key") or "")[:16]
    again = "decide again against the champion of now"
    if assumed != now:
        return f"champion is version {now}, but the decision was made against {assumed}; {again}"
    if engine and champion is not None and champion.tags.get("engine_key", engine)[:16] != engine:
        return f"champion is engine {champion.tags['engine_key']}, but the decision was made against {engine}; {again}"
    return ""
