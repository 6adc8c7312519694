"""Promote, hold or reject; the decision stage from files to documents, against a golden campaign worked out by hand."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from pipelines.config import parse
from pipelines.decide import document, evidence, stage
from pipelines.decide.decision import decide
from pipelines.decide.gate import GateConfig
from pipelines.decide.interval import Interval
from pipelines.decide.measured import Block, Request
from pipelines.decide.model import Candidate, Decision, Verdict
from pipelines.decide.probed import Latency, Speed, Throughput
from pipelines.errors import ConfigError, EvidenceError
from pipelines.flow.store import Manifest

GOLDEN = Path(__file__).parent.parent / "golden" / "decision"
AXES = {"speed": {"profile": "closed_1"}, "latency": {"profile": "closed_1"}}


def gate(**changes: object) -> GateConfig:
    """A gate with every default but the given ones."""
    return parse(GateConfig, AXES | changes)


def verdict(outcome: str = "pass", **changes: object) -> Verdict:
    """One comparison with that outcome."""
    given: dict[str, object] = {
        "eval_set": "qa", "slice": "all", "metric": "acc", "higher_is_better": True, "binary": True, "items": 500,
        "clusters": None, "reference_score": 0.8, "score": 0.8, "loss": 0.0, "margin": 0.02, "gains": 2, "losses": 2,
        "interval": Interval(lower=-0.01, upper=0.012, confidence=0.9), "p_value": 0.001, "method": "by hand",
        "verdict": outcome, "more_items": None, "note": "",
    }  # fmt: skip
    return Verdict.model_validate(given | changes)


def speed(ratio: float, lower: float, upper: float, evidence: bool = True) -> Speed:
    """A speed with its interval."""
    interval = Interval(lower=lower, upper=upper, confidence=0.9)
    return Speed(
        metric="e2e_ms p50", profile="closed_1", ratio=ratio, interval=interval, evidence=evidence, note="told"
    )


def candidate(label: str, **changes: object) -> Candidate:
    """A native candidate that passes and is twice as fast, but for the given changes."""
    given: dict[str, object] = {
        "label": label, "variant": label, "engine": "ort", "reference": False, "status": "ok", "failure": None,
        "quantizer": "gptq", "scheme": "W4A16_G64", "library": "x 1", "target": "ort", "native": True,
        "native_note": "", "keys": {}, "variant_bytes": 1, "engine_bytes": 1, "perplexity": 20.0, "engine_kl": 0.0,
        "scores": {"qa": 0.8}, "mean_score": 0.8, "verdicts": (verdict(),), "latency": (latency(50.0),),
        "throughput": (), "speed": speed(2.0, 1.8, 2.2), "pareto": False, "outcome": None, "reasons": (),
    }  # fmt: skip
    return Candidate.model_validate(given | changes)


def latency(value: float | None) -> Latency:
    """The figure of the gate's axis."""
    return Latency(profile="closed_1", metric="e2e_ms", percentile=99.0, value=value, interval=None, requests=120)


REFERENCE = candidate(
    "base", reference=True, verdicts=(), speed=None, latency=(latency(100.0),), mean_score=0.82, quantizer="none"
)


LICENSED = {"licence": "Apache-2.0", "licence source": "card"}
REMOTE = {"native": False, "native_note": "it is served from elsewhere", "served_on": "not stated"}


def decided(*candidates: Candidate, rules: GateConfig | None = None) -> Decision:
    """The decision on these candidates against the reference."""
    return decide("test", [REFERENCE, *candidates], "base", rules or gate(), {}, LICENSED)


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({}, "promote", "within the margin on 1 of 1 comparisons, 2.00x as fast"),
        ({"status": "failed", "failure": "loads as noise"}, "reject", "could not be made: loads as noise"),
        ({"unjudged": "it has no server"}, "hold", "built, not judged: it has no server"),
        ({"verdicts": (verdict("fail"),)}, "reject", "qa: loses more than 0.02"),
        ({"verdicts": (verdict(), verdict("veto", slice="a", note="loops"))}, "reject", "qa/a: vetoed (loops)"),
        ({"verdicts": (verdict("invalid", note="item 3 differs"),)}, "hold", "qa: no verdict, item 3 differs"),
        ({"verdicts": (verdict("inconclusive", more_items=640),)}, "hold", "qa: inconclusive at margin 0.02"),
        ({"verdicts": (verdict("inconclusive"), verdict("fail"))}, "reject", "qa: loses more than 0.02"),
        ({"verdicts": (verdict(), verdict("fail", slice="a", gates=False))}, "promote", "1 of 1 comparisons"),
        ({"verdicts": ()}, "hold", "no eval set was scored"),
        ({"native": False, "native_note": "FP8 runs in fp32"}, "hold", "accuracy passes, latency is not evidence: FP8"),
        ({"native": False, "verdicts": (verdict("fail"),)}, "reject", "qa: loses more than 0.02"),
        (REMOTE, "hold", "accuracy passes, latency is not evidence: it is served from elsewhere"),
        ({"simulated": True}, "hold", "v was made by a simulated container, which is evidence of nothing"),
        ({"simulated": True, "verdicts": (verdict("fail"),)}, "hold", "v was made by a simulated container"),
        ({"speed": None}, "hold", "no speed evidence: no latency was measured"),
        ({"speed": speed(2.0, 1.8, 2.2, evidence=False)}, "hold", "no speed evidence: told"),
        ({"speed": speed(0.9, 0.8, 1.0)}, "reject", "brings no speed (e2e_ms p50 at closed_1: 0.90x, 0.80 to 1.00"),
        ({"speed": speed(1.1, 0.9, 1.3)}, "hold", "speed is undecided"),
        ({"verdicts": (verdict(p_value=0.06),)}, "hold", "passes alone, but not among all variants tried"),
    ],
)  # fmt: skip
def test_outcome_of_one_candidate(changes: dict[str, object], outcome: str, reason: str) -> None:
    """What each kind of evidence, or the lack of it, leads to."""
    found = decided(candidate("v", **changes))
    assert (outcome, outcome) == (found.outcome, found.candidates[1].outcome)
    assert reason in found.candidates[1].reasons[0]
    assert ("v" if outcome == "promote" else None) == found.winner
    assert found.headline.startswith(outcome.upper())


def test_speed_may_be_waived_but_not_for_an_emulated_format() -> None:
    """Without `require_speed` accuracy is enough, unless the engine does not run the format."""
    rules = gate(require_speed=False)
    assert "promote" == decided(candidate("v", speed=None), rules=rules).outcome
    assert "hold" == decided(candidate("v", speed=None, native=False), rules=rules).outcome


def test_perplexity_guard() -> None:
    """A perplexity ratio above the guard rejects; a missing one holds."""
    rules = gate(max_perplexity_ratio=1.2)
    assert "promote" == decided(candidate("v", perplexity=23.9), rules=rules).outcome
    rejected = decided(candidate("v", perplexity=25.0), rules=rules).candidates[1]
    assert ("reject", ("veto, perplexity is 1.250 times the reference's, allowed 1.2",)) == (
        rejected.outcome,
        rejected.reasons,
    )
    assert "hold" == decided(candidate("v", perplexity=None), rules=rules).outcome


def test_without_a_reference_everything_holds() -> None:
    """When the reference itself failed there is nothing to promote against."""
    broken = REFERENCE.model_copy(update={"status": "failed", "failure": "out of memory"})
    found = decide("test", [broken, candidate("v")], "base", gate(), {}, LICENSED)
    assert ("hold", None, "hold") == (found.outcome, found.winner, found.candidates[1].outcome)
    assert "the reference itself failed: out of memory" in found.candidates[0].reasons


def test_what_is_built_and_not_judged_neither_saves_a_campaign_nor_stops_it() -> None:
    """Candidates with evidence decide; one without waits beside them, and stands last in the headline."""
    waiting = candidate("waiting", unjudged="it has no server", verdicts=(), speed=None, mean_score=None)
    bad = candidate("bad", verdicts=(verdict("fail"),))
    lost = decided(waiting, bad)
    assert ("reject", "hold") == (lost.outcome, lost.candidates[1].outcome)
    assert lost.headline.startswith("REJECT: none of 2 variants may be promoted; bad:")
    assert "promote" == decided(waiting, candidate("good")).outcome
    alone = decided(waiting)
    assert ("hold", True) == (alone.outcome, "its scores and latency on the device it is for" in alone.would_change[0])


def test_a_reference_that_was_not_judged_is_none() -> None:
    """Nothing can be compared with an engine that never answered."""
    built = REFERENCE.model_copy(update={"unjudged": "it has no server"})
    found = decide("test", [built, candidate("good")], "base", gate(), {}, LICENSED)
    assert ("hold", "there is no reference to compare with") == (found.outcome, found.candidates[1].reasons[0])
    assert ("the reference itself was built, not judged: it has no server",) == found.candidates[0].reasons


def test_many_variants_do_not_raise_the_risk() -> None:
    """p = 0.02 passes alone; among four variants Holm asks for 0.0125 of the best one."""
    lucky = candidate("lucky", verdicts=(verdict(p_value=0.02),))
    others = [candidate(f"v{n}", verdicts=(verdict("inconclusive", p_value=0.3),)) for n in range(3)]
    assert "promote" == decided(lucky).outcome
    assert "hold" == decided(lucky, *others).outcome
    assert "lucky" == decided(lucky, *others, rules=gate(several_variants="none")).winner


def throughput(rate: float, peak: int = 2**30) -> Throughput:
    """What an engine delivers."""
    return Throughput(
        profile="closed_1", requests=9, failed=0, requests_per_s=1.0, output_tokens_per_s=rate, peak_rss_bytes=peak
    )


RIVALS = {
    "quick": {"latency": (latency(40.0),), "throughput": (throughput(100.0),)},
    "cheap": {"latency": (latency(60.0),), "throughput": (throughput(300.0),)},
    "lean": {"latency": (latency(70.0),), "throughput": (throughput(100.0, 2**28),), "engine_bytes": 1},
}
BASE = {"throughput": (throughput(100.0),), "engine_bytes": 4}


def rivals(**choice: object) -> Decision:
    """Three that pass, each ahead in something, against the reference."""
    found = [candidate(name, **{"engine_bytes": 2} | changes) for name, changes in RIVALS.items()]
    rules = gate(choice=choice)
    return decide("test", [REFERENCE.model_copy(update=BASE), *found], "base", rules, {}, LICENSED)


@pytest.mark.parametrize(("role", "winner"), [("product", "quick"), ("finance", "cheap"), ("ops", "lean")])
def test_a_role_chooses_by_what_it_weighs(role: str, winner: str) -> None:
    """Product takes the fastest, finance the cheapest, operations the one with the least memory."""
    assert winner == rivals(role=role).winner


def test_a_choice_by_hand() -> None:
    """2.5 times as fast, as many tokens, half the size: 0.2 ln(0.788/0.82) + 0.5 ln 2.5 + 0.1 ln 2."""
    choice = rivals().choice
    assert choice is not None
    first = choice.standings[0]
    expected = 0.2 * math.log(0.788 / 0.82) + 0.5 * math.log(2.5) + 0.1 * math.log(2)
    assert ("quick", pytest.approx(expected)) == (first.label, first.score)
    assert {"latency": 2.5, "cost": 1.0, "memory": 1.0, "size": 2.0} == pytest.approx(
        {d: v for d, v in first.ratios.items() if d != "quality"}
    )
    assert 1.0 == pytest.approx(sum(s.first_share for s in choice.standings))
    assert all(0.05 < s.first_share < 0.9 for s in choice.standings)


def test_the_only_one_stays_first_under_any_weights_and_cost_is_a_price_by_tokens() -> None:
    """At 3.60 an hour and 100 tokens a second, 1,000 tokens cost 0.01."""
    rules = gate(choice={"price_per_device_hour": 3.6})
    made = decided(candidate("v", throughput=(throughput(100.0),)), rules=rules)
    assert made.choice is not None
    assert (1.0, pytest.approx(0.01)) == (
        made.choice.standings[0].first_share,
        made.choice.standings[0].cost_per_1000_tokens,
    )
    assert ("cost", "memory") == made.choice.left_out  # the reference has no throughput to compare with


def test_what_another_beats_in_everything_is_not_ranked() -> None:
    """Slower and nothing better: off the front of those that pass, and said so."""
    made = decided(candidate("fast", latency=(latency(40.0),)), candidate("slow", latency=(latency(60.0),)))
    assert made.choice is not None
    assert ("fast", ("slow",)) == (made.winner, made.choice.off_front)
    assert {"base": True, "fast": True, "slow": False} == {c.label: c.pareto for c in made.candidates}


def test_goodput_may_stand_for_speed() -> None:
    """Twice the requests within the promise outweigh a better p99."""
    promise = {"slo": [{"profile": "closed_1", "max_ms": 500}]}
    rules = gate(choice={"load": "goodput"}, vetoes=promise)
    made = decide(
        "test",
        [REFERENCE.model_copy(update={"goodput": 1.0}), candidate("a", goodput=4.0, latency=(latency(90.0),)),
         candidate("b", goodput=2.0, latency=(latency(40.0),))],
        "base", rules, {}, LICENSED,
    )  # fmt: skip
    assert "a" == made.winner


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"roles": {"mine": {"quality": 0.5, "latency": 0.6}}, "role": "mine"}, "weights sum to 1.1, not to 1"),
        ({"roles": {"mine": {}}, "role": "mine"}, "weights sum to 0, not to 1"),
        ({"role": "prodct"}, "there is no 'prodct' .did you mean 'product'"),
        ({"load": "goodput"}, "goodput needs a promise at closed_1"),
        ({"roles": {"product": {"quality": 1.5, "latency": -0.5}}}, "greater than or equal to 0"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(choice: dict[str, object], told: str) -> None:
    """Weights that do not sum, a role that is not there, goodput without a promise: one clear error each."""
    with pytest.raises(ConfigError, match=told):
        gate(choice=choice)


def test_would_change_names_what_would_decide() -> None:
    """Held candidates say what they wait for; a promotion names its closest call."""
    held = decided(candidate("v", verdicts=(verdict("inconclusive", more_items=640),)))
    assert ("v: qa: 640 more items would decide",) == held.would_change
    assert "a loss above 0.02 on qa, its closest call (upper bound +0.0120)" in decided(candidate("v")).would_change[0]
    assert "another variant is needed" in decided(candidate("v", verdicts=(verdict("fail"),))).would_change[0]


# The stage


def artifact(root: Path, kind: str, name: str, facts: Mapping[str, object]) -> Path:
    """An artifact directory with a manifest; its key is its name repeated to 64 characters."""
    path = root / kind / (name * 16)[:16]
    path.mkdir(parents=True)
    record = {
        "kind": kind, "stage": kind, "version": 1, "key": (name * 64)[:64], "config": {}, "inputs": {},
        "toolchain": {"runtime": "1.2"} if kind == "engine" else {}, "device": None, "facts": facts, "files": {},
        "started": "2026-01-02T03:04:05+00:00", "seconds": 1.0, "peak_rss": 1,
    }  # fmt: skip
    (path / "manifest.json").write_text(Manifest.model_validate(record).model_dump_json())
    return path


def table(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as parquet."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)


def intent(lost: int, gained: int) -> list[dict[str, object]]:
    """500 yes/no items, 400 right for the reference: the first `lost` turn wrong, and `gained` wrong ones right."""
    right = [n >= lost if n < 400 else n < 400 + gained for n in range(500)]
    return [row("intent", "acc", n, float(ok), None, True) for n, ok in enumerate(right)]


def passages(drop: float) -> list[dict[str, object]]:
    """480 answers graded 0.5 or 0.75, four to a passage; each twelfth passage drops by `drop` throughout."""
    return [
        row("passages", "f1", n, 0.5 + n % 2 / 4 - (drop if n // 4 % 12 == 0 else 0.0), f"p{n // 4}", False)
        for n in range(480)
    ]


def row(eval_set: str, metric: str, n: int, score: float, cluster: str | None, binary: bool) -> dict[str, object]:
    """One row of items.parquet."""
    return {
        "eval_set": eval_set, "item_id": f"{n:03d}", "slice": "all", "cluster": cluster, "filter": "none",
        "metric": metric, "higher_is_better": True, "binary": binary, "score": score, "prediction": "", "reference": "",
        "prompt_hash": f"{n:08x}", "template_id": "t1", "finish_reason": "stop", "tokens_in": 10, "tokens_out": 1,
        "truncated": False, "empty": False, "looping": False, "not_finite": False, "must_pass": False,
    }  # fmt: skip


def request_row(engine: str, turn: int, n: int, **times: object) -> dict[str, object]:
    """One row of requests.parquet, as the probe writes it, answered with 20 tokens."""
    return {
        "engine": engine, "profile": "closed_1", "mode": "closed", "concurrency": 1, "rate": None, "round": turn,
        "block": 0, "position": 0, "request": n, "prompt_id": str(n), "phase": 0, "bucket": "<=128", "input_tokens": 50,
        "output_tokens": 20, "asked_tokens": 20, "usage_input_tokens": 50, "usage_output_tokens": 20,
        "counted_tokens": None, "cached_tokens": None, "finish_reason": "length", "scheduled_s": float(n),
        "sent_s": float(n), "ok": True, "error": None, **times,
    }  # fmt: skip


def block_row(engine: str, turn: int, factor: float) -> dict[str, object]:
    """One row of blocks.parquet, of a machine without a GPU, five minutes after the block before."""
    absent = ("gpu_memory_idle_bytes", "gpu_memory_loaded_bytes", "gpu_memory_peak_bytes",
              "gpu_utilisation_percent", "gpu_power_w", "energy_j", "gpu_temperature_c", "gpu_clock_mhz",
              "kv_usage_peak", "queue_peak", "prefix_hit_rate")  # fmt: skip
    return dict.fromkeys(absent) | {
        "engine": engine, "profile": "closed_1", "round": turn, "started": f"2026-01-02T03:{5 * turn:02d}:00.000+00:00",
        "wall_s": 4.0 * factor, "requests": 40, "failed": 0, "output_tokens_per_s": 200.0 / factor,
        "peak_rss_bytes": 3 * 10**8, "threads": 2, "load_average": 0.5 + turn, "foreign_cpu_percent": 1.0,
        "cpu_percent": 150.0, "steady": True, "warmup_requests": 8, "ready_s": 1.5, "disturbed": "", "partial": False,
        "idle_rss_bytes": 10**8, "loaded_rss_bytes": 2 * 10**8,
    }  # fmt: skip


# lost, gained, drop on a twelfth of passages, latency as a share of the reference's, native
CAMPAIGN = {
    "a": ("baseline", 0, 0, 0.0, 1.0, True),
    "b": ("gptq", 1, 1, 0.0, 0.5, True),
    "c": ("awq", 12, 8, 0.0, 0.5, True),
    "d": ("rtn", 40, 10, 0.25, 0.5, True),
    "e": ("fp8", 0, 0, 0.0, 1.5, False),
}


def campaign(root: Path) -> tuple[stage.DecisionConfig, dict[str, list[Path]], Path]:
    """Artifacts of five variants in an engine each, one more that failed, and the config that names them."""
    inputs: dict[str, list[Path]] = {"scores": [], "engines": [], "variants": []}
    candidates, requests, blocks = [], [], []
    for letter, (label, lost, gained, drop, factor, native) in CAMPAIGN.items():
        facts = {"quantizer": label, "scheme": "W4", "library": "lib", "library_version": "1.0", "size_bytes": 10**8}
        inputs["variants"].append(artifact(root, "variant", letter, facts))
        note = "" if native else "FP8 weights run in fp32"
        engine = {
            "target": "ort",
            "native": native,
            "native_note": note,
            "size_bytes": 2 * 10**8,
            "perplexity": 20.0,
            "kl_mean": 1e-4,
        }
        inputs["engines"].append(artifact(root, "engine", letter, engine))
        keys = []
        for number, (name, rows) in enumerate({"intent": intent(lost, gained), "passages": passages(drop)}.items()):
            path = artifact(root, "scores", f"{letter}{number}", {"eval_set": name})
            table(path / "items.parquet", rows)
            inputs["scores"].append(path)
            keys.append(path.name)
        key = (letter * 16)[:16]
        candidates.append(
            {"label": label, "variant": label, "engine": "ort", "variant_key": key, "engine_key": key, "scores": keys}
        )
        for turn in range(3):
            requests += [
                request_row(key, turn, n, ttft_ms=10.0 * factor, tpot_ms=2.0 * factor,
                            e2e_ms=(100.0 + n + 10 * turn) * factor, itl_ms=[2.0 * factor] * 20)
                for n in range(40)
            ]  # fmt: skip
            blocks.append(block_row(key, turn, factor))
    candidates.append({"label": "gptq3", "variant": "gptq3", "engine": "ort", "quantizer": "gptq", "scheme": "W3",
                       "status": "failed", "failure": "perplexity 4812 of the reloaded checkpoint"})  # fmt: skip
    probe = artifact(root, "latency", "f", {"device": "2 cores", "rounds": 3, "profiles": "closed_1"})
    table(probe / "requests.parquet", requests)
    table(probe / "blocks.parquet", blocks)
    config = {
        "campaign": "golden", "reference": "baseline", "candidates": candidates, "gate": AXES,
        "eval_sets": {"intent": {"family": "standard", "metric": "acc", "binary": True},
                      "passages": {"family": "standard", "metric": "f1"}},
        "base": {"model": "a small model", "licence": "Apache-2.0"},
    }  # fmt: skip
    return parse(stage.DecisionConfig, config), inputs, probe


def rounded(value: object) -> object:
    """The same data with floats to six digits, so that a last bit of arithmetic does not matter."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def run(root: Path) -> tuple[dict[str, object], Path]:
    """Run the stage on the campaign; give facts and the output directory."""
    config, inputs, probe = campaign(root)
    out = root / "out"
    out.mkdir()
    facts = stage.run(
        config, out, scores=inputs["scores"], latency=probe, engines=inputs["engines"], variants=inputs["variants"]
    )
    return dict(facts), out


def test_golden_campaign(tmp_path: Path) -> None:
    """decision.json and decision.md are the golden ones (QUANTGATE_REWRITE_GOLDEN=1 rewrites them)."""
    _, out = run(tmp_path)
    if os.environ.get("QUANTGATE_REWRITE_GOLDEN"):
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for name in ("decision.json", "decision.md"):
            (GOLDEN / name).write_text((out / name).read_text("utf-8").split("## Formulas")[0], "utf-8")
    expected, actual = (json.loads((where / "decision.json").read_text("utf-8")) for where in (GOLDEN, out))
    assert rounded(expected) == rounded(actual)
    told, tells = ((where / "decision.md").read_text("utf-8").split("## Formulas")[0] for where in (GOLDEN, out))
    assert told == tells


def test_golden_figures_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    """Counts, losses, speed and outcomes of the campaign follow from how it was made."""
    facts, out = run(tmp_path)
    decision = Decision.model_validate_json((out / "decision.json").read_bytes())
    by = {c.label: c for c in decision.candidates}
    assert ("promote", "gptq") == (facts["outcome"], facts["winner"])
    assert {"baseline": None, "gptq": "promote", "awq": "hold", "rtn": "reject", "fp8": "hold", "gptq3": "reject"} == {
        label: c.outcome for label, c in by.items()
    }
    awq, rtn = by["awq"].verdicts[0], by["rtn"].verdicts
    assert (500, 12, 8, 0.008, "inconclusive") == (
        awq.items,
        awq.losses,
        awq.gains,
        pytest.approx(awq.loss),
        awq.verdict,
    )
    assert (
        awq.more_items is not None and f"awq: intent: {awq.more_items} more items would decide" in decision.would_change
    )
    assert (0.06, "fail") == (pytest.approx(rtn[0].loss), rtn[0].verdict)
    assert (120, 0.25 / 12) == (rtn[1].clusters, pytest.approx(rtn[1].loss))
    assert by["baseline"].mean_score == pytest.approx((0.8 + 0.625) / 2)
    speed = by["gptq"].speed
    assert speed is not None and speed.evidence and speed.ratio == pytest.approx(2.0)
    assert by["fp8"].speed is not None and not by["fp8"].speed.evidence
    assert {"baseline", "gptq"} == {c.label for c in decision.candidates if c.pareto}  # the reference loses nothing
    p99 = next(f for f in by["baseline"].latency if f.metric == "e2e_ms" and f.percentile == 99)
    assert (158.0, None, 120) == (p99.value, p99.interval, p99.requests)
    assert "0.5 to 2.5" == decision.conditions["load average"]


def test_first_ten_lines_say_what_to_do_and_why(tmp_path: Path) -> None:
    """Outcome, command, reason, closest call and the limit that matters most stand before anything else."""
    _, out = run(tmp_path)
    top = (out / "decision.md").read_text("utf-8").splitlines()[:10]
    assert "# PROMOTE gptq: within the margin on 2 of 2 comparisons, 2.00x as fast as the reference" == top[0]
    told = "\n".join(top)
    for said in (
        "**Do**: promote `gptq`: `quantgate promote campaign=golden`",
        "**Why**: within the margin on 2 of 2",
        "**Would change it**: gptq: a loss above 0.02 on passages, its closest call",
        "**Beware**: A pass bounds the loss",
    ):
        assert said in told


def test_the_document_has_three_parts_and_says_what_it_lacks(tmp_path: Path) -> None:
    """Conditions, figures, conclusion, in that order; the limits name emulation, the missing champion and the p99."""
    _, out = run(tmp_path)
    text = (out / "decision.md").read_text("utf-8")
    parts = [text.index(f"## {n}") for n in ("1. Conditions", "2. Figures", "3. Conclusion")]
    assert parts == sorted(parts)
    limits = text.split("### What this does not show")[1].split("## Evidence")[0]
    for said in ("fp8 is that of an emulated format", "champion: nobody is champion", "no interval with 120 requests"):
        assert said in limits
    for said in ("| gptq | intent | 399 | 1 | 1 | 99 |", "stays first under 100% of weights drawn at random"):
        assert said in text


def test_two_items_swapped_are_invalid(tmp_path: Path) -> None:
    """Two prompts exchanged between runs cannot be compared, and the decision says which item."""
    config, inputs, probe = campaign(tmp_path)
    rows = intent(1, 1)
    rows[7]["prompt_hash"], rows[9]["prompt_hash"] = rows[9]["prompt_hash"], rows[7]["prompt_hash"]
    table(tmp_path / "scores" / ("b0" * 8) / "items.parquet", rows)
    out = tmp_path / "out"
    out.mkdir()
    stage.run(
        config, out, scores=inputs["scores"], latency=probe, engines=inputs["engines"], variants=inputs["variants"]
    )
    decision = Decision.model_validate_json((out / "decision.json").read_bytes())
    assert ("invalid", "hold") == (decision.candidates[1].verdicts[0].verdict, decision.candidates[1].outcome)
    assert "item 007: prompt_hash differs" in decision.candidates[1].reasons[0]


def test_a_veto_on_answers_reaches_verdict_outcome_and_document(tmp_path: Path) -> None:
    """An item that must stay right turned wrong for the winner: its verdict, outcome, reason and document say VETO."""
    config, inputs, probe = campaign(tmp_path)
    for letter, lost in (("a", 0), ("b", 1)):
        rows = intent(lost, lost)
        rows[0]["must_pass"] = True
        table(tmp_path / "scores" / (f"{letter}0" * 8) / "items.parquet", rows)
    out = tmp_path / "out"
    out.mkdir()
    stage.run(
        config, out, scores=inputs["scores"], latency=probe, engines=inputs["engines"], variants=inputs["variants"]
    )
    decision = Decision.model_validate_json((out / "decision.json").read_bytes())
    gptq = decision.candidates[1]
    assert ("veto", "reject", ["must_pass"]) == (gptq.verdicts[0].verdict, gptq.outcome, [v.kind for v in gptq.vetoes])
    assert "veto, intent: 1 items that must not turn wrong did (000)" == gptq.reasons[0]
    assert "| VETO |" in (out / "decision.md").read_text("utf-8")


def with_champion(root: Path, lost: int, **changes: object) -> Decision:
    """The campaign's decision where a champion other than its reference lost so many of 500 items itself."""
    config, inputs, probe = campaign(root)
    keys = []
    for number, (name, rows) in enumerate({"intent": intent(lost, 0), "passages": passages(0.0)}.items()):
        path = artifact(root, "scores", f"9{number}", {"eval_set": name})
        table(path / "items.parquet", rows)
        inputs["scores"].append(path)
        keys.append(path.name)
    given = {"version": "7", "engine_key": "9" * 64, "scores": keys} | changes
    config = parse(stage.DecisionConfig, config.model_dump() | {"champion": given})
    out = root / "out"
    out.mkdir()
    stage.run(
        config, out, scores=inputs["scores"], latency=probe, engines=inputs["engines"], variants=inputs["variants"]
    )
    return Decision.model_validate_json((out / "decision.json").read_bytes())


def test_candidates_are_compared_with_the_champion_too(tmp_path: Path) -> None:
    """Against a champion that is 40 items behind the base, gptq passes there as well, with its own rows."""
    made = with_champion(tmp_path, 40)
    gptq = made.candidates[1]
    found = [(v.eval_set, v.against, v.verdict) for v in gptq.verdicts]
    assert [("intent", "champion", "pass"), ("passages", "champion", "pass")] == found[2:]
    assert ("promote", "within the margin on 4 of 4 comparisons, 2.00x as fast as the reference") == (
        gptq.outcome, gptq.reasons[0]
    )  # fmt: skip
    assert "version 7, engine 9999999999999999, compared with on the same items" == made.conditions["champion"]


def test_a_step_back_from_the_champion_is_not_promoted(tmp_path: Path) -> None:
    """A variant within the margin of the base but behind a better champion is held or rejected, naming the champion."""
    config, inputs, probe = campaign(tmp_path)
    better = [row("intent", "acc", n, float(n < 440), None, True) for n in range(500)]
    path = artifact(tmp_path, "scores", "90", {"eval_set": "intent"})
    table(path / "items.parquet", better)
    other = artifact(tmp_path, "scores", "91", {"eval_set": "passages"})
    table(other / "items.parquet", passages(0.0))
    inputs["scores"] += [path, other]
    given = {"version": "7", "engine_key": "9" * 64, "scores": [path.name, other.name]}
    for how, outcome in (("gate", "reject"), ("report", "promote")):
        changed = parse(
            stage.DecisionConfig, config.model_dump() | {"champion": given, "gate": AXES | {"champion": how}}
        )
        out = tmp_path / how
        out.mkdir()
        stage.run(
            changed, out, scores=inputs["scores"], latency=probe, engines=inputs["engines"], variants=inputs["variants"]
        )
        gptq = Decision.model_validate_json((out / "decision.json").read_bytes()).candidates[1]
        assert outcome == gptq.outcome
        assert (how == "gate") == gptq.reasons[0].startswith("intent against the champion: loses more than 0.02")


def test_a_champion_is_not_compared_with_itself_and_one_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    """The champion's own engine has no rows against itself; without scores the decision says why there are none."""
    made = with_champion(tmp_path, 0, engine_key="b" * 16)
    assert {"reference"} == {v.against for v in made.candidates[1].verdicts}
    assert {"reference", "champion"} == {v.against for v in made.candidates[2].verdicts}
    lost = with_champion(tmp_path / "other", 0, engine_key="", scores=(), note="version 7 cannot be compared with")
    assert "version 7 cannot be compared with" == lost.conditions["champion"]
    assert {"reference"} == {v.against for c in lost.candidates for v in c.verdicts}


def test_scores_by_length_of_prompt(tmp_path: Path) -> None:
    """Items of 10 tokens and of 600 are summed up apart; a set of one length has no such rows."""
    config, inputs, probe = campaign(tmp_path)
    for letter, lost in (("a", 0), ("b", 3)):
        rows = [r | {"tokens_in": 600 if n < 100 else 10} for n, r in enumerate(intent(lost, 0))]
        table(tmp_path / "scores" / (f"{letter}0" * 8) / "items.parquet", rows)
    out = tmp_path / "out"
    out.mkdir()
    stage.run(
        config, out, scores=inputs["scores"], latency=probe, engines=inputs["engines"], variants=inputs["variants"]
    )
    found = Decision.model_validate_json((out / "decision.json").read_bytes()).candidates[1].lengths
    assert [("intent", 0, 128, 400, 0.0), ("intent", 512, 2048, 100, 0.03)] == [
        (b.eval_set, b.least, b.below, b.items, pytest.approx(b.loss)) for b in found
    ]


@pytest.mark.parametrize("kind", ["variant", "engine"])
def test_a_simulated_artifact_is_never_promoted(tmp_path: Path, kind: str) -> None:
    """The winner's manifest says that a stand-in for a container made it: the same campaign holds, and says why."""
    config, inputs, probe = campaign(tmp_path)
    path = tmp_path / kind / ("b" * 16) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"simulated": True}))
    out = tmp_path / "out"
    out.mkdir()
    stage.run(
        config, out, scores=inputs["scores"], latency=probe, engines=inputs["engines"], variants=inputs["variants"]
    )
    decision = Decision.model_validate_json((out / "decision.json").read_bytes())
    (gptq,) = [c for c in decision.candidates if c.label == "gptq"]
    assert ("hold", None, "hold", True, False) == (
        decision.outcome, decision.winner, gptq.outcome, gptq.simulated, gptq.pareto
    )  # fmt: skip
    assert "gptq was made by a simulated container" in gptq.reasons[0]
    assert "gptq: the same run with a real container runtime" in decision.would_change


def test_a_remote_has_a_word_of_its_own() -> None:
    """It is not called emulated, and stating its device is what would settle it."""
    made = decided(candidate("far", **REMOTE), candidate("near", native=False, native_note="fp32"))
    assert ["", "remote", "emulated"] == [c.doubt for c in made.candidates]
    assert "" == candidate("lost", **REMOTE, status="failed", failure="no answer").doubt
    assert any("engine.served_on" in line for line in made.would_change)
    text = document.markdown(made)
    assert "far is a remote: its format and device are not known" in text
    assert "The latency of near is that of an emulated format" in text
    assert (1, 1) == (text.count("ort (remote)"), text.count("ort (emulated)"))


def test_against_a_simulated_reference_nothing_is_promoted() -> None:
    """A comparison with it says nothing of anybody."""
    reference = REFERENCE.model_copy(update={"simulated": True})
    found = decide("test", [reference, candidate("v")], "base", gate(), {}, LICENSED)
    assert ("hold", "base was made by a simulated container, which is evidence of nothing") == (
        found.outcome, found.candidates[1].reasons[0]
    )  # fmt: skip


def test_no_probe_means_no_promotion(tmp_path: Path) -> None:
    """Without latency the same campaign holds."""
    config, inputs, _ = campaign(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    facts = stage.run(config, out, scores=inputs["scores"], engines=inputs["engines"], variants=inputs["variants"])
    assert ("hold", None) == (facts["outcome"], facts["winner"])


def test_wrong_config_is_told_at_once(tmp_path: Path) -> None:
    """An unknown reference, a key that is no input and a scored set without a card are listed together."""
    config, inputs, probe = campaign(tmp_path)
    wrong = config.model_copy(update={"reference": "basline", "eval_sets": {"intent": config.eval_sets["intent"]}})
    with pytest.raises(ConfigError) as caught:
        stage.run(wrong, tmp_path, scores=inputs["scores"], latency=probe, engines=[], variants=inputs["variants"])
    told = str(caught.value)
    assert "did you mean 'baseline'?" in told
    assert "candidates.gptq.engine_key='bbbbbbbbbbbbbbbb': not among the inputs" in told
    assert "eval_sets='passages': scored, but it has no card" in told


def test_unreadable_evidence_is_one_clear_error(tmp_path: Path) -> None:
    """A broken table names the file."""
    config, inputs, probe = campaign(tmp_path)
    (probe / "blocks.parquet").write_bytes(b"PAR1")
    with pytest.raises(EvidenceError, match=r"blocks\.parquet: cannot be read"):
        stage.run(config, tmp_path, scores=[], latency=probe, engines=inputs["engines"], variants=inputs["variants"])


PROBE_COLUMNS = [
    *(("requests.parquet", one.name) for one in fields(Request)),
    *(("blocks.parquet", one.name) for one in fields(Block) if one.name not in ("started_s", "excused")),
    ("blocks.parquet", "started"),
]


@pytest.mark.parametrize(("name", "column"), PROBE_COLUMNS)
def test_a_probe_without_a_column_is_no_evidence(tmp_path: Path, name: str, column: str) -> None:
    """A table of another version is refused by the column that it lacks; nothing is guessed in its place."""
    rows = {"requests.parquet": request_row("a" * 16, 0, 0, ttft_ms=1.0, tpot_ms=1.0, e2e_ms=1.0, itl_ms=[1.0]),
            "blocks.parquet": block_row("a" * 16, 0, 1.0)}  # fmt: skip
    probe = artifact(tmp_path, "latency", "f", {})
    for file, row_ in rows.items():
        table(probe / file, [{k: v for k, v in row_.items() if (file, k) != (name, column)}])
    with pytest.raises(EvidenceError, match=rf"{name}: no column {column}; .* measure again"):
        evidence.read(scores=[], latency=probe, engines=[], variants=[])


def with_blocks(root: Path, config: Mapping[str, object], **changes: object) -> Decision:
    """The campaign's decision where two of the winner's three blocks are not like the others."""
    settings, inputs, probe = campaign(root)
    blocks = [block_row(letter * 16, turn, factor) | (changes if letter == "b" and turn else {})
              for letter, (*_, factor, _native) in CAMPAIGN.items() for turn in range(3)]  # fmt: skip
    table(probe / "blocks.parquet", blocks)
    path = probe / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config": config}))
    out = root / "out"
    out.mkdir()
    stage.run(
        settings, out, scores=inputs["scores"], latency=probe, engines=inputs["engines"], variants=inputs["variants"]
    )
    return Decision.model_validate_json((out / "decision.json").read_bytes())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"disturbed": "the GPU was slowed for its heat"}, "disturbed: the GPU was slowed for its heat"),
        ({"steady": False}, "not steady after 8 warm-up requests"),
        ({"partial": True}, "cut short"),
    ],
)
def test_a_winner_whose_blocks_are_no_evidence_is_held(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    """One sound round of three is none to conclude from, and the reason is in the decision and its document."""
    made = with_blocks(tmp_path, {}, **changes)
    gptq = made.candidates[1]
    assert ("hold", None) == (gptq.outcome, made.winner)
    assert "no speed evidence: 1 round measured on both sides, at least 2 are needed" in gptq.reasons[0]
    assert told in gptq.reasons[0]
    assert f"| gptq | closed_1 | 1 | {told} |" in (tmp_path / "out" / "decision.md").read_text("utf-8")


def test_disturbed_blocks_count_where_the_probe_was_told_to_keep_them(tmp_path: Path) -> None:
    """The winner wins, as `probe.disturbed: kept` has it."""
    assert "gptq" == with_blocks(tmp_path, {"disturbed": "kept"}, disturbed="hot").winner
