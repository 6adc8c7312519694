"""An engine's server for as long as a `with` block: started, waited for, and gone afterwards with all its children."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from pipelines.engine.card import EngineCard, read_card
from pipelines.engine.ending import end
from pipelines.engine.endpoint import Endpoint
from pipelines.engine.table import Elsewhere, target
from pipelines.errors import EndpointError, EnvironmentProblem
from pipelines.flow.launch import Launch, serving

HOST = "127.0.0.1"
PORT_TRIES = 3
STARTUP_S = 120.0
POLL_S = 0.02
REMOTE_POLL_S = 0.5
LOG_LINES = 15
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers; `pid` leads a process group of its own, and is None where the server is not ours.

    `ready_s` is from start to first answer, or from the first try where nothing was started.
    """

    endpoint: Endpoint
    pid: int | None
    ready_s: float


class _PortTaken(EnvironmentProblem):
    """Somebody took the port between our choice and the server's bind."""


@contextmanager
def serve(
    engine_dir: Path, *, threads: int, log: Path | None = None, startup_timeout_s: float | None = None
) -> Iterator[Served]:
    """Serve an engine on a free loopback port; everything its server started ends with the block, within its target's
    grace. Without a time to start within, it may take what its card says, or STARTUP_S.

    On Linux the server also ends when the calling thread does, however that happens. A server that somebody else runs
    is only waited for.

    Raises:
        EndpointError: it died or did not answer in time; the message ends with its last log lines.
        EnvironmentProblem: no port could be had in several tries, or the engine belongs to another machine.
    """
    card = read_card(engine_dir)
    row = target(card.target)
    if misplaced := row.misplaced(engine_dir):
        raise EnvironmentProblem(f"{engine_dir}: cannot run here: {'; '.join(map(str, misplaced))}")
    allowed_s = startup_timeout_s or card.startup_timeout_s or STARTUP_S
    if (elsewhere := row.elsewhere(engine_dir)) is not None:
        with _reached(engine_dir, elsewhere, card, allowed_s) as served:
            yield served
        return
    with ExitStack() as stack:
        path = log or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quantgate-"))) / "server.log"
        out = stack.enter_context(path.open("ab"))
        for attempt in range(PORT_TRIES):
            port = _free_port()
            argv, extra = row.serve(engine_dir, port, threads)
            started = stack.enter_context(serving(engine_dir, argv, extra))
            stack.callback(started.tidy)
            began = time.monotonic()
            process = _start(started, out)
            stack.callback(end, process, row.grace_s)
            try:
                _wait(process, port, card, path, began + allowed_s)
            except _PortTaken:
                if attempt == PORT_TRIES - 1:
                    raise
                continue
            break
        ready_s = time.monotonic() - began
        endpoint = Endpoint(f"http://{HOST}:{port}/v1", card.model_id, row.capabilities(engine_dir))
        stack.callback(endpoint.close)
        yield Served(endpoint, started.pid() or process.pid, ready_s)


@contextmanager
def _reached(engine_dir: Path, elsewhere: Elsewhere, card: EngineCard, allowed_s: float) -> Iterator[Served]:
    """A server that is not ours, once it answers a question about its models."""
    capabilities = target(card.target).capabilities(engine_dir)
    endpoint = Endpoint(
        elsewhere.base_url, card.model_id, capabilities, headers=elsewhere.headers, text_of=elsewhere.text_of
    )
    with closing(endpoint):
        began = time.monotonic()
        while (refused := endpoint.not_ready()) and time.monotonic() < began + allowed_s:
            time.sleep(REMOTE_POLL_S)
        if refused:
            raise EndpointError(f"{card.model_id}: nothing that can be used answers at {elsewhere.base_url}: {refused}")
        yield Served(endpoint, None, time.monotonic() - began)


def _start(started: Launch, out: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            started.argv,
            env=started.env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
    except OSError as error:
        raise EndpointError(f"{started.argv[0]}: cannot be started: {error.strerror}") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


def _die_with_parent() -> Callable[[], None] | None:
    """What the child runs before its program: ask the kernel for a signal when the parent's thread ends."""
    if not sys.platform.startswith("linux"):
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return ask


def _wait(process: subprocess.Popen[bytes], port: int, card: EngineCard, log: Path, deadline: float) -> None:
    """Wait until the server is healthy and is the one that was started."""
    with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=2.0, trust_env=False) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                if process.returncode == EnvironmentProblem.exit_code or _taken(port):
                    raise _PortTaken(f"{card.model_id}: port {port} was taken by another process; tried {PORT_TRIES}")
                raise EndpointError(f"{card.model_id}: the server ended with {process.returncode}{_last_lines(log)}")
            if _is_ours(client, card):
                return
            time.sleep(POLL_S)
    waited = f"{card.model_id}: the server did not answer in time (startup_timeout_s)"
    raise EndpointError(f"{waited}{_last_lines(log)}")


def _is_ours(client: httpx.Client, card: EngineCard) -> bool:
    try:
        if client.get("/health").status_code != httpx.codes.OK:
            return False
        models = client.get("/v1/models").json()["data"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False
    return any(model.get("id") == card.model_id for model in models)


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "; its last words:\n" + "\n".join(lines) if lines else "; it said nothing"
