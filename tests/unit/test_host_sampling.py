"""Sampling and log-probabilities against numpy, scipy and known distributions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, logsumexp

from pipelines.engine.host.decoder import Sampling
from pipelines.engine.host.sampling import choose, log_normalizers, rank

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def draws(sampling: Sampling, count: int = 4000) -> list[float]:
    """Frequencies of the four tokens."""
    random = np.random.default_rng(1)
    counts = np.bincount([choose(LOGITS, sampling, random) for _ in range(count)], minlength=4)
    return list(counts / count)


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(temperature=0), [1, 0, 0, 0]),
        (Sampling(), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (Sampling(top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.79), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (Sampling(top_p=0.01), [1, 0, 0, 0]),
        (Sampling(top_k=1, temperature=2), [1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_by_their_probability(sampling: Sampling, wanted: list[float]) -> None:
    """Frequencies follow the tempered and filtered distribution; 0.03 is four standard errors and more."""
    assert wanted == pytest.approx(draws(sampling), abs=0.035)


def test_a_seed_repeats_the_draws() -> None:
    """The same seed gives the same tokens, another seed others."""

    def run(seed: int) -> list[int]:
        random = np.random.default_rng(seed)
        return [choose(LOGITS, Sampling(seed=seed), random) for _ in range(30)]

    assert run(3) == run(3)
    assert run(3) != run(4)


@given(st.integers(1, 40), st.integers(2, 50), st.integers(0, 10**6), st.sampled_from([1.0, 50.0]))
def test_normalizers_equal_scipys(rows: int, vocab: int, seed: int, scale: float) -> None:
    """The blocked log-sum-exp is scipy's, also where exponentials would overflow."""
    logits = (np.random.default_rng(seed).normal(size=(rows, vocab)) * scale).astype(np.float32)
    np.testing.assert_allclose(
        log_normalizers(logits), logsumexp(logits.astype(np.float64), axis=1), rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize("count", [0, 1, 3])
def test_ranks_are_the_best_tokens_in_order(count: int) -> None:
    """Ranked alternatives are the largest log-softmax values, best first."""
    logits = np.random.default_rng(0).normal(size=(5, 20)).astype(np.float32)
    wanted = log_softmax(logits.astype(np.float64), axis=1)
    found = rank(logits, log_normalizers(logits), count)
    assert [list(np.argsort(-row)[:count]) for row in logits] == [[i for i, _ in row] for row in found]
    for row, exact in zip(found, wanted, strict=True):
        assert [exact[i] for i, _ in row] == pytest.approx([value for _, value in row], abs=1e-5)
