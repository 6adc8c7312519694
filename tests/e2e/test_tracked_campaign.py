"""A campaign on a real server, stopped once and robbed of its server once, with secrets planted all over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipelines.track.connection import session
from pipelines.track.server import server
from tests.tracked import found

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]
QUANTGATE = [sys.executable, "-c", "from pipelines.cli import entry; entry()"]
SECRET = "s3cr3t"
PLANTED = {
    "HF_TOKEN": f"hf_{SECRET}",
    "MLFLOW_TRACKING_PASSWORD": f"{SECRET}-password",
    "AWS_SECRET_ACCESS_KEY": f"{SECRET}-aws",
    "LITELLM_KEY": f"{SECRET}-gateway",
    "https_proxy": f"http://ada:{SECRET}-proxy@127.0.0.1:9",
}


@dataclass(frozen=True)
class Place:
    """A campaign's own store, database and working directory, and the address of the server."""

    root: Path
    checkpoint: Path
    port: int

    @property
    def database(self) -> str:
        return f"sqlite:///{self.root / 'mlruns' / 'mlflow.db'}"

    def command(self, verb: str, *more: str) -> list[str]:
        overrides = [
            "experiment=smoke",
            "items_per_set=5",
            "evalset=[support_intent,passage_qa]",
            f"checkpoint.source={self.checkpoint}",
            f"paths.store={self.root / 'store'}",
            f"paths.ledger={self.root / 'ledger.jsonl'}",
            f"tracking.uri=http://ada:{SECRET}-uri@127.0.0.1:{self.port}",
        ]
        return [*QUANTGATE, verb, *overrides, *more, "--json"]

    def start(self, verb: str, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(verb, *more), cwd=self.root / "here", env={**os.environ, **PLANTED}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def ended(self, process: subprocess.Popen[str], name: str) -> tuple[int, dict[str, Any], str]:
        """Wait for a verb; what it said is kept beside the store, to be looked through for secrets."""
        out, err = process.communicate(timeout=900)
        (self.root / f"{name}.out").write_text(out + err)
        assert "Traceback" not in out + err, err
        return process.returncode, json.loads(out.splitlines()[-1]) if out else {}, err

    def call(self, name: str, verb: str, *more: str) -> tuple[int, dict[str, Any], str]:
        return self.ended(self.start(verb, *more), name)

    def runs(self) -> dict[str, str]:
        """The campaign's runs in MLflow: status by id."""
        with session(self.database) as client:
            return {run.info.run_id: run.info.status for run in found(client, "campaign")}

    def until(self, what: str, seconds: float = 240.0) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        while set((now := self.runs()).values()) != {what} and time.monotonic() < deadline:
            time.sleep(0.3)
        assert {what} == set(now.values())
        return now


@dataclass(frozen=True)
class Story:
    """What happened: the run at each point, and what the verbs said."""

    place: Place
    opened: dict[str, str]
    made_by_then: list[Path]
    stopped: dict[str, str]
    reopened: dict[str, str]
    away: tuple[int, dict[str, Any], str]
    resumed: tuple[int, dict[str, Any], str]
    again: tuple[int, dict[str, Any], str]
    again_s: float
    ended: dict[str, str]


@pytest.fixture(scope="module")
def story(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    root = tmp_path_factory.mktemp("tracked")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = Place(root, base_checkpoint, int(probe.getsockname()[1]))
    (root / "here").mkdir()
    with session(place.database):
        pass
    with server(place.database, place.port):
        first = place.start("run")
        opened = place.until("RUNNING")
        made = list((root / "store").glob("engine/*/manifest.json"))
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=120)
        stopped = place.until("KILLED", 60)
        second = place.start("run")
        reopened = place.until("RUNNING")
    away = place.ended(second, "away")  # the server went away in the middle of the work
    with server(place.database, place.port):
        resumed = place.call("resumed", "track", "--resume")
        begun = time.monotonic()
        again = place.call("again", "run")
        yield Story(
            place, opened, made, stopped, reopened, away, resumed, again, time.monotonic() - begun, place.runs()
        )


def test_the_run_is_open_before_anything_is_made(story: Story) -> None:
    """One RUNNING run while there is no engine yet; interrupted it is KILLED, and goes on as the same."""
    assert [] == story.made_by_then
    (run_id,) = story.opened
    assert (story.opened, story.stopped, story.reopened, story.ended) == tuple(
        {run_id: status} for status in ("RUNNING", "KILLED", "RUNNING", "FINISHED")
    )


def test_a_server_that_goes_away_never_ends_a_campaign(story: Story) -> None:
    """The exit code is the decision's, and the terminal says what is missing and the command that mends it."""
    code, document, stderr = story.away
    assert {"promote": 0, "hold": 3, "reject": 4}[document["outcome"]] == code, stderr
    assert document["unrecorded"].startswith("quantgate track --resume experiment=smoke")
    assert "kept locally" in stderr


def test_resuming_uploads_it_once(story: Story) -> None:
    """Recorded now; run again, nothing is made, it is as quick as before, and the answer is the same."""
    code, document, _ = story.resumed
    assert (0, 1, {}) == (code, len(document["recorded"]), document["failed"])
    assert (story.away[0], 0) == (story.again[0], story.again[1]["steps"]["made"])
    assert story.again_s < 20
    with session(story.place.database) as client:
        assert (1, 2) == (len(found(client, "campaign")), len(found(client, "variant")))


def test_no_secret_is_in_any_file(story: Story) -> None:
    """Database, artifacts, manifests, requests, logs, report, and what was printed: none holds what was planted."""
    root = story.place.root
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    kinds = {path.relative_to(root).parts[0] for path in files}
    assert {"mlruns", "store", "away.out", "resumed.out", "again.out"} <= kinds
    assert {"track", "report", "decision", ".logs", ".requests"} <= {
        path.relative_to(root / "store").parts[0] for path in files if path.is_relative_to(root / "store")
    }
    assert [] == [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_secret_in_the_configuration_is_refused_and_not_shown(story: Story) -> None:
    """It would be in a manifest; the key is named, the value is not."""
    code, document, stderr = story.place.call("refused", "plan", f"checkpoint.note='https://ada:{SECRET}@hub/x'")
    assert (2, True) == (code, "checkpoint.note" in document["message"])
    assert SECRET not in stderr + json.dumps(document)


def test_no_database_is_left_where_the_command_was_given(story: Story) -> None:
    """MLflow's default is a database in the working directory; none of ours uses it."""
    assert [] == list((story.place.root / "here").iterdir())
    assert [story.place.root / "mlruns" / "mlflow.db"] == list(story.place.root.rglob("mlflow.db"))
