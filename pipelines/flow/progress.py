"""How a stage says how far it is. The worker installs a sink; without one, reports go nowhere."""

from __future__ import annotations

from collections.abc import Callable

Sink = Callable[[int, int, str, float | None], None]
_sink: list[Sink] = []


def report(done: int, total: int, what: str, left_s: float | None = None) -> None:
    """Tell whoever watches that `done` of `total` units of `what` are finished, and how long the rest will take where
    that is known better than from their number."""
    for sink in _sink:
        sink(done, total, what, left_s)


def install(sink: Sink) -> None:
    """Send this process's reports to `sink`."""
    _sink[:] = [sink]
