"""The statistics against published examples, reference libraries and simulation."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.decide import stats
from pipelines.decide.bootstrap import RESAMPLES, SEED, bca
from pipelines.decide.looks import nominal_alpha

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


def test_newcombe_matches_the_published_example() -> None:
    """Airway hyper-responsiveness, 1 and 12 alike and 1 and 7 not: method 10 gives -0.5069 to -0.0256."""
    found = stats.newcombe_interval(1, 1, 7, 12, 0.95)
    assert (-0.5069, -0.0256) == tuple(round(v, 4) for v in found)


@unhurried
@given(counts, st.integers(0, 100))
def test_newcombe_mirrors_and_contains_the_estimate(case: tuple[int, int, int], right: int) -> None:
    """Exchanging sides mirrors it, and the difference lies inside."""
    gains, losses, n = case
    wrong = n - gains - losses
    low, high = stats.newcombe_interval(right, gains, losses, wrong, 0.9)
    back = stats.newcombe_interval(right, losses, gains, wrong, 0.9)
    assert (-high, -low) == pytest.approx(back, abs=1e-12)
    assert low - 1e-12 <= (gains - losses) / (n + right) <= high + 1e-12


@pytest.mark.parametrize(("gains", "losses"), [(1, 7), (6, 16), (30, 12)])
def test_score_at_zero_is_mcnemar(gains: int, losses: int) -> None:
    """At difference 0 the statistic is McNemar's z."""
    expected = (gains - losses) / math.sqrt(gains + losses)
    assert expected == pytest.approx(stats.paired_score(gains, losses, 500, 0.0))


def highest(derivative: Callable[[float], float], low: float, high: float) -> float:
    """Where a concave log-likelihood is highest: the root of its derivative, which falls."""
    from scipy.optimize import brentq

    gap = 1e-15 * (high - low)
    if derivative(low + gap) <= 0:
        return low
    return high if derivative(high - gap) >= 0 else float(brentq(derivative, low + gap, high - gap, xtol=1e-16))


@unhurried
@given(counts, st.floats(-0.5, 0.5).filter(lambda d: abs(d) > 1e-3))
def test_closed_form_is_the_maximum_likelihood(case: tuple[int, int, int], difference: float) -> None:
    """The closed-form rate of losses is, to 1e-8, where the likelihood held at the difference is highest."""
    gains, losses, n = case

    def slope(q: float) -> float:
        parts = ((gains, 1.0, q + difference), (losses, 1.0, q), (n - gains - losses, -2.0, 1.0 - 2.0 * q - difference))
        return sum(k * d / p for k, d, p in parts if k)

    found = highest(slope, max(0.0, -difference), (1.0 - difference) / 2.0)
    assert found == pytest.approx(stats.loss_rate_under(gains, losses, n, difference), abs=1e-8)


@unhurried
@given(st.integers(1, 300), st.integers(0, 40), st.integers(0, 40), st.integers(0, 200), st.floats(0.5, 0.999))
def test_closed_form_of_a_ratio_is_the_maximum_likelihood(
    right: int, gains: int, losses: int, wrong: int, ratio: float
) -> None:
    """The same for a ratio: all cells follow from the rate of losses, and the likelihood is highest there."""
    n = right + gains + losses + wrong
    share = (n - wrong) / n

    def slope(q: float) -> float:
        gained = share - (share - q) / ratio
        parts = ((right, -1.0 / ratio - 1.0, (share - q) / ratio - q), (gains, 1.0 / ratio, gained), (losses, 1.0, q))
        return sum(k * d / p for k, d, p in parts if k)

    found = highest(slope, share * (1.0 - ratio), share / (1.0 + ratio))
    assert found == pytest.approx(stats.ratio_loss_rate(right, gains, losses, n, ratio), abs=1e-8)


@pytest.mark.parametrize(("gains", "losses"), [(1, 7), (6, 16), (30, 12)])
def test_ratio_score_at_one_is_mcnemar(gains: int, losses: int) -> None:
    """At ratio 1 nothing but the flips counts."""
    expected = (gains - losses) / math.sqrt(gains + losses)
    assert expected == pytest.approx(stats.ratio_score(80, gains, losses, 500, 1.0))


@unhurried
@given(st.integers(1, 300), st.integers(0, 40), st.integers(0, 40), st.integers(0, 200), st.floats(0.7, 0.999))
def test_ratio_test_and_interval_agree(right: int, gains: int, losses: int, wrong: int, ratio: float) -> None:
    """The score is above the critical value exactly when the interval lies above the ratio, and holds the estimate."""
    n = right + gains + losses + wrong
    low, high = stats.ratio_interval(right, gains, losses, n, 0.9)
    assert low <= (right + gains) / (right + losses) + 1e-9
    assert (right + gains) / (right + losses) <= high + 1e-9
    if abs(low - ratio) > 1e-9:
        assert (low > ratio) == (stats.ratio_score(right, gains, losses, n, ratio) > stats.critical(0.9))


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


def test_cluster_t_matches_statsmodels() -> None:
    """Mean, standard error and interval are those of its regression on a constant with clustered covariance."""
    import numpy
    from statsmodels.regression.linear_model import OLS

    rng = numpy.random.default_rng(4)
    clusters = numpy.repeat(numpy.arange(30), rng.integers(1, 6, 30))
    values = rng.normal(size=30)[clusters] + rng.normal(size=len(clusters))
    model = OLS(values, numpy.ones(len(values)))
    fitted = model.fit(cov_type="cluster", cov_kwds={"groups": clusters}, use_t=True)
    estimate = stats.cluster_t(values.tolist(), clusters.tolist())
    assert (fitted.params[0], fitted.bse[0], 29) == pytest.approx((estimate.mean, estimate.se, estimate.df))
    assert tuple(fitted.conf_int(0.1)[0]) == pytest.approx(estimate.interval(0.9))


@pytest.mark.parametrize("clustered", [False, True])
def test_bootstrap_matches_scipy(clustered: bool) -> None:
    """BCa limits are scipy's from the same resamples; of clusters, those of a ratio of sums, paired."""
    import numpy
    from scipy.stats import bootstrap

    rng = numpy.random.default_rng(2)
    sizes = rng.integers(1, 6, 40) if clustered else numpy.ones(40, int)
    values = rng.exponential(size=int(sizes.sum())) - 0.4
    groups = numpy.repeat(numpy.arange(40), sizes)
    sums = numpy.bincount(groups, weights=values)
    expected = bootstrap(
        (sums, sizes.astype(float)), lambda s, n, axis=-1: s.sum(axis) / n.sum(axis), paired=True, method="BCa",
        confidence_level=0.9, n_resamples=RESAMPLES, rng=numpy.random.default_rng(SEED), vectorized=True,
    ).confidence_interval  # fmt: skip
    found = bca(values.tolist(), groups.tolist() if clustered else None)
    assert found is not None
    assert (expected.low, expected.high) == pytest.approx(found.interval(0.9))


def test_bootstrap_p_is_that_of_its_interval() -> None:
    """The upper end of a 90% interval has p = 0.05, and the lower end 0.95."""
    found = bca([0.1 * (n % 7) ** 2 - 1.0 for n in range(60)])
    assert found is not None
    low, high = found.interval(0.9)
    assert (0.95, 0.05) == pytest.approx((found.p_at_least(low), found.p_at_least(high)), abs=2e-3)


def test_bootstrap_of_equal_values_teaches_nothing() -> None:
    """Where nothing differs there is no distribution, and none is made up."""
    assert bca([0.0] * 50) is None
    assert bca([0.25, -0.25] * 20, [n // 2 for n in range(40)]) is None


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


def exact_power(n: int, flips: float, margin: float, alpha: float) -> float:
    """The chance that the test passes when nothing is lost: all outcomes with their probabilities added up."""
    from scipy.stats import binom

    critical, chance = stats.critical(1 - 2 * alpha), 0.0
    for flipped in range(int(n * flips + 8 * math.sqrt(n * flips) + 10)):
        passing = [
            k for k in range(flipped + 1) if stats.paired_score(flipped - k, k, n, -margin) > critical
        ]  # losses that still pass are 0 to the last of these
        chance += binom.pmf(flipped, n, flips) * binom.cdf(len(passing) - 1, flipped, 0.5) if passing else 0.0
    return float(chance)


@pytest.mark.parametrize("n", [200, 500, 2000])
@pytest.mark.parametrize("flips", [0.02, 0.05, 0.10])
@pytest.mark.parametrize("margin", [0.01, 0.02])
def test_power_is_within_three_points_of_the_exact_one(n: int, flips: float, margin: float) -> None:
    """The formula that plans is right where campaigns are."""
    assert exact_power(n, flips, margin, 0.05) == pytest.approx(stats.power_of(n, flips, margin, 0.05), abs=0.03)


def test_smallest_loss_inverts_items_needed() -> None:
    """A set of the needed size resolves its margin, one item less does not, and few flips leave the size as bound."""
    needed = stats.items_needed(0.05, 0.01, 0.05, 0.8)
    assert stats.smallest_loss(needed, 0.05, 0.05, 0.8) <= 0.01 < stats.smallest_loss(needed - 1, 0.05, 0.05, 0.8)
    assert needed == pytest.approx(3092, rel=0.03)
    assert stats.smallest_loss(100, 1e-9, 0.05, 0.8) == pytest.approx(0.0263, abs=1e-4)


@pytest.mark.parametrize(
    ("alpha", "looks", "expected"),
    [(0.05, 2, 0.0304), (0.05, 3, 0.0232), (0.025, 2, 0.0147), (0.025, 3, 0.0110), (0.05, 1, 0.05)],
)
def test_levels_of_repeated_looks_are_pococks(alpha: float, looks: int, expected: float) -> None:
    """The nominal level of each of K equally spaced looks, as tabled."""
    shares = tuple((k + 1) / looks for k in range(looks))
    assert expected == pytest.approx(nominal_alpha(alpha, shares), abs=5e-5)


@pytest.mark.parametrize(("quantile", "one", "two"), [(0.95, 59, 72), (0.99, 299, 368), (0.999, 2995, 3688)])
def test_observations_needed(quantile: float, one: int, two: int) -> None:
    """The smallest samples that bound p95, p99 and p99.9 at 95%, from above and on both sides."""
    assert (one, two) == (
        stats.observations_needed(quantile, 0.95, one_sided=True),
        stats.observations_needed(quantile, 0.95),
    )
    assert stats.quantile_interval(range(two - 1), quantile, 0.95) is None
    assert stats.quantile_interval(range(two), quantile, 0.95) is not None


@pytest.mark.parametrize(("quantile", "needed"), [(0.5, 5), (0.95, 59), (0.99, 299)])
def test_a_quantile_is_bounded_from_above_by_the_largest_of_so_many(quantile: float, needed: int) -> None:
    """With the fewest observations that do, the bound is the largest; with one less there is none."""
    assert needed == stats.quantile_bounds(range(1, needed + 1), quantile, 0.95)[1]
    assert stats.quantile_bounds(range(1, needed), quantile, 0.95)[1] is None
    assert (None, None) == stats.quantile_bounds([], quantile, 0.95)


def test_bounds_of_a_quantile_hold_as_often_as_they_say() -> None:
    """Of 2,000 samples of 400, the true p99 is above the upper bound, and below the lower one, at most 5% of times."""
    import numpy

    samples = numpy.random.default_rng(3).random((2000, 400))
    found = [stats.quantile_bounds(row, 0.99, 0.95) for row in samples.tolist()]
    above = sum(high is not None and high < 0.99 for _, high in found) / 2000
    below = sum(low is not None and low > 0.99 for low, _ in found) / 2000
    assert max(above, below) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_median_interval_of_ten() -> None:
    """The tabled 95% interval of a median from n=10 is the 2nd to the 9th value."""
    assert stats.quantile_interval([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], 0.5, 0.95) == (2, 9)


def test_holm_matches_statsmodels() -> None:
    """Adjusted p-values of twelve variants are its own."""
    import random

    from statsmodels.stats.multitest import multipletests

    drawn = random.Random(1)
    for count in (1, 2, 5, 12):
        p_values = [drawn.random() ** 3 for _ in range(count)]
        assert multipletests(p_values, method="holm")[1] == pytest.approx(stats.holm(p_values))


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
