"""Margins, evidence checks, verdicts on slices and clusters, and speed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.config import parse
from pipelines.decide import gate as gates
from pipelines.decide import speed, stats
from pipelines.decide.gate import EvalCard, GateConfig
from pipelines.decide.judge import Item, judge
from pipelines.decide.model import Verdict
from pipelines.decide.planning import Size, resolutions
from pipelines.errors import ConfigError

unhurried = settings(deadline=None, max_examples=50)
CARD = EvalCard(family="standard", metric="acc", binary=True)
GRADED = EvalCard(family="standard", metric="f1")
AXES = {"speed": {"profile": "closed_1"}, "latency": {"profile": "closed_1"}}


def gate(**changes: object) -> GateConfig:
    """A gate with every default but the given ones."""
    return parse(GateConfig, AXES | changes)


def column(scores: Sequence[float | None], card: EvalCard = CARD, clusters: int | None = None) -> list[Item]:
    """Items 0, 1, 2 ... with these scores, in slices a and b by turns; `clusters` items share a document."""
    return [
        Item(
            item_id=f"{n:04d}", score=score, prompt_hash=f"hash {n}", template_id="t1", slice="ab"[n % 2],
            cluster=str(n // clusters) if clusters else None, metric=card.metric,
            higher_is_better=card.higher_is_better, binary=card.binary,
        )
        for n, score in enumerate(scores)
    ]  # fmt: skip


def overall(
    reference: Sequence[Item], candidate: Sequence[Item], card: EvalCard = CARD, rules: GateConfig | None = None
) -> Verdict:
    """The verdict on the whole set."""
    return judge(reference, candidate, "qa", card, rules or gate())[0]


def flipped(n: int, losses: int, gains: int) -> tuple[list[Item], list[Item]]:
    """Two columns of n items: the first `losses` are lost, the next `gains` gained, the rest right on both sides."""
    ours = [1.0] * losses + [0.0] * gains + [1.0] * (n - losses - gains)
    theirs = [0.0] * losses + [1.0] * gains + [1.0] * (n - losses - gains)
    return column(ours), column(theirs)


def test_published_example_through_the_gate() -> None:
    """161 items, 16 lost, 6 gained: loss 0.0621, 95% interval 0.0054 to 0.1240, as published."""
    verdict = overall(*flipped(161, 16, 6), rules=gate(alpha=0.025))
    assert verdict.interval is not None and verdict.loss is not None
    assert (0.0621, 0.0054, 0.1240) == (
        round(verdict.loss, 4), round(verdict.interval.lower, 4), round(verdict.interval.upper, 4)
    )  # fmt: skip
    assert (161, 16, 6, "inconclusive", None) == (
        verdict.items, verdict.losses, verdict.gains, verdict.verdict, verdict.more_items
    )  # fmt: skip
    assert "unlikely to pass: stop" in verdict.note


@pytest.mark.parametrize(
    ("n", "losses", "gains", "expected"),
    [
        (200, 0, 0, "pass"),
        (2000, 10, 10, "pass"),
        (200, 40, 2, "fail"),
        (100, 0, 0, "inconclusive"),
        (300, 9, 7, "inconclusive"),
    ],
)
def test_verdict_needs_the_whole_interval_on_one_side(n: int, losses: int, gains: int, expected: str) -> None:
    """PASS below the margin of 2 points, FAIL above it, else INCONCLUSIVE."""
    assert expected == overall(*flipped(n, losses, gains)).verdict


def test_inconclusive_says_how_many_more_items() -> None:
    """No loss, 16 flips in 300: (1.645 + 0.842)^2 * psi_U / 0.02^2 - 300, psi_U the upper 80% Wilson bound."""
    verdict = overall(*flipped(300, 8, 8))
    z, p, n = 0.8416, 16 / 300, 300
    bound = (p + z * z / (2 * n) + z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (1 + z * z / n)
    expected = 6.1826 * bound / 0.02**2 - 300
    assert verdict.more_items == pytest.approx(expected, abs=2)
    assert f"{verdict.more_items} more items would decide" in verdict.note


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt_hash": "other"}, "item 0001: prompt_hash differs"),
        ({"template_id": "t2"}, "item 0001: template_id differs (reference t1, candidate t2)"),
        ({"item_id": "0007x"}, "item 0001: missing from the candidate (10 items against 10)"),
        ({"score": None}, "item 0001: the candidate has no score"),
        ({"score": math.nan}, "item 0001: the candidate has no score (nan)"),
        ({"score": 0.5}, "item 0001: the candidate's score 0.5 is neither 0 nor 1"),
        ({"metric": "f1"}, "item 0001: metric differs"),
        ({"item_id": "0000"}, "item 0000: scored more than once by the candidate"),
    ],
)
def test_mismatched_evidence_is_invalid(change: dict[str, object], told: str) -> None:
    """Nothing is compared unless both sides answered the same prompts; the first differing item is named."""
    ours = column([1.0] * 10)
    theirs = [replace(item, **change) if item.item_id == "0001" else item for item in ours]  # type: ignore[arg-type]
    verdicts = judge(ours, theirs, "qa", CARD, gate())
    assert ["invalid"] == [v.verdict for v in verdicts]
    assert verdicts[0].note.startswith(told)
    assert verdicts[0].loss is None


def test_fewer_items_are_invalid() -> None:
    """A run that stopped early is not compared on what it has."""
    ours = column([1.0] * 10)
    assert "item 0009: missing from the candidate (10 items against 9)" == overall(ours, ours[:9]).note
    assert "the candidate has no scores on this eval set" == overall(ours, []).note


def test_several_filters_need_a_choice() -> None:
    """With two answers per item the card must name the filter that counts."""
    both = [replace(item, filter=f) for item in column([1.0] * 200) for f in ("strict", "flexible")]
    assert "name one in the card's `filter`" in overall(both, both).note
    assert "pass" == overall(both, both, CARD.model_copy(update={"filter": "strict"})).verdict


def test_order_of_items_does_not_matter() -> None:
    """The same rows in another order give the same verdicts."""
    ours, theirs = flipped(120, 7, 3)
    shuffled = random.Random(3).sample(theirs, len(theirs))
    assert judge(ours, theirs, "qa", CARD, gate()) == judge(ours[::-1], shuffled, "qa", CARD, gate())


@unhurried
@given(st.integers(2, 60), st.integers(0, 20), st.integers(0, 20))
def test_swapping_sides_flips_the_loss(same: int, losses: int, gains: int) -> None:
    """Loss, interval and counts of the exchanged comparison are mirrored."""
    ours, theirs = flipped(same + losses + gains, losses, gains)
    there, back = overall(ours, theirs), overall(theirs, ours)
    assert there.loss is not None and back.loss is not None and there.interval and back.interval
    assert (-back.loss, back.gains, back.losses) == pytest.approx((there.loss, there.losses, there.gains))
    assert (-back.interval.upper, -back.interval.lower) == pytest.approx(
        (there.interval.lower, there.interval.upper), abs=1e-9
    )


@unhurried
@given(st.lists(st.tuples(st.floats(0.001, 1), st.floats(0, 1)), min_size=2, max_size=40), st.booleans())
def test_graded_interval_contains_the_loss(scores: list[tuple[float, float]], clustered: bool) -> None:
    """Graded scores, clustered or not: the interval contains the mean loss."""
    size = 2 if clustered and len(scores) > 2 else None
    ours, theirs = (column(side, GRADED, size) for side in zip(*scores, strict=True))
    verdict = overall(ours, theirs, GRADED)
    assert verdict.loss is not None and verdict.interval
    assert verdict.interval.lower <= verdict.loss <= verdict.interval.upper


@unhurried
@given(st.floats(0.001, 0.3), st.floats(0.001, 0.3))
def test_wider_margin_never_hurts(one: float, other: float) -> None:
    """A comparison that passes keeps passing when the margin grows."""
    order = {"fail": 0, "inconclusive": 1, "pass": 2}
    small, large = (
        overall(*flipped(300, 9, 5), rules=gate(margins={"standard": margin})) for margin in sorted((one, other))
    )
    assert order[small.verdict] <= order[large.verdict]


def test_the_two_by_two_table_and_other_methods_stand_beside_the_verdict() -> None:
    """161 items: 59 right on both sides, 80 wrong, 16 lost and 6 gained; Newcombe and McNemar agree with theirs."""
    ours = column([1.0] * 16 + [0.0] * 6 + [1.0] * 59 + [0.0] * 80)
    theirs = column([0.0] * 16 + [1.0] * 6 + [1.0] * 59 + [0.0] * 80)
    verdict = overall(ours, theirs, rules=gate(alpha=0.025))
    assert (59, 6, 16, 80, 22) == (verdict.both_right, verdict.gains, verdict.losses, verdict.both_wrong, verdict.flips)
    assert verdict.newcombe is not None and verdict.interval is not None
    assert verdict.interval.upper == pytest.approx(verdict.newcombe.upper, abs=0.01)
    assert 0.0525 == pytest.approx(verdict.mcnemar_p, abs=1e-4)  # binomial test of 6 in 22


def test_a_relative_margin_asks_for_recovery() -> None:
    """2% of a reference at 0.5 is one point: the interval is that of the ratio, and pass means recovery above 98%."""
    rules = gate(margins={"standard": {"relative": 0.02}})
    ours = column([1.0, 0.0] * 2000)
    theirs = [replace(i, score=0.0) if n in (0, 2, 4) else i for n, i in enumerate(ours)]
    verdict = overall(ours, theirs, rules=rules)
    assert (0.01, 0.02, "pass") == (pytest.approx(verdict.margin), verdict.relative, verdict.verdict)
    low, high = stats.ratio_interval(1997, 0, 3, 4000, 0.9)
    assert verdict.interval is not None
    assert (0.5 * (1 - high), 0.5 * (1 - low)) == pytest.approx((verdict.interval.lower, verdict.interval.upper))
    assert "inconclusive" == overall(ours[:400], theirs[:400], rules=rules).verdict


@pytest.mark.parametrize("clustered", [False, True])
def test_a_relative_margin_of_graded_scores_is_a_linear_contrast(clustered: bool) -> None:
    """Scores of 0.8 and 0.78 throughout lose 2.5%: more than 2% allowed, less than 3%."""
    ours = column([0.8 + 0.01 * (n % 5) for n in range(600)], GRADED, 3 if clustered else None)
    theirs = [replace(i, score=0.975 * (i.score or 0)) for i in ours]
    found = [overall(ours, theirs, GRADED, gate(margins={"standard": {"relative": r}})) for r in (0.01, 0.04)]
    assert ["fail", "pass"] == [v.verdict for v in found]


def test_all_wrong_is_no_evidence_and_all_right_is_told() -> None:
    """Where the reference has nothing right nothing can be lost; where it has all right only losses can be seen."""
    nothing = column([0.0] * 400)
    verdict = overall(nothing, nothing)
    assert ("inconclusive", "the reference scores 0 on all 400 items: nothing can be lost here") == (
        verdict.verdict,
        verdict.note,
    )
    everything = column([1.0] * 400)
    verdict = overall(everything, everything)
    assert ("pass", "the reference is right on every item: only losses can be seen") == (verdict.verdict, verdict.note)


def test_lower_is_better_turns_the_sign() -> None:
    """Where lower is better, a higher score is a loss."""
    card = EvalCard(family="perplexity", metric="nll", higher_is_better=False)
    ours = column([2.0 + n % 7 / 10 for n in range(60)], card)
    theirs = [replace(item, score=(item.score or 0) + 0.2 + int(item.item_id) % 3 / 100) for item in ours]
    verdict = overall(ours, theirs, card)
    assert verdict.loss == pytest.approx(0.21)
    assert "fail" == verdict.verdict


def test_clusters_widen_the_interval() -> None:
    """Losses that come by whole documents are worth fewer observations than scattered ones."""
    ours = column([1.0] * 400, clusters=5)
    together = column([0.0] * 10 + [1.0] * 390, clusters=5)
    scattered = column([0.0 if n % 40 == 0 else 1.0 for n in range(400)], clusters=5)
    grouped, spread = overall(ours, together), overall(ours, scattered)
    plain = overall(*(([replace(i, cluster=None) for i in side]) for side in (ours, scattered)))
    assert grouped.interval and spread.interval and plain.interval
    assert (80, 80, None) == (grouped.clusters, spread.clusters, plain.clusters)
    assert grouped.interval.upper > spread.interval.upper > plain.interval.upper


def test_one_cluster_decides_nothing() -> None:
    """All questions on one document are one observation."""
    ours = column([1.0] * 300, clusters=300)
    assert "inconclusive" == overall(ours, ours).verdict


def test_identical_answers_never_fail() -> None:
    """A copy of the reference passes where the set is large enough, and is inconclusive where it is not."""
    for n, expected in ((400, "pass"), (50, "inconclusive")):
        for card in (CARD, GRADED):
            ours = column([1.0, 0.0] * (n // 2), card)
            assert expected == overall(ours, ours, card).verdict


def test_slices_are_shown_and_decide_only_when_asked() -> None:
    """Each slice has a verdict with its own margin; `slices` says whether it decides."""
    ours, theirs = flipped(400, 3, 3)
    rules = {"sets": {"qa": {"margin": 0.05, "slices": {"b": 0.08}}}}
    shown = judge(ours, theirs, "qa", CARD, gate(**rules))
    asked = judge(ours, theirs, "qa", CARD, gate(slices="gate", **rules))
    assert [("all", 400, 0.05, True), ("a", 200, 0.05, False), ("b", 200, 0.08, False)] == [
        (v.slice, v.items, v.margin, v.gates) for v in shown
    ]
    assert [True, True, True] == [v.gates for v in asked]


def test_suspect_outputs_are_counted() -> None:
    """Truncated, empty and cut outputs stand beside the verdict, for both sides."""
    ours = column([1.0] * 200)
    theirs = [replace(item, truncated=n < 2, empty=n < 1, cut=n < 3) for n, item in enumerate(ours)]
    told = "prompts truncated: reference 0, candidate 2; outputs empty: reference 0, candidate 1; outputs cut short: "
    assert overall(ours, theirs).note.startswith(told + "reference 0, candidate 3")


def test_margin_is_looked_up_from_the_nearest_place() -> None:
    """Gate's slice, card's slice, gate's set, card, family."""
    card = EvalCard(family="strict", metric="em", margin=0.04, slices={"a": 0.06})
    assert 0.01 == gate().rule("x", EvalCard(family="strict", metric="em")).margin
    assert (0.04, 0.06) == (gate().rule("x", card).margin, gate().rule("x", card, "a").margin)
    rules = gate(sets={"x": {"margin": 0.05, "slices": {"a": 0.07}}})
    assert [0.05, 0.07, 0.05] == [rules.rule("x", card, part).margin for part in ("all", "a", "b")]


def test_alpha_and_power_can_be_set_for_a_set_and_a_slice() -> None:
    """The nearest word counts, and the level of a look follows from it."""
    rules = gate(
        sets={"x": {"alpha": 0.01, "slices": {"a": {"alpha": 0.1, "power": 0.9, "margin": {"relative": 0.02}}}}}
    )
    found = [rules.rule("x", CARD, part) for part in ("all", "a")]
    assert [(0.01, 0.8), (0.1, 0.9)] == [(r.alpha, r.power) for r in found]
    assert 0.014 == pytest.approx(found[1].points(0.7))
    assert 0.05 == rules.rule("y", CARD).alpha


def test_looks_are_judged_at_pococks_level() -> None:
    """Two looks planned at half and all of the items: 0.0304 each, and a wider interval than one look's."""
    ours, theirs = flipped(500, 5, 3)
    one, two = (overall(ours, theirs, rules=gate(looks=looks)) for looks in ({}, {"at": [0.5, 1.0], "number": 2}))
    assert one.interval and two.interval
    assert (0.05, 0.0304) == (one.alpha, pytest.approx(two.alpha, abs=5e-5))
    assert two.interval.upper > one.interval.upper


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ({"at": [0.25, 0.5, 0.75, 1.0], "number": 4}, "4 looks are planned; 1 to 3 are allowed"),
        ({"at": [0.5, 1.0], "number": 3}, "look 3 of 2; the plan made beforehand has no such look"),
        ({"at": [0.5, 0.9]}, "growing, the last of them 1"),
        ({"at": [0.7, 0.5, 1.0]}, "growing, the last of them 1"),
        ({"number": 0}, "greater than or equal to 1"),
    ],
)
def test_looks_that_are_no_plan_are_refused(looks: dict[str, object], told: str) -> None:
    """A fourth look, one that was not planned, or shares that do not grow to the whole are errors."""
    with pytest.raises(ConfigError, match=told):
        gate(looks=looks)


def test_nonsense_gates_are_refused() -> None:
    """Margins of 0 or 2, a silly alpha and a misspelt key are all reported at once."""
    with pytest.raises(ConfigError) as caught:
        parse(GateConfig, AXES | {"alpha": 0.9, "margins": {"strict": 0, "lose": 2}, "slice": "gate"}, "gate")
    keys = {problem.key for problem in caught.value.problems}
    assert {"gate.alpha", "gate.margins.strict", "gate.margins.lose", "gate.slice"} == keys


def test_names_that_match_nothing_are_found() -> None:
    """Overrides for a set or slice that does not exist, and a profile nobody runs, are problems with a suggestion."""
    rules = gate(sets={"suport_intent": {"margin": 0.1}, "qa": {"slices": {"emial": 0.1}}})
    found = gates.problems(rules, {"support_intent": [], "qa": ["email", "chat"]}, ["closed_2"])
    keys = ["gate.sets.qa.slices.emial", "gate.sets.suport_intent", "gate.speed.profile", "gate.latency.profile"]
    assert keys == [p.key for p in found]
    assert "did you mean 'email'?" in str(found[0])
    assert "did you mean 'support_intent'?" in str(found[1])


@pytest.mark.parametrize("margin", [0, 2, {"relative": 0}, {"relative": 1.5}, {"relatve": 0.1}])
def test_a_margin_that_is_none_is_one_clear_error(margin: object) -> None:
    """Nothing or everything allowed, in points or as a share, and a misspelt share: one problem, at its key."""
    with pytest.raises(ConfigError) as caught:
        parse(GateConfig, AXES | {"margins": {"strict": margin}}, "gate")
    assert "gate.margins.strict" in {
        p.key.removesuffix(".relative").removesuffix(".relatve") for p in caught.value.problems
    }


def test_plan_knows_what_a_set_can_show() -> None:
    """With 5% flips some 3,100 items resolve one point (3,092 by the short formula); 300 resolve about 3.4."""
    card = EvalCard(family="strict", metric="em", binary=True)
    (large,), (small,) = (resolutions("x", {"all": Size(n)}, card, gate()) for n in (3200, 300))
    assert (True, False) == (large.enough, small.enough)
    assert 3092 == pytest.approx(small.items_needed, rel=0.03)
    assert math.sqrt(6.1826 * 0.05 / 300) == pytest.approx(small.smallest_loss, rel=0.1)
    assert resolutions("x", {"all": Size(300, 60)}, card, gate())[0].smallest_loss > small.smallest_loss


def test_plan_resolves_slices_by_their_own_margins() -> None:
    """A slice has its own size and margin, and decides only where the gate says so; an unknown size shows nothing."""
    sizes = {"all": Size(300), "a": Size(200), "b": Size(100)}
    rules = {"sets": {"x": {"slices": {"b": {"relative": 0.04}}}}}
    shown, asked = (resolutions("x", sizes, CARD, gate(**rules, slices=how)) for how in ("report", "gate"))
    assert [("x", 0.02, False), ("x/a", 0.02, False), ("x/b", 0.04, True)] == [
        (r.name, r.margin, r.relative) for r in shown
    ]
    assert [[True, False, False], [True, True, True]] == [[r.decides for r in some] for some in (shown, asked)]
    assert shown[0].smallest_loss < shown[1].smallest_loss < shown[2].smallest_loss
    assert (1.0, False) == (resolutions("x", {"all": Size(0)}, CARD, gate())[0].smallest_loss, False)


def load(engine: str, factor: float, rounds: int = 3, requests: int = 20, spread: float = 0.0) -> list[speed.Request]:
    """Requests of 100, 101 ... ms times a factor, which `spread` changes from round to round."""
    return [
        speed.Request(engine, "closed_1", r, True, e2e_ms=(100.0 + n) * factor * (1 + spread * (r - 1)))
        for r in range(rounds)
        for n in range(requests)
    ]


def compared(reference: list[speed.Request], candidate: list[speed.Request], *against: str) -> speed.Speed:
    """The comparison at the default rule."""
    return speed.compare(reference, candidate, gate().speed, 0.9, against)


def test_speed_is_a_ratio_per_round() -> None:
    """Half the latency in every round is twice as fast, whatever drifts between the rounds."""
    found = compared(load("a", 1.0, spread=0.3), load("b", 0.5, spread=0.3))
    assert found.ratio == pytest.approx(2.0)
    assert found.interval is not None and found.evidence
    assert (2.0, 2.0) == pytest.approx((found.interval.lower, found.interval.upper))


def test_speed_interval_is_t_over_rounds() -> None:
    """Log-ratios ln 2 and ln 4: mean ln 2.83, and t(1 df, 95%) = 6.314 times half their distance."""
    two, four = load("b", 0.5, rounds=1), [replace(r, round=1) for r in load("b", 0.25, rounds=1)]
    found = compared(load("a", 1.0, rounds=2), [*two, *four])
    assert found.ratio == pytest.approx(math.sqrt(8))
    assert found.interval is not None
    assert found.interval.upper == pytest.approx(math.sqrt(8) * math.exp(6.3138 * math.log(2) / 2), rel=1e-3)


@pytest.mark.parametrize(
    ("candidate", "against", "told"),
    [
        (load("b", 0.5, rounds=1), (), "1 round measured on both sides, at least 2 are needed"),
        ([replace(r, ok=r.round != 1) for r in load("b", 0.5)], (), "20 of 120 requests failed"),
        (load("b", 0.5), ("FP8 weights run in fp32",), "FP8 weights run in fp32"),
        (load("b", 0.5, requests=4), (), "4 requests a round cannot bound p50, which takes 5"),
        ([], (), "no requests of the candidate under profile 'closed_1'"),
    ],
)
def test_weak_speed_is_no_evidence(candidate: list[speed.Request], against: tuple[str, ...], told: str) -> None:
    """One round, failures, emulation, few requests or none: a figure perhaps, but no evidence."""
    found = compared(load("a", 1.0), candidate, *against)
    assert not found.evidence
    assert told in found.note
