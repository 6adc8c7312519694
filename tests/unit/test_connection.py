"""Work over a connection that goes away: what is done again, and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import pytest

from pipelines.errors import EnvironmentProblem
from pipelines.track import connection
from pipelines.track.connection import TRIES, Lost, persistently

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

SERVER = "http://127.0.0.1:9"


class Line:
    """Stands for MLflow: fails as it is told, one failure a call, and counts how often work was begun."""

    def __init__(self, *failures: Exception | None, opens: bool = True, back: bool = True) -> None:
        self.failures, self.opens, self.back, self.begun = list(failures), opens, back, 0

    @contextmanager
    def session(self, uri: str, *, timeout_s: float) -> Iterator[object]:
        if not self.opens:
            raise EnvironmentProblem("it does not answer")
        yield self

    def reach(self, uri: str, timeout_s: float) -> None:
        if not self.back:
            raise EnvironmentProblem("it does not answer")

    def work(self, client: MlflowClient) -> str:
        assert cast("object", client) is self
        self.begun += 1
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return "recorded"


def record(monkeypatch: pytest.MonkeyPatch, line: Line, uri: str = SERVER) -> str:
    monkeypatch.setattr(connection, "session", line.session)
    monkeypatch.setattr(connection, "reach", line.reach)
    return persistently(uri, line.work, timeout_s=0.1, patience_s=0.01)


@pytest.mark.parametrize("uri", [SERVER, "postgresql://db/x"])
def test_work_that_was_lost_is_done_again_from_its_beginning(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    """Lost twice, done the third time."""
    line = Line(Lost("gone"), Lost("gone"))
    assert ("recorded", 3) == (record(monkeypatch, line, uri), line.begun)


@pytest.mark.parametrize(
    ("line", "begun"),
    [
        (Line(opens=False), 0),
        (Line(EnvironmentProblem("no permission")), 1),
        (Line(Lost("gone"), back=False), 1),
        (Line(*[Lost("gone")] * TRIES), TRIES),
    ],
    ids=["never there", "refused", "not back in time", "lost each time"],
)
def test_what_will_not_get_better_is_told(monkeypatch: pytest.MonkeyPatch, line: Line, begun: int) -> None:
    """An absent server is not waited for, a refusal not repeated; patience and tries have an end."""
    with pytest.raises(EnvironmentProblem):
        record(monkeypatch, line)
    assert begun == line.begun


def test_a_server_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Away at the first two looks, there at the third: the work is done again."""
    line, looks = Line(Lost("gone")), iter([False, False, True])

    def reach(uri: str, timeout_s: float) -> None:
        if not next(looks):
            raise EnvironmentProblem("it does not answer")

    monkeypatch.setattr(connection, "session", line.session)
    monkeypatch.setattr(connection, "reach", reach)
    monkeypatch.setattr(connection.time, "sleep", lambda _: None)
    assert "recorded" == persistently(SERVER, line.work, timeout_s=0.1, patience_s=30.0)
    assert 2 == line.begun


def test_a_database_that_does_not_listen_is_told_at_once() -> None:
    """The address is named without its password, and no driver is waited for."""
    with pytest.raises(EnvironmentProblem, match=r"postgresql://\*\*\*@127\.0\.0\.1:9/x.*127\.0\.0\.1:9") as caught:
        persistently("postgresql://ada:s3cr3t@127.0.0.1:9/x", lambda _: None, timeout_s=1.0, patience_s=1.0)
    assert "s3cr3t" not in str(caught.value)
