"""Waking an event loop at a point in time, to within some tens of microseconds.

Event loops keep their timers in whole milliseconds, which is 2% of a TTFT of 50 ms. On Linux a timer of the kernel's
wakes the loop instead; elsewhere the loop's own timer does.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Self

CLOCK_MONOTONIC = 1
NONBLOCK_CLOEXEC = 0o2004000
NONE_FD = -1


class _Span(ctypes.Structure):
    """struct itimerspec: interval, then time left; each seconds and nanoseconds."""

    _fields_ = (("every_s", ctypes.c_long), ("every_ns", ctypes.c_long), ("s", ctypes.c_long), ("ns", ctypes.c_long))


class Alarm:
    """One timer on the running loop. Setting it again replaces what it was set to."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
        self._fd = NONE_FD if self._libc is None else self._libc.timerfd_create(CLOCK_MONOTONIC, NONBLOCK_CLOEXEC)

    def __enter__(self) -> Self:
        if self._fd != NONE_FD:
            self._loop.add_reader(self._fd, self._expired)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd != NONE_FD:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
        if self._timer is not None:
            self._timer.cancel()

    def set(self, seconds: float) -> None:
        """Ring once, that many seconds from now."""
        if self._fd == NONE_FD or self._libc is None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(seconds, self._ring)
            return
        span = _Span(0, 0, *divmod(max(1, int(seconds * 1e9)), 10**9))
        self._libc.timerfd_settime(self._fd, 0, ctypes.byref(span), None)

    def _expired(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._fd, 8)
            self._ring()
