"""The split of users: the same everywhere, sticky as it grows, another for each rollout; and its mismatch test."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.decide.split import BUCKETS, bucket, canary_buckets, mismatch_p

PERCENTS = st.floats(min_value=0.01, max_value=100)


def test_buckets_are_those_that_haproxy_computes() -> None:
    """HAProxy 2.6: str("salt:"),concat(,txn.user),sha2(256),bytes(0,4),be2dec(,4),mod(10000)."""
    assert [1057, 9412, 2315] == [bucket("salt", user) for user in ("anna", "bob", "ünï")]


@given(st.text(), st.text(), PERCENTS, PERCENTS)
def test_who_is_in_stays_in(salt: str, user: str, one: float, other: float) -> None:
    """A user whom a small share holds is held by every larger one; at 100% everybody is."""
    small, large = sorted((one, other))
    at = bucket(salt, user)
    assert bucket(salt, user) == at
    assert not at < canary_buckets(small) or at < canary_buckets(large)
    assert 0 <= at < canary_buckets(100) == BUCKETS


def test_shares_are_what_they_say_and_salts_are_independent() -> None:
    """20% of 20,000 users, and 20% of those under another salt too."""
    users = [f"user-{n}" for n in range(20_000)]
    inside = [u for u in users if bucket("one", u) < canary_buckets(20)]
    again = [u for u in inside if bucket("two", u) < canary_buckets(20)]
    assert mismatch_p(len(inside), len(users) - len(inside), 0.2) > 0.001
    assert mismatch_p(len(again), len(inside) - len(again), 0.2) > 0.001


def test_mismatch_by_hand() -> None:
    """60 of 100 where half is planned: chi-square 4, p 0.0455. 3 of 50 at 1%: exactly 1 - P(X <= 2) = 0.0138."""
    assert 0.0455 == pytest.approx(mismatch_p(60, 40, 0.5), abs=5e-5)
    below = sum(w * 0.01**k * 0.99 ** (50 - k) for k, w in ((0, 1), (1, 50), (2, 1225)))
    assert 1 - below == pytest.approx(mismatch_p(3, 47, 0.01), abs=1e-9)
    assert 1.0 == mismatch_p(10, 0, 1.0)
    assert 0.0 == mismatch_p(10, 1, 1.0)
    assert 1.0 == mismatch_p(0, 0, 0.5)
