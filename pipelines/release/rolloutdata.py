"""Reads what a step of a rollout brought: JSON lines, or the metrics or artifacts of an MLflow run. Strict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from pipelines.decide.traffic import Line
from pipelines.errors import EvidenceError, InputError
from pipelines.track.connection import session

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

FIELDS = ("score", "correct", "ttft_ms", "tpot_ms", "e2e_ms", "error")
SHOWN = 10


@dataclass(frozen=True, slots=True)
class Data:
    """The lines of a step, where they came from and the hash of what was read."""

    name: str
    sha256: str
    lines: tuple[Line, ...]


def from_file(path: Path) -> Data:
    """Read a JSONL file.

    Raises:
        InputError: it cannot be read.
        EvidenceError: lines are none of a step's, or there are none; they are named by number.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return parsed(str(path), content)


def parsed(name: str, content: bytes) -> Data:
    """Read JSON lines."""
    lines, bad = [], []
    for number, text in enumerate(content.splitlines(), start=1):
        try:
            lines.append(Line.model_validate_json(text, strict=True))
        except ValidationError as error:
            bad.append(f"line {number}: {_why(error)}")
    if bad:
        more = f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        listed = "\n  ".join(bad[:SHOWN])
        raise EvidenceError(f"{name}: {len(bad)} bad lines\n  {listed}{more}")
    if not lines:
        raise EvidenceError(f"{name}: no line in it")
    return Data(name, hashlib.sha256(content).hexdigest(), tuple(lines))


def _why(error: ValidationError) -> str:
    told = []
    for e in error.errors(include_url=False, include_input=False):
        key = str(e["loc"][0]) if e["loc"] else ""
        message = e["msg"].removeprefix("Value error, ")
        if e["type"] == "extra_forbidden":
            message = f"unknown key (allowed: {', '.join(Line.model_fields)})"
        told.append(f"{key}: {message}" if key else message)
    return "; ".join(dict.fromkeys(told))


def from_run(tracking_uri: str, run_id: str, step: int) -> Data:
    """Read an MLflow run: its artifact `canary/step-N.jsonl`, else the histories of metrics named `canary/e2e_ms`,
    `control/score` and so on, of which one step of MLflow is one request.

    Raises:
        EnvironmentProblem: there is no such run, or no MLflow.
        EvidenceError: it has neither, or they are not as they should be.
    """
    with session(tracking_uri) as client:
        name = f"canary/step-{step}.jsonl"
        if name in {found.path for found in client.list_artifacts(run_id, "canary")}:
            return parsed(f"{name} of run {run_id}", Path(client.download_artifacts(run_id, name)).read_bytes())
        rows = [row for arm in ("control", "canary") for row in _requests(client, run_id, arm)]
    if not rows:
        raise EvidenceError(
            f"run {run_id}: no artifact {name}, and no metric named canary/FIELD or control/FIELD "
            f"(FIELD: {', '.join(FIELDS)})"
        )
    return parsed(f"metrics of run {run_id}", "\n".join(json.dumps(row, sort_keys=True) for row in rows).encode())


def _requests(client: MlflowClient, run_id: str, arm: str) -> Sequence[dict[str, object]]:
    """One arm's requests, joined over its metrics by MLflow's step."""
    found: dict[int, dict[str, object]] = {}
    for field in FIELDS:
        for metric in client.get_metric_history(run_id, f"{arm}/{field}"):
            at = datetime.fromtimestamp(metric.timestamp / 1000, UTC).isoformat()
            row = found.setdefault(metric.step, {"arm": arm, "at": at})
            if field in row:
                raise EvidenceError(f"run {run_id}: {arm}/{field} has step {metric.step} twice; a step is a request")
            whole = field in ("correct", "error") and metric.value in (0.0, 1.0)
            row[field] = bool(metric.value) if whole else metric.value
    return [found[step] for step in sorted(found)]
