"""What MLflow is given: the saved view, names, texts, and no secrets."""

from __future__ import annotations

import base64
import json
import math
import zlib

import pytest

from pipelines.decide.model import Choice, Standing, Veto
from pipelines.decide.probed import Latency, LeftOut, Probed, Saturation, Throughput
from pipelines.track import figures, views, wording
from pipelines.track.masking import exposed, masked, masked_text
from tests import decisions


def test_a_packed_view_is_deflated_json() -> None:
    """The form that MLflow writes itself: a word, a semicolon, base64 of zlib."""
    state = views.state("k" * 16, "latency/c/ttft_p99_ms", "quality/mean_score", ["perplexity"])
    word, _, data = views.packed(state).partition(";")
    assert "deflate" == word
    assert state == json.loads(zlib.decompress(base64.b64decode(data)))


def test_the_view_shows_the_scatter_of_this_campaigns_variants_only() -> None:
    """Filter, axes and order are those of the campaign."""
    state = views.state("abc", "x", "y", ["x", "y"])
    assert "tags.kind = 'variant' and tags.campaign_key = 'abc'" == state["searchFilter"]
    scatter, parallel = state["compareRunCharts"]  # type: ignore[misc]
    assert ("SCATTER", "x", "y") == (scatter["type"], scatter["xaxis"]["key"], scatter["yaxis"]["key"])
    assert ("PARALLEL", ["x", "y"]) == (parallel["type"], parallel["selectedMetrics"])


def test_a_link_opens_the_view_or_the_plain_list() -> None:
    """Both open the chart page of the training side of MLflow."""
    assert "#/experiments/7/runs?workflowType=machine_learning&viewStateShareKey=k&compareRunsMode=CHART" == (
        views.fragment("7", "k")
    )
    assert "#/experiments/7/runs?workflowType=machine_learning&compareRunsMode=CHART" == views.fragment("7")


def test_metric_names_are_ones_mlflow_takes() -> None:
    """Commas, brackets and slashes inside a part become underscores; slashes stand only between parts."""
    assert "quality/acc_none/a_b_/score" == wording.metric_name("quality", "acc,none", "a(b)", "score")
    assert "latency/closed-4/ttft_p99.9_ms" == wording.latency_name("closed-4", "ttft_ms", 99.9)


def test_figures_that_are_missing_or_not_finite_are_never_metrics() -> None:
    """NaN, infinity and None are left out, not stored as another number."""
    one = decisions.decision().candidates[1].model_copy(update={"perplexity": math.inf, "engine_kl": math.nan})
    found = wording.metrics(one.model_copy(update={"mean_score": None}))
    assert not {"perplexity", "engine_kl", "quality/mean_score"} & found.keys()
    assert all(math.isfinite(v) for v in found.values())


def test_metrics_have_the_plain_names() -> None:
    """Quality by set and slice, latency and throughput by profile, memory in GiB; a loss is a delta below 0."""
    found = wording.metrics(decisions.decision().candidates[1])
    assert pytest.approx(-0.013) == found["quality/support_intent/all/lower_bound"]
    assert pytest.approx(-0.006) == found["quality/support_intent/billing/delta"]
    assert pytest.approx(0.003) == found["quality/ticket_json/all/delta"]
    assert pytest.approx(0.02) == found["quality/support_intent/all/margin"]
    assert pytest.approx(31 * 2.4 * 1.9) == found["latency/closed-4/ttft_p99_ms"]
    assert pytest.approx(4000 / 31) == found["throughput/closed-4/output_tokens_per_s"]
    assert pytest.approx(124_000_000 / 2**30) == found["size/engine_gib"]
    assert pytest.approx(410_000_000 / 2**30) == found["memory/peak_gib"] == found["memory/open-2/peak_rss_gib"]
    assert not {name for name in found if name.endswith(("loss", "upper_bound", "_mib"))}


def test_the_delta_of_a_metric_that_falls_is_a_loss_where_the_candidate_is_higher() -> None:
    """Bits per byte 1.2 of a reference of 1.0: worse by 0.2, so the delta is -0.2."""
    worse = decisions.verdict("passage_qa", "all", 0.2, 0.05, "fail").model_copy(
        update={"higher_is_better": False, "reference_score": 1.0, "score": 1.2}
    )
    found = wording.metrics(decisions.candidate("v", score=1.2, ttft=30.0, verdicts=[worse]))
    assert (1.2, -0.2, -0.25) == tuple(
        pytest.approx(found[f"quality/passage_qa/all/{name}"]) for name in ("score", "delta", "lower_bound")
    )


def test_a_candidates_params_name_method_scheme_and_what_it_was_made_and_measured_with() -> None:
    """The group size is the scheme's own; a scheme somebody else states may be no scheme of ours, and has none."""
    made = decisions.decision()
    found = wording.params(made.candidates[1], made, "0123456789abcdef")
    expected = {"method": "gptq", "scheme": "W4A16_G64", "group_size": "64", "library": "llm-compressor 0.9.0",
                "target": "ort_genai", "calibration": "0123456789abcdef",
                "device": decisions.CONDITIONS["device"]}  # fmt: skip
    assert expected.items() <= found.items()
    elsewhere = made.candidates[1].model_copy(update={"scheme": "some 4 bit"})
    assert "group_size" not in wording.params(elsewhere, made)


def test_what_a_thousand_tokens_cost_is_a_metric_of_those_that_pass() -> None:
    """0.00021 of the standings; a candidate without a standing has none."""
    standing = Standing(label="gptq_w4a16_g64", score=0.0, ratios={}, first_share=1.0, cost_per_1000_tokens=0.00021)
    choice = Choice(role="speed", weights={}, left_out=(), off_front=(), standings=(standing,), currency="EUR")
    made = decisions.decision().model_copy(update={"choice": choice})
    assert 0.00021 == wording.metrics(made.candidates[1], made)["cost/per_1000_tokens"]
    assert "cost/per_1000_tokens" not in wording.metrics(made.candidates[2], made)


def test_the_campaigns_text_starts_with_the_decision_in_two_lines() -> None:
    """Before the table, since the page folds the rest away."""
    made = decisions.decision()
    lines = wording.campaign_text(made).splitlines()
    assert [f"**{made.headline}**", made.detail] == [line.strip() for line in lines[:2]]
    assert lines[3].startswith("| candidate |")
    assert 3 + 2 + len(made.candidates) <= len(lines)


def test_a_long_campaigns_text_stays_within_what_mlflow_keeps() -> None:
    """Four hundred candidates: whole lines only, and it says where the rest is."""
    made = decisions.decision()
    many = tuple(made.candidates[1].model_copy(update={"label": f"variant_{n}"}) for n in range(400))
    text = wording.campaign_text(made.model_copy(update={"candidates": many}))
    assert len(text) < 8000
    assert text.endswith("(the rest is in decision.md)")


def test_a_failed_candidates_text_starts_with_the_reason() -> None:
    """Status and reason first."""
    broken = decisions.decision().candidates[-1]
    assert f"**Failed:** {broken.failure}" == wording.candidate_text(broken).splitlines()[0]
    assert broken.failure == wording.tags(broken, decisions.decision(), "k")["failure"]


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"vetoes": (Veto(kind="must_pass", where="ticket_json", text="2 of 9 items that must pass are wrong"),)},
         "**Vetoed:** 2 of 9 items that must pass are wrong (outcome: reject)"),
        ({"verdicts": (decisions.verdict("ticket_json", "all", 0.0, 0.1, "invalid").model_copy(
            update={"note": "items differ"}),)},
         "**Invalid:** ticket_json, all: items differ (outcome: reject)"),
        ({"reasons": ("fails on 2 of 3 comparisons",)}, "**Reject:** fails on 2 of 3 comparisons"),
    ],
)  # fmt: skip
def test_what_became_of_a_candidate_and_why_is_its_first_line(changes: dict[str, object], first: str) -> None:
    """Ruled out, without valid evidence, or refused by its scores; the reason is a tag where it was no score."""
    one = decisions.candidate("v", score=0.7, ttft=30.0, outcome="reject", changes=changes)
    tags = wording.tags(one, decisions.decision(), "k")
    assert first == wording.candidate_text(one).splitlines()[0]
    assert first.startswith("**Reject") is ("failure" not in tags)
    assert ("must_pass" if "vetoes" in changes else None) == tags.get("vetoes")


def test_settings_named_like_secrets_are_masked_and_others_kept() -> None:
    """Names are taken word by word: hf_token is one, max_tokens and eos_token are not."""
    given = {
        "hf_token": "a", "apiKey": "b", "db": {"password": 5, "user": "u"}, "Authorization": "c", "key": "d",
        "max_tokens": 64, "tokenizer": "t", "eos_token": "</s>", "campaign_key": "k", "keys": ["x"], "token": None,
    }  # fmt: skip
    expected = given | {
        "hf_token": "***", "apiKey": "***", "db": {"password": "***", "user": "u"}, "Authorization": "***",
        "key": "***",
    }  # fmt: skip
    assert expected == masked(given)


def test_secrets_that_a_configuration_would_write_down_are_named() -> None:
    """By name, in a URL, or by shape; where a secret is only likely, as in prose, nothing is refused."""
    given = {
        "toolchain": {"x": {"env": {"HF_TOKEN": "a", "PYTHONHASHSEED": "0"}, "pass_env": ["HF_TOKEN"]}},
        "tracking": {"uri": "postgresql://me:pw@db/x"}, "notes": ["fine", "sk-abcdefghijklmnopqrst"],
        "checkpoint": {"note": "Basic quantization; key=value"}, "engine": {"api_key_env": "MY_KEY", "max_tokens": 5},
    }  # fmt: skip
    assert ["toolchain.x.env.HF_TOKEN", "tracking.uri", "notes.1"] == list(exposed(given))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:pw@db/x", "postgresql://***@db/x"),
        ("postgresql://me:p@w/with:all@db:5432/x", "postgresql://***@db:5432/x"),
        ("http://h:5000/#/experiments/1", "http://h:5000/#/experiments/1"),
        ("https://h/p?api_key=abc&x=1", "https://h/p?api_key=***&x=1"),
        ("postgresql://db/x?sslpassword=abc&hf_token=d", "postgresql://db/x?sslpassword=***&hf_token=***"),
        ("https://s3/b?X-Amz-Signature=abc&max_tokens=64", "https://s3/b?X-Amz-Signature=***&max_tokens=64"),
        ("Bearer abcdefghijkl", "Bearer ***"),
        ("use hf_abcdefghijklmnopqrst now", "use *** now"),
        ("support@example.com and a/b@c", "support@example.com and a/b@c"),
    ],
)
def test_credentials_inside_texts_are_masked(text: str, expected: str) -> None:
    """URLs lose their user part, parameters and headers their value, tokens of a known shape everything."""
    assert expected == masked_text(text)


def test_figures_of_the_probe_have_plain_names() -> None:
    """Profile and figure; phase and bucket stand between them only where there are several."""
    groups = (("one", 0, "<=128"), ("mixed", 0, "<=128"), ("mixed", 0, ">8192"), ("steps", 0, "<=128"),
              ("steps", 1, "<=128"), ("search", 0, "<=128"))  # fmt: skip
    latency = [
        Latency(profile=profile, phase=phase, bucket=bucket, metric="ttft_ms", percentile=99.0, value=1.0 + phase,
                interval=None, requests=500)
        for profile, phase, bucket in groups
    ]  # fmt: skip
    flows = [Throughput(profile=f.profile, phase=f.phase, bucket=f.bucket, requests=9, failed=0, requests_per_s=2.0,
                        output_tokens_per_s=8.0, peak_rss_bytes=None, goodput_per_s=1.5) for f in latency]  # fmt: skip
    flows.append(flows[1].model_copy(update={"bucket": "", "output_tokens_per_s": 16.0}))
    found_rate = Saturation(profile="search", by_round=(4.0,), failed_by_round=(8.0,), rate=4.0, interval=None,
                            at_least=False, promise="")  # fmt: skip
    probed = Probed(saturations=(found_rate,), left_out=(LeftOut(profile="one", round=0, reason="hot"),))
    one = decisions.candidate("v", score=0.7, ttft=30.0,
                              changes={"latency": latency, "throughput": flows, "probed": probed})  # fmt: skip
    names = {name for name in wording.metrics(one) if name.startswith("latency/")}
    assert {"latency/one/ttft_p99_ms", "latency/mixed/in_to_128/ttft_p99_ms", "latency/mixed/in_above_8192/ttft_p99_ms",
            "latency/steps/phase_1/ttft_p99_ms", "latency/steps/phase_2/ttft_p99_ms",
            "latency/blocks_left_out"} == names  # fmt: skip
    logged = wording.metrics(one)
    assert (8.0, 16.0, 1.5, 4.0) == (
        logged["throughput/one/output_tokens_per_s"], logged["throughput/mixed/output_tokens_per_s"],
        logged["throughput/mixed/in_to_128/goodput_per_s"], logged["throughput/search/saturation_requests_per_s"],
    )  # fmt: skip


def test_an_axis_over_several_phases_is_that_of_the_slowest() -> None:
    """The view sorts and draws by a metric that every candidate has."""
    found = [Latency(profile="steps", phase=phase, metric="ttft_ms", percentile=99.0, value=value, interval=None,
                     requests=500) for phase, value in ((0, 10.0), (1, 80.0), (2, 20.0))]  # fmt: skip
    made = decisions.decision()
    made = made.model_copy(update={"candidates": (made.candidates[1].model_copy(update={"latency": tuple(found)}),)})
    assert "latency/steps/phase_2/ttft_p99_ms" == wording.axis_name(made, figures.Axis("steps", "ttft_ms", 99.0))
    assert "latency/none/ttft_p99_ms" == wording.axis_name(made, figures.Axis("none", "ttft_ms", 99.0))
