"""The latency formulas, against figures worked out by hand and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.probe import latency

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=400)


def test_one_stream_by_hand() -> None:
    """Started at 10.0 s, tokens at 10.2, 10.3, 10.5: TTFT 200, E2E 500, TPOT (500-200)/2, ITL 100 and 200 ms."""
    times = (10.2, 10.3, 10.5)
    assert latency.ttft_ms(10.0, times) == pytest.approx(200)
    assert latency.e2e_ms(10.0, times) == pytest.approx(500)
    assert latency.tpot_ms(500, 200, 3) == pytest.approx(150)
    assert latency.itl_ms(times) == pytest.approx((100, 200))


def test_no_tokens_no_latency() -> None:
    """A stream without tokens has neither TTFT nor E2E nor gaps."""
    assert latency.ttft_ms(0.0, ()) is None
    assert latency.e2e_ms(0.0, ()) is None
    assert latency.itl_ms(()) == ()


def test_one_token_has_no_tpot() -> None:
    """An answer of one token has no time per output token; 0 would flatter the mean."""
    assert latency.tpot_ms(120, 120, 1) is None


def test_tpot_of_a_server_that_sends_four_tokens_an_event() -> None:
    """16 tokens in 4 events 40 ms apart are 10 ms a token; dividing by n - 1 would say 8."""
    assert latency.tpot_ms(e2e=170, ttft=50, tokens=16, first_tokens=4) == pytest.approx(10)


@given(first=st.floats(0, 100), step=st.floats(0.001, 1), tokens=st.integers(2, 300))
def test_steady_stream_has_tpot_equal_to_itl(first: float, step: float, tokens: int) -> None:
    """With equal gaps TPOT is the gap, whatever the TTFT, and TTFT plus all gaps is E2E."""
    times = tuple(first + k * step for k in range(tokens))
    ttft, e2e = latency.ttft_ms(0.0, times), latency.e2e_ms(0.0, times)
    assert ttft is not None and e2e is not None
    assert latency.tpot_ms(e2e, ttft, tokens) == pytest.approx(step * 1e3)
    assert ttft + sum(latency.itl_ms(times)) == pytest.approx(e2e)


@given(values=VALUES, p=st.sampled_from([1.0, 25.0, 50.0, 90.0, 95.0, 99.0, 99.9]))
def test_percentile_is_numpys_inverted_cdf_below_the_maximum(values: list[float], p: float) -> None:
    """Where a percentile is available it equals numpy's definition of the inverse empirical distribution."""
    found = latency.percentile(values, p)
    if len(values) >= latency.requests_needed(p):
        assert found == np.percentile(values, p, method="inverted_cdf")
    else:
        assert found is None


@given(values=st.lists(st.integers(), unique=True, max_size=300), p=st.floats(0.1, 99.99))
def test_percentile_is_never_the_maximum(values: list[int], p: float) -> None:
    """No percentile of distinct values is the largest of them."""
    found = latency.percentile(values, p)
    assert found is None or found < max(values)


@pytest.mark.parametrize(("p", "needed"), [(50.0, 2), (90.0, 10), (95.0, 20), (99.0, 100), (99.9, 1000)])
def test_requests_a_percentile_needs(p: float, needed: int) -> None:
    """One request in 100 lies above p99, so 100 are needed; likewise for the others."""
    assert latency.requests_needed(p) == needed
    assert latency.percentile(range(needed - 1), p) is None
    assert latency.percentile(range(needed), p) == needed - 2


def test_p99_of_one_to_a_hundred() -> None:
    """Of the numbers 1 to 100 the 99th percentile is 99, as the nearest-rank definition has it."""
    assert latency.percentile(range(1, 101), 99) == 99


@given(VALUES)
def test_percentiles_do_not_depend_on_order(values: list[float]) -> None:
    """A sample summarizes alike in any order."""
    assert latency.summarize(values).percentiles == latency.summarize(values[::-1]).percentiles


def test_summary_says_what_is_not_available() -> None:
    """Ten values support p50 and p90, not p95 or p99."""
    summary = latency.summarize([float(k) for k in range(10)])
    assert summary.count == 10
    assert summary.mean == 4.5
    assert dict(summary.percentiles) == {50.0: 4.0, 90.0: 8.0, 95.0: None, 99.0: None, 99.9: None}


def test_empty_sample() -> None:
    """Nothing measured is not zero."""
    assert latency.summarize([]).mean is None
    assert latency.percentile([], 50) is None


def test_rates() -> None:
    """Thirty requests in 12 seconds are 2.5 a second; a load that never ran has rate 0."""
    assert latency.per_second(30, 12.0) == 2.5
    assert latency.per_second(0, 0.0) == 0.0


def test_every_printed_figure_has_its_formula() -> None:
    """A report can print the formula of each figure that the tables hold."""
    assert {"TTFT", "TPOT", "ITL", "E2E", "percentile", "requests/s", "output tokens/s"} <= latency.FORMULAS.keys()
