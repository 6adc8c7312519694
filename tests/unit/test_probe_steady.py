"""When a server counts as warm: against processes whose truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as some
from scipy import stats

from pipelines.probe.steady import CONFIDENCE, DRIFT, LEAST, both, drift, level, steady

BATCHES = 10
TRIALS = 400


def levels(noise: float, mean: Callable[[int], float], seed: int) -> Iterator[float]:
    source = random.Random(seed)
    for k in range(BATCHES):
        yield math.log(mean(k)) + source.gauss(0.0, noise)


def outcome(noise: float, mean: Callable[[int], float], seed: int) -> tuple[bool | None, int]:
    """What a warm-up of up to ten batches ends with, and after how many."""
    seen: list[float] = []
    verdict: bool | None = None
    for one in levels(noise, mean, seed):
        seen.append(one)
        verdict = steady(seen)
        if verdict:
            break
    return verdict, len(seen)


def share(noise: float, mean: Callable[[int], float], verdict: bool | None) -> float:
    return sum(outcome(noise, mean, seed)[0] is verdict for seed in range(TRIALS)) / TRIALS


@given(some.lists(some.floats(0.0, 8.0), min_size=4, max_size=30).filter(lambda x: max(x) - min(x) > 1e-6))
def test_the_interval_is_that_of_linear_regression(values: list[float]) -> None:
    """Slope and standard error are scipy's, the interval Student's with n - 2 degrees of freedom."""
    n = len(values)
    line = stats.linregress(range(n), values)
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, n - 2) * line.stderr
    expected = ((line.slope - reach) * (n - 1), (line.slope + reach) * (n - 1))
    assert drift(values, CONFIDENCE) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_an_even_server_is_soon_steady() -> None:
    """Noise of 1% from batch to batch: nearly every warm-up ends after the fewest batches, none is called drifting."""
    found = [outcome(0.01, lambda _: 80.0, seed) for seed in range(TRIALS)]
    assert {True} == {verdict for verdict, _ in found}
    assert sum(count == LEAST + 1 for _, count in found) > 0.9 * TRIALS


def test_a_server_that_gets_faster_is_not_steady() -> None:
    """Latency falls by 8% with each batch, through noise of 2%: it is seen, and hardly ever taken for steady."""
    assert share(0.02, lambda k: 80.0 * 0.92**k, False) > 0.98
    assert share(0.02, lambda k: 80.0 * 0.92**k, True) < 0.02


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.4])
def test_an_even_server_is_hardly_ever_said_to_drift(noise: float) -> None:
    """However much its batches differ: about one warm-up in a hundred, whose block is then left out for nothing."""
    assert share(noise, lambda _: 80.0, False) < 0.025


def test_a_slow_beginning_is_forgotten() -> None:
    """Five times as slow at first, then even: the warm-up goes on until those batches are out of the window."""
    found = [outcome(0.01, lambda k: 400.0 if k < 2 else 80.0, seed) for seed in range(TRIALS)]
    assert sum(verdict is True for verdict, _ in found) > 0.95 * TRIALS
    assert min(count for _, count in found) >= 2 + LEAST


def test_too_much_noise_is_not_called_either() -> None:
    """Batches that differ by 40% show nothing: nearly all warm-ups end without an answer."""
    assert share(0.4, lambda _: 80.0, None) > 0.9
    assert share(0.4, lambda _: 80.0, True) < 0.05


def test_a_drift_at_the_limit_passes_as_rarely_as_promised() -> None:
    """Just at the limit, one look passes with the 5% that a 90% interval allows."""
    source, window = random.Random(1), 9
    slope = DRIFT / (window - 1)
    passed = 0
    for _ in range(2000):
        seen = [k * slope + source.gauss(0.0, 0.01) for k in range(window)]
        passed += drift(seen, CONFIDENCE)[1] < DRIFT
    assert 0.035 < passed / 2000 < 0.065


def test_too_few_batches_tell_nothing() -> None:
    """The first batch never counts, and a line through three points is no test."""
    assert [None] * (LEAST + 1) == [steady([4.0] * count) for count in range(LEAST + 1)]
    assert steady([9.0, *[4.0] * LEAST]) is True


def test_a_level_is_the_mean_log_of_a_whole_batch() -> None:
    """100 and 400 ms average 200; a batch that lacks a figure has no level, for it is not like the others."""
    assert level([100.0, 400.0]) == pytest.approx(math.log(200.0))
    assert level([100.0, None]) is None
    assert level([]) is None


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [([True, True], True), ([True, None], None), ([None, False], False), ([True, False], False), ([], None)],
)
def test_all_latencies_must_be_steady(verdicts: list[bool | None], expected: bool | None) -> None:
    """One that drifts decides; one that cannot be told leaves it open."""
    assert expected is both(verdicts)
