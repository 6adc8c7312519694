"""Open what was recorded: MLflow's server on loopback, awaited, its links printed, and stopped with all it started."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

from pipelines.errors import EnvironmentProblem
from pipelines.track import views
from pipelines.track.connection import artifact_root, database, is_server
from pipelines.track.masking import masked_text

HOST = "127.0.0.1"
START_S, STOP_S = 180.0, 10.0


@dataclass(frozen=True, slots=True)
class Link:
    """A page to look at: a campaign's saved view, newest first, or the front page."""

    name: str
    fragment: str


def serve_ui(
    tracking_uri: str,
    port: int = 5000,
    *,
    artifacts: str = "",
    campaign: str = "",
    open_browser: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Start the server, print the links once it answers, and wait until it ends or Ctrl-C.

    With a server's own URI only the links are printed.

    Raises:
        EnvironmentProblem: the port is taken, nothing was recorded yet, or the server does not come up.
    """
    found = links(tracking_uri, campaign)
    if is_server(tracking_uri):
        _show(masked_text(tracking_uri).rstrip("/"), found, open_browser, say)
        return
    say("starting MLflow (a minute on a slow machine)")
    try:
        with _ends_on_signals(), server(tracking_uri, port, artifacts=artifacts) as process:
            _show(f"http://{HOST}:{port}", found, open_browser, say)
            say("Ctrl-C stops it")
            process.wait()
    except KeyboardInterrupt:
        say("stopped")


@contextmanager
def server(
    tracking_uri: str, port: int, *, artifacts: str = "", start_s: float = START_S
) -> Iterator[subprocess.Popen[bytes]]:
    """A ready server in a process group of its own, which is gone when this ends.

    Raises:
        EnvironmentProblem: the port is taken, or the server ended or stayed silent; its last words are given.
    """
    _free(port)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            _command(tracking_uri, port, artifacts), stdout=log, stderr=log, env=_environment(), start_new_session=True
        )
        try:
            _await(process, port, start_s, lambda: _tail(log))
            yield process
        finally:
            _stop(process)


def links(tracking_uri: str, campaign: str = "") -> list[Link]:
    """The saved views of a local database, the last recorded first; those of one campaign where it is named.

    Raises:
        EnvironmentProblem: there is no database there, or the campaign has no recording in it.
    """
    path = database(tracking_uri)
    if path is None:
        return []
    if not path.is_file():
        raise EnvironmentProblem(f"tracking.uri={tracking_uri!r}: nothing was recorded there yet; run a campaign first")
    found = [link for name, link in _views(path) if campaign in ("", name)]
    if campaign and not found:
        raise EnvironmentProblem(f"campaign={campaign!r}: no recording of it in {path}")
    return found


def _views(path: Path) -> list[tuple[str, Link]]:
    import json

    asked = (
        "SELECT e.experiment_id, e.name, t.key, t.value "
        "FROM experiment_tags t JOIN experiments e USING (experiment_id) "
        "WHERE t.key LIKE ? AND e.lifecycle_stage = 'active'"
    )
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5)) as connection:
            rows = connection.execute(asked, (views.TAG + "%",)).fetchall()
    except sqlite3.Error as error:
        raise EnvironmentProblem(f"tracking.uri: {path} is no readable MLflow database ({error})") from None
    dated = []
    for experiment_id, name, key, value in rows:
        entry = json.loads(value)
        link = Link(str(entry["name"]), views.fragment(str(experiment_id), key.removeprefix(views.TAG)))
        dated.append((entry["updatedAt"], str(name), link))
    return [(name, link) for _, name, link in sorted(dated, key=lambda d: -d[0])]


def _show(address: str, found: list[Link], open_browser: bool, say: Callable[[str], None]) -> None:
    for link in found[:5]:
        say(f"{link.name}\n  {address}/{link.fragment}")
    if not found:
        say(f"{address}/")
    if open_browser:
        webbrowser.open(f"{address}/{found[0].fragment if found else ''}")


def _command(tracking_uri: str, port: int, artifacts: str) -> list[str]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", tracking_uri]
    root = artifact_root(tracking_uri, artifacts)
    return [*command, "--default-artifact-root", root] if root else command


def _environment() -> dict[str, str]:
    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "GIT_PYTHON_REFRESH": "quiet",
    }
    return os.environ | quiet


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """Treat the end of the terminal or of this process like Ctrl-C, so that the server does not outlive it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {sign: signal.signal(sign, interrupt) for sign in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise EnvironmentProblem(
                f"port={port}: cannot listen on {HOST}:{port} ({why}); choose another port"
            ) from None


def _await(process: subprocess.Popen[bytes], port: int, start_s: float, tail: Callable[[], str]) -> None:
    end = time.monotonic() + start_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise EnvironmentProblem(f"MLflow's server ended at once (exit {process.returncode}): {tail()}")
        try:
            with urlopen(f"http://{HOST}:{port}/health", timeout=2):
                return
        except (URLError, OSError):
            time.sleep(0.3)
    raise EnvironmentProblem(f"port={port}: MLflow's server did not answer within {start_s:g} s: {tail()}")


def _tail(log: object) -> str:
    from typing import BinaryIO, cast

    stream = cast(BinaryIO, log)
    stream.seek(0)
    lines = stream.read().decode(errors="replace").strip().splitlines()
    return masked_text(" | ".join(lines[-5:]))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group: politely, then by force."""
    for sign, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        end = time.monotonic() + wait_s
        try:
            while time.monotonic() < end and _group_alive(process):
                time.sleep(0.05)
        except KeyboardInterrupt:  # pressed again: no more waiting
            continue
    process.wait()


def _group_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
