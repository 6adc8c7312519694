"""Servers of every temper: started, waited for, and gone afterwards with whatever they started."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipelines.engine import serving
from pipelines.engine.capabilities import Capabilities
from pipelines.engine.card import EngineCard
from pipelines.engine.table import TARGETS, Target
from pipelines.errors import EndpointError, EnvironmentProblem

# What a server does before it serves; `port` is its port and `note(word)` puts a word on record.
SCRIPT = """
import http.server, json, os, pathlib, signal, socket, subprocess, sys, time
here, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def note(word):
    with (here / "notes").open("a") as file:
        file.write(word + "\\n")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "fake"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

TEMPER
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
CHILD = 'subprocess.Popen([sys.executable, "-c", {code!r}], start_new_session={alone})'
Serve = Callable[..., Path]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Make an engine whose server has a temper; whoever noted `pid N` is gone when the test is over."""
    notes = tmp_path / "notes"

    def make(temper: str, grace_s: float = 5.0, startup_timeout_s: float | None = None) -> Path:
        script = tmp_path / "server.py"
        script.write_text(SCRIPT.replace("TEMPER", temper))

        class Fake(Target):
            def serve(self, engine: Path, port: int, threads: int) -> tuple[list[str], dict[str, str]]:
                return [sys.executable, str(script), str(engine), str(port)], {"TOLD": "to all"}

            def misplaced(self, engine: Path) -> list[object]:  # type: ignore[override]
                return []

            def capabilities(self, engine: Path) -> Capabilities:
                return Capabilities()

        row = Fake("fake", 1, "", "", (), grace_s=grace_s)
        monkeypatch.setattr(serving, "target", lambda name: row)
        card = EngineCard(
            target="fake", native=True, native_note="", max_length=8, eos_token_ids=[0], bos_token_id=None,
            vocab_size=2, model_id="fake", startup_timeout_s=startup_timeout_s,
        )  # fmt: skip
        (tmp_path / "engine.json").write_text(card.model_dump_json())
        return tmp_path

    yield make
    for line in notes.read_text().splitlines() if notes.is_file() else ():
        if line.startswith("pid "):
            assert not running(int(line.removeprefix("pid "))), "a process outlived the test"


def running(pid: int) -> bool:
    """Whether a process does anything still; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def noted(engine: Path, word: str) -> int:
    """Wait for `word N` among the notes; give N."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        notes = engine / "notes"
        for line in notes.read_text().splitlines() if notes.is_file() else ():
            if line.startswith(f"{word} "):
                return int(line.split()[1])
        time.sleep(0.02)
    raise AssertionError(f"nobody noted {word!r}")


def test_a_server_is_there_inside_the_block_and_gone_after_it(engine: Serve) -> None:
    """It answers on loopback, leads a process group of its own, and ends when asked to: no one has to be killed."""
    where = engine('note(f"pid {os.getpid()}")')
    with serving.serve(where, threads=1) as served:
        assert served.endpoint.base_url.startswith("http://127.0.0.1:")
        assert served.pid is not None and os.getpgid(served.pid) == served.pid
        assert 0 < served.ready_s < 30
    assert not running(served.pid)


def test_a_server_that_ignores_the_polite_signal_is_killed_after_its_grace(engine: Serve) -> None:
    """A target's grace is how long it has: 0.5 s here, and none of it is left to the server afterwards."""
    where = engine('signal.signal(signal.SIGTERM, signal.SIG_IGN); note(f"pid {os.getpid()}")', grace_s=0.5)
    with serving.serve(where, threads=1) as served:
        began = time.monotonic()
    assert 0.5 <= time.monotonic() - began < 30
    assert served.pid is not None and not running(served.pid)


def test_a_server_has_its_grace_to_end_in_order(engine: Serve) -> None:
    """One that takes a second to put its things away is not killed meanwhile."""
    where = engine(
        "def away(*_):\n    time.sleep(1)\n    note('away')\n    os._exit(0)\nsignal.signal(signal.SIGTERM, away)",
    )
    with serving.serve(where, threads=1):
        pass
    assert "away\n" == (where / "notes").read_text()


@pytest.mark.parametrize("alone", [False, True])
def test_children_that_outlive_their_server_end_with_it(engine: Serve, alone: bool) -> None:
    """A child that ignores the signal is killed, in the server's process group or, having left it, in its own."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = CHILD.format(code=code, alone=alone).replace("start_new", "stdout=subprocess.PIPE, start_new")
    where = engine(f'child = {child}; child.stdout.readline(); note(f"pid {{child.pid}}")', grace_s=0.5)
    with serving.serve(where, threads=1):
        assert running(noted(where, "pid"))
    assert not running(noted(where, "pid"))


def test_a_server_that_dies_is_told_with_its_last_words(engine: Serve) -> None:
    """The error has the exit status and the end of the log, not the whole of it."""
    where = engine('print("\\n".join(f"line {n}" for n in range(99))); sys.exit("no such kernel")')
    with (
        pytest.raises(EndpointError, match=r"(?s)fake: the server ended with 1.*line 98\nno such kernel") as told,
        serving.serve(where, threads=1),
    ):
        pass
    assert "line 9\n" not in str(told.value)


def test_a_server_that_never_answers_is_given_up(engine: Serve) -> None:
    """The card says how long it may take; then it is ended, and the error has what it said last."""
    where = engine('note(f"pid {os.getpid()}"); print("loading", flush=True); time.sleep(60)', startup_timeout_s=5.0)
    began = time.monotonic()
    with pytest.raises(EndpointError, match=r"(?s)did not answer in time.*loading"), serving.serve(where, threads=1):
        pass
    assert 5 <= time.monotonic() - began < 40


def test_a_port_that_somebody_takes_is_no_failure_of_the_engine(engine: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another port is tried; when none can be had, it is this machine that cannot."""
    where = engine("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], serving._free_port()])
        monkeypatch.setattr(serving, "_free_port", lambda: next(ports))
        with serving.serve(where, threads=1) as served:
            assert not served.endpoint.base_url.endswith(f":{taken.getsockname()[1]}/v1")
        monkeypatch.setattr(serving, "_free_port", lambda: taken.getsockname()[1])
        with pytest.raises(EnvironmentProblem, match="taken by another process"), serving.serve(where, threads=1):
            pass


def test_two_servers_at_once_have_a_port_each(engine: Serve) -> None:
    """Engines are served side by side."""
    where = engine("")
    with serving.serve(where, threads=1) as one, serving.serve(where, threads=1) as other:
        assert one.endpoint.base_url != other.endpoint.base_url
        assert one.pid != other.pid


def test_a_log_is_kept_where_it_was_asked_for(engine: Serve, tmp_path: Path) -> None:
    """What the server prints is in the file, also after it ended."""
    where, log = engine('print("hello from", os.environ["TOLD"], flush=True)'), tmp_path / "server.log"
    with serving.serve(where, threads=1, log=log):
        pass
    assert "hello from to all\n" == log.read_text()


def test_every_target_gives_its_server_some_time_to_end() -> None:
    """No row kills at once."""
    assert [] == [row.name for row in TARGETS.values() if row.grace_s <= 0]
