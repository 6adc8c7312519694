"""`quantgate track --resume`: what MLflow lacks is recorded once, whatever kept it away."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipelines import cli
from pipelines.decide.model import Decision
from pipelines.flow.executor import execute
from pipelines.flow.plan import plan
from pipelines.flow.store import manifest
from pipelines.track.config import TrackingConfig
from pipelines.track.connection import session
from pipelines.verbs.tracking import Asked, step
from tests import decisions
from tests.tracked import World, found

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
AWAY = "http://127.0.0.1:9"


def keys(world: World, kind: str) -> list[str]:
    return [manifest(path).key for path in sorted((world.store.root / kind).iterdir())]


def refused(world: World, made: Decision) -> None:
    """Record a decision as the end of a run does, on a server that is not there: the request is all that is left."""
    world.store.prepare()
    decision = world.decided(made)
    report = decisions.artifact(world.store.root / "report" / decision.name, "report", manifest(decision).key)
    (report / "report.html").write_text("<p>report</p>")
    inputs: Mapping[str, str | list[str]] = {
        "decision": manifest(decision).key,
        "report": manifest(report).key,
        "latency": keys(world, "latency")[0],
        **{name: keys(world, kind) for name, kind in (("engines", "engine"), ("variants", "variant"))},
        "scores": keys(world, "scores"),
    }
    config = TrackingConfig(tracking_uri=AWAY, experiment=made.campaign, registered_model="demo", timeout_s=1.0)
    wanted = step(Asked(config.model_dump(mode="json"), inputs), AWAY, "")
    (outcome,) = [
        o for o in execute(plan([wanted], world.store), world.store, lambda _: None, {}).values() if o.state == "failed"
    ]
    assert "127.0.0.1:9" in outcome.message
    assert "quantgate track --resume" in outcome.message


def resume(world: World, capsys: pytest.CaptureFixture[str], *more: str, uri: str = "") -> tuple[int, dict[str, Any]]:
    words = ["track", "--resume", f"tracking.uri={uri or world.uri}", f"paths.store={world.store.root}", *more]
    code = cli.main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_what_was_not_recorded_is_recorded_once(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that was away: two campaigns go up by name and together; again nothing changes; a lost database is
    filled anew."""
    refused(world, decisions.decision())
    refused(world, decisions.decision("hold").model_copy(update={"campaign": "other"}))
    code, document = resume(world, capsys, "campaign=other")
    assert (0, 1, 0, {}) == (code, len(document["recorded"]), document["before"], document["failed"])
    code, document = resume(world, capsys)
    assert (0, 1, 1) == (code, len(document["recorded"]), document["before"])
    code, document = resume(world, capsys)
    assert (0, [], 2) == (code, document["recorded"], document["before"])
    with session(world.uri) as client:
        assert (2, 12) == (len(found(client, "campaign")), len(found(client, "variant")))
    elsewhere = f"sqlite:///{world.root}/elsewhere/mlflow.db"
    assert 2 == len(resume(world, capsys, uri=elsewhere)[1]["recorded"])
    (world.root / "elsewhere" / "mlflow.db").unlink()
    assert 2 == len(resume(world, capsys, uri=elsewhere)[1]["recorded"])


def test_a_server_that_is_still_away_and_evidence_that_is_gone_are_told(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 6 with the address; what was collected from the store cannot be recorded, and is named."""
    refused(world, decisions.decision())
    code, document = resume(world, capsys, uri=AWAY)
    assert (6, True) == (code, "127.0.0.1:9" in document["message"])
    engine = next((world.store.root / "engine").iterdir())
    world.store.remove("engine", manifest(engine).key)
    code, document = resume(world, capsys)
    assert (0, [], [f"engine/{engine.name}"]) == (code, document["recorded"], list(document["gone"].values()))


def test_the_verb_does_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without --resume it says what is missing; a store without decisions is nothing to record."""
    assert 2 == cli.main(["track", f"paths.store={tmp_path}"])
    assert "--resume" in capsys.readouterr().err
    assert 0 == cli.main(["track", "--resume", f"paths.store={tmp_path}", f"tracking.uri=sqlite:///{tmp_path}/x.db"])
    assert "0 recorded now, 0 were recorded before, 0 failed" in capsys.readouterr().out
