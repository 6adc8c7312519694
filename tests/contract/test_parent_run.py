"""The run that stands for a campaign, from before the work to its end, against a real MLflow on sqlite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from pipelines.flow.plan import Plan
from pipelines.track import opening, parent
from pipelines.track.config import TrackingConfig
from pipelines.track.connection import MASK, addressed, request, session, whole
from pipelines.track.keeper import kept_open
from pipelines.track.opening import Opening, PlannedStep
from pipelines.track.standing import recorded
from tests import decisions
from tests.tracked import World, found

if TYPE_CHECKING:
    from mlflow.entities import Run

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
PLAN = decisions.key_of("plan")[:16]
STEPS = (
    PlannedStep(step="checkpoint", artifact="checkpoint/0", state="reuse", why="made before", seconds=0.0,
                toolchain="current"),
    PlannedStep(step="variant awq", artifact="variant/1", state="run", why="not made yet", seconds=45.0,
                toolchain="current"),
)  # fmt: skip
OPENING = Opening(
    started="2026-11-30T20:00:00+00:00", plan=STEPS, python="3.11.9", platform="Linux", packages={"torch": "2.13.0"},
    device={"cpu": "Intel Xeon", "gpu": "none"},
    git={"commit": "a" * 40, "dirty": "true", "branch": "main", "remote": "https://***@h/x.git"},
)  # fmt: skip


def asked(world: World, **more: object) -> TrackingConfig:
    config = {"campaign": "demo", "gate": {"alpha": 0.05}}
    given = {"tracking_uri": world.uri, "plan_key": PLAN, "opening": OPENING, "campaign_config": config}
    return TrackingConfig.model_validate(given | more)


def begin(world: World, **more: object) -> str:
    with session(world.uri) as client:
        return parent.begin(client, asked(world, **more), "demo")


def end(world: World, run_id: str, how: parent.End, reason: str = "") -> None:
    with session(world.uri) as client:
        parent.end(client, run_id, how, reason)


def only(world: World) -> Run:
    with session(world.uri) as client:
        (run,) = found(client, "campaign")
        return run


def text(world: World, run_id: str, name: str, tmp_path: Path) -> str:
    with session(world.uri) as client:
        return Path(client.download_artifacts(run_id, name, str(tmp_path))).read_text()


def test_an_opened_run_shows_the_plan_the_configuration_and_what_it_runs_with(world: World, tmp_path: Path) -> None:
    """RUNNING, with the plan as a table, the environment and the commit; the first line says how much is to do."""
    run_id = begin(world)
    run = only(world)
    assert ("RUNNING", "running") == (run.info.status, run.data.tags["verdict"])
    assert (
        "**Running** since 2026-11-30T20:00:00+00:00: 1 steps to do, 1 reused."
        == (run.data.tags["mlflow.note.content"].splitlines()[0])
    )
    plan = json.loads(text(world, run_id, "plan.json", tmp_path))
    assert ("step", ["variant awq", "variant/1", "run", "not made yet", 45.0, "current"]) == (
        plan["columns"][0],
        plan["data"][1],
    )
    environment = json.loads(text(world, run_id, "environment.json", tmp_path))
    assert ("3.11.9", {"torch": "2.13.0"}, "true") == (
        environment["python"], environment["packages"], environment["git"]["dirty"],
    )  # fmt: skip
    assert ("a" * 40, "true") == (run.data.tags["mlflow.source.git.commit"], run.data.tags["git_dirty"])
    assert "alpha: 0.05" in text(world, run_id, "config.yaml", tmp_path)


def test_the_decision_takes_the_run_that_was_opened_whatever_its_key(world: World) -> None:
    """The same run, finished, with the decision first in its description; its children hang under it."""
    run_id = begin(world)
    facts = world.record(world.decided(decisions.decision()), asked(world))
    run = only(world)
    assert (run_id, run_id, "FINISHED", "promote") == (
        facts["run_id"], run.info.run_id, run.info.status, run.data.tags["verdict"],
    )  # fmt: skip
    assert run.data.tags["mlflow.note.content"].startswith("**PROMOTE")
    assert run.data.tags["campaign_key"] != PLAN == run.data.tags["plan_key"]
    with session(world.uri) as client:
        assert {run_id} == {child.data.tags["mlflow.parentRunId"] for child in found(client, "variant")}
    assert recorded(world.uri, run_id)


def test_a_stopped_campaign_goes_on_with_the_same_run(world: World, tmp_path: Path) -> None:
    """KILLED with how to go on, RUNNING again by the next attempt, which adds its own plan."""
    first = begin(world)
    end(world, first, "KILLED", "interrupted; the same command goes on with this run")
    stopped = only(world)
    again = begin(world)
    assert ("KILLED", "killed") == (stopped.info.status, stopped.data.tags["verdict"])
    assert (
        "**Stopped:** interrupted; the same command goes on with this run" == (stopped.data.tags["mlflow.note.content"])
    )
    assert (first, "RUNNING", "2") == (again, only(world).info.status, only(world).data.tags["attempts"])
    assert text(world, first, "plan.json", tmp_path) == text(world, first, "plan-2.json", tmp_path)
    facts = world.record(world.decided(decisions.decision()), asked(world))
    assert (first, "FINISHED") == (facts["run_id"], only(world).info.status)


def test_a_failed_campaign_says_why_without_its_secrets(world: World) -> None:
    """FAILED, the reason first in the description."""
    end(world, begin(world), "FAILED", "no route to https://ada:s3cr3t@hub/x")
    run = only(world)
    assert ("FAILED", "**Failed:** no route to https://***@hub/x") == (
        run.info.status, run.data.tags["mlflow.note.content"],
    )  # fmt: skip


def test_another_attempt_with_the_same_decision_leaves_no_second_run(world: World) -> None:
    """The run opened for it goes, whether the track stage runs again or not; another decision keeps its own."""
    promoted = world.decided(decisions.decision())
    first = world.record(promoted, asked(world))
    begin(world)
    assert first["run_id"] == world.record(promoted, asked(world))["run_id"] == only(world).info.run_id
    end(world, begin(world), "SPARE")
    assert first["run_id"] == only(world).info.run_id
    spare = begin(world)
    second = world.record(world.decided(decisions.decision("hold")), asked(world))
    assert (spare, True) == (second["run_id"], second["run_id"] != first["run_id"])
    with session(world.uri) as client:
        assert {"promote", "hold"} == {run.data.tags["verdict"] for run in found(client, "campaign")}


def test_a_run_that_a_decision_has_is_ended_but_not_rewritten(world: World) -> None:
    """A recording that broke off: FAILED, the decision still first; recorded again it is finished."""
    decision = world.decided(decisions.decision())
    facts = world.record(decision, asked(world))
    with session(world.uri) as client:
        client.delete_tag(str(facts["run_id"]), "quantgate.complete")
        client.update_run(str(facts["run_id"]), status="RUNNING")
    end(world, str(facts["run_id"]), "FAILED", "the server went away")
    assert ("FAILED", True) == (
        only(world).info.status, only(world).data.tags["mlflow.note.content"].startswith("**PROMOTE"),
    )  # fmt: skip
    assert facts == world.record(decision, asked(world))
    assert "FINISHED" == only(world).info.status


def test_a_recording_without_an_opened_run_has_the_plan_too(world: World, tmp_path: Path) -> None:
    """A server that was away at first: the run begun at the end shows what was known at the beginning."""
    facts = world.record(world.decided(decisions.decision()), asked(world))
    assert "variant awq" in text(world, str(facts["run_id"]), "plan.json", tmp_path)


HOLD = """
import sys, time
from pathlib import Path
from pipelines.flow.store import Store
from pipelines.track.config import TrackingConfig
from pipelines.track.keeper import kept_open

config = TrackingConfig.model_validate_json(Path(sys.argv[1]).read_text())
with kept_open(config, Store(Path(sys.argv[2]))) as kept:
    kept.wait()
    print("open", flush=True)
    time.sleep(300)
"""


def test_a_keeper_ends_the_run_of_a_campaign_that_was_killed_outright(world: World) -> None:
    """SIGKILL of the conductor: the run is KILLED soon after; SIGTERM: too. A second attempt has the same run."""
    world.store.prepare()
    path = world.root / "config.json"
    path.write_text(asked(world).model_dump_json())
    for blow in (signal.SIGKILL, signal.SIGINT):
        argv = [sys.executable, "-c", HOLD, str(path), str(world.store.root)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as campaign:
            assert campaign.stdout is not None
            assert "open\n" == campaign.stdout.readline(), (world.store.root / ".logs").iterdir()
            assert "RUNNING" == only(world).info.status
            os.kill(campaign.pid, blow)
        deadline = time.monotonic() + 60
        while only(world).info.status == "RUNNING" and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "KILLED" == only(world).info.status
    assert "2" == only(world).data.tags["attempts"]


def test_a_keeper_ends_as_it_is_told_and_says_what_kept_it_from_opening(world: World) -> None:
    """FAILED with the reason; a server that is not there is told with its address, and costs no exception."""
    world.store.prepare()
    with kept_open(asked(world), world.store) as kept:
        kept.wait()
        assert "" == kept.problem
        kept.leave("FAILED", "it was not decided", wait=True)
    assert ("FAILED", "**Failed:** it was not decided") == (
        only(world).info.status, only(world).data.tags["mlflow.note.content"],
    )  # fmt: skip
    away = asked(world, tracking_uri="http://ada:s3cr3t@127.0.0.1:9", plan_key="f" * 16)
    with addressed("http://ada:s3cr3t@127.0.0.1:9"), kept_open(away, world.store) as kept:
        kept.wait()
        assert "127.0.0.1:9" in kept.problem
        kept.leave("FAILED", "", wait=True)
    written = [p.read_text() for p in world.store.root.rglob("parent-*") if p.is_file()]
    assert len(written) >= 4
    assert not [one for one in written if "s3cr3t" in one]


def test_a_password_travels_in_the_environment_and_in_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration has the masked URI; who was told the whole one finds it, anybody else is told what to do."""
    from pipelines.errors import EnvironmentProblem

    uri = "postgresql://ada:s3cr3t@db/x?sslpassword=t0ps3cret"
    config = TrackingConfig(tracking_uri=uri)
    assert f"postgresql://{MASK}@db/x?sslpassword={MASK}" == config.tracking_uri
    with addressed(uri):
        assert uri == whole(config.tracking_uri)
    with pytest.raises(EnvironmentProblem, match=r"track --resume"):
        whole(config.tracking_uri)
    assert "sqlite:////x/mlflow.db" == whole("sqlite:////x/mlflow.db")


def test_what_is_known_before_the_work(tmp_path: Path) -> None:
    """The versions of what the pipeline stands on, and the repository the user is in: commit, branch, changes."""
    git = ["git", "-c", "user.name=ada", "-c", "user.email=ada@x", "-C", str(tmp_path)]
    assert {} == opening.look(Plan(()), tmp_path).git
    subprocess.run([*git, "init", "-q", "-b", "trunk"], check=True)
    (tmp_path / "notes").write_text("one")
    subprocess.run([*git, "add", "notes"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    subprocess.run([*git, "remote", "add", "origin", "https://ada:s3cr3t@h/x.git"], check=True)
    clean = opening.look(Plan(()), tmp_path)
    (tmp_path / "notes").write_text("two")
    changed = opening.look(Plan(()), tmp_path)
    assert {"dirty": "false", "branch": "trunk", "remote": "https://***@h/x.git"}.items() <= clean.git.items()
    assert (40, clean.git["commit"], "true") == (
        len(clean.git["commit"]), changed.git["commit"], changed.git["dirty"],
    )  # fmt: skip
    assert {"mlflow", "pydantic", "torch"} <= clean.packages.keys()


def test_credentials_of_an_address_are_given_apart_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow prints the address with every run that ends, so it has none in it; what asks without MLflow sends them."""
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    asked = request("http://ada:p%40ss@h:5000/health")
    assert ("http://h:5000/health", "Basic " + b64encode(b"ada:p@ss").decode()) == (
        asked.full_url, asked.get_header("Authorization"),
    )  # fmt: skip
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as there:
        Thread(target=there.serve_forever, daemon=True).start()
        with session(f"http://ada:p%40ss@127.0.0.1:{there.server_port}") as client:
            assert f"http://127.0.0.1:{there.server_port}" == client.tracking_uri
            assert ("ada", "p@ss") == (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"])
        there.shutdown()
    assert "MLFLOW_TRACKING_USERNAME" not in os.environ


class Healthy(BaseHTTPRequestHandler):
    """Answers that it is there."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
