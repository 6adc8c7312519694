"""Whether a server's process has ended, and how; told without taking its exit status from whoever started it."""

from __future__ import annotations

import os
import signal
import time

POLL_S = 0.01


def soon(pid: int | None, within_s: float) -> str:
    """As `how`, of a server whose connections broke: its sockets close a moment before it has ended."""
    deadline_s = time.monotonic() + within_s
    while not (found := how(pid)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return found


def how(pid: int | None) -> str:
    """In words, "" where it runs, or is not ours to know."""
    import psutil

    if pid is None:
        return ""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # a container's, say
        try:
            gone = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            gone = True
        return "the server ended" if gone else ""
    if status is None:
        return ""
    if status.si_code == os.CLD_EXITED:
        return f"the server ended with exit code {status.si_status}"
    return f"the server was ended by {signal.Signals(status.si_status).name}"
