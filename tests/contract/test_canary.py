"""`quantgate canary` as a user meets it: plans from the ledger, exit codes, and evidence that lies in MLflow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import main
from pipelines.decide.traffic import Line
from pipelines.release import rollout
from pipelines.release.ledger import Change, Ledger
from pipelines.release.rolloutdata import from_run
from pipelines.track.connection import session
from pipelines.verbs.canary import after_promotion
from tests import decisions
from tests.rollouts import a_plan, decision, traffic


def written(path: Path, lines: Sequence[Line]) -> str:
    path.write_text("\n".join(line.model_dump_json(exclude_unset=True) for line in lines))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], str]:
    code = main(["canary", *argv, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), out + err


@pytest.fixture
def promoted(tmp_path: Path) -> list[str]:
    """Overrides for a store and a ledger in which the made-up winner was promoted over version 2."""
    made = decision()
    at = decisions.decided(tmp_path / "store", made)
    winner = next(c for c in made.candidates if c.label == made.winner)
    change = Change(
        action="promote", model="demo", version="3", champion_before="2", previous_before=None, actor="anna",
        override_reason=None, decision_key=at.name, engine_key=winner.keys["engine"][:16],
    )  # fmt: skip
    ledger = Ledger(tmp_path / "mlruns" / "ledger.jsonl")
    with ledger.locked():
        ledger.append("t", "committed", change)
    return [
        "campaign=demo", f"paths.store={tmp_path / 'store'}", f"paths.ledger={tmp_path / 'mlruns' / 'ledger.jsonl'}",
    ]  # fmt: skip


def test_a_plan_is_written_for_the_champion(
    capsys: pytest.CaptureFixture[str], promoted: list[str], tmp_path: Path
) -> None:
    """Beside the ledger, with the settings given, the gateway, and the command that undoes the promotion."""
    code, document, out = run(capsys, "plan", *promoted, "rollout.requests_per_s=50", "rollout.steps=[10,100]")
    path = tmp_path / "mlruns" / "rollouts" / "demo" / "3" / "plan.yaml"
    assert (0, str(path)) == (code, document["plan"])
    assert [10.0, 100.0] == [s["percent"] for s in document["steps"]]
    assert f"quantgate rollback campaign=demo paths.store={tmp_path / 'store'}" in document["rollback"]
    assert path.with_name("haproxy.cfg").is_file()
    assert "quantgate canary check" in out
    assert rollout.read(path).model_dump(mode="json").items() <= document.items()


def test_a_plan_holds_no_password(capsys: pytest.CaptureFixture[str], promoted: list[str], tmp_path: Path) -> None:
    """The command to roll back names the database, not who may open it."""
    code, document, _ = run(capsys, "plan", *promoted, "tracking.uri=postgresql://me:hunter2@db/mlflow")
    assert (0, True) == (code, "@db/mlflow" in document["rollback"])
    assert not [p for p in (tmp_path / "mlruns").rglob("*") if p.is_file() and "hunter2" in p.read_text()]


def test_nothing_to_plan_is_said(capsys: pytest.CaptureFixture[str], promoted: list[str], tmp_path: Path) -> None:
    """Nobody was promoted; or the champion came back by a rollback; or the decision is gone."""
    code, document, _ = run(capsys, "plan", *promoted, "campaign=other")
    assert (7, True) == (code, "nothing was promoted" in document["message"])
    decided = next((tmp_path / "store" / "decision").glob("*/decision.json"))
    decided.unlink()
    code, document, _ = run(capsys, "plan", *promoted)
    assert (7, True) == (code, str(decided) in document["message"])


def test_a_promotion_stands_where_its_plan_cannot_be_written(
    capsys: pytest.CaptureFixture[str], promoted: list[str], tmp_path: Path
) -> None:
    """What `promote` calls last: it gives the plan's place, or says why there is none, and raises nothing."""
    path = tmp_path / "mlruns" / "rollouts" / "demo" / "3" / "plan.yaml"
    assert str(path) == after_promotion(promoted, None)
    assert path.is_file()
    next((tmp_path / "store" / "decision").glob("*/decision.json")).write_text("{}")
    assert "" == after_promotion(promoted, None)
    assert "warning: no rollout plan was written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arms", "code", "word"),
    [({}, 0, "continue"), ({"right": (0.8, 0.76)}, 3, "hold"), ({"right": (0.8, 0.4)}, 4, "roll_back")],
)
def test_the_exit_code_is_the_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arms: dict[str, Any], code: int, word: str
) -> None:
    """0, 3 and 4, the same word in the document and the record, and what to do now."""
    path = rollout.write(a_plan(), tmp_path)
    data = written(tmp_path / "step.jsonl", traffic(a_plan(), 1, 1200, **arms))
    found, document, out = run(capsys, "check", str(path), "--step", "1", "--data", data)
    assert (code, word) == (found, document["answer"])
    recorded = json.loads(path.with_name("plan.record.jsonl").read_text())
    assert (word, data) == (recorded["answer"], recorded["data"])
    told = {
        "continue": "go on to step 2: 50% of users, CANARY_BUCKETS=5000",
        "hold": "stay at 20%",
        "roll_back": "quantgate rollback campaign=demo --reason 'canary step 1: quality: ",
    }
    assert told[word] in document["next"] and told[word] in out


def test_data_that_are_no_evidence_end_with_seven(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Bad lines by number; a split that is none."""
    path = rollout.write(a_plan(), tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"arm": "canary"}\n{"arm": "both"}\n')
    code, document, _ = run(capsys, "check", str(path), "--step", "1", "--data", str(tmp_path / "bad.jsonl"))
    assert (7, True) == (code, "line 2: arm" in document["message"])
    lines = [line for line in traffic(a_plan(), 1, 1200) if line.arm == "canary"]
    code, document, _ = run(capsys, "check", str(path), "--step", "1", "--data", written(tmp_path / "half", lines))
    assert (7, True) == (code, "planned is 20%" in document["message"])


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_evidence_can_lie_in_mlflow(tmp_path: Path, capsys: pytest.CaptureFixture[str], promoted: list[str]) -> None:
    """Metrics of which one step is one request, or an artifact, which then counts alone."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with session(uri) as client:
        experiment = client.create_experiment("live", artifact_location=str(tmp_path / "artifacts"))
        run_id = client.create_run(experiment).info.run_id
        for n in range(3):
            at = 1_796_112_000_000 + 1000 * n
            client.log_metric(run_id, "canary/e2e_ms", 400.0 + n, timestamp=at, step=n)
            client.log_metric(run_id, "canary/error", float(n == 2), timestamp=at, step=n)
            client.log_metric(run_id, "control/correct", 1.0, timestamp=at, step=n)
        empty = client.create_run(experiment).info.run_id
    lines = from_run(uri, run_id, 1).lines
    assert [("control", None, True)] * 3 == [(x.arm, x.e2e_ms, x.correct) for x in lines[:3]]
    assert [(400.0, False), (401.0, False), (402.0, True)] == [(x.e2e_ms, x.error) for x in lines[3:]]
    assert 2.0 == (lines[5].at - lines[3].at).total_seconds()  # type: ignore[operator]
    path = rollout.write(a_plan(), tmp_path)
    with session(uri) as client:
        written(tmp_path / "step-1.jsonl", traffic(a_plan(), 1, 1200))
        client.log_artifact(run_id, str(tmp_path / "step-1.jsonl"), "canary")
    args = [*promoted, f"tracking.uri={uri}"]
    code, document, _ = run(capsys, "check", str(path), *args, "--step", "1", "--mlflow-run", run_id)
    assert (0, "continue") == (code, document["answer"])
    code, document, _ = run(capsys, "check", str(path), *args, "--step", "1", "--mlflow-run", empty)
    assert (7, True) == (code, "no artifact canary/step-1.jsonl" in document["message"])
