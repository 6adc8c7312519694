"""How far a probe is and how long it takes still, from loads whose times are given."""

from __future__ import annotations

import pytest

from pipelines.probe.arrivals import Arrival
from pipelines.probe.pace import Pace
from pipelines.probe.rounds import Load, Round
from tests.unit.probe_configs import profile

CLOSED = profile("closed", concurrency=1, requests=10)
OPEN = profile("open", rate=2.0, requests=21)


def planned(rounds: int) -> list[Round]:
    """Each round: ten requests one after another, then 21 of which the last is due after ten seconds."""
    closed = Load(CLOSED, tuple(Arrival(k, 0, None, 0, 8) for k in range(10)), range(10))
    opened = Load(OPEN, tuple(Arrival(k, 0, k / 2, 0, 8) for k in range(21)), range(21))
    return [Round(number, range(0), (0,), 1, (closed, opened)) for number in range(rounds)]


def test_time_left_is_what_is_left_of_the_same_kind() -> None:
    """Two engines, two rounds: a closed load took 30 s, an open one its 12, and a turn 8 s besides."""
    told: list[tuple[int, int, str, float | None]] = []
    rounds = planned(2)
    pace = Pace(rounds, 2, lambda *report: told.append(report))
    assert pace.left_s() is None, "nobody knows yet how long ten requests take"
    pace.load_ended(rounds[0].loads[0], 30.0)
    assert told[-1] == (10, 124, "requests", pytest.approx(3 * 30.0 + 4 * 10.0))
    pace.load_ended(rounds[0].loads[1], 12.0)
    assert told[-1] == (31, 124, "requests", pytest.approx(3 * 30.0 + 3 * 12.0))
    pace.turn_ended(50.0)
    pace.load_ended(rounds[0].loads[1], 12.0)
    assert told[-1] == (52, 124, "requests", pytest.approx(3 * 30.0 + 2 * 12.0 + 2 * 8.0)), "two more servers start"


def test_it_ends_at_nothing_left() -> None:
    """The last report has all requests done and no time left, also where loads could not be sent."""
    told: list[tuple[int, int, str, float | None]] = []
    rounds = planned(1)
    pace = Pace(rounds, 2, lambda *report: told.append(report))
    for seconds in (30.0, None):
        for load in rounds[0].loads:
            pace.load_ended(load, seconds)
        pace.turn_ended(60.0 if seconds else 0.0)
    assert (62, 62, "requests", 0.0) == told[-1]
