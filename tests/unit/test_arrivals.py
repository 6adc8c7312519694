"""Schedules of load: their distribution, and that they depend on nothing but profile, seed and round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.probe.arrivals import Asked, TraceLine, due_times, schedule, turn_order
from pipelines.probe.profiles import Closed, Open, Replay, Search, Spike, Steps

from .probe_configs import profile

SLO = {"ttft_ms": 100.0}


def open_profile(rate: float = 10.0, requests: int = 100, **more: object) -> Open:
    return Open.model_validate({"name": "open", "mode": "open", "rate": rate, "requests": requests, **more})


def search_profile(low: float = 1.0, high: float = 8.0, requests: int = 50, **more: object) -> Search:
    given = {"name": "s", "mode": "search", "low": low, "high": high, "requests": requests, "slo": SLO}
    return Search.model_validate(given | more)


def times(profile: Open | Steps | Search | Replay, *, seed: int = 1, round_number: int = 0) -> tuple[float, ...]:
    return tuple(at for _, at in due_times(profile, seed=seed, round_number=round_number) if at is not None)


def gaps(at: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise((0.0, *at))]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_poisson_gaps_are_exponential(seed: int) -> None:
    """A Kolmogorov-Smirnov test does not tell the gaps of a Poisson schedule from an exponential distribution."""
    from scipy.stats import expon, kstest

    between = gaps(times(open_profile(rate=25.0, requests=5000), seed=seed))
    assert kstest(between, expon(scale=1 / 25.0).cdf).pvalue > 0.001


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_their_shape_and_the_rates_mean(shape: float) -> None:
    """Burstiness is the shape of a gamma distribution with mean 1/rate: the test tells it from twice the shape."""
    from scipy.stats import gamma, kstest

    between = gaps(times(open_profile(20.0, 4000, arrivals="gamma", burstiness=shape)))
    assert kstest(between, gamma(a=shape, scale=1 / (20.0 * shape)).cdf).pvalue > 0.001
    assert kstest(between, gamma(a=2 * shape, scale=1 / (40.0 * shape)).cdf).pvalue < 1e-6


def test_steps_are_poisson_processes_one_after_another() -> None:
    """Within a step arrivals are uniform over its time, and as many as rate x seconds within four standard errors."""
    from scipy.stats import kstest, uniform

    given = {"name": "steps", "mode": "steps", "steps": [{"rate": 50, "seconds": 40}, {"rate": 200, "seconds": 20}]}
    due = due_times(Steps.model_validate(given), seed=3, round_number=0)
    for phase, begin, length, expected in ((0, 0.0, 40.0, 2000), (1, 40.0, 20.0, 4000)):
        mine = [at for step, at in due if step == phase and at is not None]
        assert kstest(mine, uniform(begin, length).cdf).pvalue > 0.001
        assert abs(len(mine) - expected) < 4 * math.sqrt(expected)
    assert [phase for phase, _ in due] == sorted(phase for phase, _ in due)


def test_poisson_gaps_are_independent() -> None:
    """Neighbouring gaps of a Poisson schedule are uncorrelated (within four standard errors)."""
    from scipy.stats import pearsonr

    between = gaps(times(open_profile(requests=5000), seed=4))
    assert abs(pearsonr(between[:-1], between[1:]).statistic) < 4 / math.sqrt(len(between))


@given(rate=st.floats(0.1, 1000), seed=st.integers(0, 2**32))
def test_poisson_mean_rate_is_the_rate_asked(rate: float, seed: int) -> None:
    """Over 2000 requests the delivered rate is the asked one within five standard errors."""
    at = times(open_profile(rate=rate, requests=2000), seed=seed)
    assert abs(at[-1] * rate / 2000 - 1) < 5 / math.sqrt(2000)


@given(rate=st.floats(0.1, 1000), requests=st.integers(1, 200))
def test_constant_arrivals_do_not_drift(rate: float, requests: int) -> None:
    """Request k of a constant schedule is due at k/rate exactly, however many came before."""
    assert times(open_profile(rate, requests, arrivals="constant")) == tuple(k / rate for k in range(requests))


@given(seed=st.integers(), round_number=st.integers(0, 20), prompts=st.integers(1, 50))
def test_schedule_is_a_pure_function(seed: int, round_number: int, prompts: int) -> None:
    """The same profile, seed and round give the same schedule, with rising due times."""
    asked = Asked(tuple(range(prompts)), 8)
    first, second = (schedule(open_profile(), asked, seed=seed, round_number=round_number) for _ in range(2))
    assert first == second
    due = [arrival.due_s for arrival in first if arrival.due_s is not None]
    assert len(due) == 100
    assert due == sorted(due)


def test_another_seed_or_round_is_another_schedule() -> None:
    """Seed and round both change when requests are due."""
    assert len({times(open_profile(), seed=seed, round_number=n) for seed in (1, 2) for n in (0, 1)}) == 4


def test_closed_loops_have_no_due_times() -> None:
    """In a closed loop a request is due when a slot is free, which no schedule can know."""
    given = {"name": "c", "mode": "closed", "concurrency": 4, "requests": 8}
    assert due_times(Closed.model_validate(given), seed=0, round_number=0) == ((0, None),) * 8


def test_a_spike_has_three_phases() -> None:
    """Base, peak and base again, as many requests in each."""
    spike = Spike.model_validate({"name": "s", "mode": "spike", "base": 2, "peak": 5, "requests": 5})
    due = due_times(spike, seed=0, round_number=0)
    assert due == ((0, None),) * 5 + ((1, None),) * 5 + ((2, None),) * 5


@given(
    at=st.lists(st.floats(0, 1e6), min_size=1, max_size=30).map(sorted),
    speed=st.sampled_from([0.5, 0.75, 1.0, 1.5, 2.0]),
    round_number=st.integers(0, 3),
)
def test_a_replay_keeps_the_traces_times(at: list[float], speed: float, round_number: int) -> None:
    """Each request is due at its own time over the speed, in every round, and nothing is drawn."""
    replay = Replay.model_validate({"name": "r", "mode": "replay", "trace": "t", "speed": speed})
    asked = Asked((0, 1), 8, tuple(TraceLine(one, None, None) for one in at))
    due = [arrival.due_s for arrival in schedule(replay, asked, seed=1, round_number=round_number)]
    assert due == [one / speed for one in at]


def test_a_traces_own_prompts_and_lengths_come_first() -> None:
    """What a line does not say is taken from the profile: the next prompt in turn, the default output length."""
    replay = Replay.model_validate({"name": "r", "mode": "replay", "trace": "t"})
    asked = Asked((0,), 8, (TraceLine(0.0, 7, None), TraceLine(0.1, None, 3), TraceLine(0.1, 9, 4)))
    planned = schedule(replay, asked, seed=1, round_number=0)
    assert [(a.prompt, a.max_tokens) for a in planned] == [(7, 8), (0, 3), (9, 4)]


def test_rates_of_a_search_differ_in_nothing_but_their_pace() -> None:
    """At twice the rate the same prompts are due at half the times; each rate's schedule is in the plan."""
    search = search_profile(resolution=1.0)
    assert search.grid == pytest.approx((1, 2, 4, 8))
    planned = schedule(search, Asked(tuple(range(7)), 8), seed=2, round_number=1)
    by_rate = [[a for a in planned if a.phase == phase] for phase in range(4)]
    assert {len(part) for part in by_rate} == {50}
    for phase, part in enumerate(by_rate):
        assert [a.prompt for a in part] == [a.prompt for a in by_rate[0]]
        assert [a.due_s for a in part] == pytest.approx([(a.due_s or 0.0) / 2**phase for a in by_rate[0]])
    assert [a.request for a in planned] == list(range(200))


@given(low=st.floats(0.01, 100), ratio=st.floats(1.01, 1000), resolution=st.floats(0.01, 1))
def test_a_grid_reaches_from_low_to_high_in_equal_ratios(low: float, ratio: float, resolution: float) -> None:
    """Neighbours are the same ratio apart, no more than the resolution allows."""
    grid = search_profile(low, low * ratio, resolution=resolution).grid
    assert (grid[0], grid[-1]) == (low, low * ratio)
    ratios = [b / a for a, b in pairwise(grid)]
    assert max(ratios) <= 1 + resolution + 1e-6
    assert max(ratios) - min(ratios) < 1e-6


@given(requests=st.integers(1, 40), prompts=st.integers(1, 60), rounds=st.integers(1, 6))
def test_prompts_are_used_equally_often(requests: int, prompts: int, rounds: int) -> None:
    """Over all rounds no prompt is used twice before every other was used once."""
    closed = profile("closed", concurrency=1, requests=requests)
    used = [
        arrival.prompt
        for number in range(rounds)
        for arrival in schedule(closed, Asked(tuple(range(prompts)), 8), seed=9, round_number=number)
    ]
    counts = [used.count(prompt) for prompt in range(prompts)]
    assert max(counts) - min(counts) <= 1


def test_rounds_of_uneven_size_take_prompts_in_turn() -> None:
    """Steps send as many requests as come to be due; the next round goes on where the last one stopped."""
    steps = profile("steps", steps=[{"rate": 5.0, "seconds": 4.0}])
    rounds = [schedule(steps, Asked(tuple(range(9)), 8), seed=9, round_number=number) for number in range(4)]
    assert len({len(one) for one in rounds}) > 1
    used = [arrival.prompt for one in rounds for arrival in one]
    assert used == [used[k % 9] for k in range(len(used))]


def test_rounds_alternate() -> None:
    """Three engines run as A B C, C B A, A B C."""
    assert [turn_order(3, number) for number in range(3)] == [(0, 1, 2), (2, 1, 0), (0, 1, 2)]


def test_alternation_cancels_linear_drift() -> None:
    """Over two rounds every engine has the same mean place in time."""
    places = [[turn_order(4, n).index(engine) + 4 * n for n in range(2)] for engine in range(4)]
    assert {sum(place) for place in places} == {7}
