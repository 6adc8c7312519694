"""Divergence figures: against hand-computed cases and scipy, and lower bounds that are never above the exact KL."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from pipelines.divergence import figures, reading
from pipelines.divergence.figures import Figures, Row, clustered_se, summarize
from pipelines.divergence.positions import Positions, exact, log_softmax, partition_kl
from pipelines.divergence.reading import Window
from pipelines.errors import EvidenceError, StageFailed

LOGITS = arrays(np.float64, (2, 9), elements=st.floats(-30, 30, allow_nan=False))


def logs(*shares: float) -> NDArray[np.float64]:
    """Log-probabilities, which are logits too."""
    return np.log(np.array([shares]))


def test_figures_of_two_positions_by_hand() -> None:
    """Reference halves and quarters against a uniform third: every figure is a short sum."""
    reference = np.concatenate([logs(0.5, 0.25, 0.25), logs(0.25, 0.5, 0.25)])
    other = np.concatenate([logs(0.25, 0.5, 0.25), logs(0.25, 0.5, 0.25)])
    found = summarize(exact(reference, other, np.array([0, 1]), [0, 1]), exact=True)
    first = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert found.kl_mean == pytest.approx(first / 2)
    assert found.kl_median == pytest.approx(first / 2)
    assert (None, None) == (found.kl_p99, found.kl_p999)
    assert 0.5 == found.same_top
    assert found.dp_mean == pytest.approx(-0.125)
    assert found.dp_rms == pytest.approx(0.25 / math.sqrt(2))
    assert found.perplexity_reference == pytest.approx(2.0)
    assert found.perplexity == pytest.approx(math.sqrt(8))
    assert math.exp(found.log_ratio) == pytest.approx(math.sqrt(2))
    # losses ln 2 and 0 in two windows: se is that of a t interval of two numbers
    assert found.log_ratio_se == pytest.approx(scipy.stats.sem([math.log(2), 0.0]))


@given(LOGITS)
def test_exact_kl_is_scipys(both: NDArray[np.float64]) -> None:
    """The sum over the vocabulary is scipy's relative entropy of the two softmaxes."""
    p, q = np.exp(log_softmax(both))
    found = exact(both[:1], both[1:], np.array([0]), [0])
    assert found.kl[0] == pytest.approx(scipy.stats.entropy(p, q), rel=1e-6, abs=1e-12)


@given(LOGITS, st.sets(st.integers(0, 8)), st.sets(st.integers(0, 8)))
def test_a_partition_is_never_above_the_exact_kl(both: NDArray[np.float64], left: set[int], right: set[int]) -> None:
    """Whatever tokens either side ranks, merging the rest loses divergence and never adds any."""
    p, q = log_softmax(both)
    bound = partition_kl({i: p[i] for i in left}, {i: q[i] for i in right})
    assert bound <= exact(both[:1], both[1:], np.array([0]), [0]).kl[0] * (1 + 1e-9) + 1e-12


@given(LOGITS)
def test_ranking_everything_loses_nothing(both: NDArray[np.float64]) -> None:
    """With the whole vocabulary known, the partition is the distribution."""
    p, q = log_softmax(both)
    everything = partition_kl(dict(enumerate(p)), dict(enumerate(q)))
    assert everything == pytest.approx(exact(both[:1], both[1:], np.array([0]), [0]).kl[0], abs=1e-9)


def test_a_partition_by_hand() -> None:
    """One token known of both, the rest as one: two outcomes, 0.5 and 0.5 against 0.25 and 0.75."""
    found = partition_kl({0: math.log(0.5), 1: math.log(0.3)}, {0: math.log(0.25), 2: math.log(0.7)})
    assert found == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))


def test_a_large_comparison_is_made_in_rows() -> None:
    """More rows than are widened at once give the same as row by row."""
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=(2, 200, 11)).astype(np.float32)
    true = rng.integers(0, 11, 200)
    whole = exact(p, q, true, [0] * 200)
    alone = [exact(p[i : i + 1], q[i : i + 1], true[i : i + 1], [0]).kl[0] for i in range(200)]
    assert whole.kl == pytest.approx(alone)
    assert 0 < summarize(whole, exact=True).kl_p99 < whole.kl.max()  # type: ignore[operator]


@pytest.mark.parametrize(("count", "p99", "p999"), [(99, False, False), (100, True, False), (1000, True, True)])
def test_a_percentile_needs_its_positions(count: int, p99: bool, p999: bool) -> None:
    """A 99.9th percentile of fewer than 1,000 positions would be their maximum under another name."""
    values = np.linspace(0, 1, count)
    found = summarize(Positions(values, None, -values, -values, np.zeros(count, np.int64)), exact=False)
    assert (p99, p999) == (found.kl_p99 is not None, found.kl_p999 is not None)
    assert (None, None) == (found.same_top, found.log_ratio_se)


def test_the_error_bar_is_that_of_window_means() -> None:
    """With windows of one size the sandwich is the standard error of the windows' means."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=60)
    means = values.reshape(6, 10).mean(axis=1)
    assert clustered_se(values, np.repeat(np.arange(6), 10)) == pytest.approx(scipy.stats.sem(means))


@pytest.mark.parametrize("broken", ["kl", "reference", "other"])
def test_numbers_that_are_none_are_no_figures(broken: str) -> None:
    """NaN logits fail the comparison; they never become an average."""
    columns = {name: np.zeros(3) for name in ("kl", "reference", "other")}
    columns[broken][1] = np.nan
    with pytest.raises(StageFailed, match="not all finite"):
        summarize(Positions(same_top=None, window=np.zeros(3, np.int64), **columns), exact=True)


def test_other_shapes_are_not_compared() -> None:
    """A padded vocabulary is another distribution."""
    with pytest.raises(ValueError, match="shape"):
        exact(np.zeros((1, 4)), np.zeros((1, 5)), np.array([0]), [0])


def windows() -> tuple[Window, ...]:
    return Window("held_out", (1, 2, 3), 1), Window("prompts", (4, 5, 6, 7), 3)


def reading_of(seed: int, vocabulary: int = 30) -> tuple[reading.Reading, NDArray[np.float64]]:
    """A reading of two windows by a made-up model, and its logits; seeds are models a little apart."""
    logits = np.random.default_rng(7).normal(size=(3, vocabulary)) * 3
    logits += np.random.default_rng(seed).normal(size=logits.shape) * 0.3
    first, second = windows()
    parts = [reading.rank(logits[:2], first.true), reading.rank(logits[2:], second.true)]
    return reading.joined(windows(), parts), logits


def test_readings_bound_the_exact_kl_from_below() -> None:
    """Two readings compare at each position: a bound close to the exact KL, the exact top tokens and changes."""
    (ours, p), (theirs, q) = reading_of(0), reading_of(1)
    true = np.array([2, 3, 7])
    bound, whole = reading.positions(ours, theirs), exact(p, q, true, [0, 0, 1])
    assert (bound.kl <= whole.kl + 1e-12).all()
    assert (bound.kl > whole.kl / 2).all()
    assert bound.same_top is not None and whole.same_top is not None
    assert whole.same_top.tolist() == bound.same_top.tolist()
    assert bound.other == pytest.approx(whole.other)
    assert [0, 0, 1] == bound.window.tolist()


def test_a_small_vocabulary_is_ranked_whole() -> None:
    """Where there are fewer tokens than ranks, the bound is the KL itself."""
    (ours, p), (theirs, q) = reading_of(0, 12), reading_of(1, 12)
    assert reading.positions(ours, theirs).kl == pytest.approx(exact(p, q, np.array([2, 3, 7]), [0, 0, 1]).kl)


def test_a_reading_survives_its_file(tmp_path: Path) -> None:
    """What is written is what is read, and a part of it can be taken."""
    made, _ = reading_of(2)
    reading.write(tmp_path, made)
    found = reading.read(tmp_path)
    assert made.windows == found.windows
    for name in ("logprobs", "ranked", "ranked_logprobs"):
        for a, b in zip(getattr(made, name), getattr(found, name), strict=True):
            assert np.array_equal(a, b)
    part = found.only(windows()[1:])
    assert (windows()[1:], 1) == (part.windows, len(part.logprobs))


def test_readings_of_other_tokens_are_not_compared(tmp_path: Path) -> None:
    """Different ids are different evidence; a missing file says where it should be."""
    made, _ = reading_of(2)
    with pytest.raises(EvidenceError, match="different token ids"):
        reading.positions(made, made.only(windows()[1:]))
    with pytest.raises(EvidenceError, match=r"reading\.npz"):
        reading.read(tmp_path)


def test_rows_survive_their_file(tmp_path: Path) -> None:
    """Figures are kept to the last bit; an artifact without them has none, a broken file is an error."""
    assert () == figures.read(tmp_path)
    ours, theirs = reading_of(0)[0], reading_of(1)[0]
    found: Figures = summarize(reading.positions(ours, theirs), exact=False)
    row = Row(loss="total", text="held_out", between="a and b", figures=found)
    figures.write(tmp_path, [row])
    assert (row,) == figures.read(tmp_path)
    (tmp_path / figures.FILE).write_text("[{}]")
    with pytest.raises(EvidenceError, match="cannot be read"):
        figures.read(tmp_path)
