"""The statistics behind a verdict: paired non-inferiority, intervals, sample sizes. Pure arithmetic on plain numbers.

Differences are candidate minus reference in [-1, 1]; `gains` are items only the candidate got right, `losses` those
only the reference got right. Counts may be fractional, which is how clustered items enter (see `design_effect`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()
_EDGE = 1.0 - 1e-12
_LOWEST_RATIO = 1e-9
PRIOR_ICC = 0.3
"""Correlation of changes inside one cluster, assumed until the data say otherwise."""


def critical(confidence: float, df: float = math.inf) -> float:
    """Give the two-sided critical value of Student's t, or of the normal when `df` is infinite."""
    tail = (1.0 - confidence) / 2.0
    if math.isinf(df):
        return -_NORMAL.inv_cdf(tail)
    from scipy.stats import t

    return float(t.isf(tail, df))


def upper_tail(statistic: float, df: float = math.inf) -> float:
    """Give P(T > statistic) under Student's t, or the normal when `df` is infinite."""
    if math.isinf(df):
        return 1.0 - _NORMAL.cdf(statistic)
    from scipy.stats import t

    return float(t.sf(statistic, df))


# Binary scores


def paired_score(gains: float, losses: float, n: float, difference: float) -> float:
    """Compute the score statistic T of H0: p_candidate - p_reference = `difference` (Nam 1997, Tango 1998).

    T decreases as `difference` grows; at 0 it is McNemar's z, (gains - losses) / sqrt(gains + losses).
    """
    excess = gains - losses - n * difference
    q = loss_rate_under(gains, losses, n, difference)
    variance = n * (2.0 * q + difference * (1.0 - difference))
    if variance <= 0.0:
        return 0.0 if excess == 0.0 else math.copysign(math.inf, excess)
    return excess / math.sqrt(variance)


def loss_rate_under(gains: float, losses: float, n: float, difference: float) -> float:
    """Give the maximum-likelihood rate of losses when the difference is held at `difference`, in closed form."""
    a = 2.0 * n
    b = -gains - losses + (2.0 * n - gains + losses) * difference
    c = -losses * difference * (1.0 - difference)
    return (math.sqrt(max(0.0, b * b - 4.0 * a * c)) - b) / (2.0 * a)


def noninferiority_p(gains: float, losses: float, n: float, margin: float, df: float = math.inf) -> float:
    """Give the one-sided p-value of H0: the candidate is worse by `margin` or more; small means non-inferior."""
    return upper_tail(paired_score(gains, losses, n, -margin), df)


def paired_score_interval(
    gains: float, losses: float, n: float, confidence: float, df: float = math.inf
) -> tuple[float, float]:
    """Give Tango's score interval of p_candidate - p_reference: every difference with |T| within the critical value."""
    z = critical(confidence, df)
    at = (gains - losses) / n

    def score(difference: float) -> float:
        return paired_score(gains, losses, n, difference)

    return root(score, z, -_EDGE, at), root(score, -z, at, _EDGE)


def root(decreasing: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Find where a decreasing function meets `target`; the end of the range when it never does."""
    if decreasing(low) <= target:
        return round(low)
    if decreasing(high) >= target:
        return round(high) if abs(high) >= _EDGE else high
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if decreasing(middle) > target else (low, middle)
    return (low + high) / 2.0


def newcombe_interval(
    both_right: float, gains: float, losses: float, both_wrong: float, confidence: float
) -> tuple[float, float]:
    """Give Newcombe's hybrid interval (1998, method 10) of p_candidate - p_reference: another road to Tango's.

    It squares and adds Wilson's limits of both proportions, with their correlation phi corrected for continuity.
    """
    n = both_right + gains + losses + both_wrong
    ours, theirs = (both_right + gains) / n, (both_right + losses) / n
    low1, high1 = wilson(both_right + gains, n, confidence)
    low2, high2 = wilson(both_right + losses, n, confidence)
    product = both_right * both_wrong - gains * losses
    product = max(0.0, product - n / 2.0) if product > 0.0 else product
    sizes = (both_right + gains) * (losses + both_wrong) * (both_right + losses) * (gains + both_wrong)
    phi = product / math.sqrt(sizes) if sizes > 0.0 else 0.0

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one - 2.0 * phi * one * other + other * other))

    at = ours - theirs
    return at - reach(ours - low1, high2 - theirs), at + reach(high1 - ours, theirs - low2)


def ratio_score(both_right: float, gains: float, losses: float, n: float, ratio: float) -> float:
    """Compute the score statistic of H0: p_candidate = `ratio` * p_reference (Nam and Blackwelder 2002, Tang 2003).

    T decreases as `ratio` grows; at 1 it is McNemar's z. Under H0 the variance of candidate - ratio * reference is
    ratio * (rate of losses + rate of gains), with both rates at their maximum likelihood.
    """
    excess = both_right + gains - ratio * (both_right + losses)
    q = ratio_loss_rate(both_right, gains, losses, n, ratio)
    share = (both_right + gains + losses) / n
    variance = n * ratio * (q + share - (share - q) / ratio)
    if variance <= 0.0:
        return 0.0 if excess == 0.0 else math.copysign(math.inf, excess)
    return excess / math.sqrt(variance)


def ratio_loss_rate(both_right: float, gains: float, losses: float, n: float, ratio: float) -> float:
    """Give the maximum-likelihood rate of losses when p_candidate is held at `ratio` * p_reference."""
    a = n * (1.0 + ratio)
    b = (both_right + losses) * ratio**2 - (both_right + gains + 2.0 * losses)
    c = losses * (1.0 - ratio) * (both_right + gains + losses) / n
    return (math.sqrt(max(0.0, b * b - 4.0 * a * c)) - b) / (2.0 * a)


def ratio_interval(
    both_right: float, gains: float, losses: float, n: float, confidence: float, df: float = math.inf
) -> tuple[float, float]:
    """Give the score interval of p_candidate / p_reference; the reference must be right at least once."""
    z = critical(confidence, df)
    at = (both_right + gains) / (both_right + losses)

    def score(ratio: float) -> float:
        return ratio_score(both_right, gains, losses, n, ratio)

    low, high = _LOWEST_RATIO, max(4.0, 4.0 * at)
    while score(high) > -z:
        high *= 2.0
    lower = low if score(low) <= z else root(score, z, low, max(at, low))
    return lower, root(score, -z, max(at, low), high)


def mcnemar_exact(gains: int, losses: int) -> float:
    """Give McNemar's exact two-sided p-value: under H0 each flip is a fair coin."""
    flips, fewer = gains + losses, min(gains, losses)
    tail = sum(math.comb(flips, k) for k in range(fewer + 1))
    return min(1.0, 2.0 * (tail / (1 << flips)))


def wilson(successes: float, n: float, confidence: float) -> tuple[float, float]:
    """Give Wilson's score interval of one proportion."""
    z = critical(confidence)
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


# Graded scores and clusters


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error and degrees of freedom."""

    mean: float
    se: float
    df: float

    def interval(self, confidence: float) -> tuple[float, float]:
        """Give the t interval of the mean."""
        half = critical(confidence, self.df) * self.se
        return self.mean - half, self.mean + half

    def p_at_most(self, limit: float) -> float:
        """Give the one-sided p-value of H0: the true mean is `limit` or less."""
        if self.se == 0.0:
            return 0.0 if self.mean > limit else 1.0
        return upper_tail((self.mean - limit) / self.se, self.df)


def paired_t(differences: Sequence[float]) -> Estimate:
    """Estimate the mean of paired differences (two or more) by Student's t."""
    n = len(differences)
    mean = math.fsum(differences) / n
    return Estimate(mean, math.sqrt(_squares(differences, mean) / (n * (n - 1))), n - 1)


def cluster_t(differences: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Estimate the mean with items correlated inside clusters: sandwich variance, G/(G-1), t with G-1 df."""
    n, mean = len(differences), math.fsum(differences) / len(differences)
    sums = _cluster_sums(differences, clusters, mean)
    groups = len(sums)
    variance = groups / (groups - 1) * math.fsum(s * s for s in sums) / (n * n)
    return Estimate(mean, math.sqrt(variance), groups - 1)


def design_effect(differences: Sequence[float], clusters: Sequence[Hashable], scale: float) -> float:
    """Say how many times larger the clustered variance is than that of independent items; never below 1.

    One average cluster of changes of size `scale`, correlated by `PRIOR_ICC`, is added to what was seen: a few flips
    cannot show that flips come singly (the plain sandwich would be about 0 there). It fades as evidence grows.
    """
    n, mean = len(differences), math.fsum(differences) / len(differences)
    sums = _cluster_sums(differences, clusters, mean)
    groups = len(sums)
    size = n / groups
    prior = size * scale**2
    between = groups / (groups - 1) * math.fsum(s * s for s in sums) + prior * (1.0 + (size - 1.0) * PRIOR_ICC)
    within = n / (n - 1) * _squares(differences, mean) + prior
    return max(1.0, between / within) if within > 0.0 else 1.0


def cautious_t(
    differences: Sequence[float], clusters: Sequence[Hashable] | None, scale: float, confidence: float
) -> Estimate:
    """Estimate a mean difference without trusting an absence of variance.

    z^2 squared changes of full `scale` join the sum of squares, so that n unanimous items bound the mean at about
    scale * z^2 / n, as the score interval of a binary metric does; a plain t interval would have width 0 there.
    """
    n, mean = len(differences), math.fsum(differences) / len(differences)
    squares = _squares(differences, mean) + (critical(confidence) * scale) ** 2
    effect = design_effect(differences, clusters, scale) if clusters is not None else 1.0
    df = (len(set(clusters)) if clusters is not None else n) - 1
    return Estimate(mean, math.sqrt(effect * squares / (n * (n - 1))), df)


def _squares(values: Sequence[float], mean: float) -> float:
    return math.fsum((v - mean) ** 2 for v in values)


def _cluster_sums(values: Sequence[float], clusters: Sequence[Hashable], mean: float) -> list[float]:
    sums: dict[Hashable, float] = {}
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + value - mean
    return list(sums.values())


# How many items


def required_items(variance: float, room: float, alpha: float, power: float) -> int:
    """Give the number of pairs whose one-sided test at `alpha` has `power`: (z_a + z_b)^2 variance / room^2.

    `variance` is that of one paired difference (flips - difference^2 when binary), `room` the distance from the
    true loss to the margin.
    """
    return math.ceil(_factor(alpha, power) * variance / room**2 - 1e-9)


def more_items(n: int, variance: float, loss: float, margin: float, alpha: float, power: float) -> int | None:
    """Say how many items beyond `n` would decide if the loss seen is the true one; None: unlikely ever to pass.

    A gain counts as no loss. Half the margin lost already is taken as unlikely to pass.
    """
    loss = max(0.0, loss)
    if loss >= margin / 2.0:
        return None
    return max(1, required_items(variance, margin - loss, alpha, power) - n)


def power_of(n: float, flips: float, margin: float, alpha: float, loss: float = 0.0) -> float:
    """Give the chance that the paired score test of `n` items passes, when a share of `flips` changes and `loss` is
    the true loss: Nam's formula (1997), the null's variance taken at the expected counts.

    Within 3 points of the exact power from 200 items and 2% of flips on; the shorter formula behind `required_items`
    is up to 16 points too hopeful there.
    """
    gains, losses = n * (flips - loss) / 2.0, n * (flips + loss) / 2.0
    under = 2.0 * loss_rate_under(gains, losses, n, -margin) - margin * (1.0 + margin)
    spread = flips - loss * loss
    distance = (margin - loss) * math.sqrt(n) - critical(1.0 - 2.0 * alpha) * math.sqrt(max(0.0, under))
    return _NORMAL.cdf(distance / math.sqrt(spread))


def smallest_loss(n: float, flips: float, alpha: float, power: float) -> float:
    """Give the smallest margin that `n` pairs can rule out with `power` when there is no loss at all."""
    z2 = critical(1.0 - 2.0 * alpha) ** 2
    at_best = z2 / (n + z2)  # with no flip at all
    if power_of(n, flips, _EDGE, alpha) < power:
        return 1.0
    return max(at_best, root(lambda margin: -power_of(n, flips, margin, alpha), -power, 0.0, _EDGE))


def items_needed(flips: float, margin: float, alpha: float, power: float) -> int:
    """Give the number of pairs with which a lossless candidate passes with `power`."""
    most = 2
    while power_of(most, flips, margin, alpha) < power:
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if power_of(middle, flips, margin, alpha) < power else (least, middle)
    return most


def _factor(alpha: float, power: float) -> float:
    return (_NORMAL.inv_cdf(1.0 - alpha) + _NORMAL.inv_cdf(power)) ** 2


# Quantiles and multiplicity


def observations_needed(quantile: float, confidence: float, *, one_sided: bool = False) -> int:
    """Give the smallest n whose order statistics bound a quantile: from above (one-sided) or on both sides."""
    tail = 1.0 - confidence if one_sided else (1.0 - confidence) / 2.0
    above = math.ceil(math.log(tail) / math.log(quantile))
    return above if one_sided else max(above, math.ceil(math.log(tail) / math.log(1.0 - quantile)))


def quantile_interval(values: Sequence[float], quantile: float, confidence: float) -> tuple[float, float] | None:
    """Bound a quantile by two order statistics, whatever the distribution; None where n cannot support it."""
    n = len(values)
    if n < observations_needed(quantile, confidence):
        return None
    from scipy.stats import binom

    tail = (1.0 - confidence) / 2.0
    lower = int(binom.ppf(tail, n, quantile))
    upper = int(binom.ppf(1.0 - tail, n, quantile)) + 1
    if lower < 1 or upper > n:
        return None
    ordered = sorted(values)
    return ordered[lower - 1], ordered[upper - 1]


def quantile_bounds(values: Sequence[float], quantile: float, confidence: float) -> tuple[float | None, float | None]:
    """Bound a quantile from below and from above, each one-sided at `confidence`, whatever the distribution.

    A side is None where n observations cannot support it: p99 takes 299 from above at 95%.
    """
    from scipy.stats import binom

    n, ordered = len(values), sorted(values)
    if n == 0:
        return None, None
    upper = int(binom.ppf(confidence, n, quantile)) + 1  # least k with P(B < k) >= confidence
    lower = int(binom.ppf(1.0 - confidence, n, quantile))
    return (ordered[lower - 1] if lower >= 1 else None), (ordered[upper - 1] if upper <= n else None)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down method, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted
