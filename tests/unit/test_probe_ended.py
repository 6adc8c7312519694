"""Whether and how a server's process ended, without taking its exit status from whoever waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pipelines.probe import ended


@pytest.mark.parametrize(
    ("code", "words", "status"),
    [
        ("import sys; sys.exit(3)", "the server ended with exit code 3", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the server was ended by SIGKILL", -signal.SIGKILL),
    ],
)
def test_a_child_that_ended_is_described_and_still_to_be_waited_for(code: str, words: str, status: int) -> None:
    """The words name code or signal, and its starter gets the status all the same."""
    child = subprocess.Popen([sys.executable, "-c", code])
    assert words == ended.soon(child.pid, 20)
    assert status == child.wait()


def test_a_running_server_has_not_ended_and_a_remote_one_is_not_known() -> None:
    """Neither is an end."""
    assert "" == ended.how(None)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        assert "" == ended.how(child.pid)
        assert child.stdin is not None
        child.stdin.close()


def test_a_process_that_is_not_ours_is_only_seen_to_be_gone() -> None:
    """A server inside a container is nobody's child here: how it ended is not known, that it did is."""
    assert "" == ended.how(os.getppid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert "the server ended" == ended.how(child.pid)
