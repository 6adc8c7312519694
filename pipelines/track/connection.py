"""A connection to MLflow: bounded waits, one initialisation of a fresh database, no telemetry, one kind of error."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote
from urllib.request import Request, urlopen

from pipelines.errors import EnvironmentProblem
from pipelines.track.masking import masked_text

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

KEY = "tracking.uri"
KEPT = "results are kept locally; run the same command again once it answers, and they are recorded once"


def absolute_uri(uri: str) -> str:
    """Make a sqlite URI's relative path absolute, so that every process means the same database."""
    prefix = "sqlite:///"
    if uri.startswith(prefix) and not uri.startswith(prefix + "/"):
        return prefix + str(Path(uri.removeprefix(prefix)).resolve())
    return uri


def database(uri: str) -> Path | None:
    """The file behind a sqlite tracking URI; None for any other."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(unquote(uri.removeprefix("sqlite:///").partition("?")[0]))


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def artifact_root(uri: str, chosen: str = "") -> str | None:
    """Where artifacts go: beside a local database unless chosen otherwise; a server decides for itself."""
    path = database(uri)
    return chosen or (str(path.parent / "artifacts") if path is not None else None)


@contextmanager
def session(uri: str, *, timeout_s: float = 10.0) -> Iterator[MlflowClient]:
    """Open a client; whatever MLflow raises inside becomes one clear error.

    Raises:
        EnvironmentProblem: the server does not answer in time, the database cannot be opened or written.
    """
    with _settings(timeout_s):
        if is_server(uri):
            _reach(uri, timeout_s)
        from mlflow.exceptions import MlflowException

        try:
            yield _client(uri)
        except MlflowException as error:
            why = masked_text(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
            raise EnvironmentProblem(
                f"{KEY}={masked_text(uri)!r}: MLflow refused or failed: {why[:300]}; {KEPT}"
            ) from None


def reachable(uri: str, *, timeout_s: float = 5.0) -> str:
    """Say what answers at a tracking URI, without MLflow and without creating anything.

    Raises:
        EnvironmentProblem: nothing does, or the database cannot be opened or could not be made.
    """
    path = database(uri)
    if is_server(uri):
        _reach(uri, timeout_s)
        return "the server answers"
    if path is None:
        return "is neither a server nor a database; MLflow will see"
    if not path.exists():
        return f"no database yet, the first run makes it{_unwritable(path)}"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=timeout_s)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM runs").fetchone()
    except sqlite3.Error as error:
        raise EnvironmentProblem(
            f"{KEY}={masked_text(uri)!r}: no MLflow database ({error}); move the file away, or choose another path"
        ) from None
    return f"a database with {count} runs"


def _unwritable(path: Path) -> str:
    at = next(up for up in path.parents if up.exists())
    if not at.is_dir() or not os.access(at, os.W_OK):
        raise EnvironmentProblem(f"{KEY}: {at} cannot be written; choose another path")
    return ""


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
    import json

    address = f"{uri.rstrip('/')}/api/2.0/mlflow/runs/get?run_id={quote(run_id)}"
    try:
        with urlopen(request(address), timeout=timeout_s) as answer:
            info = json.load(answer)["run"]["info"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(info.get("status") == "FINISHED" and info.get("lifecycle_stage") == "active")


def aliased_tags(uri: str, model: str, alias: str, *, timeout_s: float = 5.0) -> dict[str, str]:
    """Give the tags of the version an alias points at, with its "version"; empty where it points at none.

    Reads a sqlite database or asks a server directly, as `recorded` does.

    Raises:
        EnvironmentProblem: the server does not answer, or the database cannot be read.
    """
    path = database(uri)
    if path is not None:
        return _tags_in_database(path, model, alias)
    if not is_server(uri):
        return {}
    _reach(uri, timeout_s)
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


def _tags_on_server(uri: str, model: str, alias: str, timeout_s: float) -> dict[str, str]:
    import json

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


def _reach(uri: str, timeout_s: float) -> None:
    """Ask whether the server is there at all, once, so that an absent one costs seconds and not MLflow's retries."""
    try:
        with urlopen(request(f"{uri.rstrip('/')}/health"), timeout=timeout_s):
            return
    except HTTPError as error:
        if error.code in (401, 403, 404):  # it is there; what it allows shows when it is asked
            return
        why = f"HTTP {error.code}"
    except (URLError, OSError, ValueError) as error:
        why = str(getattr(error, "reason", error))
    raise EnvironmentProblem(
        f"{KEY}={masked_text(uri)!r}: the tracking server does not answer within {timeout_s:g} s ({why}); "
        f"start it, or choose another URI (sqlite:////absolute/path/mlflow.db needs no server); {KEPT}"
    )


def request(address: str) -> Request:
    """A request with the credentials MLflow itself would take from the environment."""
    import base64

    request = Request(address)
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    elif user := os.environ.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        request.add_header("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
    return request


def _client(uri: str) -> MlflowClient:
    """A client; a local database is opened by one process at a time, since its creation is not safe for several."""
    from mlflow.tracking import MlflowClient

    path = database(uri)
    if path is None:
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    from filelock import FileLock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock"), timeout=120):
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_experiments(max_results=1)
            client.search_registered_models(max_results=1)
            return client
    except OSError as error:
        raise EnvironmentProblem(f"{KEY}={uri!r}: cannot write there ({error}); choose another path") from None


@contextmanager
def _settings(timeout_s: float) -> Iterator[None]:
    """MLflow's settings for a bounded, quiet, self-contained conversation, put back afterwards."""
    wanted = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(max(1, round(timeout_s))),
        "GIT_PYTHON_REFRESH": "quiet",
    }
    before = {name: os.environ.get(name) for name in (*wanted, "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID")}
    os.environ.pop("MLFLOW_RUN_ID", None)
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
