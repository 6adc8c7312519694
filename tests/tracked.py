"""A store with made-up artifacts of a decision, and an MLflow on sqlite to record it in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.decide.model import Decision
from pipelines.flow.store import Store
from pipelines.release.registry import Registry
from pipelines.track import runs
from pipelines.track.config import TrackingConfig
from pipelines.track.connection import session
from tests import decisions

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient


class Crash(BaseException):
    """Stands for the end of the process at one place."""


@dataclass(frozen=True)
class World:
    """One store, one MLflow, and what to record."""

    root: Path

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.root}/mlruns/mlflow.db"

    @property
    def store(self) -> Store:
        return Store(self.root / "store")

    @property
    def registry(self) -> Registry:
        return Registry(self.uri, self.root / "mlruns" / "ledger.jsonl", "demo")

    def decided(self, made: Decision) -> Path:
        return decisions.decided(self.root / "store", made)

    def record(self, decision: Path, config: TrackingConfig | None = None) -> dict[str, object]:
        out, report, store = self.root / "out", self.root / "report", self.root / "store"
        out.mkdir(exist_ok=True)
        report.mkdir(exist_ok=True)
        (report / "report.html").write_text("<p>report</p>")
        found = runs.run(
            config or TrackingConfig(tracking_uri=self.uri),
            out,
            decision=decision,
            report=report,
            engines=sorted((store / "engine").iterdir()),
            variants=sorted((store / "variant").iterdir()),
            scores=sorted((store / "scores").iterdir()),
            latency=next((store / "latency").iterdir()),
        )
        return dict(found)

    def aliases(self) -> dict[str, str]:
        with session(self.uri) as client:
            return {str(k): str(v) for k, v in client.get_registered_model("demo").aliases.items()}


def found(client: MlflowClient, kind: str) -> list[Run]:
    experiments = [e.experiment_id for e in client.search_experiments()]
    return list(client.search_runs(experiments, f"tags.kind = '{kind}'"))
