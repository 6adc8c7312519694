"""The run that stands for a campaign: opened before any work, found again by whoever goes on, ended once.

It is known by the key its decision has if nothing fails (`plan_key`), until a decision takes it (`campaign_key`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pipelines.errors import EnvironmentProblem
from pipelines.track import connection, layers
from pipelines.track.config import TrackingConfig
from pipelines.track.masking import masked_text
from pipelines.track.opening import Opening, PlannedStep
from pipelines.track.wording import NOTE, NOTE_CHARACTERS

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

CAMPAIGN, TAKEN, PLANNED = "campaign", "campaign_key", "plan_key"
ATTEMPTS = "attempts"
CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
End = Literal["FAILED", "KILLED", "SPARE"]
"""How a run ends that no decision took: the campaign failed, was stopped, or came to a decision recorded before."""


def experiment(client: MlflowClient, config: TrackingConfig, campaign: str) -> str:
    """The experiment's id, made where there is none.

    Raises:
        EnvironmentProblem: the user deleted it.
    """
    from mlflow.exceptions import MlflowException

    name = config.experiment or campaign
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            root = connection.artifact_root(connection.whole(config.tracking_uri), config.artifact_root)
            tags = {"mlflow.experimentKind": "custom_model_development"}  # opens on runs, not on traces
            return str(client.create_experiment(name, artifact_location=root, tags=tags))
        except MlflowException as error:
            found = client.get_experiment_by_name(name)
            if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
                raise
    if found.lifecycle_stage != "active":
        raise EnvironmentProblem(
            f"tracking.experiment={name!r}: that experiment was deleted in MLflow; choose another name, or restore it "
            f"with `mlflow experiments restore --experiment-id {found.experiment_id}`"
        )
    return str(found.experiment_id)


def runs_of(client: MlflowClient, experiment_id: str, kind: str, tag: str, key: str) -> list[Run]:
    """The runs of one kind that have a key in a tag, oldest first."""
    asked, order = f"tags.kind = '{kind}' and tags.{tag} = '{key}'", ["attributes.start_time ASC"]
    found: list[Run] = []
    token: str | None = ""
    while token is not None:
        page = client.search_runs([experiment_id], asked, max_results=1000, order_by=order, page_token=token or None)
        found += page
        token = page.token or None
    return found


def opened(client: MlflowClient, experiment_id: str, plan_key: str) -> Run | None:
    """The run that was opened for this plan and that no decision has taken yet."""
    found = runs_of(client, experiment_id, CAMPAIGN, PLANNED, plan_key) if plan_key else []
    return next((run for run in found if TAKEN not in run.data.tags), None)


def begin(client: MlflowClient, config: TrackingConfig, campaign: str) -> str:
    """Open the run of a campaign that is about to work, or go on with the one an interrupted attempt left.

    Raises:
        EnvironmentProblem: as for `experiment`.
    """
    where = experiment(client, config, campaign)
    left = opened(client, where, config.plan_key)
    made = left or client.create_run(where, run_name=name(campaign, config.plan_key), tags=identity(config, campaign))
    run_id = str(made.info.run_id)
    if left is not None:
        client.update_run(run_id, status="RUNNING")
    _say(client, run_id, {"verdict": "running", NOTE: _begun(config.opening)})
    describe(client, run_id, config, attempts(made) + 1)
    return run_id


def name(campaign: str, key: str) -> str:
    """What the run is called in lists."""
    return f"{campaign} {key[:6]}"


def identity(config: TrackingConfig, campaign: str) -> dict[str, str]:
    """What the run is found by."""
    found = {"kind": CAMPAIGN, "campaign": campaign, PLANNED: config.plan_key, "mlflow.source.name": "quantgate"}
    return {tag: text for tag, text in found.items() if text}


def attempts(run: Run) -> int:
    """How often the campaign of this run began to work; 0 where nothing was said of it yet."""
    return int(run.data.tags.get(ATTEMPTS, 0))


def describe(client: MlflowClient, run_id: str, config: TrackingConfig, attempt: int) -> None:
    """Keep with the run what it does and with what: configuration, plan, environment, state of the user's files.

    Every attempt adds its plan. The number of attempts is written last: an unfinished description is done again.
    """
    import yaml

    client.log_text(run_id, yaml.safe_dump(config.campaign_config, sort_keys=False, allow_unicode=True), CONFIG)
    told = config.opening
    tags: dict[str, str] = {}
    if told is not None:
        client.log_text(run_id, _table(told), plan_file(attempt))
        client.log_text(run_id, told.model_dump_json(indent=1, exclude={"plan"}) + "\n", ENVIRONMENT)
        tags = _git_tags(told.git)
        listed = [{"path": plan_file(n), "type": "table"} for n in range(1, attempt + 1)]
        tags |= {layers.TABLES: json.dumps(listed), "python": told.python, "device": _line(told.device)}
    _say(client, run_id, tags | {ATTEMPTS: str(attempt)})


def plan_file(attempt: int) -> str:
    return "plan.json" if attempt == 1 else f"plan-{attempt}.json"


def end(client: MlflowClient, run_id: str, how: End, reason: str) -> None:
    """End a run that was opened here. One that a decision took keeps what is said of it, and is not complete."""
    run = client.get_run(run_id)
    taken = TAKEN in run.data.tags
    if run.info.status != "RUNNING" or (taken and how == "SPARE"):
        return
    if how == "SPARE":
        client.set_terminated(run_id, "KILLED")
        client.delete_run(run_id)
        return
    if not taken:
        text = f"**{'Failed' if how == 'FAILED' else 'Stopped'}:** {masked_text(reason.strip())}"
        _say(client, run_id, {"verdict": how.lower(), NOTE: text[:NOTE_CHARACTERS]})
    client.set_terminated(run_id, how)


def _say(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, text) for key, text in tags.items()], synchronous=True)


def _begun(told: Opening | None) -> str:
    if told is None:
        return "**Running.**"
    return (
        f"**Running** since {told.started}: {told.to_do} steps to do, {len(told.plan) - told.to_do} reused.\n\n"
        "The plan and the configuration are among the artifacts; the decision takes this place."
    )


def _table(told: Opening) -> str:
    """The plan in the form of MLflow's tables."""
    columns = list(PlannedStep.model_fields)
    rows: list[list[Any]] = [[getattr(step, column) for column in columns] for step in told.plan]
    return json.dumps({"columns": columns, "data": rows})


def _git_tags(git: Mapping[str, str]) -> dict[str, str]:
    names: dict[str, str] = {
        "commit": "mlflow.source.git.commit", "branch": "mlflow.source.git.branch",
        "remote": "mlflow.source.git.repoURL", "dirty": "git_dirty",
    }  # fmt: skip
    return {names[key]: text for key, text in git.items()}


def _line(device: Mapping[str, str]) -> str:
    return ", ".join(_parts(device))


def _parts(device: Mapping[str, str]) -> Iterator[str]:
    yield device.get("cpu", "unknown processor")
    if device.get("gpu", "none") != "none":
        yield device["gpu"]
