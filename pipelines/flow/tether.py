"""A process that ends when whoever started it does. `python -m pipelines.flow.tether COMMAND...` runs one that cannot
ask for that itself: an installer, or a container's client, which then ends its container.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with_parent() -> None:
    """Ask Linux to end this process when whoever started it dies, so a killed run leaves nothing behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(
            1, signal.SIGTERM
        )  # PR_SET_PDEATHSIG; kept when the program is replaced


def tethered(argv: list[str]) -> list[str]:
    """The command that runs `argv` tethered to whoever starts it."""
    return [sys.executable, "-P", "-m", "pipelines.flow.tether", *argv]


if __name__ == "__main__":
    die_with_parent()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        print(f"{sys.argv[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
