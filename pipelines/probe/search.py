"""Which rate a search tries next: pure, from where the SLO was met at the rates tried so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pipelines.probe.profiles import Search, Slo


class Figures(Protocol):
    """What is known of a request that was sent."""

    @property
    def ok(self) -> bool: ...
    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def tpot_ms(self) -> float | None: ...
    @property
    def e2e_ms(self) -> float | None: ...


def next_phase(points: int, met: Mapping[int, bool]) -> int | None:
    """Place in the grid of the rate to try next, given whether the SLO was met at places tried; None when it is known.

    Bisects between the highest place that met it and the lowest that did not, as if rates outside did either.
    """
    below = max((place for place, kept in met.items() if kept), default=-1)
    above = min((place for place, kept in met.items() if not kept), default=points)
    return None if above - below <= 1 else (below + above) // 2


def bisect(points: int, met: Callable[[int], bool]) -> dict[int, bool]:
    """Ask at one place after another whether the SLO is met there, until the highest such place is known."""
    found: dict[int, bool] = {}
    while (place := next_phase(points, found)) is not None:
        found[place] = met(place)
    return found


def most_visits(points: int) -> int:
    """Rates tried at most: there are points + 1 answers, none of the rates being one of them."""
    return math.ceil(math.log2(points + 1))


def keeps(slo: Slo, request: Figures) -> bool:
    """Whether one request was answered within every limit; a limit on a time that it does not have holds."""
    pairs = ((slo.ttft_ms, request.ttft_ms), (slo.tpot_ms, request.tpot_ms), (slo.e2e_ms, request.e2e_ms))
    return request.ok and all(most is None or took is None or took <= most for most, took in pairs)


def meets(slo: Slo, requests: Sequence[Figures]) -> bool:
    """Whether enough of the requests sent kept the SLO; those that failed have not."""
    return sum(keeps(slo, request) for request in requests) >= slo.share * len(requests) - 1e-9


def first_phase(profile: Search) -> int:
    """Place in the grid of the rate that is tried first, whatever comes of it."""
    return (len(profile.grid) - 1) // 2
