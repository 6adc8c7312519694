"""A candidate in MLflow: one run with params, figures, tags, data sets, evidence and plots, whatever became of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.decide.model import Candidate, Decision
from pipelines.flow.store import MANIFEST, facts, manifest
from pipelines.track import charts, drawing, figures, layers, parent, wording

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run
    from mlflow.tracking import MlflowClient

COMPLETE = "quantgate.complete"
VARIANT, NAME_PARENT, CHAMPION = "variant", "mlflow.parentRunId", "champion"
DIGEST_CHARACTERS = 36
"""Of a data set's digest MLflow takes so many; the whole one is a tag of the input."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """One recording: where it goes and what it is about. `champion` is the engine of the champion of now, if any."""

    client: MlflowClient
    experiment_id: str
    decision: Decision
    key: str
    model: str
    champion: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What there is of a candidate on disk: its scores by eval set, its variant, the probe of all engines."""

    scores: Mapping[str, Path] = field(default_factory=dict)
    variant: Path | None = None
    latency: Path | None = None

    @classmethod
    def of(
        cls, candidate: Candidate, scores: Sequence[Path], variants: Sequence[Path], latency: Path | None
    ) -> Evidence:
        """The artifacts that a candidate's keys name, of those that are there."""
        by_name = {path.name: path for path in scores}
        asked = {
            kind.removeprefix("scores/"): key[:16] for kind, key in candidate.keys.items() if kind.startswith("scores/")
        }
        variant = {path.name: path for path in variants}.get(candidate.keys.get("variant", "")[:16])
        return cls({name: by_name[key] for name, key in asked.items() if key in by_name}, variant, latency)

    @property
    def calibration(self) -> str:
        """The key of the calibration set the variant was made with, "none" where it was shown nothing."""
        if self.variant is None or not (self.variant / MANIFEST).is_file():
            return ""
        return str(manifest(self.variant).inputs.get("calibration", "none"))[:16]


def recorded(campaign: Campaign) -> dict[str, Run]:
    """This campaign's runs by candidate; the oldest where there are several."""
    found = parent.runs_of(campaign.client, campaign.experiment_id, VARIANT, parent.TAKEN, campaign.key)
    return {run.data.tags.get("candidate", ""): run for run in reversed(found)}


def complete(found: Run) -> bool:
    return bool(found.data.tags.get(COMPLETE) == "true" and found.info.status in ("FINISHED", "FAILED"))


def record(campaign: Campaign, above: Run, candidate: Candidate, evidence: Evidence, begun: Run | None) -> str:
    """A candidate's run: found complete, found and finished now, or made."""
    from mlflow.entities import Metric, Param, RunTag

    if begun is not None and complete(begun):
        return str(begun.info.run_id)
    client, made = campaign.client, campaign.decision
    champion = bool(campaign.champion) and candidate.keys.get("engine", "")[:16] == campaign.champion
    tags = wording.tags(candidate, made, campaign.key)
    tags |= {NAME_PARENT: above.info.run_id, CHAMPION: str(champion).lower()}
    run = begun or client.create_run(campaign.experiment_id, run_name=candidate.label, tags=tags)
    run_id, when = str(run.info.run_id), int(run.info.start_time)  # of the run, so that a figure sent twice is one
    shown = wording.metrics(candidate, made)
    shown |= {} if evidence.variant is None else layers.metrics(facts(evidence.variant))
    metrics = [Metric(name, value, when, 0) for name, value in shown.items()]
    params = [Param(k, v) for k, v in wording.params(candidate, made, evidence.calibration).items()]
    for n in range(0, max(len(metrics), 1), 500):
        client.log_batch(run_id, metrics=metrics[n : n + 500], params=params if n == 0 else [], synchronous=True)
    if inputs := list(_datasets(evidence.scores)):
        client.log_inputs(run_id, datasets=inputs)
    _attach(client, run_id, candidate, evidence)
    for name, drawn in _plots(made, candidate, evidence.latency):
        client.log_text(run_id, drawn, f"plots/{name}.svg")
    client.log_batch(run_id, tags=[RunTag(COMPLETE, "true")], synchronous=True)
    client.set_terminated(run_id, "FAILED" if candidate.status == "failed" else "FINISHED")
    return run_id


def _attach(client: MlflowClient, run_id: str, candidate: Candidate, evidence: Evidence) -> None:
    """Items, requests and layers as files of the run."""
    for eval_set, scores in evidence.scores.items():
        client.log_artifact(run_id, str(scores / "items.parquet"), f"scores/{wording.metric_name(eval_set)}")
    if evidence.latency is not None:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "requests.parquet"
            if _own_requests(evidence.latency, candidate.keys.get("engine", "")[:16], path):
                client.log_artifact(run_id, str(path), "latency")
    if evidence.variant is not None:
        client.log_text(run_id, layers.table(evidence.variant), layers.FILE)
        client.set_tag(run_id, layers.TABLES, layers.TAG)
        if config := layers.declared(evidence.variant):
            client.log_text(run_id, config, layers.DECLARED)


def _own_requests(latency: Path, engine: str, path: Path) -> bool:
    """Write the requests that one engine answered; False where there are none."""
    import pyarrow.parquet as pq

    source = latency / "requests.parquet"
    if not engine or not source.is_file():
        return False
    rows = pq.read_table(source, filters=[("engine", "=", engine)])
    if rows.num_rows:
        pq.write_table(rows, path)
    return bool(rows.num_rows)


def _datasets(scores: Mapping[str, Path]) -> Iterator[DatasetInput]:
    """The eval sets by the digest of what was drawn from them, as the scores' own manifests have it."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    for name, path in scores.items():
        made = manifest(path)
        digest = str(made.config.get("digest", ""))
        if digest:
            items = f'{{"num_rows": {made.facts.get("items", 0)}}}'
            source = f'{{"eval_set": "{wording.metric_name(name)}"}}'
            tags = [InputTag("mlflow.data.context", "evaluation"), InputTag("digest", digest)]
            yield DatasetInput(Dataset(name, digest[:DIGEST_CHARACTERS], "local", source, profile=items), tags)


def _plots(decision: Decision, candidate: Candidate, latency: Path | None) -> Iterator[tuple[str, str]]:
    """Its losses against their margins, and its latencies with the reference's, each as a file of its own."""
    others = [one for one in decision.candidates if one.reference and one.label != candidate.label]
    if candidate.verdicts:
        yield (
            "losses",
            drawing.standalone(charts.forest(figures.rows([candidate]), title=f"Losses of {candidate.label}")),
        )
    axis = figures.axis_of(decision)
    if axis is None or latency is None or not candidate.latency or not (latency / "requests.parquet").is_file():
        return
    for n, curves in enumerate(figures.curves(decision, latency, axis, [*others, candidate]).values(), 1):
        title = f"Share of requests within each latency: {', '.join(curve.label for curve in curves)}"
        drawn = charts.ecdf(curves, x_title=f"{axis.metric.removesuffix('_ms').upper()}, ms", title=title)
        yield f"latency-{n}", drawing.standalone(drawn)
