"""Which arm a user meets, the same at every step and on every machine; and whether the split that came is the planned
one. Pure."""

from __future__ import annotations

import hashlib
import math

BUCKETS = 10_000
FORMULA = "first 4 bytes, big-endian, of sha256(salt + ':' + user id), modulo 10000"
UNLIKELY = 0.001
FEW = 5.0


def bucket(salt: str, user: str) -> int:
    """Give the bucket of a user, from 0 to 9,999; another salt shuffles everybody anew."""
    digest = hashlib.sha256(f"{salt}:{user}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % BUCKETS


def canary_buckets(percent: float) -> int:
    """Give how many buckets, counted from 0, meet the canary; so whoever met it at a smaller share still does."""
    return round(percent / 100.0 * BUCKETS)


def mismatch_p(canary: int, control: int, share: float) -> float:
    """Give the chance of a count of the canary at least as unlike its `share` as this one.

    Pearson's chi-square with one degree of freedom; the exact binomial test where it expects fewer than 5 of an arm.
    """
    n = canary + control
    if n == 0:
        return 1.0
    if share >= 1.0:
        return 1.0 if control == 0 else 0.0
    expected = n * share
    if min(expected, n - expected) < FEW:
        from scipy.stats import binomtest

        return float(binomtest(canary, n, share).pvalue)
    chi_square = (canary - expected) ** 2 / expected + (canary - expected) ** 2 / (n - expected)
    return math.erfc(math.sqrt(chi_square / 2.0))
