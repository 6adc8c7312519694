"""A campaign in MLflow: one parent run, a child run per candidate, a version per candidate that may be promoted.

Recording the same decision twice changes nothing; an interrupted recording is taken up where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.decide.model import Candidate
from pipelines.flow.progress import report as report_progress
from pipelines.flow.store import Fact, manifest
from pipelines.track import children, figures, parent, versions, views, wording
from pipelines.track.children import Campaign, Evidence
from pipelines.track.config import TrackingConfig
from pipelines.track.connection import persistently, whole
from pipelines.track.report import CHARTS, read

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

DECIDED = "decided"


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
    made, uri = read(decision), whole(config.tracking_uri)
    known = {path.name: path for path in engines}
    evidence = {one.label: Evidence.of(one, scores, variants, latency) for one in made.candidates}

    def record(client: MlflowClient) -> dict[str, Fact]:
        where = parent.experiment(client, config, made.campaign)
        model = config.registered_model or made.campaign
        champion = versions.alias(client, model, versions.CHAMPION)
        engine = champion.tags.get("engine_key", "") if champion is not None else ""
        campaign = Campaign(client, where, made, decision.name, model, engine[:16])
        found = _parent(campaign, config)
        mine = children.recorded(campaign)
        labels = {
            one.label: children.record(campaign, found, one, evidence[one.label], mine.get(one.label))
            for one in _counted(made.candidates)
        }
        link = _view(campaign)
        views.describe(client, where, views.note(made.headline, where, found.info.run_id))
        numbers = _versions(campaign, labels, known, manifest(decision).started)
        if not children.complete(found):
            _attach(campaign, found, config, decision, report, latency)
        _write(out / "runs.yaml", {"parent": found.info.run_id, "children": labels, "versions": numbers, "link": link})
        return {
            "run_id": found.info.run_id,
            "experiment_id": where,
            "experiment": config.experiment or made.campaign,
            "children": len(labels),
            "link": link,
            "model": campaign.model if numbers else "",
            "model_version": numbers.get(made.winner or "", ""),
            "tracking_uri": config.tracking_uri,
        }

    return persistently(uri, record, timeout_s=config.timeout_s, patience_s=config.patience_s)


def _parent(campaign: Campaign, config: TrackingConfig) -> Run:
    """The campaign's run: this decision's, or the one that was opened before the work, or one begun now."""
    from mlflow.entities import RunTag

    client, where, made = campaign.client, campaign.experiment_id, campaign.decision
    known = parent.runs_of(client, where, parent.CAMPAIGN, parent.TAKEN, campaign.key)
    opened = parent.opened(client, where, config.plan_key)
    if known:
        if opened is not None:  # the work was done again and came to the same decision
            parent.end(client, opened.info.run_id, "SPARE", "")
        return known[0]
    called = parent.name(made.campaign, campaign.key)
    said = parent.identity(config, made.campaign) | {
        parent.TAKEN: campaign.key,
        "verdict": made.outcome,
        "winner": made.winner or "",
        **wording.licence(made),
        wording.NOTE: wording.campaign_text(made),
    }
    if opened is None:
        return client.create_run(where, run_name=called, tags=said)
    run_id = str(opened.info.run_id)
    client.update_run(run_id, status="RUNNING", name=called)
    client.log_batch(run_id, tags=[RunTag(key, text) for key, text in said.items()], synchronous=True)
    return client.get_run(run_id)


def _attach(
    campaign: Campaign, found: Run, config: TrackingConfig, decision: Path, report: Path, latency: Path | None
) -> None:
    """Give the parent its documents; its end is written last, so a finished parent is a complete recording."""
    client, run_id = campaign.client, found.info.run_id
    if not parent.attempts(found):
        parent.describe(client, run_id, config, 1)
    for path in (decision / "decision.json", decision / "decision.md", report / "report.html"):
        if path.is_file():
            client.log_artifact(run_id, str(path))
    if (report / CHARTS).is_dir():
        client.log_artifacts(run_id, str(report / CHARTS), artifact_path=CHARTS)
    for name in ("requests.parquet", "blocks.parquet", "resources.parquet"):
        if latency is not None and (latency / name).is_file():
            client.log_artifact(run_id, str(latency / name), artifact_path="latency")
    client.set_tag(run_id, children.COMPLETE, "true")
    client.set_terminated(run_id, "FINISHED")


def _view(campaign: Campaign) -> str:
    """Save the view of this campaign's variants and give its link."""
    axis = figures.axis_of(campaign.decision)
    if axis is None:
        return views.fragment(campaign.experiment_id)
    x, y = wording.axis_name(campaign.decision, axis), "quality/mean_score"
    name = f"{campaign.decision.campaign} {campaign.key[:6]}: accuracy against {axis.short}"
    view = views.state(campaign.key, x, y, [x, "size/engine_gib", y])
    return views.save(campaign.client, campaign.experiment_id, campaign.key, name, int(time.time() * 1000), view)


def _versions(
    campaign: Campaign, labels: Mapping[str, str], engines: Mapping[str, Path], decided: str
) -> dict[str, str]:
    """Register each candidate that may be promoted, by label; the winner, and only a winner, becomes challenger.

    A challenger of a later decision stays: campaigns may be recorded long after they were decided.
    """
    made, client, found = campaign.decision, campaign.client, {}
    for one in made.candidates:
        engine = engines.get(one.keys.get("engine", "")[:16])
        if engine is None or (one.outcome != "promote" and one.label != made.winner):
            continue
        tags = versions.evidence(made, one, campaign.key, engine) | {DECIDED: decided}
        found[one.label] = versions.ensure(client, campaign.model, tags, labels.get(one.label))
    if made.outcome == "promote" and made.winner in found:
        now = versions.alias(client, campaign.model, versions.CHALLENGER)
        if now is None or now.tags.get(DECIDED, "") <= decided:
            versions.challenge(client, campaign.model, found[made.winner])
    return found


def _counted(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    for n, one in enumerate(candidates):
        report_progress(n, len(candidates), "runs recorded")
        yield one
    report_progress(len(candidates), len(candidates), "runs recorded")


def _write(path: Path, data: object) -> None:
    import yaml

    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
