"""Two arms that different users met: bounds and sample sizes against published figures and reference libraries."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipelines.decide import arms
from pipelines.decide.arms import Graded, Share
from pipelines.decide.looks import spent


@pytest.mark.parametrize(
    ("control", "canary", "published"),
    [(Share(56, 70), Share(48, 80), (0.0528, 0.3382)), (Share(9, 10), Share(3, 10), (0.1700, 0.8406))],
)
def test_bounds_of_shares_are_miettinen_and_nurminens(
    control: Share, canary: Share, published: tuple[float, float]
) -> None:
    """Newcombe (1998), table II, method 6, at 95%."""
    found = arms.share_bounds(control, canary, 0.025, 0.025)
    assert published == pytest.approx(found, abs=6e-5)


def test_each_side_has_a_level_of_its_own() -> None:
    """The bound for going on does not move the one for rolling back."""
    narrow = arms.share_bounds(Share(900, 1000), Share(85, 100), 0.05, 0.05)
    mixed = arms.share_bounds(Share(900, 1000), Share(85, 100), 0.05, 0.001)
    assert narrow[0] == mixed[0]
    assert narrow[1] < mixed[1]


def test_the_variance_is_taken_where_the_likelihood_is_highest() -> None:
    """The closed form against a search over all shares that differ by the loss."""
    control, canary, loss = Share(70, 100), Share(90, 100), -0.29

    def likelihood(q: float) -> float:
        p = q + loss
        return (
            control.right * math.log(p) + (control.n - control.right) * math.log(1 - p)
            + canary.right * math.log(q) + (canary.n - canary.right) * math.log(1 - q)
        )  # fmt: skip

    q = max(np.linspace(0.2901, 0.9999, 200_001), key=likelihood)
    p = q + loss
    variance = (p * (1 - p) / 100 + q * (1 - q) / 100) * 200 / 199
    assert (0.7 - 0.9 - loss) / math.sqrt(variance) == pytest.approx(arms.score(control, canary, loss), abs=1e-4)


def test_unanimous_arms_still_have_a_width() -> None:
    """Nobody failed among 100: with z = 1.645 up to z^2 / (n + z^2) may, and no harm is shown."""
    lower, upper = arms.share_bounds(Share(10_000, 10_000), Share(100, 100), 0.05, 0.05)
    z2 = 1.6448536**2
    assert lower < 0
    assert z2 / (100 + z2) == pytest.approx(upper, rel=0.03)


def test_requests_of_one_user_count_as_fewer() -> None:
    """1,000 requests of 100 users who each see one thing only are about 100 independent ones."""
    values = [float(user % 4 > 0) for user in range(100) for _ in range(10)]
    users = [f"u{user}" for user in range(100) for _ in range(10)]
    found = arms.share(values, users)
    assert 0.75 == pytest.approx(found.p)
    assert 100 == pytest.approx(found.n, rel=0.1)
    assert 99 == found.df
    assert Share(750.0, 1000) == arms.share(values, list(range(1000)))


def test_means_are_welchs_where_requests_are_many() -> None:
    """Two arms of unequal size and spread against scipy; ours is a little wider, never narrower."""
    from scipy.stats import ttest_ind

    rng = np.random.default_rng(3)
    ours, theirs = rng.beta(8, 2, 8000), rng.beta(3, 1, 2000)
    scipys = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.9)
    found = arms.mean_bounds(Graded(list(ours), None), Graded(list(theirs), None), 0.05, 0.05)
    assert (scipys.low, scipys.high) == pytest.approx(found, abs=2e-4)
    assert found[0] <= scipys.low and scipys.high <= found[1]


def test_sample_sizes_are_those_of_textbooks() -> None:
    """Chow, Shao and Wang (2008), 4.2: 65% against 85%, room 0.3: 25 an arm. And 85% in both, margin 10 points, 2.5%,
    power 90%: 268 an arm."""
    assert (25, 25) == arms.requests_needed(0.85 * 0.15, 0.65 * 0.35, 0.5, 0.3, 0.05, 0.8)
    assert (268, 268) == arms.requests_needed(0.85 * 0.15, 0.85 * 0.15, 0.5, 0.1, 0.025, 0.9)


@pytest.mark.parametrize("percent", [1, 5, 20, 50])
def test_sample_sizes_with_unequal_arms_are_statsmodels(percent: int) -> None:
    """The canary gets a share of the traffic: its variance is v (1 + p / (1 - p))."""
    from statsmodels.stats.power import normal_sample_size_one_tail

    p, v = percent / 100, 0.7 * 0.3
    canary, control = arms.requests_needed(v, v, p, 0.02, 0.025, 0.8)
    expected = normal_sample_size_one_tail(0.02, 0.8, 0.025, std_null=math.sqrt(v * (1 + p / (1 - p))))
    assert math.ceil(expected) == canary
    assert canary * (1 - p) / p == pytest.approx(control, abs=1)


def test_looks_that_nobody_counted_beforehand_spend_alpha_once() -> None:
    """Half, a sixth, a twelfth: however many there are, together never more."""
    assert [0.025, 0.05 / 6, 0.05 / 12] == pytest.approx([spent(0.05, look) for look in (1, 2, 3)])
    assert 0.05 == pytest.approx(sum(spent(0.05, look) for look in range(1, 100_000)), rel=2e-5)
