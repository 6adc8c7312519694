"""Comparisons of two engines: by hand on small cases, and by simulation where the truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipelines.decide import soundness, stats
from pipelines.decide.gate import GateConfig, SpeedRule
from pipelines.decide.measured import Block, Group, Measured, Request
from pipelines.decide.probing import compared
from pipelines.decide.speed import by_block, by_request, compare, differences

GROUP = Group("closed_1", 0, "<=128")
RULE = SpeedRule(profile="closed_1")


def request(engine: str, round_number: int, number: int, e2e_ms: float, **changes: object) -> Request:
    """One answered request of 20 tokens."""
    given: dict[str, object] = {
        "engine": engine, "profile": "closed_1", "round": round_number, "request": number, "ok": True,
        "ttft_ms": e2e_ms / 5, "tpot_ms": e2e_ms / 25, "e2e_ms": e2e_ms, "itl_ms": [e2e_ms / 25] * 19,
        "bucket": "<=128", "prompt_id": str(number), "input_tokens": 50, "output_tokens": 20, "asked_tokens": 20,
    }  # fmt: skip
    return Request(**given | changes)  # type: ignore[arg-type]


def side(engine: str, times: Sequence[Sequence[float]], **changes: object) -> list[Request]:
    """An engine's requests: one sequence of latencies a round."""
    return [request(engine, r, n, ms, **changes) for r, row in enumerate(times) for n, ms in enumerate(row)]


def failing(rows: Sequence[Request], count: int, error: str = "timeout") -> list[Request]:
    """The same requests, the first so many of them failed."""
    return [replace(r, ok=False, error=error) if n < count else r for n, r in enumerate(rows)]


ROUNDS = [[100.0 + n for n in range(10)], [120.0 + n for n in range(10)]]


def test_by_request_by_hand() -> None:
    """Rounds of ratios (2, 8) and (2, 2): mean logs ln 4 and ln 2, so the mean ratio is 4 ** 0.75."""
    ours, theirs = side("a", [[100.0, 80.0], [100.0, 100.0]]), side("b", [[50.0, 10.0], [50.0, 50.0]])
    found = by_request(GROUP, ours, theirs, "e2e_ms")
    assert found is not None and found.interval is not None
    assert (4**0.75, 2, 4) == (pytest.approx(found.ratio), found.rounds, found.pairs)
    assert pytest.approx(-(60.0 + 50.0) / 2) == found.difference_ms  # rounds of 50 and 70, of 50 and 50
    half = 12.7062 * math.log(2) / 2  # t with one degree of freedom, standard error |ln 4 - ln 2| / 2
    assert pytest.approx((4**0.75 * math.exp(-half), 4**0.75 * math.exp(half)), rel=1e-4) == (
        found.interval.lower, found.interval.upper
    )  # fmt: skip


def test_a_request_is_compared_with_itself_only() -> None:
    """Another order of the rows changes nothing; another prompt, or one that failed, is no pair."""
    ours, theirs = side("a", ROUNDS), side("b", ROUNDS)
    assert 1.0 == getattr(by_request(GROUP, ours, theirs[::-1], "e2e_ms"), "ratio", None)
    other = [replace(theirs[0], prompt_id="another"), replace(theirs[1], ok=False), *theirs[2:]]
    found = by_request(GROUP, ours, other, "e2e_ms")
    assert found is not None and 18 == found.pairs
    assert by_request(GROUP, ours, side("b", [[1.0]], prompt_id="x"), "e2e_ms") is None


def test_one_round_has_a_ratio_and_no_interval() -> None:
    """Nothing is known of how rounds differ."""
    found = by_request(GROUP, side("a", ROUNDS[:1]), side("b", ROUNDS[:1]), "ttft_ms")
    assert found is not None
    assert (1.0, None, None) == (found.ratio, found.interval, found.difference_interval)


def test_by_block_takes_each_rounds_own_percentile() -> None:
    """Medians of 100..109 and 120..129 by nearest rank are 104 and 124; halved, the ratio is 2. There is no p99."""
    ours, theirs = side("a", ROUNDS), side("b", [[v / 2 for v in row] for row in ROUNDS])
    found = by_block(GROUP, ours, theirs, "e2e_ms", 50.0)
    assert found is not None
    assert (2.0, -57.0, 2) == (pytest.approx(found.ratio), pytest.approx(found.difference_ms), found.pairs)
    assert by_block(GROUP, ours, theirs, "e2e_ms", 99.0) is None


def test_differences_cover_every_metric_that_both_have_and_leave_a_search_out() -> None:
    """Gaps are compared by percentile only, as they belong to no pair."""
    ours, theirs = side("a", ROUNDS), side("b", ROUNDS)
    found = [(d.metric, d.by) for d in differences(ours, theirs)]
    assert [("ttft_ms", "request"), ("ttft_ms", "p50"), ("tpot_ms", "request"), ("tpot_ms", "p50"),
            ("itl_ms", "p99"), ("e2e_ms", "request"), ("e2e_ms", "p50")] == found  # fmt: skip
    assert () == differences([replace(r, mode="search") for r in ours], theirs)


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (failing(side("b", ROUNDS), 3), "3 of 40 requests failed"),
        (side("b", ROUNDS[:1]), "1 round measured on both sides, at least 2 are needed"),
        ([], "no requests of the candidate under profile 'closed_1' that count"),
        (side("b", [row[:4] for row in ROUNDS]), "4 requests a round cannot bound p50, which takes 5"),
        (side("b", ROUNDS, prompt_id="x"), "20 of 20 requests ask another prompt of one side than of the other"),
        (side("b", ROUNDS, mode="search"), "'closed_1' searches: it tries other rates with each engine"),
        (side("b", ROUNDS, output_tokens=19), "answers are 0.950 times as long as the reference's"),
    ],
)
def test_what_is_no_evidence_says_why(theirs: list[Request], told: str) -> None:
    """Failures, too few rounds or requests, other prompts, other lengths: never evidence."""
    found = compare(side("a", ROUNDS), theirs, RULE, 0.9)
    assert not found.evidence
    assert told in found.note


def test_shorter_answers_may_still_be_compared_token_by_token() -> None:
    """TPOT does not depend on how long an answer is."""
    rule = RULE.model_copy(update={"metric": "tpot_ms"})
    assert compare(side("a", ROUNDS), side("b", ROUNDS, output_tokens=10), rule, 0.9).evidence


def test_what_the_probe_interrupted_is_no_failure() -> None:
    """The server did nothing wrong, but there must be enough left."""
    rounds = [[100.0 + n for n in range(12)]] * 2
    theirs = failing(side("b", rounds), 2, "interrupted")
    assert compare(side("a", rounds), theirs, RULE, 0.9).evidence


def test_of_several_buckets_the_slowest_decides() -> None:
    """Twice as fast on short prompts and no faster on long ones is no faster."""
    long = {"bucket": "128-1024", "input_tokens": 600}
    ours = side("a", ROUNDS) + [replace(r, request=r.request + 50, **long) for r in side("a", ROUNDS)]
    theirs = side("b", [[v / 2 for v in row] for row in ROUNDS])
    theirs += [replace(r, request=r.request + 50, **long) for r in side("b", ROUNDS)]
    found = compare(ours, theirs, RULE, 0.9)
    assert (1.0, "128-1024", True) == (found.ratio, found.bucket, found.evidence)
    assert "the slowest of 2 groups" in found.note
    assert not compare(ours, theirs[:20], RULE, 0.9).evidence  # the long ones were not measured


def blocks(engine: str, **changes: object) -> list[Block]:
    """Two sound blocks; changes are those of the first."""
    sound = Block(engine, "closed_1", 0, 1.0, 10, 0, 1.0, None, steady=True, warmup_requests=8)
    return [replace(sound, **changes), replace(sound, round=1)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"disturbed": "foreign CPU 61%"}, "round 0 of the candidate left out (disturbed: foreign CPU 61%)"),
        ({"steady": False}, "round 0 of the candidate left out (not steady after 8 warm-up requests)"),
        ({"partial": True}, "round 0 of the candidate left out (cut short)"),
    ],
)
def test_blocks_that_are_no_evidence_take_their_round_with_them(changes: dict[str, object], told: str) -> None:
    """With one round of two left there is no evidence, and the note says which was left out and why."""
    gate = GateConfig.model_validate({"speed": RULE, "latency": {"profile": "closed_1"}})
    ours = Measured(side("a", ROUNDS), blocks("a"))
    assert compared(ours, Measured(side("b", ROUNDS), blocks("b")), gate, ()).evidence
    found = compared(ours, Measured(side("b", ROUNDS), blocks("b", **changes)), gate, ())
    assert (False, True) == (found.evidence, told in found.note)


def test_a_disturbed_block_counts_where_the_probe_was_told_so() -> None:
    """`probe.disturbed: kept` leaves steadiness and interruption alone."""
    assert "" == blocks("a", disturbed="hot", excused=True)[0].left_out
    assert "cut short" == blocks("a", disturbed="hot", excused=True, partial=True)[0].left_out


def test_failures_in_a_block_that_was_left_out_still_count() -> None:
    """Otherwise a server that breaks under load would hide behind the disturbance."""
    gate = GateConfig.model_validate({"speed": RULE, "latency": {"profile": "closed_1"}})
    three = [*ROUNDS, ROUNDS[0]]
    ours = Measured(side("a", three), [*blocks("a"), replace(blocks("a")[0], round=2)])
    hot = [*blocks("b", disturbed="hot"), replace(blocks("b")[0], round=2)]
    assert compared(ours, Measured(side("b", three), hot), gate, ()).evidence
    found = compared(ours, Measured(failing(side("b", three), 1), hot), gate, ())
    assert not found.evidence
    assert "1 requests of the candidate failed in blocks that were left out" in found.note


def late(rows: Sequence[Request], ms: float) -> list[Request]:
    """Requests of an open load, each sent so late."""
    return [replace(r, mode="open", scheduled_s=float(n), sent_s=n + ms / 1e3) for n, r in enumerate(rows)]


def test_a_client_that_is_too_slow_is_no_evidence() -> None:
    """20 requests have no p99, so the maximum is held against 5 ms (5% of a TTFT of 20 to 25 ms is less)."""
    gate = GateConfig.model_validate({"speed": RULE, "latency": {"profile": "closed_1"}})
    ours, theirs = side("a", ROUNDS), side("b", ROUNDS)
    assert compared(Measured(late(ours, 4.0)), Measured(late(theirs, 4.0)), gate, ()).evidence
    found = compared(Measured(late(ours, 4.0)), Measured(late(theirs, 6.0)), gate, ())
    assert not found.evidence
    assert "the client was too slow with the candidate: sent at most 6.0 ms late, allowed 5.0" in found.note
    wide = GateConfig.model_validate({"speed": RULE, "latency": {"profile": "closed_1"}, "lag": {"share": 0.5}})
    assert compared(Measured(late(ours, 4.0)), Measured(late(theirs, 6.0)), wide, ()).evidence


def test_prefix_caches_that_help_one_side_are_no_evidence() -> None:
    """Half of one side's input cached and none of the other's is another piece of work."""
    gate = GateConfig.model_validate({"speed": RULE, "latency": {"profile": "closed_1"}})
    sides = [Measured(side(e, ROUNDS, cached_tokens=n)) for e, n in (("a", 0), ("b", 25))]
    found = compared(sides[0], sides[1], gate, ())
    assert "prefix-cache hits differ (0.0% and 50.0% of input tokens)" in found.note
    assert not found.evidence
    assert [(0.5, "usage")] == [(s.prefix_hits, s.prefix_source) for s in soundness.soundness(sides[1], gate.lag)]


# What is claimed of the intervals, on machines made up


def machine(seed: int, rounds: int, per_round: int, effect: float = 0.03) -> tuple[list[Request], list[Request]]:
    """Two engines of which the second is slower by `effect`: prompts that differ by 30%, 3% of noise a request, 2% a
    block, and a machine that slows down by 1% from each block to the next, in alternating order."""
    rng = random.Random(seed)
    found: dict[str, list[Request]] = {"a": [], "b": []}
    for r in range(rounds):
        prompts = [rng.gauss(0.0, 0.3) for _ in range(per_round)]
        for place, engine in enumerate("ab" if r % 2 == 0 else "ba"):
            level = rng.gauss(0.0, 0.02) + 0.01 * (2 * r + place) + (effect if engine == "b" else 0.0)
            for n, prompt in enumerate(prompts):
                ms = 100.0 * math.exp(prompt + level + rng.gauss(0.0, 0.03))
                found[engine].append(request(engine, r, n, ms, prompt_id=f"{r}/{n}"))
    return found["a"], found["b"]


def logs(rows: Sequence[Request]) -> list[float]:
    return [math.log(r.e2e_ms or 1.0) for r in rows]


def test_the_paired_interval_covers_and_an_interval_over_requests_does_not() -> None:
    """Nominal 95%, six rounds of 30: about 95% by rounds, in spite of drift; pairs taken as independent cover 40%."""
    truth, runs = -0.03, 150
    by_rounds = by_pairs = 0
    for seed in range(runs):
        ours, theirs = machine(seed, rounds=6, per_round=30)
        found = by_request(GROUP, ours, theirs, "e2e_ms")
        assert found is not None and found.interval is not None
        by_rounds += math.log(found.interval.lower) <= truth <= math.log(found.interval.upper)
        low, high = stats.paired_t([a - b for a, b in zip(logs(ours), logs(theirs), strict=True)]).interval(0.95)
        by_pairs += low <= truth <= high
    assert 0.91 * runs <= by_rounds
    assert by_pairs < 0.5 * runs


def test_paired_beats_unpaired() -> None:
    """The same requests, 5 rounds of 20, a difference of 8%: pairs see it nearly always, two samples less than half as
    often, since prompts differ more than engines do."""
    paired = unpaired = 0
    for seed in range(100):
        ours, theirs = machine(seed, rounds=5, per_round=20, effect=0.08)
        found = by_request(GROUP, ours, theirs, "e2e_ms")
        assert found is not None and found.interval is not None
        paired += found.interval.upper < 1.0
        one, other = stats.paired_t(logs(ours)), stats.paired_t(logs(theirs))
        half = stats.critical(0.95, one.df + other.df) * math.hypot(one.se, other.se)
        unpaired += one.mean - other.mean + half < 0.0
    assert paired >= 95
    assert unpaired < paired / 2
