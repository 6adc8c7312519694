"""What stands in MLflow: whether a run is finished, what an alias points at.

Of a sqlite database or a server it is read without importing MLflow.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

from pipelines.errors import EnvironmentProblem
from pipelines.track.connection import KEY, database, is_server, reach, request, session
from pipelines.track.masking import masked_text


def recorded(uri: str, run_id: str, *, timeout_s: float = 5.0) -> bool:
    """Say whether a recorded run still stands, finished and not deleted; False where nobody can tell.

    Reads a sqlite database or asks a server directly, so MLflow itself is not imported.
    """
    path = database(uri)
    if path is not None:
        return _in_database(path, run_id)
    if is_server(uri):
        return _on_server(uri, run_id, timeout_s)
    with session(uri, timeout_s=timeout_s) as client:
        info = client.get_run(run_id).info
        return bool(info.lifecycle_stage == "active" and info.status == "FINISHED")


def _in_database(path: Path, run_id: str) -> bool:
    if not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5)) as connection:
            row = connection.execute(
                "SELECT status, lifecycle_stage FROM runs WHERE run_uuid = ?", (run_id,)
            ).fetchone()
    except sqlite3.Error:
        return False
    return bool(row == ("FINISHED", "active"))


def _on_server(uri: str, run_id: str, timeout_s: float) -> bool:
    address = f"{uri.rstrip('/')}/api/2.0/mlflow/runs/get?run_id={quote(run_id)}"
    try:
        with urlopen(request(address), timeout=timeout_s) as answer:
            info = json.load(answer)["run"]["info"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(info.get("status") == "FINISHED" and info.get("lifecycle_stage") == "active")


def aliased_tags(uri: str, model: str, alias: str, *, timeout_s: float = 5.0) -> dict[str, str]:
    """Give the tags of the version an alias points at, with its "version"; empty where it points at none.

    Reads a sqlite database or asks a server directly, as `recorded` does; other databases are MLflow's to read.

    Raises:
        EnvironmentProblem: the server does not answer, or the database cannot be read.
    """
    path = database(uri)
    if path is not None:
        return _tags_in_database(path, model, alias)
    if not is_server(uri):
        return _tags_by_mlflow(uri, model, alias, timeout_s)
    reach(uri, timeout_s)
    return _tags_on_server(uri, model, alias, timeout_s)


def _tags_in_database(path: Path, model: str, alias: str) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5)) as connection:
            asked = "SELECT version FROM registered_model_aliases WHERE name = ? AND alias = ?"
            row = connection.execute(asked, (model, alias)).fetchone()
            if row is None:
                return {}
            asked = "SELECT key, value FROM model_version_tags WHERE name = ? AND version = ?"
            return {**dict(connection.execute(asked, (model, row[0])).fetchall()), "version": str(row[0])}
    except sqlite3.Error as error:
        raise EnvironmentProblem(f"{KEY}={masked_text(str(path))!r}: the registry cannot be read ({error})") from None


def _tags_by_mlflow(uri: str, model: str, alias: str, timeout_s: float) -> dict[str, str]:
    from pipelines.track.versions import alias as aliased

    with session(uri, timeout_s=timeout_s) as client:
        found = aliased(client, model, alias)
        return {} if found is None else {**found.tags, "version": str(found.version)}


def _tags_on_server(uri: str, model: str, alias: str, timeout_s: float) -> dict[str, str]:
    where = f"name={quote(model)}&alias={quote(alias)}"
    address = f"{uri.rstrip('/')}/api/2.0/mlflow/registered-models/alias?{where}"
    try:
        with urlopen(request(address), timeout=timeout_s) as answer:
            version = json.load(answer)["model_version"]
    except HTTPError as error:
        if error.code in (400, 404):  # no such model, or nobody has the alias
            return {}
        raise EnvironmentProblem(f"{KEY}={masked_text(uri)!r}: the registry answers HTTP {error.code}") from None
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentProblem(f"{KEY}={masked_text(uri)!r}: the registry does not answer ({error})") from None
    return {t["key"]: t["value"] for t in version.get("tags", [])} | {"version": str(version["version"])}
