"""Looking at growing data more than once: Pocock's constant boundary for a plan of looks made beforehand. Pure."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST = 3
_NODES, _FAR = 96, 8.5
_NORMAL = NormalDist()


@functools.cache
def nominal_alpha(alpha: float, shares: tuple[float, ...]) -> float:
    """Give the one-sided level of every look that keeps `alpha` over all of them (Pocock 1977).

    `shares` are the shares of the data at which one looks, the last of them 1; between looks the statistic moves as
    Brownian motion does. For three equal steps and alpha 0.05 it is 0.0232.
    """
    if len(shares) == 1:
        return alpha
    low, high = _NORMAL.inv_cdf(1.0 - alpha), _NORMAL.inv_cdf(1.0 - alpha / len(shares))
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if crossing(middle, shares) > alpha else (low, middle)
    return 1.0 - _NORMAL.cdf((low + high) / 2.0)


def spent(alpha: float, look: int) -> float:
    """Give the level of the `look`-th look where nobody planned how many there will be: alpha / (look (look + 1)).

    The levels of all looks, however many, sum to `alpha`, so that by Bonferroni's inequality it holds over them
    whatever the data of one look share with those of another.
    """
    return alpha / (look * (look + 1))


def crossing(limit: float, shares: tuple[float, ...]) -> float:
    """Give the chance that the statistic of a true null is above `limit` at one look at least.

    By the recursion of Armitage, McPherson and Rowe (1969): the density of what has stayed below so far, carried from
    look to look on Gauss-Legendre nodes.
    """
    import numpy as np

    at, weights = np.polynomial.legendre.leggauss(_NODES)
    nodes: NDArray[np.float64] = np.zeros(1)
    density: NDArray[np.float64] = np.ones(1)
    before = 0.0
    for share in shares:
        edge, least, step = limit * math.sqrt(share), -_FAR * math.sqrt(share), math.sqrt(share - before)
        half = (edge - least) / 2.0
        fresh = least + half * (at + 1.0)
        carried = _normal_density((fresh[:, None] - nodes[None, :]) / step) / step
        density = (carried @ density) * weights * half
        nodes, before = fresh, share
    return float(1.0 - density.sum())


def _normal_density(x: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    return np.asarray(np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi))
