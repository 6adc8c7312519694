"""Percentiles, rates, drift, saturation, the client's lateness and resources, from rows made up by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pipelines.decide import drift, latencies, phases, resources, stats, throughput
from pipelines.decide.gate import LagRule, Slo
from pipelines.decide.loadsections import tables
from pipelines.decide.markup import Table
from pipelines.decide.measured import Block, Measured, Request
from pipelines.decide.model import Candidate
from pipelines.decide.probed import Latency, Probed, Spot
from pipelines.decide.probing import searched
from pipelines.decide.promises import promises
from pipelines.decide.soundness import soundness
from pipelines.decide.throughput import Limits
from tests.unit.test_decision import candidate
from tests.unit.test_speed import request


def sent(count: int, **changes: object) -> list[Request]:
    """Requests of 1, 2, 3, ... ms end to end in round 0, one due each second."""
    rows = [request("e", 0, n, float(n + 1)) for n in range(count)]
    return [replace(r, scheduled_s=float(n), sent_s=float(n), **changes) for n, r in enumerate(rows)]  # type: ignore[arg-type]


def block(**changes: object) -> Block:
    """A sound block of ten seconds."""
    return replace(Block("e", "closed_1", 0, 10.0, 10, 0, 1.0, 10**8, steady=True), **changes)  # type: ignore[arg-type]


def figure(found: Sequence[Latency], metric: str, percentile: float, bucket: str = "<=128") -> Latency:
    (one,) = [f for f in found if (f.metric, f.percentile, f.bucket) == (metric, percentile, bucket)]
    return one


# Percentiles and their intervals


def test_percentiles_that_the_sample_cannot_support_are_not_available() -> None:
    """Of 1..99 ms p50 is 50 and p95 is 95; p99 would be the maximum, and p99.9 too."""
    found = latencies.latencies(Measured(sent(99)))
    assert [50.0, 90.0, 95.0, None, None] == [figure(found, "e2e_ms", p).value for p in (50, 90, 95, 99, 99.9)]
    assert 99 == figure(found, "e2e_ms", 99.9).requests


def test_buckets_are_never_blended() -> None:
    """Two lengths give two figures each, from short to long, and none over both."""
    long = sent(20, bucket="128-1024", input_tokens=900)
    found = latencies.latencies(Measured([*long, *sent(10)]))
    assert ["<=128", "128-1024"] == list(dict.fromkeys(f.bucket for f in found))
    assert (5.0, 10.0) == (figure(found, "e2e_ms", 50).value, figure(found, "e2e_ms", 50, "128-1024").value)
    assert figure(found, "e2e_ms", 50, "128-1024") == latencies.at(found, "closed_1", "e2e_ms", 50)  # the slowest


def test_a_bucket_without_the_percentile_leaves_the_profile_without_it() -> None:
    """The other bucket's figure does not stand for it."""
    found = latencies.latencies(Measured([*sent(200), *sent(10, bucket="128-1024", input_tokens=900)]))
    at = latencies.at(found, "closed_1", "e2e_ms", 99)
    assert at is not None and (None, "128-1024") == (at.value, at.bucket)


@pytest.mark.parametrize(("quantile", "n"), [(0.5, 40), (0.9, 60), (0.95, 100), (0.99, 500)])
def test_intervals_of_percentiles_cover_the_truth_of_any_distribution(quantile: float, n: int) -> None:
    """Nominal 95%; skewed and two-humped samples, whose quantiles are known. Discrete ranks can only cover more."""
    rng, runs = random.Random(f"{quantile}"), 400
    skewed = humped = 0
    for _ in range(runs):
        uniform = [rng.random() for _ in range(n)]
        low, high = stats.quantile_interval([u**-0.5 for u in uniform], 1.0 - quantile, 0.95) or (0.0, 0.0)
        skewed += low <= quantile**-0.5 <= high
        low, high = stats.quantile_interval([u if u < 0.5 else u + 9 for u in uniform], quantile, 0.95) or (0.0, 0.0)
        humped += low <= quantile + (9 if quantile > 0.5 else 0.0) <= high
    assert skewed >= 0.92 * runs
    assert humped >= 0.92 * runs


def answers(rng: random.Random, count: int) -> list[list[float]]:
    """Gaps of answers that are slow or quick as a whole: exp(normal), half of the variance between answers."""
    spread = 0.3 / math.sqrt(2)
    levels = [rng.gauss(0, spread) for _ in range(count)]
    return [[math.exp(level + rng.gauss(0, spread)) for _ in range(20)] for level in levels]


def test_intervals_of_gaps_know_that_gaps_of_one_answer_resemble_each_other() -> None:
    """60 answers of 20 gaps: the clustered interval of p90 covers nominally, that of 1,200 single gaps does not."""
    rng, runs = random.Random(5), 200
    truth = math.exp(0.3 * 1.2815515655)
    clustered = naive = 0
    for _ in range(runs):
        gaps = answers(rng, 60)
        ordered = sorted(v for one in gaps for v in one)
        bounds = latencies.gaps_interval(gaps, ordered, 0.9, 0.95)
        assert bounds is not None
        clustered += bounds[0] <= truth <= bounds[1]
        plain = stats.quantile_interval(ordered, 0.9, 0.95)
        assert plain is not None
        naive += plain[0] <= truth <= plain[1]
    assert clustered >= 0.92 * runs
    assert naive < 0.7 * runs


def test_gaps_of_one_answer_have_no_interval() -> None:
    """However many they are."""
    gaps = [float(n) for n in range(2000)]
    assert latencies.gaps_interval([gaps], gaps, 0.5, 0.95) is None
    assert latencies.gaps_interval([gaps[:1000], gaps[1000:]], gaps, 0.5, 0.95) is None  # as good as two values


def test_figures_come_from_blocks_that_count_and_from_all_of_them_only_where_none_does() -> None:
    """A disturbed round is left out; when every round is, figures are shown and marked."""
    rows = [*sent(10), *(replace(r, round=1, e2e_ms=1000.0) for r in sent(10))]
    mixed = latencies.latencies(Measured(rows, [block(), block(round=1, disturbed="hot")]))
    assert (5.0, 10, True) == (
        figure(mixed, "e2e_ms", 50).value, figure(mixed, "e2e_ms", 50).requests, figure(mixed, "e2e_ms", 50).evidence
    )  # fmt: skip
    none = latencies.latencies(Measured(rows, [block(disturbed="hot"), block(round=1, disturbed="hot")]))
    assert (20, False) == (figure(none, "e2e_ms", 50).requests, figure(none, "e2e_ms", 50).evidence)


def test_promises_are_held_in_every_bucket_by_blocks_that_count() -> None:
    """Short prompts keep 250 ms at p50 and long ones break it; a disturbed block can do neither."""
    rows = [*sent(100), *sent(100, bucket="128-1024", input_tokens=900, e2e_ms=400.0)]
    slo = Slo(profile="closed_1", percentile=50, max_ms=250)
    assert [("<=128", "kept"), ("128-1024", "broken")] == [(p.bucket, p.state) for p in promises(Measured(rows), slo)]
    assert ["open"] == [p.state for p in promises(Measured(rows, [block(disturbed="hot")]), slo)]


# Rates


def test_rates_errors_and_goodput_by_hand() -> None:
    """Ten sent in 10 s: one timed out, one was interrupted, eight answered, of which six within 6 ms."""
    rows = sent(10)
    rows[8] = replace(rows[8], ok=False, error="timeout")
    rows[9] = replace(rows[9], ok=False, error="interrupted")
    (one,) = throughput.throughputs(Measured(rows, [block()]), {"closed_1": Limits({"e2e_ms": 6.0})})
    assert (10, 1, {"interrupted": 1, "timeout": 1}) == (one.requests, one.failed, one.errors)
    assert (0.8, 40.0, 16.0, 56.0) == (
        one.requests_per_s, one.input_tokens_per_s, one.output_tokens_per_s, one.total_tokens_per_s
    )  # fmt: skip
    assert (0.6, 0.6, pytest.approx(8 / 9)) == (one.goodput_per_s, one.within_slo, one.success)


def test_promises_are_kept_jointly() -> None:
    """Three keep TTFT and E2E both, though six keep one and three the other."""
    rows = [replace(r, ttft_ms=10.0 if n < 6 else 99.0, e2e_ms=999.0 if n < 3 else 50.0) for n, r in enumerate(sent(9))]
    (one,) = throughput.throughputs(Measured(rows, [block()]), {"closed_1": Limits({"ttft_ms": 20.0, "e2e_ms": 100.0})})
    assert 0.3 == one.goodput_per_s
    assert Limits({"tpot_ms": 1.0}).kept(replace(rows[0], tpot_ms=None))  # one token has none to break


def test_a_profile_of_two_buckets_has_its_total_and_both_shares() -> None:
    """Rates add up, unlike latencies."""
    rows = [*sent(10), *sent(30, bucket="128-1024", input_tokens=900)]
    found = throughput.throughputs(Measured(rows, [block()]), {})
    assert [("", 4.0), ("<=128", 1.0), ("128-1024", 3.0)] == [(t.bucket, t.requests_per_s) for t in found]


def test_phases_have_walls_of_their_own() -> None:
    """Two steps send at 0..9 s and 10..19 s: each takes from its first request due to its last answer."""
    rows = [
        replace(r, mode="steps", phase=int(n >= 10), rate=1.0 + int(n >= 10), e2e_ms=1000.0)
        for n, r in enumerate(sent(20))
    ]
    found = throughput.throughputs(Measured(rows, [block(wall_s=20.0)]), {})
    assert [(0, 1.0, 1.0), (1, 2.0, 1.0)] == [(t.phase, t.rate, t.requests_per_s) for t in found]
    shown = candidate("v", throughput=found, latency=latencies.latencies(Measured(rows)))
    assert {("closed_1", 0): "1: 1/s", ("closed_1", 1): "2: 2/s"} == phases.names([shown])
    assert [1000.0, 1000.0] == [at.latency for at in phases.curve(shown, "closed_1", "e2e_ms", 50.0)]


def test_a_load_curve_sets_the_latency_of_a_bucket_against_the_whole_load() -> None:
    """Half of the requests of each step are long: they wait behind all of them, so the load is 2/s, not 1/s."""
    rows = [
        replace(r, mode="steps", phase=n // 20, rate=2.0 * (1 + n // 20), request=n, scheduled_s=float(n // 2),
                e2e_ms=1000.0, **({"bucket": "128-1024", "input_tokens": 600} if n % 2 else {}))
        for n, r in enumerate(sent(40))
    ]  # fmt: skip
    measured = Measured(rows)
    one = candidate("v", latency=latencies.latencies(measured), throughput=throughput.throughputs(measured, {}))
    points = phases.curve(one, "closed_1", "e2e_ms", 50.0)
    assert [(0, "<=128", 2.0), (0, "128-1024", 2.0), (1, "<=128", 2.0), (1, "128-1024", 2.0)] == [
        (p.phase, p.bucket, p.throughput.requests_per_s) for p in points
    ]


def searching(kept: dict[float, int], round_number: int = 0) -> list[Request]:
    """Ten requests at each rate, of which so many keep 100 ms."""
    return [
        replace(r, mode="search", round=round_number, phase=place, rate=rate, e2e_ms=50.0 if n < good else 500.0)
        for place, (rate, good) in enumerate(sorted(kept.items()))
        for n, r in enumerate(sent(10))
    ]


def test_saturation_is_the_highest_rate_below_the_first_that_failed() -> None:
    """8/s keeps the promise by luck above 4/s, which did not: it saturates at 2. Over rounds the geometric mean."""
    limits = Limits({"e2e_ms": 100.0}, share=0.9)
    rows = [*searching({1.0: 10, 2.0: 9, 4.0: 8, 8.0: 10}), *searching({4.0: 10, 8.0: 9, 16.0: 0}, 1)]
    found = throughput.saturation(Measured(rows), "closed_1", limits)
    assert found is not None and found.interval is not None
    assert ((2.0, 8.0), 4.0, False) == (found.by_round, pytest.approx(found.rate), found.at_least)
    assert (4.0, 16.0) == found.failed_by_round
    assert found.interval.lower < 2.0 < 8.0 < found.interval.upper


def test_a_search_that_never_failed_or_never_met_its_promise_says_so() -> None:
    """The highest rate is then a lower bound; and where the lowest failed there is no rate at all."""
    limits = Limits({"e2e_ms": 100.0}, share=0.9)
    high = throughput.saturation(Measured(searching({1.0: 10, 2.0: 10})), "closed_1", limits)
    low = throughput.saturation(Measured(searching({1.0: 0})), "closed_1", limits)
    assert high is not None and (2.0, True) == (pytest.approx(high.rate), high.at_least)
    assert low is not None and ((None,), None) == (low.by_round, low.rate)
    assert throughput.saturation(Measured(sent(5)), "closed_1", limits) is None
    hot = throughput.saturation(Measured(searching({1.0: 10}), [block(disturbed="hot")]), "closed_1", limits)
    assert hot is not None and not hot.evidence


def test_what_a_search_promises_is_read_from_its_profile() -> None:
    """Metrics that are not promised are left out; other profiles promise nothing there."""
    slo = {"ttft_ms": 200, "tpot_ms": None, "e2e_ms": 900.0, "share": 0.95}
    config = {"profiles": [{"name": "c", "mode": "closed"}, {"name": "s", "mode": "search", "slo": slo}]}
    assert {"s": Limits({"ttft_ms": 200.0, "e2e_ms": 900.0}, 0.95)} == searched(config)


# Drift


def test_drift_by_hand() -> None:
    """Medians of 100, 110 and 121 at equal times grow by 21%, without doubt; two blocks have none."""
    spots = [Spot(hours=n / 2, value=100 * 1.1**n) for n in range(3)]
    change, interval = drift.growth(spots)
    assert interval is not None
    assert pytest.approx((0.21, 0.21, 0.21)) == (change, interval.lower, interval.upper)
    assert (None, None) == drift.growth(spots[:2])
    assert (None, None) == drift.growth([Spot(hours=1.0, value=v) for v in (1.0, 2.0, 3.0)])


def test_drift_covers_no_change_where_there_is_none() -> None:
    """Nominal 95%, five blocks with 3% of noise."""
    rng, runs = random.Random(3), 300
    inside = 0
    for _ in range(runs):
        _, interval = drift.growth(
            [Spot(hours=h, value=math.exp(rng.gauss(0, 0.03))) for h in (0.0, 0.3, 0.5, 0.9, 1.2)]
        )
        assert interval is not None
        inside += interval.lower <= 0.0 <= interval.upper
    assert 0.92 * runs <= inside < runs


def test_blocks_left_out_are_shown_and_do_not_drift() -> None:
    """The disturbed one stands among the medians, and the line is drawn without it."""
    rows = [replace(r, round=n, e2e_ms=100.0 if n != 1 else 900.0) for n in range(4) for r in sent(3)]
    loads = [block(round=n, started_s=60.0 * n, disturbed="hot" if n == 1 else "") for n in range(4)]
    (found,) = drift.drifts(Measured(rows, loads), "e2e_ms")
    assert [100.0, 900.0, 100.0, 100.0] == [s.value for s in found.spots]
    assert 0.0 == pytest.approx(found.change)
    assert ["", "disturbed: hot", "", ""] == [s.left_out for s in found.spots]


# Client, counts, resources


def test_lateness_is_held_against_its_p99_where_there_is_one() -> None:
    """Of 100 requests one may be very late; in closed loops nothing is due."""
    rows = [replace(r, mode="open", sent_s=r.scheduled_s + (0.9 if n == 0 else 0.001)) for n, r in enumerate(sent(100))]
    (one,) = soundness(Measured(rows), LagRule())
    assert (pytest.approx(1.0), pytest.approx(900.0), False) == (one.lag_p99_ms, one.lag_max_ms, one.late)
    (few,) = soundness(Measured(rows[:50]), LagRule())
    assert (None, True) == (few.lag_p99_ms, few.late)
    (closed,) = soundness(Measured(sent(100)), LagRule())
    assert (None, None, False) == (closed.lag_p99_ms, closed.lag_limit_ms, closed.late)


def test_counts_that_disagree_are_counted() -> None:
    """Two answers of three tell both counts, one of them two different ones; one prompt is longer than it was sent."""
    rows = sent(3)
    rows[0] = replace(rows[0], usage_output_tokens=20, counted_tokens=20, usage_input_tokens=50)
    rows[1] = replace(rows[1], usage_output_tokens=20, counted_tokens=19, usage_input_tokens=51)
    rows[2] = replace(rows[2], output_tokens=7)
    (one,) = soundness(Measured(rows, [block(), block(round=1, steady=None)]), LagRule())
    assert (1, 2, 1, 1) == (one.token_mismatches, one.compared_tokens, one.input_mismatches, one.other_lengths)
    assert (2, 1, None) == (one.blocks, one.steady_blocks, one.prefix_hits)
    (told,) = soundness(Measured(sent(3), [block(prefix_hit_rate=0.2), block(round=1, prefix_hit_rate=0.4)]), LagRule())
    assert (pytest.approx(0.3), "metrics") == (told.prefix_hits, told.prefix_source)


def test_energy_per_output_token_needs_every_blocks_power() -> None:
    """Five answers of 20 tokens in each of two blocks of 300 J: 3 J a token. Without one reading there is no figure."""
    rows = [replace(r, round=n) for n in range(2) for r in sent(5)]
    loads = [block(round=n, energy_j=300.0, gpu_memory_peak_bytes=n + 1, gpu_clock_mhz=1500.0 - n) for n in range(2)]
    (one,) = resources.resources(Measured(rows, loads))
    assert (3.0, 2, 1499.0) == (one.energy_per_output_token_j, one.gpu_memory_peak_bytes, one.gpu_clock_mhz)
    (other,) = resources.resources(Measured(rows, [loads[0], block(round=1)]))
    assert other.energy_per_output_token_j is None


def test_memory_is_the_gpus_where_one_was_used() -> None:
    """Else the server's own; nothing measured is nothing."""
    (one,) = resources.resources(Measured(sent(1), [block(gpu_memory_peak_bytes=7)]))
    (cpu,) = resources.resources(Measured(sent(1), [block()]))
    assert (7, 5, None) == (
        resources.peak_memory([one], 5), resources.peak_memory([cpu], 5), resources.peak_memory([], None)
    )  # fmt: skip


# What people see


def shown(measured: Measured) -> Candidate:
    """A candidate with the figures of these rows."""
    probed = Probed(
        drifts=drift.drifts(measured, "e2e_ms"),
        left_out=measured.left_out,
        soundness=soundness(measured, LagRule()),
        resources=resources.resources(measured),
        saturations=tuple(
            s for s in [throughput.saturation(measured, "closed_1", Limits({"e2e_ms": 100.0}, 0.9))] if s is not None
        ),
    )
    limits = {"closed_1": Limits({"e2e_ms": 100.0})}
    return candidate("v", latency=latencies.latencies(measured), throughput=throughput.throughputs(measured, limits),
                     probed=probed)  # fmt: skip


def by_heading(one: Candidate) -> dict[str, Table]:
    return {t.heading: t for t in tables([one])}


def test_tables_mark_what_is_no_evidence_and_say_why() -> None:
    """Rows of a profile of which no block counts carry a dagger; the block is listed with its reason."""
    found = by_heading(shown(Measured(sent(10), [block(disturbed="foreign CPU 61%")])))
    assert all(row[3] == "v †" for row in found["Latency"].rows)
    assert "†: no block of the profile counts" in found["Latency"].told
    assert [("v", "closed_1", "0", "disturbed: foreign CPU 61%")] == list(found["Blocks left out"].rows)
    assert "(5.5)" == found["Drift over blocks"].rows[0][-1]


def test_a_search_is_shown_as_a_curve_with_its_saturation() -> None:
    """Each rate with what came of it, then the rate that is the result; no table of percentiles for each rate."""
    found = by_heading(shown(Measured(searching({1.0: 10, 2.0: 10, 4.0: 5}), [block()])))
    assert ["1: 1/s", "2: 2/s", "3: 4/s"] == [row[3] for row in found["Load curve"].rows]
    assert ["100.0%", "100.0%", "50.0%"] == [row[-1] for row in found["Load curve"].rows]
    assert ("v", "closed_1", "2", "–", "2", "4", "90.0% within E2E <= 100 ms") == found["Saturation"].rows[0]
    assert [[], []] == [list(found[name].rows) for name in ("Latency", "Throughput")]


def test_tables_say_not_available_rather_than_nothing() -> None:
    """No GPU, no cache figures, no schedule."""
    found = by_heading(shown(Measured(sent(10), [block()])))
    assert "–" == found["Resources"].rows[0][12]
    assert ("no schedule", "not told") == (
        found["Client and counts"].rows[0][6],
        found["Client and counts"].rows[0][-1],
    )


PROBES = sorted((Path(__file__).parents[2] / "conf" / "probe").glob("*.yaml"))


@pytest.mark.parametrize("conf", PROBES, ids=lambda path: str(path.stem))
def test_shipped_gates_compare_by_a_profile_of_one_input_length(conf: Path) -> None:
    """Requests of several buckets would each need to bound the percentile by themselves."""
    gate = yaml.safe_load((conf.parents[1] / "gate" / "default.yaml").read_text("utf-8"))
    by_name = {p["name"]: p for p in yaml.safe_load(conf.read_text("utf-8"))["profiles"]}
    assert {"<=128"} == {by_name[gate[rule]["profile"]]["bucket"] for rule in ("speed", "latency")}
