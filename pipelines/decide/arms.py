"""Two arms that different users met, so nothing is paired: bounds of the loss, and how many requests settle it. Pure.

A loss is control minus canary of something that is better when higher; positive is worse.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pipelines.decide import stats

_ALL = 1.0 - 1e-9


@dataclass(frozen=True, slots=True)
class Share:
    """How many of `n` requests were right. Both are divided by the design effect where users sent several."""

    right: float
    n: float
    df: float = math.inf

    @property
    def p(self) -> float:
        return self.right / self.n


def share(values: Sequence[float], clusters: Sequence[Hashable] | None) -> Share:
    """Count zeros and ones; requests of one user count as so many fewer independent ones, judged by t."""
    if clusters is None or len(set(clusters)) == len(values):
        return Share(math.fsum(values), len(values))
    groups = len(set(clusters))
    if groups == 1:
        return Share(values[0], 1.0, 1.0)
    effect = stats.design_effect(values, clusters, 1.0)
    return Share(math.fsum(values) / effect, len(values) / effect, groups - 1.0)


def score(control: Share, canary: Share, loss: float) -> float:
    """Compute the score statistic of H0: p_control - p_canary = `loss`, for two independent shares.

    Miettinen and Nurminen (1985): the variance is taken at the maximum-likelihood shares under H0.
    """
    p, q = _under(control, canary, loss)
    n = control.n + canary.n
    variance = (p * (1.0 - p) / control.n + q * (1.0 - q) / canary.n) * n / (n - 1.0)
    excess = control.p - canary.p - loss
    if variance <= 0.0:
        return 0.0 if excess == 0.0 else math.copysign(math.inf, excess)
    return excess / math.sqrt(variance)


def _under(control: Share, canary: Share, loss: float) -> tuple[float, float]:
    """The likeliest shares of both arms where they differ by `loss`: the root of a cubic (Miettinen and Nurminen)."""
    n = control.n + canary.n
    big, small = control.n / n, canary.n / n
    right = (control.right + canary.right) / n
    c2 = (big + 2.0 * small) * loss - 1.0 - right
    c1 = (small * loss - 1.0 - 2.0 * canary.right / n) * loss + right
    c0 = canary.right / n * loss * (1.0 - loss)
    c = c2**3 / 27.0 - c1 * c2 / 6.0 + c0 / 2.0
    b = math.copysign(math.sqrt(max(0.0, c2 * c2 / 9.0 - c1 / 3.0)), c)
    a = (math.pi + math.acos(max(-1.0, min(1.0, c / b**3)))) / 3.0 if b else 0.0
    low, high = max(0.0, -loss), min(1.0, 1.0 - loss)
    q = min(high, max(low, 2.0 * b * math.cos(a) - c2 / 3.0))
    return min(1.0, max(0.0, q + loss)), q


def share_bounds(control: Share, canary: Share, below: float, above: float) -> tuple[float, float]:
    """Bound the loss of a share, from below and from above, each one-sided at a level of its own."""
    df, at = min(control.df, canary.df), control.p - canary.p

    def statistic(loss: float) -> float:
        return score(control, canary, loss)

    lower = stats.root(statistic, stats.critical(1.0 - 2.0 * below, df), -_ALL, at)
    return lower, stats.root(statistic, -stats.critical(1.0 - 2.0 * above, df), at, _ALL)


@dataclass(frozen=True, slots=True)
class Graded:
    """Scores of one arm, and who sent the requests."""

    values: Sequence[float]
    clusters: Sequence[Hashable] | None


def mean_bounds(control: Graded, canary: Graded, below: float, above: float) -> tuple[float, float]:
    """Bound the loss of a mean of scores in [0, 1] from both sides: Welch's t over `stats.cautious_t` of each arm."""

    def bound(level: float, sign: float) -> float:
        confidence = 1.0 - 2.0 * level
        ours, theirs = (stats.cautious_t(a.values, a.clusters, 1.0, confidence) for a in (control, canary))
        squares = ours.se**2 + theirs.se**2
        df = squares**2 / (ours.se**4 / ours.df + theirs.se**4 / theirs.df)
        return stats.Estimate(ours.mean - theirs.mean, math.sqrt(squares), df).interval(confidence)[sign > 0]

    return bound(below, -1.0), bound(above, 1.0)


def requests_needed(
    control: float, canary: float, share_of_canary: float, margin: float, alpha: float, power: float
) -> tuple[int, int]:
    """Give how many requests of the canary and of the control let a lossless canary pass with `power`.

    (z_a + z_b)^2 (v_canary + v_control p / (1 - p)) / margin^2 of the canary, which gets a share p of the traffic;
    the others are the control's. `control` and `canary` are the variances of one request.
    """
    odds = share_of_canary / (1.0 - share_of_canary)
    mine = stats.required_items(canary + control * odds, margin, alpha, power)
    return mine, math.ceil(mine / odds - 1e-9)
