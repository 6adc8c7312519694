"""The paired bootstrap of a mean difference: bias-corrected and accelerated, over items or whole clusters.

Seeded, so that the same scores always give the same interval; no other state.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 4999
SEED = 20260101
AT_ONCE = 2_000_000  # draws held in memory
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """What resampling gave: the distribution of the mean, the bias correction z0 and the acceleration a.

    (Efron 1987; Efron and Tibshirani 1993, chapter 14.)
    """

    means: NDArray[np.float64]
    bias: float
    acceleration: float

    def interval(self, confidence: float) -> tuple[float, float]:
        """Give the BCa interval of the mean."""
        import numpy as np

        z = _NORMAL.inv_cdf((1.0 + confidence) / 2.0)
        low, high = (_NORMAL.cdf(self._adjusted(side)) for side in (-z, z))
        return float(np.quantile(self.means, low)), float(np.quantile(self.means, high))

    def p_at_least(self, limit: float) -> float:
        """Give the one-sided p-value of H0: the true mean is `limit` or more; small where the interval is below it."""
        shift = _NORMAL.inv_cdf(_share_below(self.means, limit)) - self.bias
        z = shift / (1.0 + self.acceleration * shift) - self.bias
        return 1.0 - _NORMAL.cdf(z)

    def _adjusted(self, z: float) -> float:
        moved = self.bias + z
        return self.bias + moved / (1.0 - self.acceleration * moved)


def bca(
    differences: Sequence[float], clusters: Sequence[Hashable] | None = None, resamples: int = RESAMPLES
) -> Bootstrap | None:
    """Resample items, or whole clusters where there are any; None where nothing differs, so nothing can be learned."""
    import numpy as np

    sums, sizes = _groups(differences, clusters)
    each = sums / sizes
    if len(sums) < 2 or float(np.ptp(each)) == 0.0:
        return None
    mean = float(sums.sum() / sizes.sum())
    means = _resampled(sums, sizes, resamples)
    left_out = (sums.sum() - sums) / (sizes.sum() - sizes)
    spread = left_out.mean() - left_out
    squares = float((spread**2).sum())
    acceleration = float((spread**3).sum()) / (6.0 * squares**1.5) if squares > 0.0 else 0.0
    return Bootstrap(means, _NORMAL.inv_cdf(_share_below(means, mean)), acceleration)


def _groups(
    differences: Sequence[float], clusters: Sequence[Hashable] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and number of items of each cluster; without clusters each item is one."""
    import numpy as np

    values = np.asarray(differences, dtype=np.float64)
    if clusters is None:
        return values, np.ones_like(values)
    numbers = {name: n for n, name in enumerate(dict.fromkeys(clusters))}
    at = np.array([numbers[name] for name in clusters])
    sums = np.asarray(np.bincount(at, weights=values), dtype=np.float64)
    return sums, np.asarray(np.bincount(at), dtype=np.float64)


def _resampled(sums: NDArray[np.float64], sizes: NDArray[np.float64], resamples: int) -> NDArray[np.float64]:
    import numpy as np

    rng, groups = np.random.default_rng(SEED), len(sums)
    found = []
    for start in range(0, resamples, max(1, AT_ONCE // groups)):
        count = min(resamples - start, max(1, AT_ONCE // groups))
        drawn = rng.integers(0, groups, (count, groups))
        found.append(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    return np.concatenate(found)


def _share_below(means: NDArray[np.float64], limit: float) -> float:
    """The share of resampled means below a limit, ties counted half, kept off 0 and 1 by half a resample."""
    below = (float((means < limit).mean()) + float((means <= limit).mean())) / 2.0
    edge = 0.5 / len(means)
    return min(1.0 - edge, max(edge, below))
