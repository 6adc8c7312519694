"""A campaign in MLflow: one parent run, a child run per candidate, a version per candidate that may be promoted.

Recording the same decision twice changes nothing; an interrupted recording is taken up where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from pipelines.config import Strict
from pipelines.decide.model import Candidate, Decision
from pipelines.errors import EnvironmentProblem
from pipelines.flow.progress import report as report_progress
from pipelines.flow.store import Fact, facts
from pipelines.track import figures, layers, versions, views, wording
from pipelines.track.connection import artifact_root, session
from pipelines.track.masking import masked, masked_text
from pipelines.track.report import read

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

COMPLETE = "quantgate.complete"
NAME_PARENT = "mlflow.parentRunId"


class TrackingConfig(Strict):
    """Where campaigns are recorded.

    experiment and registered_model: the campaign's name where empty.
    campaign_config: the resolved configuration, kept with the run; secrets in it are masked before anything is stored.
    """

    tracking_uri: str
    artifact_root: str = ""
    experiment: str = ""
    registered_model: str = ""
    campaign_config: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = Field(default=10.0, gt=0)

    @field_validator("campaign_config", mode="before")
    @classmethod
    def _without_secrets(cls, value: object) -> object:
        return masked(value)


@dataclass(frozen=True, slots=True)
class Campaign:
    """One recording: where it goes and what it is about."""

    client: MlflowClient
    experiment_id: str
    decision: Decision
    key: str
    model: str


def run(
    config: TrackingConfig,
    out: Path,
    *,
    decision: Path,
    report: Path,
    engines: Sequence[Path] = (),
    variants: Sequence[Path] = (),
    scores: Sequence[Path] = (),
    latency: Path | None = None,
) -> dict[str, Fact]:
    """Record a decided campaign; the campaign's key is the decision's.

    Raises:
        EnvironmentProblem: the server is away or refuses; nothing is lost, the next call goes on.
    """
    made = read(decision)
    with session(config.tracking_uri, timeout_s=config.timeout_s) as client:
        where = _experiment(client, config, made)
        campaign = Campaign(client, where, made, decision.name, config.registered_model or made.campaign)
        parent = _parent(campaign)
        of_key = {path.name: path for path in variants}
        children = {
            one.label: _child(campaign, parent, one, evidence_of(one, scores), of_key.get(_short(one, "variant")))
            for one in _counted(made.candidates)
        }
        link = _view(campaign)
        numbers = _versions(campaign, children, {path.name: path for path in engines})
        if not _complete(parent):
            _attach(campaign, parent, config, decision, report, latency)
    _write(out / "runs.yaml", {"parent": parent.info.run_id, "children": children, "versions": numbers, "link": link})
    return {
        "run_id": parent.info.run_id,
        "experiment_id": where,
        "experiment": config.experiment or made.campaign,
        "children": len(children),
        "link": link,
        "model": campaign.model if numbers else "",
        "model_version": numbers.get(made.winner or "", ""),
        "tracking_uri": masked_text(config.tracking_uri),
    }


def evidence_of(candidate: Candidate, scores: Sequence[Path]) -> dict[str, Path]:
    """A candidate's per-item scores by eval set, as the decision names them."""
    by_name = {path.name: path for path in scores}
    asked = {
        kind.removeprefix("scores/"): key[:16] for kind, key in candidate.keys.items() if kind.startswith("scores/")
    }
    return {eval_set: by_name[key] / "items.parquet" for eval_set, key in asked.items() if key in by_name}


def _short(candidate: Candidate, kind: str) -> str:
    """The name of the directory of what a candidate was made from, "" where it has none."""
    return candidate.keys.get(kind, "")[:16]


def _experiment(client: MlflowClient, config: TrackingConfig, decision: Decision) -> str:
    """The experiment's id, made where there is none."""
    from mlflow.exceptions import MlflowException

    name = config.experiment or decision.campaign
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            root = artifact_root(config.tracking_uri, config.artifact_root)
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


def _parent(campaign: Campaign) -> Run:
    """The campaign's run: found by its key, or begun."""
    made = campaign.decision
    found = _found(campaign, "campaign")
    if found:
        return found[0]
    tags = {
        "kind": "campaign",
        "campaign": made.campaign,
        "campaign_key": campaign.key,
        "verdict": made.outcome,
        "winner": made.winner or "",
        wording.NOTE: wording.campaign_text(made),
    }
    return campaign.client.create_run(campaign.experiment_id, run_name=f"{made.campaign} {campaign.key[:6]}", tags=tags)


def _child(
    campaign: Campaign, parent: Run, candidate: Candidate, evidence: Mapping[str, Path], variant: Path | None
) -> str:
    """A candidate's run: found and complete, found and finished now, or made."""
    from mlflow.entities import Metric, Param, RunTag

    client = campaign.client
    mine = [r for r in _found(campaign, "variant") if r.data.tags.get("candidate") == candidate.label]
    if mine and _complete(mine[0]):
        return str(mine[0].info.run_id)
    tags = wording.tags(candidate, campaign.decision, campaign.key) | {NAME_PARENT: parent.info.run_id}
    begun = mine[0] if mine else client.create_run(campaign.experiment_id, run_name=candidate.label, tags=tags)
    run_id, now = str(begun.info.run_id), int(time.time() * 1000)
    logged = begun.data.metrics
    shown = wording.metrics(candidate) | ({} if variant is None else layers.metrics(facts(variant)))
    metrics = [Metric(k, v, now, 0) for k, v in shown.items() if k not in logged]
    params = [Param(k, v) for k, v in wording.params(candidate).items()]
    for n in range(0, max(len(metrics), 1), 500):
        client.log_batch(run_id, metrics=metrics[n : n + 500], params=params if n == 0 else [], synchronous=True)
    for eval_set, path in evidence.items():
        client.log_artifact(run_id, str(path), artifact_path=f"scores/{wording.metric_name(eval_set)}")
    if variant is not None:
        client.log_text(run_id, layers.table(variant), layers.FILE)
        client.set_tag(run_id, layers.TABLES, layers.TAG)
        if config := layers.declared(variant):
            client.log_text(run_id, config, layers.DECLARED)
    client.log_batch(run_id, tags=[RunTag(COMPLETE, "true")], synchronous=True)
    client.set_terminated(run_id, "FAILED" if candidate.status == "failed" else "FINISHED")
    return run_id


def _attach(
    campaign: Campaign, parent: Run, config: TrackingConfig, decision: Path, report: Path, latency: Path | None
) -> None:
    """Give the parent its documents; its end is written last, so a finished parent is a complete recording."""
    import yaml

    client, run_id = campaign.client, parent.info.run_id
    client.log_text(run_id, yaml.safe_dump(config.campaign_config, sort_keys=False, allow_unicode=True), "config.yaml")
    for path in (decision / "decision.json", decision / "decision.md", report / "report.html", report / "pareto.svg"):
        if path.is_file():
            client.log_artifact(run_id, str(path))
    for name in ("requests.parquet", "blocks.parquet", "resources.parquet"):
        if latency is not None and (latency / name).is_file():
            client.log_artifact(run_id, str(latency / name), artifact_path="latency")
    client.set_tag(run_id, COMPLETE, "true")
    client.set_terminated(run_id, "FINISHED")


def _view(campaign: Campaign) -> str:
    """Save the view of this campaign's variants and give its link."""
    axis = figures.axis_of(campaign.decision)
    if axis is None:
        return views.fragment(campaign.experiment_id)
    x, y = wording.axis_name(campaign.decision, axis), "quality/mean_score"
    name = f"{campaign.decision.campaign} {campaign.key[:6]}: accuracy against {axis.short}"
    view = views.state(campaign.key, x, y, [x, "size/engine_mib", y])
    return views.save(campaign.client, campaign.experiment_id, campaign.key, name, int(time.time() * 1000), view)


def _versions(campaign: Campaign, children: Mapping[str, str], engines: Mapping[str, Path]) -> dict[str, str]:
    """Register each candidate that may be promoted, by label; the winner, and only a winner, becomes challenger."""
    made, found = campaign.decision, {}
    for one in made.candidates:
        engine = engines.get(one.keys.get("engine", "")[:16])
        if engine is None or (one.outcome != "promote" and one.label != made.winner):
            continue
        tags = versions.evidence(made, one, campaign.key, engine)
        found[one.label] = versions.ensure(campaign.client, campaign.model, tags, children.get(one.label))
    if made.outcome == "promote" and made.winner in found:
        campaign.client.set_registered_model_alias(campaign.model, versions.CHALLENGER, found[made.winner])
    return found


def _found(campaign: Campaign, kind: str) -> list[Run]:
    """This campaign's runs of one kind, oldest first."""
    asked = f"tags.kind = '{kind}' and tags.campaign_key = '{campaign.key}'"
    order = ["attributes.start_time ASC"]
    return list(campaign.client.search_runs([campaign.experiment_id], asked, max_results=1000, order_by=order))


def _complete(found: Run) -> bool:
    return bool(found.data.tags.get(COMPLETE) == "true" and found.info.status in ("FINISHED", "FAILED"))


def _counted(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    for n, one in enumerate(candidates):
        report_progress(n, len(candidates), "runs recorded")
        yield one
    report_progress(len(candidates), len(candidates), "runs recorded")


def _write(path: Path, data: object) -> None:
    import yaml

    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
