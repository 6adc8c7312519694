"""Comparisons under load: what speaks against one, and rates, cost and saturation by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipelines.decide.compared import Delta, Refusal
from pipelines.decide.contrast import Asked
from pipelines.decide.contrastload import Load, loads
from pipelines.decide.measured import Block, Measured, Request
from pipelines.decide.throughput import Limits
from pipelines.flow.store import Manifest
from tests import shop

ASKED = Asked(("old", "new"), 0.95, anyway=False)
SLOW = [[100.0, 80.0, 90.0], [100.0, 100.0, 110.0]]
FAST = [[50.0, 40.0, 45.0], [50.0, 50.0, 55.0]]


def manifest(kind: str, **given: Any) -> Manifest:
    about: dict[str, Any] = {
        "kind": kind, "stage": kind, "version": 1, "key": kind * 8, "config": {}, "inputs": {}, "toolchain": {},
        "device": None, "facts": {"native": True}, "files": {}, "started": shop.NIGHT, "seconds": 1.0, "peak_rss": 0,
    }  # fmt: skip
    return Manifest.model_validate(about | given)


PROBE = manifest("latency", config=shop.PROBE)


def load(
    times: Sequence[Sequence[float]] = (),
    *,
    requests: Sequence[Request] = (),
    blocks: Sequence[Block] = (),
    searched: dict[str, Limits] | None = None,
    price: tuple[float, str] | None = None,
    **facts: Any,
) -> Load:
    measured = Measured(requests or shop.requests("e", times), blocks or shop.loads("e", times))
    return Load(manifest("engine", facts={"native": True} | facts), PROBE, measured, searched or {}, price)


def refused(base: Load, other: Load) -> str:
    (one,) = [r for r in loads(base, other, ASKED) if isinstance(r, Refusal)]
    return "; ".join(one.reasons)


def delta(found: list[Delta | Refusal], kind: str, part: str) -> Delta:
    (one,) = [d for d in found if isinstance(d, Delta) and (d.kind, d.part) == (kind, part)]
    return one


def test_failed_requests_are_no_like_work() -> None:
    """Whoever drops the slow ones would look fast."""
    rows = shop.requests("e", FAST)
    other = load(FAST, requests=[replace(rows[0], ok=False, error="timeout"), *rows[1:]])
    assert "1 of 6 requests of new failed" == refused(load(SLOW), other)


def test_blocks_that_are_no_evidence_are_no_comparison() -> None:
    """Every block disturbed: refused, with the reason; one of two: the other round is compared, with no interval."""
    blocks = shop.loads("e", FAST)
    lost = [replace(b, disturbed="foreign CPU 80%") for b in blocks]
    assert "every block of new was left out (disturbed: foreign CPU 80%)" == refused(
        load(SLOW), load(FAST, blocks=lost)
    )
    found = delta(loads(load(SLOW), load(FAST, blocks=[lost[0], blocks[1]]), ASKED), "latency", "TTFT by request")
    assert (pytest.approx(0.5), 1, None, "") == (found.ratio, found.count, found.ratio_interval, found.reading)


def test_engines_in_two_places_are_not_compared() -> None:
    """A remote engine's times are its network's and its machine's too."""
    assert "old is served on this machine; new is served on gpu-7" == refused(load(SLOW), load(FAST, served_on="gpu-7"))


def test_longer_answers_spoil_end_to_end_times_only() -> None:
    """E2E is refused with the ratio of lengths; the first token and the pace are compared."""
    longer = load(FAST, requests=[replace(r, output_tokens=22) for r in shop.requests("e", FAST)])
    found = loads(load(SLOW), longer, ASKED)
    (one,) = [r for r in found if isinstance(r, Refusal)]
    assert ("latency", "closed_1, <=128 tokens in: E2E") == (one.kind, one.name)
    assert ("answers of new are 2.000 times as long, so E2E is no measure of speed",) == one.reasons
    assert {"TTFT by request", "TPOT by request"} <= {d.part for d in found if isinstance(d, Delta)}
    marked = delta(loads(load(SLOW), longer, replace(ASKED, anyway=True)), "latency", "E2E by request")
    assert one.reasons == marked.marks


def test_a_profile_of_one_side_is_missing() -> None:
    """Named, and nothing more."""
    other = load(requests=[replace(r, profile="open_2") for r in shop.requests("e", FAST)], blocks=[])
    found = [r for r in loads(load(SLOW), other, ASKED) if isinstance(r, Refusal)]
    assert [("closed_1", "new was not measured under it"), ("open_2", "old was not measured under it")] == [
        (r.name, *r.reasons) for r in found
    ]
    assert all(r.missing for r in found)


def test_the_cost_goes_with_the_rate() -> None:
    """3 EUR an hour at 60 tokens/s: 1,000 tokens are 3000 / 216000 EUR; at twice the rate half of it."""
    found = loads(load(SLOW, price=(3.0, "EUR")), load(FAST, price=(3.0, "EUR")), ASKED)
    rate, cost = delta(found, "throughput", "output tokens/s"), delta(found, "cost", "1,000 output tokens")
    assert rate.base and rate.ratio_interval and cost.ratio_interval
    assert (pytest.approx(2.0), pytest.approx(0.5), "EUR") == (rate.ratio, cost.ratio, cost.unit)
    assert pytest.approx(1000 * 3 / (3600 * rate.base)) == cost.base
    assert pytest.approx(1 / rate.ratio_interval.upper) == cost.ratio_interval.lower


def test_other_prices_give_no_cost() -> None:
    """One in another currency, or without a price, is no comparison of engines."""
    for price, said in (((3.0, "USD"), "3 EUR a device-hour and 3 USD"), (None, "3 EUR a device-hour and no price")):
        assert said in refused(load(SLOW, price=(3.0, "EUR")), load(FAST, price=price))


def searches(kept: Sequence[float]) -> list[Request]:
    """A search at 1, 2 and 4 requests a second, whose promise of 100 ms is kept up to a rate, by round."""
    blank = shop.requests("e", [[50.0]])[0]
    return [
        replace(
            blank, profile="find", mode="search", phase=n, round=r, rate=rate, e2e_ms=50.0 if rate <= most else 200.0
        )
        for r, most in enumerate(kept)
        for n, rate in enumerate((1.0, 2.0, 4.0))
    ]


def test_the_saturation_is_compared_round_by_round() -> None:
    """Rates 1 and 2 against 2 and 2: ratios 2 and 1, so sqrt 2; latencies of a search are left out."""
    promise = {"find": Limits({"e2e_ms": 100.0}, 1.0)}
    old, new = (load(requests=searches(kept), searched=promise) for kept in ((1.0, 2.0), (2.0, 2.0)))
    found = loads(old, new, ASKED)
    one = delta(found, "throughput", "saturation")
    assert (pytest.approx(math.sqrt(2)), 2, "requests/s") == (one.ratio, one.count, one.unit)
    assert [] == [d for d in found if d.kind == "latency"]
