"""MLflow's server on loopback: started, awaited, and stopped with all it started, also when whoever started it is
killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO
from urllib.error import URLError
from urllib.request import urlopen

from pipelines.errors import EnvironmentProblem
from pipelines.flow.tether import tethered
from pipelines.track.connection import artifact_root
from pipelines.track.masking import masked_text

HOST = "127.0.0.1"
START_S, STOP_S = 180.0, 10.0


@contextmanager
def server(
    tracking_uri: str, port: int, *, artifacts: str = "", start_s: float = START_S
) -> Iterator[subprocess.Popen[bytes]]:
    """A ready server in a process group of its own, which is gone when this ends.

    Raises:
        EnvironmentProblem: the port is taken, or the server ended or stayed silent; its last words are given.
    """
    if why := taken(port):
        raise EnvironmentProblem(f"port={port}: cannot listen on {HOST}:{port} ({why}); choose another port")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            tethered(_command(tracking_uri, port, artifacts)),
            stdout=log,
            stderr=log,
            env=_environment(),
            start_new_session=True,
        )
        try:
            _await(process, port, start_s, lambda: _tail(log))
            yield process
        finally:
            _stop(process)


def taken(port: int) -> str:
    """Why nothing can listen on a port of this machine, "" where it is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return ""


@contextmanager
def ends_on_signals() -> Iterator[None]:
    """Treat the end of the terminal or of this process like Ctrl-C, so that the server does not outlive it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {sign: signal.signal(sign, interrupt) for sign in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


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


def _tail(log: BinaryIO) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
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
