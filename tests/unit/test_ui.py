"""What `quantgate ui` opens, without MLflow: links out of a database, and when a browser would be seen."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipelines.cli import _parser, _verbs
from pipelines.errors import EnvironmentProblem
from pipelines.track import ui, views

EXPERIMENTS = [
    {"experiment_id": "1", "name": "demo", "artifact_location": "/a/1", "creation_time": 11, "tags": []},
    {"experiment_id": "2", "name": "other", "artifact_location": "/a/2", "creation_time": 22, "tags": []},
]


def tag(name: str, updated: int) -> str:
    return json.dumps({"name": name, "createdAt": updated, "updatedAt": updated, "state": "deflate;"})


@pytest.fixture
def database(tmp_path: Path) -> str:
    """As much of MLflow's database as is read: two experiments, three views and two tags that are none."""
    with sqlite3.connect(tmp_path / "mlflow.db") as made:
        made.execute(
            "CREATE TABLE experiments (experiment_id INTEGER, name TEXT, artifact_location TEXT, "
            "creation_time INTEGER, lifecycle_stage TEXT)"
        )
        made.execute("CREATE TABLE experiment_tags (experiment_id INTEGER, key TEXT, value TEXT)")
        for one in EXPERIMENTS:
            row = (one["experiment_id"], one["name"], one["artifact_location"], one["creation_time"], "active")
            made.execute("INSERT INTO experiments VALUES (?, ?, ?, ?, ?)", row)
        for experiment, key, value in (
            (1, views.TAG + "old", tag("demo old", 1)), (1, views.TAG + "new", tag("demo new", 3)),
            (2, views.TAG + "mid", tag("other", 2)), (1, views.TAG + "strange", "not what it was"),
            (1, "mlflow.note.content", "text"),
        ):  # fmt: skip
            made.execute("INSERT INTO experiment_tags VALUES (?, ?, ?)", (experiment, key, value))
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_links_are_the_newest_first_and_a_view_that_nobody_understands_is_passed_over(database: str) -> None:
    """Should MLflow change how it keeps views, the others are still found."""
    assert ["demo new", "other", "demo old"] == [link.name for link in ui.links(database)]
    assert ["demo new", "demo old"] == [link.name for link in ui.links(database, "demo")]
    with pytest.raises(EnvironmentProblem, match="campaign='none': no recording"):
        ui.links(database, "none")


class _Handler(BaseHTTPRequestHandler):
    """Answers as MLflow does when it is asked for its experiments."""

    answer: bytes = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "same"),
    [
        ({"experiments": EXPERIMENTS}, True),
        ({"experiments": EXPERIMENTS[:1]}, True),
        ({"experiments": [EXPERIMENTS[0] | {"creation_time": 12}]}, False),
        ({"experiments": []}, False),
        ({}, False),
        ("<html>", False),
    ],
)
def test_a_server_is_ours_when_its_experiments_are_the_databases(
    database: str, address: str, answer: object, same: bool
) -> None:
    """Same ids, places and times, and at least one; what answers otherwise, or with something else, is not."""
    _Handler.answer = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    assert same == ui.serves(address, database)


def test_on_a_port_that_serves_this_database_only_the_links_are_shown(database: str, address: str) -> None:
    """No second server; a port that something else has is named."""
    _Handler.answer = json.dumps({"experiments": EXPERIMENTS}).encode()
    said: list[str] = []
    port = int(address.rpartition(":")[2])
    link = ui.serve_ui(database, port, say=said.append)
    assert f"{address}/{views.fragment('1', 'new')}" == link
    assert f"port {port} serves this database already" == said[0]
    _Handler.answer = b"{}"
    with pytest.raises(EnvironmentProblem, match=f"cannot listen on 127.0.0.1:{port}"):
        ui.serve_ui(database, port, say=said.append)


def test_links_of_a_server_are_those_of_its_own_views(address: str) -> None:
    """A tracking server is asked for the views that campaigns saved there; without any, its front page is the link."""
    tags = [{"key": views.TAG + "k", "value": tag("demo k", 5)}, {"key": views.TAG + "x", "value": "?"}]
    _Handler.answer = json.dumps({"experiments": [EXPERIMENTS[0] | {"tags": tags}]}).encode()
    said: list[str] = []
    assert f"{address}/{views.fragment('1', 'k')}" == ui.serve_ui(address, say=said.append)
    _Handler.answer = b"{}"
    assert f"{address}/" == ui.serve_ui(address, say=said.append)


def test_a_browser_is_opened_where_it_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal with a display; not in a pipe, not over SSH, not without a display."""
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("SSH_CONNECTION", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert ui.desktop()
    monkeypatch.setenv("SSH_CONNECTION", "1 2 3 4")
    assert not ui.desktop()
    monkeypatch.delenv("SSH_CONNECTION")
    monkeypatch.delenv("DISPLAY")
    assert not ui.desktop()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert ui.desktop()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert not ui.desktop()


@pytest.mark.parametrize(("given", "expected"), [([], None), (["--browser"], True), (["--no-browser"], False)])
def test_the_verb_opens_a_browser_by_itself_or_as_told(given: list[str], expected: bool | None) -> None:
    """Nothing said: it looks where it is."""
    assert expected is _parser("ui", _verbs()["ui"]).parse_args(given).browser


def test_a_browser_that_cannot_be_opened_is_said(database: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is there to be opened by hand."""
    _Handler.answer = json.dumps({"experiments": EXPERIMENTS}).encode()
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or False)
    said: list[str] = []
    link = ui.serve_ui(database, int(address.rpartition(":")[2]), open_browser=True, say=said.append)
    assert ([link], "no browser could be opened here; open the link in one") == (opened, said[-1])
