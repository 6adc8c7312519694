"""Many writers at once, and a server that is killed half way: a real MLflow server on sqlite, and PostgreSQL."""

from __future__ import annotations

import getpass
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipelines.track import children, versions
from pipelines.track.connection import ADDRESS, session
from pipelines.track.server import server
from tests import decisions

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]
WRITERS, CANDIDATES = 8, 6
ROOT = Path(__file__).resolve().parents[2]
WRITE = """
import sys
from pathlib import Path
from pipelines.track import runs
from pipelines.track.config import TrackingConfig

root, uri, artifacts, patience = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
store = root / "store"
(root / "out").mkdir(exist_ok=True)
config = TrackingConfig(
    tracking_uri=uri, artifact_root=artifacts, experiment="shared", registered_model="demo", patience_s=patience
)
runs.run(
    config, root / "out", decision=next((store / "decision").iterdir()), report=root,
    engines=sorted((store / "engine").iterdir()), variants=sorted((store / "variant").iterdir()),
    scores=sorted((store / "scores").iterdir()), latency=next((store / "latency").iterdir()),
)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stores(root: Path, count: int) -> list[Path]:
    """A store for each of several campaigns, with a decision of its own."""
    made = []
    for n in range(count):
        where, decision = root / f"writer{n}", decisions.decision().model_copy(update={"campaign": f"campaign{n}"})
        for write in (decisions.engines, decisions.variants, decisions.scores, decisions.decided):
            write(where / "store", decision)
        decisions.requests(where / "store", decision, 20)
        made.append(where)
    return made


def writing(where: Path, uri: str, artifacts: str = "", patience_s: float = 60.0) -> subprocess.Popen[bytes]:
    """A process that records the campaign in a store; what it says goes to a file beside the store."""
    from pipelines.track.masking import masked_text

    argv = [sys.executable, "-c", WRITE, str(where), masked_text(uri), artifacts, str(patience_s)]
    with (where / "log").open("ab") as log:
        return subprocess.Popen(argv, cwd=where, stdout=log, stderr=log, env={**os.environ, ADDRESS: uri})


def ended(writers: dict[Path, subprocess.Popen[bytes]]) -> None:
    for where, process in writers.items():
        assert 0 == process.wait(400), (where / "log").read_text()


def check(uri: str, made: list[Path]) -> None:
    """Nothing lost, nothing doubled: every campaign has one finished parent, six children and one version."""
    with session(uri) as client:
        (where,) = [e.experiment_id for e in client.search_experiments() if e.name == "shared"]
        runs: list[Run] = list(client.search_runs([where], max_results=5000))
        registered = versions.versions(client, "demo")
        by_key = {path: next((path / "store" / "decision").iterdir()).name for path in made}
        assert {len(made) * (1 + CANDIDATES)} == {len(runs)}
        for path, key in by_key.items():
            mine = [run for run in runs if run.data.tags["campaign_key"] == key]
            (above,) = [run for run in mine if run.data.tags["kind"] == "campaign"]
            below = [run for run in mine if run.data.tags["kind"] == "variant"]
            labels = {run.data.tags["candidate"] for run in below}
            assert (CANDIDATES, CANDIDATES, "FINISHED") == (len(below), len(labels), above.info.status), path
            assert all(children.complete(run) for run in mine)
            assert {above.info.run_id} == {run.data.tags["mlflow.parentRunId"] for run in below}
            _whole(client, above, below)
        assert sorted(by_key.values()) == sorted(v.tags["decision_key"] for v in registered)
        assert len(made) == len({v.version for v in registered})


def _whole(client: MlflowClient, above: Run, below: list[Run]) -> None:
    files = {f.path for f in client.list_artifacts(above.info.run_id)}
    scored = {one.label: set(one.scores) for one in decisions.decision().candidates}
    assert {"config.yaml", "decision.json", "decision.md", "latency"} <= files
    for run in below:
        for name in ("quality/mean_score", "latency/closed-4/ttft_p99_ms", "quality/ticket_json/all/delta"):
            assert len(client.get_metric_history(run.info.run_id, name)) == (name in run.data.metrics)
        if run.info.status == "FINISHED":
            assert "quality/mean_score" in run.data.metrics
            inputs = [i.dataset.name for i in run.inputs.dataset_inputs]
            kept = [f.path.removeprefix("scores/") for f in client.list_artifacts(run.info.run_id, "scores")]
            assert sorted(scored[run.data.tags["candidate"]]) == sorted(inputs) == sorted(kept)


def test_eight_writers_share_a_fresh_sqlite_database(tmp_path: Path) -> None:
    """All begin at once on a database that is not there yet; each records its own campaign, and leaves nothing else."""
    uri, made = f"sqlite:///{tmp_path}/mlruns/mlflow.db", stores(tmp_path, WRITERS)
    ended({where: writing(where, uri) for where in made})
    check(uri, made)
    assert [tmp_path / "mlruns" / "mlflow.db"] == list(tmp_path.rglob("*.db"))


def test_eight_writers_share_a_server_that_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed outright while all are writing, away for seconds, started again: every recording goes on by itself.

    Nor does the server make a database of its own where it was started.
    """
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    database, port, made = f"sqlite:///{tmp_path}/mlruns/mlflow.db", free_port(), stores(tmp_path, WRITERS)
    uri = f"http://127.0.0.1:{port}"
    with session(database):
        pass  # initialised once, before anybody writes
    with server(database, port) as first:
        writers = {where: writing(where, uri, patience_s=300.0) for where in made}
        deadline = time.monotonic() + 200
        while _count(database) < WRITERS * 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        interrupted = _count(database)
        os.killpg(first.pid, signal.SIGKILL)
    assert 0 < interrupted < WRITERS * (1 + CANDIDATES)
    time.sleep(3)
    with server(database, port):
        ended(writers)
        check(uri, made)
    assert [tmp_path / "mlruns" / "mlflow.db"] == list(tmp_path.rglob("mlflow.db"))


def _count(database: str) -> int:
    import sqlite3

    with sqlite3.connect(database.removeprefix("sqlite:///"), timeout=10) as connection:
        return int(connection.execute("SELECT count(*) FROM runs").fetchone()[0])


@contextmanager
def postgres() -> Iterator[str]:
    """A database of its own with a password, on loopback, gone afterwards; its URI."""
    found = shutil.which("initdb") or next(map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))), None)
    if found is None:
        pytest.skip("needs PostgreSQL's own programs (initdb, postgres)")
    user = next((n for n in ("postgres", "nobody") if _known(n)), "") if os.geteuid() == 0 else getpass.getuser()
    if not user:
        pytest.skip("PostgreSQL refuses to run as root, and there is no other user")
    bin_dir, port, password = Path(found).resolve().parent, free_port(), secrets.token_hex(12)
    root = Path(tempfile.mkdtemp(prefix="quantgate-pg-", dir="/tmp"))
    (root / "password").write_text(password)
    if os.geteuid() == 0:
        for path in (root, root / "password"):
            shutil.chown(path, user)
    as_user = {"user": user} if os.geteuid() == 0 else {}
    init = [bin_dir / "initdb", "-D", root / "data", "-U", "ada", "-A", "scram-sha-256", "--pwfile", root / "password"]
    serve = [bin_dir / "postgres", "-D", root / "data", "-p", str(port), "-c", "listen_addresses=127.0.0.1",
             "-c", f"unix_socket_directories={root}", "-c", "fsync=off"]  # fmt: skip
    process = None
    try:
        subprocess.run(init, check=True, capture_output=True, cwd=root, **as_user)  # type: ignore[call-overload]
        with (root / "log").open("wb") as log:
            process = subprocess.Popen(serve, stdout=log, stderr=log, cwd=root, **as_user)  # type: ignore[call-overload]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.2)
        time.sleep(1)
        yield f"postgresql://ada:{password}@127.0.0.1:{port}/postgres"
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)
            process.wait(30)
        shutil.rmtree(root, ignore_errors=True)


def _known(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def test_eight_writers_share_a_fresh_postgresql_database(tmp_path: Path) -> None:
    """As with sqlite; the champion is read from it too, and its password is in no file that was written."""
    from pipelines.track.standing import aliased_tags, recorded

    pytest.importorskip("psycopg", reason="needs PostgreSQL's driver: pip install 'quantgate[postgres]'")
    with postgres() as uri:
        made = stores(tmp_path, WRITERS)
        ended({where: writing(where, uri, str(tmp_path / "artifacts")) for where in made})
        check(uri, made)
        with session(uri) as client:
            version = versions.alias(client, "demo", versions.CHALLENGER)
            assert version is not None
            client.set_registered_model_alias("demo", versions.CHAMPION, version.version)
            (parent, *_) = client.search_runs(["1"], "tags.kind = 'campaign'")
        assert version.tags["engine_key"] == aliased_tags(uri, "demo", versions.CHAMPION)["engine_key"]
        assert {} == aliased_tags(uri, "demo", "nobody")
        assert recorded(uri, parent.info.run_id)
        password = uri.partition("ada:")[2].partition("@")[0].encode()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and password in path.read_bytes()]
