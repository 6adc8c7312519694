"""End a server with everything it started: politely, for as long as it may take, then not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

POLL_S = 0.05
KILLED_WITHIN_S = 5.0


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process group and what its leader started outside it; return when all of it is gone.

    All are asked to end (SIGTERM), and killed where that takes longer than `grace_s`. Who left the group and outlives a
    leader that died by itself is not known here any more.
    """
    family = _Family(process.pid)
    family.look()
    _signal(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and (process.poll() is None or family.alive()):
        time.sleep(POLL_S)
        family.look()
    family.look()
    _signal(process.pid, signal.SIGKILL)
    family.kill()
    process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


class _Family:
    """A leader's descendants and the members of its group, but for the leader itself."""

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._known: set[psutil.Process] = set()

    def look(self) -> None:
        """Learn who is there now."""
        import psutil

        with suppress(psutil.Error):
            self._known.update(psutil.Process(self._leader).children(recursive=True))
        for one in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError, PermissionError):
                if one.pid != self._leader and os.getpgid(one.pid) == self._leader:
                    self._known.add(one)

    def alive(self) -> list[psutil.Process]:
        """Those that still run. A zombie does not: it only waits to be noticed."""
        return [one for one in self._known if _runs(one)]

    def kill(self) -> None:
        """Kill the rest, and wait until the kernel has taken them away."""
        import psutil

        for one in self.alive():
            with suppress(psutil.Error):
                one.kill()
        deadline = time.monotonic() + KILLED_WITHIN_S
        while self.alive() and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _runs(one: psutil.Process) -> bool:
    import psutil

    try:
        return bool(one.is_running() and one.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
