"""The gateway of a rollout plan, in a real HAProxy: it splits users as the plan does, and logs what a check reads."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from pipelines.decide.split import bucket
from pipelines.decide.stepanswer import Past, judge_step
from pipelines.release import gateway
from pipelines.release.rolloutdata import parsed
from tests.rollouts import a_plan

HAPROXY = shutil.which("haproxy")
USERS = 300

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="needs haproxy on the PATH (a system package)")


@contextmanager
def server(name: str) -> Iterator[str]:
    """A server that says which one it is, and fails for users whose name says so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            failing = (self.headers["x-user-id"] or "").startswith("failing")
            self.send_response(500 if failing else 200)
            self.send_header("content-length", str(len(name)))
            self.end_headers()
            self.wfile.write(name.encode())

        def log_message(self, *args: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{made.server_address[1]}"
    finally:
        made.shutdown()
        made.server_close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def running(config: Path, log: Path, buckets: int) -> Iterator[None]:
    with log.open("wb") as out:
        env = os.environ | {"CANARY_BUCKETS": str(buckets)}
        process = subprocess.Popen([str(HAPROXY), "-f", str(config)], stdout=out, stderr=subprocess.STDOUT, env=env)
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=10)


def test_haproxy_splits_and_logs_by_the_plan(tmp_path: Path) -> None:
    """Every user meets the arm of the plan's bucket, also at a larger step; the log is evidence but for the scores."""
    plan, port = a_plan(), free_port()
    with server("control") as control, server("canary") as canary:
        text = gateway.haproxy(plan)
        for example, real in (
            (gateway.CONTROL, control),
            (gateway.CANARY, canary),
            (gateway.LISTEN, f"127.0.0.1:{port}"),
        ):
            assert example in text
            text = text.replace(example, real)
        config = tmp_path / "haproxy.cfg"
        config.write_text(text)
        checked = subprocess.run([str(HAPROXY), "-c", "-f", str(config)], capture_output=True, text=True)
        assert (0, "") == (checked.returncode, "\n".join(x for x in checked.stderr.splitlines() if "WARNING" in x))
        users = [f"user-{n}" for n in range(USERS)] + [f"failing {n}" for n in range(20)] + ['quo"te\\d', "ünï"]
        for step in plan.steps[:2]:
            log = tmp_path / f"step-{step.step}.log"
            with running(config, log, step.buckets), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
                _wait(port)
                for user in users:
                    answered = client.get("/v1/models", headers={"x-user-id": user.encode()})
                    expected = "canary" if bucket(plan.split.salt, user) < step.buckets else "control"
                    assert (expected, expected) == (answered.text, answered.headers["x-rollout-arm"]), user
                assert client.get("/").headers["x-rollout-arm"] in ("control", "canary")  # nobody's request
            lines = [line for line in log.read_bytes().splitlines() if line.startswith(b"{")]
            data = parsed("log", b"\n".join(lines))
            assert [*users, None] == [line.user for line in data.lines]
            assert 20 == sum(line.failed for line in data.lines)
            assert len(data.lines) == len({line.request_id for line in data.lines})
            answer = judge_step(plan, step, data.lines, Past())
            states = {f.what: f.state for f in answer.findings}
            assert ("hold", "missing") == (answer.answer, states["quality"])
            assert answer.minutes is not None


def test_a_server_that_is_away_is_an_error_of_its_arm(tmp_path: Path) -> None:
    """HAProxy answers 503 itself, and the log says that the request failed."""
    plan, port = a_plan(), free_port()
    config, log = tmp_path / "haproxy.cfg", tmp_path / "log"
    text = gateway.haproxy(plan).replace(gateway.LISTEN, f"127.0.0.1:{port}").replace(gateway.CANARY, "127.0.0.1:1")
    config.write_text(text)
    user = next(u for u in map(str, range(1000)) if bucket(plan.split.salt, u) < plan.steps[0].buckets)
    with running(config, log, plan.steps[0].buckets):
        _wait(port)
        assert 503 == httpx.get(f"http://127.0.0.1:{port}/", headers={"x-user-id": user}).status_code
    (line,) = parsed("log", b"\n".join(x for x in log.read_bytes().splitlines() if x.startswith(b"{"))).lines
    assert ("canary", user, True) == (line.arm, line.user, line.failed)


def _wait(port: int) -> None:
    for _ in range(100):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("haproxy did not listen")
