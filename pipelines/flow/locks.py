"""Locks on files, held by the kernel: whoever dies lets go. Standard library only, since every worker needs them."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.errors import EnvironmentProblem

POLL_S = 0.05


class Held(EnvironmentProblem):
    """Somebody else holds the lock, and went on holding it for as long as we would wait."""


@contextmanager
def locked(path: Path, *, wait_s: float | None = None, shared: bool = False) -> Iterator[None]:
    """Hold the lock on a file, alone or with other sharers; None waits for ever, 0 not at all.

    Raises:
        Held: it was not to be had in time.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if wait_s is None:
            fcntl.flock(fd, how)
        else:
            _within(fd, how, wait_s, path)
        yield
    finally:
        os.close(fd)


def _within(fd: int, how: int, wait_s: float, path: Path) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Held(f"{path}: another process holds this lock") from None
            time.sleep(POLL_S)
        else:
            return
