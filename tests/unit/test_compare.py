"""Comparisons of engines: differences by hand and by published examples, what is refused and why, what a name means."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import ttest_ind

from pipelines.decide import contrast, contrastload, contrastread
from pipelines.decide.changes import changes, flat
from pipelines.decide.compared import Compared, Comparison, Delta, Refusal
from pipelines.decide.contrast import Asked
from pipelines.decide.gate import EvalCard
from pipelines.decide.interval import Interval
from pipelines.decide.judge import Item
from pipelines.errors import ConfigError, EvidenceError
from pipelines.flow.store import manifest
from pipelines.release.comparison import compare
from pipelines.release.subjects import Known, Subject, Whole
from tests import shop
from tests.shop import Engine, Shop

ASKED = Asked(("old", "new"), 0.95, anyway=False)
ANYWAY = replace(ASKED, anyway=True)
BINARY = EvalCard.model_validate(shop.CARDS["intent"])
# 21 items of which one is gained and seven are lost: Tango's interval of it is published (airway hyper-responsiveness).
OLD = [True] * 8 + [False] * 13
NEW = [True] + [False] * 7 + [True] + [False] * 12
SLOW = [[100.0, 80.0], [100.0, 100.0]]
FAST = [[50.0, 10.0], [50.0, 50.0]]
DAWN = "2026-11-30T06:00:00+00:00"


def only(found: list[Delta | Refusal], part: str = "all") -> Delta:
    (one,) = [d for d in found if isinstance(d, Delta) and d.part == part]
    return one


def items(right: list[bool]) -> list[Item]:
    return [replace(i, slice="all") for i in shop.intent(right)]


def scores(ours: list[Item], theirs: list[Item], asked: Asked = ASKED, *why: str) -> list[Delta | Refusal]:
    return contrast.scores(ours, theirs, "intent", BINARY, asked, why, ())


def test_a_binary_difference_has_the_published_interval() -> None:
    """One gain and seven losses of 21: -6/21, and Tango's interval -0.5172 to -0.0260."""
    found = only(scores(items(OLD), items(NEW)))
    assert found.interval is not None
    assert (-6 / 21, 1, 7, 21) == (pytest.approx(found.difference), found.gains, found.losses, found.count)
    assert (-0.5172, -0.0260) == (round(found.interval.lower, 4), round(found.interval.upper, 4))
    assert "worse" == found.reading


def test_the_other_way_round_it_is_mirrored() -> None:
    """What one loses the other gains."""
    found = only(scores(items(NEW), items(OLD)))
    assert found.interval is not None
    assert (0.0260, 0.5172, "better") == (
        round(found.interval.lower, 4), round(found.interval.upper, 4), found.reading
    )  # fmt: skip


def test_where_lower_is_better_a_positive_difference_is_worse() -> None:
    """Losses per word: the difference keeps its sign, what it means turns round."""
    card = EvalCard(family="perplexity", metric="nll", higher_is_better=False)
    blank = Item("", 0.0, "", "t@1", metric="nll", higher_is_better=False)
    ours = [replace(blank, item_id=str(n), score=3.0, prompt_hash=str(n)) for n in range(40)]
    theirs = [replace(i, score=3.5 + n % 2 / 10) for n, i in enumerate(ours)]
    found = only(contrast.scores(ours, theirs, "text", card, ASKED, (), ()))
    assert found.interval is not None
    assert (pytest.approx(0.55), "worse") == (found.difference, found.reading)
    assert 0 < found.interval.lower < 0.55 < found.interval.upper


def test_slices_add_up_to_the_whole() -> None:
    """A difference over everything is that of its slices, by their sizes."""
    found = scores(shop.intent(OLD), shop.intent(NEW))
    parts = {d.part: d for d in found if isinstance(d, Delta)}
    assert {"all", "even", "odd"} == set(parts)
    total = sum((parts[p].difference or 0.0) * (parts[p].count or 0) for p in ("even", "odd"))
    assert pytest.approx(total / 21) == parts["all"].difference


def test_clusters_widen_an_interval() -> None:
    """Items of one passage are not so many independent ones."""
    ours, theirs = shop.graded([0.5] * 60), shop.graded([0.4 if n // 3 % 2 else 0.5 for n in range(60)])
    card = EvalCard.model_validate(shop.CARDS["qa"])
    grouped = only(contrast.scores(ours, theirs, "qa", card, ASKED, (), ()))
    alone = [[replace(i, cluster=None) for i in side] for side in (ours, theirs)]
    single = only(contrast.scores(*alone, "qa", card, ASKED, (), ()))
    assert grouped.interval is not None and single.interval is not None
    assert (20, None, pytest.approx(-0.05)) == (grouped.clusters, single.clusters, grouped.difference)
    assert grouped.interval.lower < single.interval.lower


def test_other_items_are_refused_and_those_in_common_compared_on_request() -> None:
    """Six items more on one side: refused by name; against the reason the common ones are paired, and marked."""
    ours, theirs = items(OLD), [*items(NEW), *(replace(i, item_id=f"x{n}") for n, i in enumerate(items(OLD)[:6]))]
    (refused,) = scores(ours, theirs)
    assert isinstance(refused, Refusal)
    assert refused.reasons[0].startswith("other items: item x0: missing from old (21 items against 27)")
    found = only(scores(ours, theirs, ANYWAY))
    assert (21, pytest.approx(-6 / 21), refused.reasons) == (found.count, found.difference, found.marks)


def test_with_no_item_in_common_there_are_two_means_and_no_interval() -> None:
    """Another prompt is another item, whatever its number."""
    theirs = [replace(i, prompt_hash=f"{i.prompt_hash} again") for i in items(NEW)]
    (refused,) = scores(items(OLD), theirs)
    assert isinstance(refused, Refusal) and "prompt_hash differs" in refused.reasons[0]
    found = only(scores(items(OLD), theirs, ANYWAY))
    assert (pytest.approx(2 / 21 - 8 / 21), None, "") == (found.difference, found.interval, found.reading)
    assert contrast.NOTHING_IN_COMMON == found.note


def test_a_difference_of_one_item_has_no_interval() -> None:
    """Nothing can be told from one observation."""
    found = only(scores(items([True]), items([False])))
    assert (-1.0, None, "") == (found.difference, found.interval, found.reading)


@pytest.mark.parametrize(
    ("low", "high", "higher", "said"),
    [(0.1, 0.2, True, "better"), (0.1, 0.2, False, "worse"), (-0.2, -0.1, True, "worse"), (-0.1, 0.1, True, "no")],
)
def test_what_an_interval_reads(low: float, high: float, higher: bool, said: str) -> None:
    """Better or worse only where the whole interval says so."""
    one = Delta(
        side="b", kind="score", name="s", higher_is_better=higher, difference=0.0,
        interval=Interval(lower=low, upper=high, confidence=0.95),
    )  # fmt: skip
    assert one.reading.startswith(said)


def test_welch_is_the_reference_librarys() -> None:
    """Difference and interval of two samples of rounds are those of scipy's unequal-variance t test."""
    ours, theirs = [4.0, 5.5, 5.0, 6.5], [7.0, 7.25, 9.5]
    reference = ttest_ind(theirs, ours, equal_var=False).confidence_interval(0.95)
    at, bounds = contrastload.welch(ours, theirs, 0.95)
    assert bounds is not None
    assert pytest.approx((reference.low, reference.high)) == bounds
    assert pytest.approx(sum(theirs) / 3 - sum(ours) / 4) == at
    assert None is contrastload.welch([1.0], [2.0, 3.0], 0.95)[1]


# From a store


@pytest.fixture
def made(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def known(made: Shop, campaign: str = "demo") -> Known:
    return Known(made.store, campaign, f"sqlite:///{made.root}/none.db", "", made.root / "ledger.jsonl")


def run(made: Shop, *names: str, anyway: bool = False) -> Compared:
    return compare(known(made), names, anyway=anyway)[0]


def one(made: Shop, *names: str, anyway: bool = False) -> Comparison:
    (found,) = run(made, *names, anyway=anyway).comparisons
    return found


def find(found: Comparison, kind: str, part: str) -> Delta:
    (delta,) = [d for d in found.deltas if d.kind == kind and d.part == part]
    return delta


def reasons(found: Comparison, kind: str) -> str:
    (refused,) = [r for r in found.refusals if r.kind == kind]
    return "; ".join(refused.reasons)


PAIR = (Engine("old", OLD, times=SLOW), Engine("new", NEW, times=FAST, size_bytes=25_000_000))


def test_a_latency_is_paired_by_round(made: Shop) -> None:
    """Rounds of ratios (1/2, 1/8) and (1/2, 1/2): the mean is 4 ** -0.75, the interval t with one degree of freedom."""
    made.campaign("demo", PAIR)
    found = one(made, "old", "new")
    ratio = find(found, "latency", "TTFT by request")
    half = 12.7062 * math.log(2) / 2
    assert ratio.ratio_interval is not None
    assert (pytest.approx(4**-0.75), 2) == (ratio.ratio, ratio.count)
    expected = (4**-0.75 * math.exp(-half), 4**-0.75 * math.exp(half))
    assert pytest.approx(expected, rel=1e-4) == (ratio.ratio_interval.lower, ratio.ratio_interval.upper)
    assert (95.0, 40.0, -55.0) == (ratio.base, ratio.other, pytest.approx(ratio.difference))
    assert () == found.refusals


def test_rates_follow_the_blocks_and_sizes_are_exact(made: Shop) -> None:
    """Blocks of 180 and 200 ms against 60 and 100: rates 3 and 2 times as high, sqrt 6 together."""
    made.campaign("demo", PAIR)
    found = one(made, "old", "new")
    assert pytest.approx(math.sqrt(6)) == find(found, "throughput", "output tokens/s").ratio
    size = next(d for d in found.deltas if d.kind == "size" and d.name == "engine on disk")
    assert (0.25, -75_000_000, "better", None) == (size.ratio, size.difference, size.reading, size.interval)


def test_another_run_of_the_probe_is_another_moment(made: Shop) -> None:
    """Two campaigns measured in two nights: latency is refused, scores are compared; against it, Welch and a mark."""
    made.campaign("demo", [PAIR[0]])
    made.campaign("later", [PAIR[1]], started=DAWN)
    found = one(made, "old", "later/new")
    assert "measured in other runs of the probe" in reasons(found, "load")
    assert pytest.approx(-6 / 21) == find(found, "score", "all").difference
    marked = find(one(made, "old", "later/new", anyway=True), "latency", "TTFT p50")
    expected = ttest_ind([math.log(10.0), math.log(50.0)], [math.log(80.0), math.log(100.0)], equal_var=False)
    low, high = expected.confidence_interval(0.95)
    assert marked.ratio_interval is not None and marked.marks
    assert pytest.approx((low, high)) == (
        math.log(marked.ratio_interval.lower), math.log(marked.ratio_interval.upper)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"device": {"cpu": "Xeon"}}, "on other devices: cpu AMD EPYC and Xeon"),
        ({"probe": {"threads": 8}}, "under another load: threads 2 and 8"),
        (
            {"probe": {"profiles": [{**shop.PROFILE, "concurrency": 4}]}},
            "under another load: closed_1: concurrency 1 and 4",
        ),
    ],
)
def test_another_device_or_load_is_named(made: Shop, changed: dict[str, dict[str, object]], said: str) -> None:
    """What is unlike is said with both values."""
    made.campaign("demo", [PAIR[0]])
    made.campaign("later", [PAIR[1]], started=DAWN, **changed)  # type: ignore[arg-type]
    assert said in reasons(one(made, "old", "later/new"), "load")


def test_an_emulated_engine_is_no_match_for_a_native_one(made: Shop) -> None:
    """Its times are refused with the reason, though one probe measured both; its scores stand."""
    made.campaign("demo", [PAIR[0], replace(PAIR[1], native=False)])
    found = one(made, "old", "new")
    assert "old is native; new is emulated" == reasons(found, "load")
    assert {"score", "size"} == {d.kind for d in found.deltas}
    marked = find(one(made, "old", "new", anyway=True), "latency", "TTFT p50")
    assert ("old is native; new is emulated",) == marked.marks


def test_two_emulated_engines_are_compared(made: Shop) -> None:
    """Neither is native: the conditions are the same."""
    made.campaign("demo", [replace(one, native=False) for one in PAIR])
    assert () == one(made, "old", "new").refusals


def test_another_server_and_another_variant_at_once_are_refused(made: Shop) -> None:
    """Whose doing it is cannot be told; the same variant on a newer server can be."""
    newer = {"python": "3.11", "onnxruntime-genai": "0.19.0"}
    made.campaign("demo", [PAIR[0], replace(PAIR[1], toolchain=newer)])
    assert "onnxruntime-genai 0.18.0 and 0.19.0" in reasons(one(made, "old", "new"), "load")


def test_another_edition_of_an_eval_set_is_refused(made: Shop) -> None:
    """The prompts are the same, so an answer or the metric is not."""
    made.campaign("demo", [PAIR[0]])
    made.campaign("later", [PAIR[1]], started=DAWN, digest="d2")
    assert "another edition of the eval set (digests intent-d1 and intent-d2)" in reasons(
        one(made, "old", "later/new"), "score"
    )


def test_what_one_side_lacks_is_missing_whoever_asks(made: Shop) -> None:
    """No scores on one side: nothing makes a comparison of it."""
    made.campaign("demo", [PAIR[0], replace(PAIR[1], right=())])
    for anyway in (False, True):
        (refused,) = one(made, "old", "new", anyway=anyway).refusals
        assert ("score", "intent", ("new has none",), True) == (
            refused.kind, refused.name, refused.reasons, refused.missing
        )  # fmt: skip


def test_what_differs_is_listed_and_the_rest_counted(made: Shop) -> None:
    """Old and new values by dotted key; equal ones are a number."""
    made.campaign("demo", [
        replace(PAIR[0], config={"scheme": "W4A16", "options": {"n_grid": 4, "seed": 0}}),
        replace(PAIR[1], config={"scheme": "W4A16", "options": {"n_grid": 20, "seed": 0}}),
    ])  # fmt: skip
    found = one(made, "old", "new")
    listed = {(c.section, c.key): c.values for c in found.changes}
    assert {("config", "variant.options.n_grid"): ("4", "20")} == listed
    assert found.same["config"] == 4  # scheme, seed, and which stages made variant and engine


def test_texts_of_nested_data() -> None:
    """Lists of named things are keyed by their names, so that an insertion moves nothing."""
    told = flat({"profiles": [{"name": "closed", "rate": None}], "on": True, "ids": [1, 2]})
    assert {"profiles.closed.rate": "null", "on": "true", "ids": "[1, 2]"} == told
    assert ([], 1) == changes("x", [{"a": "1"}, {"a": "1"}])


def test_readings_of_the_same_tokens_are_compared_directly() -> None:
    """Two windows of one token each, probabilities 1/2 and 1/4 against 1/4 and 1/4: the perplexity grows by sqrt 2."""
    import numpy as np

    from pipelines.divergence.reading import ABSENT, RANKED, Reading, Window

    windows = (Window("held_out", (5, 6), 1), Window("held_out", (5, 7), 1))

    def read(*shares: float) -> Reading:
        ids = np.full((1, RANKED), ABSENT, np.int32)
        values = np.zeros((1, RANKED))
        logs = tuple(np.array([math.log(share)]) for share in shares)
        return Reading(windows, logs, (ids,) * 2, (values,) * 2)

    found = contrastread.predictions(read(0.5, 0.25), read(0.25, 0.25), ASKED)
    perplexity = next(d for d in found if isinstance(d, Delta) and d.kind == "perplexity")
    assert (pytest.approx(math.sqrt(2)), pytest.approx(math.sqrt(8)), pytest.approx(4.0)) == (
        perplexity.ratio, perplexity.base, perplexity.other
    )  # fmt: skip
    kl = next(d for d in found if isinstance(d, Delta) and d.kind == "divergence")
    # of the first token: 1/2 ln 2 + 1/2 ln (1/2 : 3/4); of the second nothing
    assert pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2) == kl.other


# Names


def test_each_way_to_name_an_engine(made: Shop) -> None:
    """Label, campaign/label, campaign@key/label and the beginning of the engine's key are one engine."""
    key = made.campaign("demo", PAIR)
    engine = known(made).resolve(["new"])[0]
    assert isinstance(engine, Subject)
    for name in ("demo/new", f"demo@{key[:6]}/new", engine.engine.key[:6], engine.engine.key):
        (found,) = known(made).resolve([name])
        assert isinstance(found, Subject)
        assert (engine.engine.key, name) == (found.engine.key, found.asked)


def test_a_label_means_the_newest_decision(made: Shop) -> None:
    """Decided again, the label stands for the newer one; the older has its key."""
    old = made.campaign("demo", PAIR)
    new = made.campaign("demo", PAIR, started=DAWN)
    newest, older = known(made).resolve(["new", f"demo@{old[:8]}/new"])
    assert isinstance(newest, Subject) and isinstance(older, Subject)
    assert newest.decision and older.decision
    assert (new, old) == (newest.decision.key, older.decision.key)


def test_a_label_with_an_at_sign_is_taken_whole(made: Shop) -> None:
    """`gptq@vllm` is a label, not an alias of a model."""
    made.campaign("demo", [PAIR[0], replace(PAIR[1], label="gptq@vllm")])
    (found,) = known(made).resolve(["gptq@vllm"])
    assert isinstance(found, Subject) and "gptq@vllm" == found.label


def test_an_engine_that_no_decision_knows_has_what_was_measured_of_it(made: Shop) -> None:
    """Its newest scores and probe are found by what they were made from."""
    key = made.campaign("demo", PAIR)
    made.store.prepare()
    engine = manifest(made.store.path("engine", shop.key_of("engine", "new", ""))).key
    made.store.remove("decision", key)
    (found,) = known(made).resolve([engine[:8]])
    assert isinstance(found, Subject)
    assert {"engine", "variant", "latency", "scores/intent"} == set(found.keys)
    other = shop.key_of("engine", "old", "")[:8]
    assert pytest.approx(-6 / 21) == find(one(made, other, engine[:8]), "score", "all").difference


def test_every_unknown_name_is_told_with_the_nearest(made: Shop) -> None:
    """One error, with what was probably meant."""
    made.campaign("demo", PAIR)
    with pytest.raises(ConfigError) as error:
        known(made).resolve(["nwe", "olld", "new"])
    assert 2 == len(error.value.problems)
    assert "did you mean 'new'" in str(error.value)
    assert "did you mean 'old'" in str(error.value)
    with pytest.raises(ConfigError, match=r"nobody has the alias 'champoin' of model 'demo'.*@champion"):
        known(made).resolve(["@champoin"])


def test_a_name_of_two_things_is_told_with_both(made: Shop) -> None:
    """A candidate called like its campaign: which one is meant must be said."""
    made.campaign("demo", [PAIR[0], replace(PAIR[1], label="demo")])
    with pytest.raises(ConfigError, match=r"may be several things: demo@\w{6}/demo, campaign demo"):
        known(made).resolve(["demo"])


def test_what_failed_cannot_be_compared(made: Shop) -> None:
    """A candidate without an engine is told with its failure."""
    made.campaign("demo", [PAIR[0], Engine("broken", failure="loads as noise")])
    with pytest.raises(EvidenceError, match="broken: there is no engine to compare: loads as noise"):
        run(made, "old", "broken")


def test_one_engine_named_twice_is_no_comparison(made: Shop) -> None:
    """By whichever names."""
    made.campaign("demo", PAIR)
    with pytest.raises(ConfigError, match="nothing to compare"):
        run(made, "new", "demo/new")


def test_campaigns_are_compared_label_by_label(made: Shop) -> None:
    """Each label that both have is compared; the others are named, and so is what failed."""
    made.campaign("demo", [*PAIR, Engine("gone", NEW, times=FAST)])
    made.campaign("later", [*PAIR, Engine("fresh", NEW, times=FAST)], started=DAWN, night="second")
    assert isinstance(known(made).resolve(["later"])[0], Whole)
    found = run(made, "demo", "later")
    assert ["old", "new"] == [c.base.candidate for c in found.comparisons]
    assert {"gone": "not in later", "fresh": "not in demo"} == found.unmatched
    assert [0.0, 0.0] == [find(c, "score", "all").difference for c in found.comparisons]


def test_a_campaign_and_an_engine_are_no_pair(made: Shop) -> None:
    """What to name instead is said."""
    made.campaign("demo", PAIR)
    with pytest.raises(ConfigError, match=r"name a candidate of it .for example demo/old"):
        run(made, "demo", "new")


def test_mlflows_own_comparison_is_found_without_mlflow(made: Shop) -> None:
    """The record in the store knows the runs; the link has them in order."""
    key = made.campaign("demo", PAIR)
    assert "" == one(made, "old", "new").mlflow
    made.recorded(key, {"old": "aaa", "new": "bbb"}, "sqlite:///x.db")
    assert (
        "#/compare-runs?runs=%5B%22bbb%22%2C%20%22aaa%22%5D&experiments=%5B%221%22%5D" == one(made, "new", "old").mlflow
    )


def aliased(made: Shop, alias: str, **tags: str) -> None:
    """A registry as MLflow keeps it in sqlite, as far as an alias is read."""
    with closing(sqlite3.connect(made.root / "none.db")) as db, db:
        db.execute("CREATE TABLE registered_model_aliases (name TEXT, alias TEXT, version INTEGER)")
        db.execute("CREATE TABLE model_version_tags (name TEXT, version INTEGER, key TEXT, value TEXT)")
        db.execute("INSERT INTO registered_model_aliases VALUES ('demo', ?, 3)", (alias,))
        db.executemany("INSERT INTO model_version_tags VALUES ('demo', 3, ?, ?)", tags.items())


def test_an_alias_stands_for_the_engine_by_the_decision_that_registered_it(made: Shop) -> None:
    """`@champion` of this campaign's model, and `demo@champion` from anywhere."""
    key = made.campaign("demo", PAIR)
    made.campaign("demo", PAIR, started=DAWN)
    engine = shop.key_of("engine", "new", "")
    aliased(made, "champion", engine_key=engine[:16], decision_key=key[:16], candidate="new")
    for name in ("@champion", "demo@champion"):
        (found,) = known(made).resolve([name])
        assert isinstance(found, Subject) and found.decision
        assert (key, "new", engine) == (found.decision.key, found.label, found.engine.key)
    with pytest.raises(ConfigError, match="nobody has the alias 'previous'"):
        known(made).resolve(["@previous"])


def test_an_alias_of_an_engine_that_is_gone_says_so(made: Shop) -> None:
    """The registry outlives the store."""
    made.campaign("demo", PAIR)
    aliased(made, "champion", engine_key="0" * 16)
    with pytest.raises(EvidenceError, match="version 3 of demo stands for engine 0000000000000000, which is not in"):
        known(made).resolve(["@champion"])


def test_bare_labels_are_about_the_campaign_decided_last_where_none_is_named(made: Shop) -> None:
    """A campaign of which nothing was decided cannot be meant."""
    made.campaign("demo", PAIR)
    made.campaign("later", PAIR, started=DAWN)
    for campaign, meant in (("demo", "demo"), ("later", "later"), ("quantgate", "later")):
        (found,) = known(made, campaign).resolve(["new"])
        assert isinstance(found, Subject) and found.made
        assert meant == found.made.campaign
