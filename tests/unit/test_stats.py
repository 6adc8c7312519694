"""The statistics against published examples, reference libraries and simulation."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.decide import stats

unhurried = settings(deadline=None, max_examples=50)
counts = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 400)).map(lambda t: (t[0], t[1], sum(t) + 1))


@pytest.mark.parametrize(
    ("gains", "losses", "n", "lower", "upper"),
    [(1, 7, 21, -0.5172, -0.0260), (6, 16, 161, -0.1240, -0.0054)],
    ids=["airway hyper-responsiveness", "stem-cell transplants"],
)
def test_interval_matches_published_examples(gains: int, losses: int, n: int, lower: float, upper: float) -> None:
    """Tango's interval of p_candidate - p_reference is the published one, to four digits."""
    assert (lower, upper) == tuple(round(v, 4) for v in stats.paired_score_interval(gains, losses, n, 0.95))


@pytest.mark.parametrize(("gains", "losses"), [(1, 7), (6, 16), (30, 12)])
def test_score_at_zero_is_mcnemar(gains: int, losses: int) -> None:
    """At difference 0 the statistic is McNemar's z."""
    expected = (gains - losses) / math.sqrt(gains + losses)
    assert expected == pytest.approx(stats.paired_score(gains, losses, 500, 0.0))


@pytest.mark.parametrize(
    ("gains", "losses", "n", "difference"), [(1, 7, 21, -0.1), (6, 16, 161, 0.02), (0, 3, 50, -0.3)]
)
def test_closed_form_is_the_maximum_likelihood(gains: int, losses: int, n: int, difference: float) -> None:
    """The closed-form rate of losses maximises the likelihood constrained to the difference."""
    from scipy.optimize import minimize_scalar

    def negative(q: float) -> float:
        p_gain, p_same = q + difference, 1.0 - 2.0 * q - difference
        parts = ((gains, p_gain), (losses, q), (n - gains - losses, p_same))
        return -sum(k * math.log(max(p, 1e-300)) for k, p in parts if k)

    low, high = max(0.0, -difference), (1.0 - difference) / 2.0
    found = minimize_scalar(negative, bounds=(low, high), method="bounded", options={"xatol": 1e-12})
    assert found.x == pytest.approx(stats.loss_rate_under(gains, losses, n, difference), abs=2e-6)


@unhurried
@given(counts)
def test_swapping_sides_flips_the_interval(case: tuple[int, int, int]) -> None:
    """Exchanging candidate and reference mirrors the interval."""
    gains, losses, n = case
    lower, upper = stats.paired_score_interval(gains, losses, n, 0.9)
    assert (-upper, -lower) == pytest.approx(stats.paired_score_interval(losses, gains, n, 0.9), abs=1e-9)


@unhurried
@given(counts)
def test_interval_contains_the_estimate(case: tuple[int, int, int]) -> None:
    """The point estimate lies inside, and the interval within [-1, 1]."""
    gains, losses, n = case
    lower, upper = stats.paired_score_interval(gains, losses, n, 0.9)
    assert -1.0 <= lower <= (gains - losses) / n <= upper <= 1.0


@unhurried
@given(counts, st.floats(0.001, 0.4), st.floats(0.001, 0.4))
def test_p_falls_as_the_margin_grows(case: tuple[int, int, int], one: float, other: float) -> None:
    """A wider margin is never harder to meet."""
    p_small, p_large = (stats.noninferiority_p(*case, margin) for margin in sorted((one, other)))
    assert p_small >= p_large - 1e-12


@unhurried
@given(counts, st.floats(0.005, 0.3))
def test_test_and_interval_agree(case: tuple[int, int, int], margin: float) -> None:
    """p < alpha exactly when the upper bound of the loss is below the margin."""
    gains, losses, n = case
    bound = -stats.paired_score_interval(gains, losses, n, 0.9)[0]
    if abs(bound - margin) > 1e-9:
        assert (bound < margin) == (stats.noninferiority_p(gains, losses, n, margin) < 0.05)


@unhurried
@given(counts, st.floats(0.01, 0.2))
def test_p_grows_with_losses(case: tuple[int, int, int], margin: float) -> None:
    """One more item lost never helps."""
    gains, losses, n = case
    before = stats.noninferiority_p(gains, losses, n + 1, margin)
    assert stats.noninferiority_p(gains, losses + 1, n + 1, margin) >= before - 1e-12


def test_no_flips_is_not_certainty() -> None:
    """With no flip at all the bound is z^2 / (n + z^2)."""
    z2 = 1.6448536269514722**2
    lower, upper = stats.paired_score_interval(0, 0, 100, 0.9)
    assert (-z2 / (100 + z2), z2 / (100 + z2)) == pytest.approx((lower, upper))


def test_mcnemar_exact_matches_the_binomial_test() -> None:
    """McNemar's exact p is the binomial test of the flips."""
    from scipy.stats import binomtest

    for gains, losses in [(1, 7), (6, 16), (5, 5), (0, 0), (300, 210)]:
        expected = binomtest(min(gains, losses), gains + losses).pvalue if gains + losses else 1.0
        assert expected == pytest.approx(stats.mcnemar_exact(gains, losses))


def test_wilson_matches_scipy() -> None:
    """Wilson's interval is scipy's."""
    from scipy.stats import binomtest

    for k, n in [(0, 20), (3, 17), (50, 50)]:
        expected = binomtest(k, n).proportion_ci(0.95, method="wilson")
        assert (expected.low, expected.high) == pytest.approx(stats.wilson(k, n, 0.95))


def test_paired_t_matches_scipy() -> None:
    """Estimate, interval and one-sided p are scipy's paired t-test."""
    from scipy.stats import ttest_rel

    a, b = [0.9, 0.4, 0.7, 1.0, 0.2, 0.5], [0.8, 0.5, 0.7, 0.6, 0.1, 0.5]
    estimate = stats.paired_t([x - y for x, y in zip(a, b, strict=True)])
    expected = ttest_rel(a, b, alternative="greater")
    ci = ttest_rel(a, b).confidence_interval(0.9)
    assert (ci.low, ci.high) == pytest.approx(estimate.interval(0.9))
    assert expected.pvalue == pytest.approx(estimate.p_at_most(0.0))


def test_cluster_t_by_hand() -> None:
    """Sandwich variance: residual sums +1.5, -0.5, -1 over three clusters of n=6 give 3/2 * 3.5 / 36."""
    estimate = stats.cluster_t([1.0, 1.0, 0.0, 0.0, 0.0, -0.5], ["a", "a", "b", "b", "c", "c"])
    mean = 0.25
    assert (mean, math.sqrt(1.5 * (1.5**2 + 0.5**2 + 1.0**2) / 36), 2) == pytest.approx(
        (estimate.mean, estimate.se, estimate.df)
    )


def test_singleton_clusters_are_plain_items() -> None:
    """With one item a cluster, the cluster-robust estimate is the paired t."""
    values = [0.1, -0.4, 0.0, 0.3, 0.9, 0.0]
    plain, clustered = stats.paired_t(values), stats.cluster_t(values, range(6))
    assert (plain.mean, plain.se, plain.df) == pytest.approx((clustered.mean, clustered.se, clustered.df))
    assert stats.design_effect(values, range(6), 1.0) == pytest.approx(1.0)


def test_design_effect_of_whole_clusters_is_their_size() -> None:
    """Items that always change together count once, as evidence outgrows the prior."""
    values = [float(g % 2) for g in range(400) for _ in range(4)]
    clusters = [g for g in range(400) for _ in range(4)]
    assert stats.design_effect(values, clusters, 1.0) == pytest.approx(4.0, rel=0.02)


def test_unanimous_graded_items_are_not_certainty() -> None:
    """100 identical scores still leave a loss of about z^2 / n open."""
    lower, upper = stats.cautious_t([0.0] * 100, None, 1.0, 0.9).interval(0.9)
    assert upper == -lower == pytest.approx(2.7055 / 100, rel=0.03)


@pytest.mark.parametrize(
    ("flips", "margin", "expected"),
    [(0.02, 0.01, 1237), (0.02, 0.02, 310), (0.05, 0.005, 12366), (0.05, 0.01, 3092), (0.05, 0.02, 773),
     (0.05, 0.03, 344), (0.10, 0.01, 6183), (0.10, 0.02, 1546), (0.10, 0.03, 687)],
)  # fmt: skip
def test_required_items_match_the_table(flips: float, margin: float, expected: int) -> None:
    """Items for 80% power at one-sided 5% when nothing is lost, to the published table."""
    assert expected == stats.required_items(flips, margin, 0.05, 0.8)


def test_more_items_stops_when_half_the_margin_is_lost() -> None:
    """A variant that has lost half its margin is not worth more items; one that gained is."""
    assert stats.more_items(500, 0.05, 0.005, 0.01, 0.05, 0.8) is None
    assert 3092 - 500 == stats.more_items(500, 0.05, -0.02, 0.01, 0.05, 0.8)


def test_smallest_loss_inverts_required_items() -> None:
    """A set of the required size resolves its margin, and a set with few flips is bounded by its size alone."""
    assert stats.smallest_loss(3092, 0.05, 0.05, 0.8) == pytest.approx(0.01, rel=1e-3)
    assert stats.smallest_loss(100, 1e-9, 0.05, 0.8) == pytest.approx(0.0263, abs=1e-4)


@pytest.mark.parametrize(("quantile", "one", "two"), [(0.95, 59, 72), (0.99, 299, 368), (0.999, 2995, 3688)])
def test_observations_needed(quantile: float, one: int, two: int) -> None:
    """The smallest samples that bound p95, p99 and p99.9 at 95%, from above and on both sides."""
    assert (one, two) == (
        stats.observations_needed(quantile, 0.95, one_sided=True),
        stats.observations_needed(quantile, 0.95),
    )
    assert stats.quantile_interval(range(two - 1), quantile, 0.95) is None
    assert stats.quantile_interval(range(two), quantile, 0.95) is not None


def test_median_interval_of_ten() -> None:
    """The tabled 95% interval of a median from n=10 is the 2nd to the 9th value."""
    assert stats.quantile_interval([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], 0.5, 0.95) == (2, 9)


def test_holm_by_hand() -> None:
    """0.01, 0.04, 0.03 become 0.03, 0.06, 0.06."""
    assert [0.03, 0.06, 0.06] == pytest.approx(stats.holm([0.01, 0.04, 0.03]))


@pytest.mark.parametrize(("n", "flips", "margin"), [(200, 0.05, 0.02), (500, 0.05, 0.01), (1000, 0.05, 0.01)])
def test_false_pass_rate_at_the_margin(n: int, flips: float, margin: float) -> None:
    """A variant exactly at the margin passes at most 5% of the time (Monte-Carlo error of 20,000 campaigns added)."""
    import numpy

    rng = numpy.random.default_rng(20260101)
    p_loss, p_gain = (flips + margin) / 2, (flips - margin) / 2
    draws = rng.multinomial(n, [p_gain, p_loss, 1 - flips], size=20_000)
    cases, times = numpy.unique(draws[:, :2], axis=0, return_counts=True)
    passed = [stats.noninferiority_p(int(g), int(b), n, margin) < 0.05 for g, b in cases]
    assert float(times[passed].sum()) / 20_000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 20_000)


@pytest.mark.parametrize(("groups", "size", "flips"), [(60, 5, 0.05), (50, 20, 0.10)])
def test_false_pass_rate_with_clusters(groups: int, size: int, flips: float) -> None:
    """With flips correlated inside clusters (0.1) the rate still holds, where ignoring clusters breaks it."""
    import numpy

    rng, margin, runs, n = numpy.random.default_rng(7), 0.02, 1500, groups * size
    rates = numpy.array([(flips + margin) / 2, (flips - margin) / 2, 1 - flips]) * 9  # Dirichlet with correlation 1/10
    clusters, robust, naive = [g for g in range(groups) for _ in range(size)], 0, 0
    limit = stats.critical(0.9, groups - 1)
    for _ in range(runs):
        p = rng.dirichlet(rates, groups)
        u = rng.random((groups, size))
        d = numpy.where(u < p[:, :1], -1.0, numpy.where(u < p[:, :1] + p[:, 1:2], 1.0, 0.0)).ravel().tolist()
        gains, losses = d.count(1.0), d.count(-1.0)
        effect = stats.design_effect(d, clusters, 1.0)
        robust += stats.paired_score(gains / effect, losses / effect, n / effect, -margin) > limit
        naive += stats.paired_score(gains, losses, n, -margin) > stats.critical(0.9)
    assert robust / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert naive > robust
