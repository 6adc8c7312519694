"""Schedules of load: their distribution, and that they depend on nothing but profile, seed and round."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.probe.arrivals import due_times, schedule, turn_order
from pipelines.probe.config import LoadProfile
from pipelines.probe.rounds import measured_requests, plan, requests_per_round

from .probe_configs import probe_config


def open_profile(rate: float = 10.0, requests: int = 100, **more: object) -> LoadProfile:
    return LoadProfile.model_validate({"name": "open", "mode": "open", "rate": rate, "requests": requests, **more})


def gaps(times: tuple[float, ...]) -> list[float]:
    return [b - a for a, b in pairwise((0.0, *times))]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_poisson_gaps_are_exponential(seed: int) -> None:
    """A Kolmogorov-Smirnov test does not tell the gaps of a Poisson schedule from an exponential distribution."""
    from scipy.stats import expon, kstest

    times = due_times(open_profile(rate=25.0, requests=5000), seed=seed, round_number=0)
    assert times is not None
    assert kstest(gaps(times), expon(scale=1 / 25.0).cdf).pvalue > 0.001


def test_poisson_gaps_are_independent() -> None:
    """Neighbouring gaps of a Poisson schedule are uncorrelated (within four standard errors)."""
    from scipy.stats import pearsonr

    times = due_times(open_profile(requests=5000), seed=4, round_number=0)
    assert times is not None
    between = gaps(times)
    assert abs(pearsonr(between[:-1], between[1:]).statistic) < 4 / math.sqrt(len(between))


@given(rate=st.floats(0.1, 1000), seed=st.integers(0, 2**32))
def test_poisson_mean_rate_is_the_rate_asked(rate: float, seed: int) -> None:
    """Over 2000 requests the delivered rate is the asked one within five standard errors."""
    times = due_times(open_profile(rate=rate, requests=2000), seed=seed, round_number=0)
    assert times is not None
    assert abs(times[-1] * rate / 2000 - 1) < 5 / math.sqrt(2000)


@given(rate=st.floats(0.1, 1000), requests=st.integers(1, 200))
def test_constant_arrivals_do_not_drift(rate: float, requests: int) -> None:
    """Request k of a constant schedule is due at k/rate exactly, however many came before."""
    times = due_times(open_profile(rate, requests, arrivals="constant"), seed=0, round_number=0)
    assert times == tuple(k / rate for k in range(requests))


@given(seed=st.integers(), round_number=st.integers(0, 20), prompts=st.integers(1, 50))
def test_schedule_is_a_pure_function(seed: int, round_number: int, prompts: int) -> None:
    """The same profile, seed and round give the same schedule, with rising due times."""
    first, second = (schedule(open_profile(), seed=seed, round_number=round_number, prompts=prompts) for _ in range(2))
    assert first == second
    due = [arrival.due_s for arrival in first if arrival.due_s is not None]
    assert len(due) == 100
    assert due == sorted(due)


def test_another_seed_or_round_is_another_schedule() -> None:
    """Seed and round both change when requests are due."""
    times = {due_times(open_profile(), seed=seed, round_number=n) for seed in (1, 2) for n in (0, 1)}
    assert len(times) == 4


def test_closed_loop_has_no_due_times() -> None:
    """In a closed loop a request is due when a slot is free, which no schedule can know."""
    profile = LoadProfile(name="closed", mode="closed", concurrency=4, requests=8)
    assert due_times(profile, seed=0, round_number=0) is None
    assert {arrival.due_s for arrival in schedule(profile, seed=0, round_number=0, prompts=3)} == {None}


@given(requests=st.integers(1, 40), prompts=st.integers(1, 60), rounds=st.integers(1, 6))
def test_prompts_are_used_equally_often(requests: int, prompts: int, rounds: int) -> None:
    """Over all rounds no prompt is used twice before every other was used once."""
    profile = LoadProfile(name="closed", mode="closed", concurrency=1, requests=requests)
    used = [
        arrival.prompt
        for number in range(rounds)
        for arrival in schedule(profile, seed=9, round_number=number, prompts=prompts)
    ]
    counts = [used.count(prompt) for prompt in range(prompts)]
    assert max(counts) - min(counts) <= 1


def test_rounds_alternate() -> None:
    """Three engines run as A B C, C B A, A B C."""
    assert [turn_order(3, number) for number in range(3)] == [(0, 1, 2), (2, 1, 0), (0, 1, 2)]


def test_alternation_cancels_linear_drift() -> None:
    """Over two rounds every engine has the same mean place in time."""
    places = [[turn_order(4, n).index(engine) + 4 * n for n in range(2)] for engine in range(4)]
    assert {sum(place) for place in places} == {7}


def test_serials_never_repeat() -> None:
    """Warm-up and measured requests of all rounds have serial numbers of their own, without gaps."""
    config = probe_config(rounds=3)
    serials = []
    for number in range(config.rounds):
        planned = plan(config, number, prompts=5)
        serials += [*planned.warmup, *(serial for load in planned.loads for serial in load.serials)]
    assert serials == list(range(config.rounds * requests_per_round(config)))


def test_measured_requests_leave_out_the_warm_up() -> None:
    """Two engines, three rounds, 4 + 6 requests a round: 60 rows."""
    assert measured_requests(probe_config(rounds=3), engines=2) == 60
