"""Open what was recorded: the pages to look at, and MLflow's server behind them while somebody does."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import webbrowser
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

from pipelines.errors import EnvironmentProblem
from pipelines.track import views
from pipelines.track.connection import database, is_server, request
from pipelines.track.masking import masked_text
from pipelines.track.server import HOST, ends_on_signals, server, taken

SHOWN = 5
"""Links that are printed; older campaigns are under MLflow's own Views menu."""


@dataclass(frozen=True, slots=True)
class Link:
    """A page to look at: a campaign's saved view."""

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
) -> str:
    """Start the server, print the links once it answers, and wait until Ctrl-C; give the first link.

    Where a server is there already, somebody's own or ours of the same database, only its links are printed.

    Raises:
        EnvironmentProblem: something else has the port, nothing was recorded yet, or the server does not come up or
            ends by itself.
    """
    if is_server(tracking_uri):
        address = masked_text(tracking_uri).rstrip("/")
        return _show(address, _of(_served(tracking_uri), campaign), open_browser, say)
    found, address = links(tracking_uri, campaign), f"http://{HOST}:{port}"
    if taken(port) and serves(address, tracking_uri):
        say(f"port {port} serves this database already")
        return _show(address, found, open_browser, say)
    say("starting MLflow (a minute on a slow machine)")
    link = ""
    try:
        with ends_on_signals(), server(tracking_uri, port, artifacts=artifacts) as process:
            link = _show(address, found or _of(_served(address), campaign), open_browser, say)
            say("Ctrl-C stops it")
            process.wait()
            raise EnvironmentProblem(f"MLflow's server ended by itself (exit {process.returncode}); start it again")
    except KeyboardInterrupt:
        say("stopped")
    return link


def desktop() -> bool:
    """Whether a browser opened from here would be seen: at a terminal, on a display that is this machine's own."""
    if not sys.stdout.isatty() or os.environ.get("SSH_CONNECTION"):
        return False
    return sys.platform in ("darwin", "win32") or any(os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY"))


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
    asked = (
        "SELECT e.experiment_id, e.name, t.key, t.value "
        "FROM experiment_tags t JOIN experiments e USING (experiment_id) "
        "WHERE t.key LIKE ? AND e.lifecycle_stage = 'active'"
    )
    found = _of(_read(path, asked, (views.TAG + "%",)), campaign)
    if campaign and not found:
        raise EnvironmentProblem(f"campaign={campaign!r}: no recording of it in {path}")
    return found


def serves(address: str, tracking_uri: str) -> bool:
    """Whether what answers at an address is MLflow on that very local database.

    Its experiments have the ids, places and times of the database's own.
    """
    path = database(tracking_uri)
    if path is None:
        return False
    asked = "SELECT experiment_id, artifact_location, creation_time FROM experiments"
    known = {tuple(map(str, row)) for row in _read(path, asked)}
    try:
        answered = _experiments(address)
    except (OSError, ValueError):
        return False
    names = ("experiment_id", "artifact_location", "creation_time")
    served = {tuple(str(one.get(name)) for name in names) for one in answered}
    return bool(served) and served <= known


Row = tuple[object, ...]
"""An experiment's id and name, a tag's key and value."""


def _of(rows: Iterable[Row], campaign: str) -> list[Link]:
    """The views among tags, newest first; what is none of ours is passed over."""
    dated = []
    for experiment_id, name, key, value in rows:
        try:
            entry = json.loads(str(value))
            when, title = float(entry["updatedAt"]), str(entry["name"])
        except (ValueError, KeyError, TypeError):
            continue
        if campaign in ("", name):
            dated.append((when, Link(title, views.fragment(str(experiment_id), str(key).removeprefix(views.TAG)))))
    return [link for _, link in sorted(dated, key=lambda d: -d[0])]


def _read(path: Path, asked: str, given: tuple[str, ...] = ()) -> list[Row]:
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5)) as connection:
            return connection.execute(asked, given).fetchall()
    except sqlite3.Error as error:
        raise EnvironmentProblem(f"tracking.uri: {path} is no readable MLflow database ({error})") from None


def _served(address: str) -> list[Row]:
    """The saved views that a server has; none where it does not tell, since its front page shows the way too."""
    try:
        found = _experiments(address)
    except (OSError, ValueError):
        return []
    tags = [(one, tag) for one in found for tag in one.get("tags") or ()]
    return [
        (one["experiment_id"], one["name"], tag["key"], tag["value"])
        for one, tag in tags
        if str(tag.get("key", "")).startswith(views.TAG)
    ]


def _experiments(address: str) -> list[dict[str, Any]]:
    """The active experiments of a server, as MLflow's own interface gives them."""
    asked = request(f"{address.rstrip('/')}/api/2.0/mlflow/experiments/search")
    asked.add_header("Content-Type", "application/json")
    asked.data = json.dumps({"max_results": 1000}).encode()
    with urlopen(asked, timeout=5) as answer:
        found = json.load(answer).get("experiments", [])
    return [one for one in found if isinstance(one, dict)]


def _show(address: str, found: list[Link], open_browser: bool, say: Callable[[str], None]) -> str:
    for link in found[:SHOWN]:
        say(f"{link.name}\n  {address}/{link.fragment}")
    if not found:
        say(f"{address}/")
    first = f"{address}/{found[0].fragment if found else ''}"
    if open_browser and not webbrowser.open(first):
        say("no browser could be opened here; open the link in one")
    return first
