"""The search for the highest rate that meets an SLO, against servers whose limit is known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.probe import search
from pipelines.probe.arrivals import Asked, schedule
from pipelines.probe.profiles import Search, Slo


@dataclass(frozen=True)
class Answer:
    ok: bool = True
    ttft_ms: float | None = 50.0
    tpot_ms: float | None = 10.0
    e2e_ms: float | None = 200.0


@given(points=st.integers(1, 300), data=st.data())
def test_bisection_finds_the_limit(points: int, data: st.DataObject) -> None:
    """Whatever the highest place that meets the SLO is, none included, it is found in the visits foreseen."""
    limit = data.draw(st.integers(-1, points - 1))
    visited = search.bisect(points, lambda place: place <= limit)
    assert max((place for place, met in visited.items() if met), default=-1) == limit
    assert len(visited) <= search.most_visits(points)
    assert all(0 <= place < points for place in visited)


def test_a_single_rate_is_tried_once() -> None:
    """A grid of one rate has two answers and takes one visit."""
    assert search.bisect(1, lambda _: True) == {0: True}
    assert search.most_visits(1) == 1


@given(points=st.integers(1, 100))
def test_the_first_rate_tried_is_known_beforehand(points: int) -> None:
    """It is what `next_phase` says before anything was tried."""
    profile = Search.model_validate(
        {"name": "s", "mode": "search", "low": 1, "high": 2, "requests": 2, "resolution": 0.01, "slo": {"e2e_ms": 1}}
    )
    assert search.first_phase(profile) == search.next_phase(len(profile.grid), {})
    assert search.next_phase(points, {}) == (points - 1) // 2


@pytest.mark.parametrize("capacity", [0.5, 2.0, 3.1, 7.9, 20.0])
def test_a_queue_is_searched_to_its_service_rate(capacity: float) -> None:
    """A server with one slot that serves `capacity` requests a second: the rate found is below it and near it.

    With times counted from when requests were due, waiting counts, so a rate above the capacity cannot meet the SLO.
    """
    profile = Search.model_validate(
        {"name": "s", "mode": "search", "low": 1.0, "high": 10.0, "requests": 4000, "resolution": 0.05,
         "slo": {"ttft_ms": 40_000.0 / capacity, "share": 0.99}}
    )  # fmt: skip
    planned = schedule(profile, Asked((0,), 8), seed=5, round_number=0)

    def met(phase: int) -> bool:
        free_s, answers = 0.0, []
        for arrival in (a for a in planned if a.phase == phase):
            due_s = arrival.due_s or 0.0
            free_s = max(free_s, due_s) + 1 / capacity
            answers.append(Answer(ttft_ms=(free_s - due_s) * 1e3))
        return search.meets(profile.slo, answers)

    kept = [profile.grid[place] for place, ok in search.bisect(len(profile.grid), met).items() if ok]
    if capacity < 1:
        assert kept == []
    elif capacity > 10:
        assert max(kept) == 10.0
    else:
        assert 0.9 * capacity < max(kept) < 1.02 * capacity


@pytest.mark.parametrize(
    ("slo", "answer", "kept"),
    [
        ({"ttft_ms": 50}, Answer(), True),
        ({"ttft_ms": 49}, Answer(), False),
        ({"ttft_ms": 60, "e2e_ms": 199}, Answer(), False),
        ({"tpot_ms": 10, "ttft_ms": 50, "e2e_ms": 200}, Answer(), True),
        ({"tpot_ms": 1}, Answer(tpot_ms=None), True),
        ({"ttft_ms": 60}, Answer(ok=False, ttft_ms=None), False),
    ],
)
def test_an_slo_is_kept_jointly(slo: dict[str, float], answer: Answer, kept: bool) -> None:
    """All limits at once; a failed request keeps none; a time that does not exist breaks none."""
    assert search.keeps(Slo.model_validate(slo), answer) is kept


@pytest.mark.parametrize(("bad", "met"), [(0, True), (1, True), (2, False)])
def test_a_share_of_the_requests_sent_must_keep_it(bad: int, met: bool) -> None:
    """99 of 100 are enough for a share of 0.99, 98 are not; those that failed count among those sent."""
    answers = [Answer()] * (100 - bad) + [Answer(ok=False, ttft_ms=None)] * bad
    assert search.meets(Slo(ttft_ms=60), answers) is met
