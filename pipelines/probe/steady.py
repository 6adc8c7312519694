"""Whether a server is warm, told from equal batches of requests: pure arithmetic.

A batch's level is the mean log latency of its requests. Every batch asks the same, so levels differ by drift and noise
alone, and the batch is the unit: requests within one are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DRIFT = math.log(1.1)
"""A server whose latency changes by less than this over the window is steady."""
CONFIDENCE = 0.90
SURE = 0.99
"""A block is lost where a server is said to drift, so that takes more."""
LEAST = 4
"""Batches in the smallest window. The first quarter of the batches, and one at least, is never in it."""


def level(latencies_ms: Sequence[float | None]) -> float | None:
    """The mean log of a batch's latencies; None where one is missing, for then the batch is not like the others."""
    known = [value for value in latencies_ms if value is not None and value > 0]
    return math.fsum(map(math.log, known)) / len(known) if known and len(known) == len(latencies_ms) else None


def steady(levels: Sequence[float]) -> bool | None:
    """Judge the levels of the batches so far, oldest first.

    True: the confidence interval of the drift over the window lies within DRIFT either way. False: it does not, and
    drift is seen, an interval at SURE leaves 0 out. None: neither, there are too few batches or they differ too much.
    """
    window = levels[max(1, len(levels) // 4) :]
    if len(window) < LEAST:
        return None
    low, high = drift(window, CONFIDENCE)
    if low > -DRIFT and high < DRIFT:
        return True
    low, high = drift(window, SURE)
    return False if low > 0 or high < 0 else None


def drift(levels: Sequence[float], confidence: float) -> tuple[float, float]:
    """The interval of the change from first to last along the least-squares line, by Student's t."""
    from scipy.special import stdtrit

    n = len(levels)
    middle, mean = (n - 1) / 2, math.fsum(levels) / n
    spread = math.fsum((k - middle) ** 2 for k in range(n))
    slope = math.fsum((k - middle) * (value - mean) for k, value in enumerate(levels)) / spread
    rest = math.fsum((value - mean - slope * (k - middle)) ** 2 for k, value in enumerate(levels))
    reach = float(stdtrit(n - 2, (1 + confidence) / 2)) * math.sqrt(rest / (n - 2) / spread)
    return (slope - reach) * (n - 1), (slope + reach) * (n - 1)


def both(verdicts: Sequence[bool | None]) -> bool | None:
    """What several latencies say together: drifting where one is, steady where all are."""
    if any(verdict is False for verdict in verdicts):
        return False
    return True if verdicts and all(verdicts) else None
