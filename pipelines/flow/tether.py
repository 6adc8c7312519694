"""A process that ends when whoever started it does. `python -m pipelines.flow.tether COMMAND...` runs one that cannot
ask for that itself, and ends it with all that it started: an installer, or a container's client.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

GRACE_S = 8.0  # less than what whoever ends us waits


def die_with_parent() -> None:
    """Ask Linux to end this process when whoever started it dies, so a killed run leaves nothing behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def tethered(argv: list[str]) -> list[str]:
    """The command that runs `argv` tethered to whoever starts it."""
    return [sys.executable, "-P", "-m", "pipelines.flow.tether", *argv]


def main(argv: list[str]) -> int:
    """Run a command in a process group of its own; its exit code is ours, and our end is the group's."""
    with suppress(PermissionError):  # we lead a group already
        os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        die_with_parent()
        code = subprocess.Popen(argv, preexec_fn=die_with_parent).wait()  # should we be killed outright
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        return 127
    except SystemExit:
        _end_group()
        raise
    return code if code >= 0 else 128 - code


def _end_group() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, GRACE_S)
    with suppress(ChildProcessError):
        os.waitpid(-1, 0)
    os.killpg(0, signal.SIGKILL)  # what our child started and left, and us


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
