"""A connection to MLflow: bounded waits, one initialisation of a fresh database, no telemetry, one kind of error.

MLflow itself never sends a request twice here, since it would send one again that arrived: whoever records does all of
it again, which finds what is there (`persistently`).
"""

from __future__ import annotations

import hashlib
import os
import socket
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from pipelines.errors import EnvironmentProblem
from pipelines.track.masking import MASK, masked_text

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

KEY = "tracking.uri"
KEPT = "results are kept locally; `quantgate track --resume` records them once, when it answers"
ADDRESS = "QUANTGATE_TRACKING_URI"
"""The environment variable in which a tracking URI with a password travels to a child: no file has it."""
PASSING = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "DATABASE_ERROR")
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
TRIES = 4
T = TypeVar("T")


class Lost(EnvironmentProblem):
    """The connection went, or the server could not just then; what was recorded so far stands."""


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
    """Where artifacts go: what was chosen; else beside a local database, in mlruns/ here for another one, and where a
    server wants them."""
    if chosen or is_server(uri) or "://" not in uri:
        return (chosen if "://" in chosen else str(Path(chosen).resolve())) if chosen else None
    path = database(uri)
    return str((Path("mlruns").resolve() if path is None else path.parent) / "artifacts")


@contextmanager
def addressed(uri: str) -> Iterator[None]:
    """Let child processes know a URI whose password is in none of their files."""
    before = os.environ.get(ADDRESS)
    os.environ[ADDRESS] = uri
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(ADDRESS, None)
        else:
            os.environ[ADDRESS] = before


def whole(uri: str) -> str:
    """The URI that was masked to this one, as the process that started us knows it.

    Raises:
        EnvironmentProblem: it is masked, and nobody told us the rest.
    """
    if MASK not in uri:
        return uri
    told = os.environ.get(ADDRESS, "")
    if masked_text(told) != uri:
        raise EnvironmentProblem(
            f"{KEY}={uri!r}: its password is in no file; `quantgate track --resume` records what was not recorded yet"
        )
    return told


def persistently(uri: str, work: Callable[[MlflowClient], T], *, timeout_s: float, patience_s: float) -> T:
    """Do work that may be done again over a connection, and again from its beginning where it was lost on the way.

    A server that is not there at first is not waited for; one that goes away in between is, for `patience_s`.

    Raises:
        EnvironmentProblem: it is away, did not come back in time, or refuses.
    """
    for last in (*[False] * (TRIES - 1), True):
        begun = False
        try:
            with session(uri, timeout_s=timeout_s) as client:
                begun = True
                return work(client)
        except Lost:
            if last or not begun or not _back(uri, timeout_s, patience_s):
                raise
    raise AssertionError("the last try returns or raises")


def _back(uri: str, timeout_s: float, patience_s: float) -> bool:
    """Wait until a server answers again; a database is only given a moment."""
    deadline = time.monotonic() + patience_s
    while True:
        time.sleep(min(1.0, patience_s))
        if not is_server(uri):
            return True
        try:
            reach(uri, timeout_s)
        except EnvironmentProblem:
            if time.monotonic() >= deadline:
                return False
        else:
            return True


@contextmanager
def session(uri: str, *, timeout_s: float = 10.0) -> Iterator[MlflowClient]:
    """Open a client; whatever MLflow and what it stands on raise inside becomes one clear error.

    Raises:
        EnvironmentProblem: the server does not answer in time, the database cannot be opened or written; `Lost` where
            another try may do.
    """
    with _settings(timeout_s, uri):
        if is_server(uri):
            reach(uri, timeout_s)
        elif host := urlsplit(uri).hostname:
            _reach_database(uri, host, timeout_s)
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield _client(uri)
        except MlflowException as error:
            kind = Lost if error.error_code in PASSING else EnvironmentProblem
            raise _told(kind, uri, error) from None
        except (RequestException, SQLAlchemyError) as error:
            raise _told(Lost, uri, error) from None
        except ModuleNotFoundError as error:
            raise EnvironmentProblem(
                f"{KEY}={masked_text(uri)!r}: the driver of this database is missing ({error}); "
                "PostgreSQL's comes with `pip install 'quantgate[postgres]'`"
            ) from None


def _told(kind: type[EnvironmentProblem], uri: str, error: Exception) -> EnvironmentProblem:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return kind(f"{KEY}={masked_text(uri)!r}: MLflow refused or failed: {masked_text(lines[0])[:300]}; {KEPT}")


def reachable(uri: str, *, timeout_s: float = 5.0) -> str:
    """Say what answers at a tracking URI, without MLflow and without creating anything.

    Raises:
        EnvironmentProblem: nothing does, or the database cannot be opened or could not be made.
    """
    path = database(uri)
    if is_server(uri):
        reach(uri, timeout_s)
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


def reach(uri: str, timeout_s: float) -> None:
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


def _reach_database(uri: str, host: str, timeout_s: float) -> None:
    """Ask whether anything listens there, since a driver may wait for minutes."""
    port = urlsplit(uri).port or next((p for name, p in PORTS.items() if uri.startswith(name)), None)
    if port is None:
        return
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        raise EnvironmentProblem(
            f"{KEY}={masked_text(uri)!r}: nothing answers at {host}:{port} within {timeout_s:g} s ({error}); start the "
            f"database, or choose another URI; {KEPT}"
        ) from None


def request(address: str) -> Request:
    """A request with the credentials MLflow itself would take: those in the address, else from the environment."""
    import base64

    bare, pair = _parted(address)
    made = Request(bare)
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        made.add_header("Authorization", f"Bearer {token}")
    elif name := os.environ.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{name}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
    if pair and not made.has_header("Authorization"):
        made.add_header("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
    return made


def _parted(address: str) -> tuple[str, str]:
    """An address without its credentials, which MLflow prints with every run that ends; and "user:password", or ""."""
    parts = urlsplit(address)
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=host)), unquote(user)


def _client(uri: str) -> MlflowClient:
    """A client; a database is opened by one process at a time, since its creation is not safe for several."""
    from mlflow.tracking import MlflowClient

    if is_server(uri):
        bare, _ = _parted(uri)
        return MlflowClient(tracking_uri=bare, registry_uri=bare)
    from filelock import FileLock
    from mlflow.store.db import utils

    utils.MAX_RETRY_COUNT = 2  # MLflow would try for two minutes to open a database that refuses
    try:
        with FileLock(_beside(uri), timeout=120):
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_experiments(max_results=1)
            client.search_registered_models(max_results=1)
            return client
    except OSError as error:
        raise EnvironmentProblem(
            f"{KEY}={masked_text(uri)!r}: cannot write there ({error}); choose another path"
        ) from None


def _beside(uri: str) -> Path:
    """The lock file of a database: beside a local one, else in this machine's directory for temporary files."""
    path = database(uri)
    if path is None:
        return (
            Path(tempfile.gettempdir())
            / f"quantgate-{os.getuid()}-{hashlib.sha256(uri.encode()).hexdigest()[:16]}.lock"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(path.name + ".lock")


@contextmanager
def _settings(timeout_s: float, uri: str) -> Iterator[None]:
    """MLflow's settings for a bounded, quiet, self-contained conversation, put back afterwards.

    Credentials in a server's address are given to MLflow apart from it, where the environment has none.
    """
    wanted = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(max(1, round(timeout_s))),
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }
    user, colon, password = _parted(uri)[1].partition(":") if is_server(uri) else ("", "", "")
    if colon and "MLFLOW_TRACKING_USERNAME" not in os.environ:
        wanted |= {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
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
