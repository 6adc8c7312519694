"""What rules a candidate out before statistics: answers that break, promises, memory, licences and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipelines.config import parse
from pipelines.decide import promises, throughput
from pipelines.decide.gate import EvalCard, Slo, Vetoes
from pipelines.decide.interval import Interval
from pipelines.decide.judge import Item
from pipelines.decide.measured import Block, Request
from pipelines.decide.model import Promise, Veto
from pipelines.decide.outputs import Findings, inspect
from pipelines.decide.probed import MetricName, Throughput
from pipelines.decide.vetoes import promised
from pipelines.errors import ConfigError
from pipelines.evaluate.answers import looping
from tests.unit.test_decision import candidate, decided, gate, verdict

CARD = EvalCard(family="standard", metric="f1")


def answers(count: int, tokens: int = 20) -> list[Item]:
    """Generated answers of about so many tokens, all right."""
    return [
        Item(item_id=f"{n:03d}", score=1.0, prompt_hash=f"h{n}", template_id="t", metric="f1", generated=True,
             tokens_out=tokens + n % 5, tokens_in=10)
        for n in range(count)
    ]  # fmt: skip


def changed(items: Sequence[Item], count: int, **changes: object) -> list[Item]:
    """The same answers, the first `count` of them changed."""
    return [replace(i, **changes) if n < count else i for n, i in enumerate(items)]  # type: ignore[arg-type]


def found(theirs: Sequence[Item], ours: Sequence[Item] | None = None, **rules: object) -> Findings:
    return inspect("qa", ours or answers(len(theirs)), theirs, CARD, parse(Vetoes, rules))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I think so. " * 8, True),
        ("The answer: " + "no no " * 10 + "n", True),
        ("=" * 60, True),
        ("a b c d e " * 3, False),
        ("yes yes yes yes", False),
        ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20", False),
        ("", False),
        ("loop loop loop loop loop loop loop loop loop, and then it ends well.", False),
    ],
)
def test_a_loop_is_an_ending_said_again_and_again(text: str, expected: bool) -> None:
    """Four times the same and 40 characters in all, at the end, perhaps cut inside; counting is none."""
    assert expected == looping(text)


@pytest.mark.parametrize(
    ("changes", "kind", "told"),
    [
        (
            {"empty": True},
            "empty",
            "10 of 100 answers are empty where the reference's are not (000, 001, 002, 003, 004 and",
        ),
        ({"looping": True}, "loop", "10 of 100 answers end in a loop"),
        ({"not_finite": True}, "not_finite", "NaN or infinite log-probabilities on 10 of 100 items"),
    ],
)
def test_broken_answers_veto(changes: dict[str, object], kind: str, told: str) -> None:
    """Named by item; the same fault on the reference's side is no fault of the candidate's."""
    (veto,) = found(changed(answers(100), 10, **changes)).vetoes
    assert (kind, "qa") == (veto.kind, veto.where)
    assert told in veto.text
    both = changed(answers(100), 10, **changes)
    assert () == found(both, both).vetoes


def test_one_empty_answer_is_no_share() -> None:
    """One in ten does not veto, two do, and two in two hundred are within 2%."""
    counts = [(10, 1), (10, 2), (200, 2), (200, 5)]
    assert [0, 1, 0, 1] == [len(found(changed(answers(n), k, empty=True)).vetoes) for n, k in counts]


def test_counts_are_reported_whether_or_not_they_veto() -> None:
    """Truncated, empty, cut and looping answers of the candidate, and its mean length."""
    theirs = changed(changed(answers(50), 1, empty=True, looping=True), 3, truncated=True, cut=True)
    outputs = found(theirs).outputs
    assert (50, 50, 3, 1, 3, 1) == (
        outputs.items, outputs.generated, outputs.truncated, outputs.empty, outputs.cut, outputs.looping
    )  # fmt: skip
    assert outputs.mean_tokens_out == pytest.approx(22.0)


@pytest.mark.parametrize(("tokens", "vetoed"), [(20, False), (21, False), (40, True), (10, True)])
def test_answers_of_another_length_veto(tokens: int, vetoed: bool) -> None:
    """Twice or half the reference's length does, 5% more does not."""
    assert vetoed == bool(found(answers(60, tokens)).vetoes)


def test_a_length_that_few_answers_suggest_is_not_cleared() -> None:
    """Outside the allowed range but not surely so: no veto, but not cleared either. One answer has no interval."""
    theirs = [replace(i, tokens_out=60 if n == 0 else i.tokens_out) for n, i in enumerate(answers(8))]
    result = found(theirs)
    assert ((), "length") == (result.vetoes, result.undecided[0].kind)
    assert "too few answers" in result.undecided[0].text
    assert found(answers(1, 60)).outputs.length_interval is None


def test_scored_prompts_have_no_length() -> None:
    """Where nothing is generated there is nothing to be empty or long."""
    scored = [replace(i, generated=False, tokens_out=0) for i in answers(20)]
    result = found(scored, scored)
    assert ((), None, 0) == (result.vetoes, result.outputs.length_ratio, result.outputs.generated)


def test_an_item_that_must_stay_right_vetoes_alone() -> None:
    """Right for the reference, wrong for the candidate, marked: named. Unmarked, or wrong before: nothing."""
    marked = changed(answers(100), 2, must_pass=True)
    lost = changed(marked, 1, score=0.0)
    (veto,) = found(lost, marked).vetoes
    assert ("must_pass", "1 items that must not turn wrong did (000)") == (veto.kind, veto.text)
    assert () == found(changed(answers(100), 1, score=0.0)).vetoes
    assert () == found(lost, lost).vetoes


def test_answers_to_other_prompts_are_not_compared() -> None:
    """An item whose prompt differs is no evidence of anything, so it does not veto."""
    theirs = changed(answers(100), 10, empty=True, prompt_hash="other")
    assert () == found(theirs).vetoes


def load(values: Sequence[float], failed: int = 0) -> list[Request]:
    ok = [Request("e", "closed_1", 0, True, e2e_ms=v) for v in values]
    return [*ok, *(Request("e", "closed_1", 0, False) for _ in range(failed))]


def held(requests: list[Request], max_ms: float, percentile: float = 99.0) -> Promise:
    return promises.promise(requests, Slo(profile="closed_1", percentile=percentile, max_ms=max_ms))


def test_a_promise_is_judged_by_its_upper_bound() -> None:
    """Of 1..299 ms the p99 lies between 293 and 299 at 95%: kept at 299, open at 298, broken at 292."""
    requests = load([float(n) for n in range(1, 300)])
    assert ["kept", "open", "broken"] == [held(requests, limit).state for limit in (299.0, 298.0, 292.0)]
    assert (299.0, 293.0, 299) == (
        held(requests, 300).upper,
        held(requests, 300).lower,
        held(requests, 300).requests_needed,
    )


def test_fewer_than_299_requests_cannot_bound_a_p99() -> None:
    """298 fast ones keep no promise, and the text says how many it takes; slow ones may still break it."""
    few = held(load([5.0] * 298), 100.0)
    assert "open" == few.state
    assert "298 requests cannot bound p99 at 95%, which takes 299; allowed 100 ms" in promised(few)
    assert "broken" == held(load([200.0] * 50), 100.0).state
    assert "open" == held([], 100.0).state


def test_failed_requests_are_later_than_any() -> None:
    """20 failures in 320 are above the p99, so it has no bound that could be kept."""
    assert "broken" == held(load([5.0] * 300, failed=20), 100.0).state
    assert "kept" == held(load([5.0] * 700, failed=1), 100.0).state


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"native": False, "native_note": "fp32"}, []),
        ({"native": False, "native_note": "elsewhere", "served_on": "not stated"}, ["slo"]),
    ],
)
def test_a_remotes_latency_breaks_promises_and_an_emulated_formats_does_not(
    engine: dict[str, object], expected: list[str]
) -> None:
    """What a server elsewhere takes is what its users wait for, whatever it runs on."""
    broken = held(load([200.0] * 50), 100.0)
    one = decided(candidate("v", promises=(broken,), **engine)).candidates[1]
    assert expected == [v.kind for v in one.vetoes]


def test_goodput_counts_requests_that_keep_every_promise() -> None:
    """Of 10 requests in 5 s one failed and three are late in one of two metrics: 6 kept, 1.2 a second."""
    times = [(10.0, 100.0)] * 6 + [(60.0, 100.0), (10.0, 900.0), (60.0, 900.0)]
    sent = [Request("e", "closed_1", 0, True, ttft_ms=first, e2e_ms=whole) for first, whole in times]
    blocks = [Block("e", "closed_1", 0, 5.0, 10, 1, 1.0, None), Block("e", "open", 0, 9.0, 9, 0, 1.0, None)]
    limits: dict[MetricName, float] = {"e2e_ms": 500, "ttft_ms": 50}
    assert 1.2 == throughput.goodput([*sent, *load([], failed=1)], blocks, "closed_1", limits)
    assert throughput.goodput(sent, blocks, "closed_1", {}) is None
    assert throughput.goodput(sent, [], "closed_1", limits) is None


def test_candidate_figures_veto() -> None:
    """Memory over its cap, a broken promise, a licence and a label that are not allowed, each with its kind."""
    rules = gate(vetoes={"max_memory_gib": 1.0}, constraints={"licences": ["MIT"], "labels": {"residency": ["eu"]}})
    flow = Throughput(profile="p", requests=9, failed=0, requests_per_s=1, output_tokens_per_s=1, peak_rss_bytes=2**31)
    broken = held(load([200.0] * 50), 100.0)
    made = decided(candidate("v", throughput=(flow,), promises=(broken,), labels={"residency": "us"}), rules=rules)
    one = made.candidates[1]
    assert ["licence", "label", "memory", "slo"] == [v.kind for v in one.vetoes]
    assert "reject" == one.outcome
    for told in (
        "licence is Apache-2.0 (its card), allowed (gate.constraints.licences): MIT",
        "residency is us, allowed eu",
        "takes 2.00 GiB at its peak, allowed 1",
    ):
        assert any(told in reason for reason in one.reasons)


def test_what_was_not_measured_is_not_cleared() -> None:
    """A memory cap without a figure and a promise with few requests hold, and say what would settle them."""
    rules = gate(vetoes={"max_memory_gib": 1.0})
    made = decided(candidate("v", promises=(held(load([5.0] * 10), 100.0),)), rules=rules)
    one = made.candidates[1]
    assert ("hold", ["memory", "slo"]) == (one.outcome, [v.kind for v in one.undecided])
    assert any("which takes 299" in line for line in made.would_change)


def test_a_veto_outranks_statistics() -> None:
    """All verdicts pass, one veto rejects, and stands first among the reasons."""
    veto = Veto(kind="must_pass", where="qa", text="1 items that must not turn wrong did (7)")
    one = decided(
        candidate("v", vetoes=(veto,), verdicts=(verdict("veto", note=veto.text), verdict("fail", slice="a")))
    ).candidates[1]
    assert "reject" == one.outcome
    assert "veto, qa: 1 items that must not turn wrong did (7)" == one.reasons[0]
    assert 2 == len(one.reasons)


def test_a_failed_build_is_a_veto_of_its_own_kind() -> None:
    """So that reports can tell it from a loss."""
    one = decided(candidate("v", status="failed", failure="loads as noise")).candidates[1]
    assert ["build"] == [v.kind for v in one.vetoes]


@pytest.mark.parametrize("length", [[1.1, 1.2], [0.9, 0.95], [0, 1.1]])
def test_a_length_range_without_one_in_it_is_refused(length: list[float]) -> None:
    """The reference's own length must be allowed."""
    with pytest.raises(ConfigError, match="a share below 1 and one above it"):
        gate(vetoes={"length": length})


def test_interval_of_a_length_ratio_is_that_of_a_ratio_estimator() -> None:
    """Lengths 10 and 30 against 20 and 20: ratio 1, residuals 10 and 10 of mean length 20, t with one degree."""
    ours = [replace(i, tokens_out=20) for i in answers(2)]
    theirs = [replace(i, tokens_out=n) for i, n in zip(answers(2), (10, 30), strict=True)]
    interval = found(theirs, ours).outputs.length_interval
    assert interval is not None
    assert interval.upper - 1.0 == pytest.approx(12.706 * 10 / 20, rel=1e-3)
    assert isinstance(interval, Interval)
