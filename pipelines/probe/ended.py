"""Whether a server's process has ended, and how; told without taking its exit status from whoever started it."""

from __future__ import annotations

import os
import signal


def how(pid: int | None) -> str:
    """In words, "" where it runs, or is not ours to know."""
    import psutil

    if pid is None:
        return ""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        gone = not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return "the server ended" if gone else ""
    if status is None:
        return ""
    if status.si_code == os.CLD_EXITED:
        return f"the server ended with exit code {status.si_status}"
    return f"the server was ended by {signal.Signals(status.si_status).name}"
