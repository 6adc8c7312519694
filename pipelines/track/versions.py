"""Model versions by reference: what a version says about the engine it stands for, and the alias of a winner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.decide.model import Candidate, Decision
from pipelines.flow.store import MANIFEST, sha256_of

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
NOBODY = "none"


def evidence(decision: Decision, candidate: Candidate, decision_key: str, engine: Path) -> dict[str, str]:
    """What a version is tagged with: where its engine is, how to know it, and by which decision."""
    return {
        "engine_uri": engine.resolve().as_uri(),
        "engine_key": engine.name,
        "manifest_sha256": sha256_of(engine / MANIFEST),
        "decision_key": decision_key,
        "candidate": candidate.label,
        "campaign": decision.campaign,
        "outcome": decision.outcome if candidate.label == decision.winner else candidate.outcome or "reference",
        "licence": decision.base.get("licence", "unknown"),
    }


def ensure(client: MlflowClient, model: str, tags: Mapping[str, str], run_id: str | None) -> str:
    """Give the version that stands for this engine by this decision, registering it where there is none yet."""
    _ensure_model(client, model)
    found = find(client, model, tags["engine_key"], tags["decision_key"])
    if found is not None:
        return str(found.version)
    assumed = alias(client, model, CHAMPION)
    made = client.create_model_version(
        model,
        source=f"quantgate://engine/{tags['engine_key']}",
        run_id=run_id,
        tags=dict(tags) | {"assumed_champion": str(assumed.version) if assumed else NOBODY},
        description=f"{tags['candidate']} of campaign {tags['campaign']}: {tags['outcome']}",
        await_creation_for=0,  # it refers to files that are there
    )
    return str(made.version)


def versions(client: MlflowClient, model: str) -> list[ModelVersion]:
    """Every version of a model, newest first."""
    found: list[ModelVersion] = []
    quoted = model.replace("'", "\\'")
    page = client.search_model_versions(f"name='{quoted}'", max_results=1000)
    found += page
    while page.token:
        page = client.search_model_versions(f"name='{quoted}'", max_results=1000, page_token=page.token)
        found += page
    return sorted(found, key=lambda v: int(v.version), reverse=True)


def alias(client: MlflowClient, model: str, name: str) -> ModelVersion | None:
    """The version an alias points at, if it points anywhere."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(model, name)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def find(client: MlflowClient, model: str, engine_key: str, decision_key: str) -> ModelVersion | None:
    """The version that stands for an engine by a decision, where it is registered."""
    asked = (engine_key, decision_key)
    return next(
        (v for v in versions(client, model) if (v.tags.get("engine_key"), v.tags.get("decision_key")) == asked), None
    )


def exists(client: MlflowClient, model: str, version: str) -> bool:
    """Say whether a version is there; MLflow drops a deleted one's aliases with it."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_model_version(model, version)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    return True


def link(client: MlflowClient, version: ModelVersion, tags: Mapping[str, str]) -> None:
    """Put what a promotion found onto its version; what it already says is not written again."""
    for name, value in tags.items():
        if value and version.tags.get(name) != value:
            client.set_model_version_tag(version.name, str(version.version), name, value)


def challenge(client: MlflowClient, model: str, version: str) -> None:
    """Name a winner challenger, unless it is champion already or was before this one."""
    known = (alias(client, model, CHAMPION), alias(client, model, PREVIOUS))
    if version not in [str(one.version) for one in known if one is not None]:
        client.set_registered_model_alias(model, CHALLENGER, version)


def _ensure_model(client: MlflowClient, model: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
