"""The report and its charts, from a made-up decision."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.decide.model import Choice, Decision, Standing
from pipelines.decide.probed import Drift, Latency, LeftOut, Probed, Spot, Throughput
from pipelines.errors import EvidenceError
from pipelines.track import charts, drawing, figures, loads
from pipelines.track.axes import Box, log_ticks, place, scale, text_width, ticks
from pipelines.track.report import ReportConfig, render, run
from tests import decisions
from tests.pages import Page

SVG = "{http://www.w3.org/2000/svg}"


def page(made: Decision) -> Page:
    return Page(render(made, ReportConfig())[0])


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    """No script, no link, no import, no url(): one file, readable offline."""
    made = decisions.decision()
    html, _ = render(made, ReportConfig(), decisions.requests(tmp_path, made, 40))
    found = Page(html)
    assert (0, []) == (found.scripts, found.links)
    assert not re.search(r"url\(|@import", html)


def test_the_page_says_what_was_decided_and_why() -> None:
    """Outcome, winner, reasons, failures, what would change it, conditions and formulas are all in words."""
    made = decisions.decision()
    text = page(made).text
    for said in (made.detail, *made.would_change, "support_intent is inconclusive", "loads as noise", "Apache-2.0"):
        assert said in text
    assert "(E2E - TTFT) / (n - n1)" in text
    assert made.conditions["device"] in text


def test_the_page_shows_how_the_winner_was_chosen_and_who_is_compared_with_the_champion() -> None:
    """Standings with the share of weights under which each comes first; comparisons with the champion are marked."""
    made = decisions.decision()
    standing = Standing(
        label="gptq_w4a16_g64", score=0.42, ratios={"latency": 2.5}, first_share=0.87, cost_per_1000_tokens=None
    )
    choice = Choice(
        role="product",
        weights={"latency": 0.5},
        left_out=("memory",),
        off_front=(),
        standings=(standing,),
        currency="EUR",
    )
    rival = made.candidates[1].verdicts[0].model_copy(update={"against": "champion"})
    one = made.candidates[1].model_copy(update={"verdicts": (*made.candidates[1].verdicts, rival)})
    candidates = (made.candidates[0], one, *made.candidates[2:])
    text = page(made.model_copy(update={"choice": choice, "candidates": candidates})).text
    for said in ("Choice for product", "87%", "Not measured on all: memory.", "support_intent · champion"):
        assert said in text


def test_names_from_outside_cannot_become_markup() -> None:
    """A label that is HTML is shown as it is written, in the page and in both chart sizes."""
    made = decisions.decision()
    evil = made.candidates[1].model_copy(update={"label": "<script>x</script>&"})
    made = made.model_copy(update={"candidates": (made.candidates[0], evil, *made.candidates[2:])})
    html, drawn = render(made, ReportConfig())
    svg = drawing.standalone(drawn.pareto.draw(860))
    assert "<script" not in html + svg
    assert "<script>x</script>&" in Page(html).text
    ET.fromstring(svg)


def test_the_scatter_labels_each_candidate_once_and_draws_emulated_ones_hollow() -> None:
    """One filled mark per native candidate with both figures, one hollow mark per emulated one, a text for each."""
    svg = ET.fromstring(render(decisions.decision(), ReportConfig())[1].pareto.draw(860))
    texts = [t.text for t in svg.iter(f"{SVG}text")]
    shown = ["baseline", "gptq_w4a16_g64", "awq_w4a16_g64", "fp8_dynamic"]
    assert [1, 1, 1, 1] == [texts.count(name) for name in shown]
    fills = [c.get("fill") for c in svg.iter(f"{SVG}circle")]
    assert (4, 1) == (len(fills), fills.count("var(--paper)"))


def test_candidates_that_cannot_be_drawn_are_named_with_the_reason() -> None:
    """Too few requests for the percentile, or a failure, is said under the chart."""
    text = page(decisions.decision()).text
    assert "rtn_w4a16_g64: no p99 TTFT" in text
    assert "gptq_w3a16_g64: perplexity 4812" in text
    assert "Hollow: latency is no evidence" in text and "fp8_dynamic is emulated (FP8 weights run in fp32)" in text


def test_a_remote_is_called_one() -> None:
    """A server whose format nobody knows is not called emulated, in the table or under the chart."""
    made = decisions.decision()
    far = {"served_on": "not stated", "native_note": "nobody states its device"}
    found = tuple(c if c.native else c.model_copy(update=far) for c in made.candidates)
    text = page(made.model_copy(update={"candidates": found})).text
    assert "fp8_dynamic is remote (nobody states its device)" in text and "emulated" not in text


def test_a_percentile_the_sample_does_not_support_is_a_dash() -> None:
    """The reader sees a dash, never the maximum in its place."""
    html, _ = render(decisions.decision(), ReportConfig())
    table = html.split("<h3>Latency</h3>")[1].split("</table>")[0]
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in table.split("<tr>")[2:]]
    (row,) = [c for c in cells if c[:3] == ["closed-4", "TTFT", "rtn_w4a16_g64"]]
    assert ("120", "–") == (row[3], row[-1])


def test_a_column_in_which_nothing_is_known_is_named_and_left_out() -> None:
    """No input lengths were told apart, nobody promised anything: no column of dashes takes the room of figures."""
    html, _ = render(decisions.decision(), ReportConfig())
    table = html.split("<h3>Throughput</h3>")[1].split("</table>")[0]
    heads = re.findall(r"<th>(.*?)</th>", table)
    assert "requests/s" in heads and not {"goodput/s", "kept all promises", "failed as"} & {*heads}
    assert "Not known of any: goodput/s, kept all promises." in table


def test_a_reused_measurement_shows_its_own_date_and_device(tmp_path: Path) -> None:
    """The date is that of the probe, not of the report."""
    made = decisions.decision()
    html, _ = render(made, ReportConfig(), decisions.requests(tmp_path, made, 20))
    assert f"Measured {decisions.CONDITIONS['measured']} on {decisions.CONDITIONS['device']}" in Page(html).text


def test_a_decision_with_nothing_measured_still_gives_a_page() -> None:
    """No scores, no latency, no verdicts: the page and a valid drawing come out all the same."""
    made = decisions.decision("hold")
    made = made.model_copy(update={"candidates": made.candidates[-1:], "gate": {}, "would_change": ()})
    html, drawn = render(made, ReportConfig())
    svg = ET.fromstring(drawing.standalone(drawn.pareto.draw(860)))
    assert "No candidate has both a score and a latency" == svg.get("aria-label")
    assert ["pareto"] == [picture.name for picture in drawn]
    assert "failed" in Page(html).text


def test_the_stage_writes_the_page_and_each_chart_twice(tmp_path: Path) -> None:
    """As SVG and as PNG; the facts say what a run's list needs."""
    made = decisions.decision("hold")
    out = tmp_path / "out"
    out.mkdir()
    facts = run(ReportConfig(), out, decision=decisions.decided(tmp_path, made), latency=None)
    assert ("hold", 6, 3) == (facts["outcome"], facts["candidates"], facts["charts"])
    assert {"report.html", "charts"} == {p.name for p in out.iterdir()}
    names = {"pareto", "forest", "load-ttft-all"}
    assert {f"{n}.{kind}" for n in names for kind in ("svg", "png")} == {p.name for p in (out / "charts").iterdir()}


def test_a_missing_decision_is_evidence_missing(tmp_path: Path) -> None:
    """The file and what to do are named."""
    with pytest.raises(EvidenceError, match=r"decision\.json"):
        run(ReportConfig(), tmp_path, decision=tmp_path)


def test_the_chart_uses_the_gates_own_latency_figure() -> None:
    """Otherwise the highest percentile up to 99 that most candidates have, on the speed test's profile and metric."""
    made = decisions.decision()
    assert figures.Axis("closed-4", "ttft_ms", 99.0) == figures.axis_of(made)
    assert figures.Axis("closed-4", "ttft_ms", 95.0) == figures.axis_of(made.model_copy(update={"gate": {}}))


def test_the_bar_of_a_mean_score_adds_intervals_in_squares() -> None:
    """Half widths 0.011, 0.009 and 0.012 of three sets give sqrt(0.011^2 + 0.009^2 + 0.012^2) / 3 = 0.00620."""
    low, high = figures.half_width(decisions.decision().candidates[1]) or (0, 0)
    assert pytest.approx((0.0062004, 0.0062004), rel=1e-4) == (low, high)


def test_a_verdict_that_does_not_gate_is_drawn_in_brackets() -> None:
    """What is only shown is told apart from what decides."""
    one = decisions.decision().candidates[1]
    shown = one.verdicts[0].model_copy(update={"gates": False})
    made = decisions.decision().model_copy(update={"candidates": (one.model_copy(update={"verdicts": (shown,)}),)})
    assert ["", "(pass)"] == [row.word if row.verdict else "" for row in figures.rows(made.candidates)]


@given(st.lists(st.floats(0.01, 1e5), min_size=1, max_size=400))
def test_the_curve_keeps_the_ends_and_never_falls(values: list[float]) -> None:
    """Thinning leaves a distribution function: from 0 to 1, not decreasing, exact where it has a point."""
    ordered = tuple(sorted(values))
    steps = charts._steps(ordered, 50)
    assert (ordered[0], 0.0) == steps[0]
    assert (ordered[-1], 1.0) == steps[-1]
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(steps))
    assert all(math.isclose(s, sum(v <= x for v in ordered) / len(ordered)) for x, s in steps[1:])


@given(st.floats(-1e6, 1e6), st.floats(1e-4, 1e6))
def test_ticks_are_inside_evenly_spaced_and_few(low: float, width: float) -> None:
    """Ticks are multiples of one step, between two and twice as many as asked."""
    found = ticks(low, low + width, 5)
    assert 2 <= len(found) <= 10
    assert all(low - width * 1e-6 <= t <= low + width * (1 + 1e-6) for t in found)


def test_a_logarithmic_axis_has_one_two_five() -> None:
    """Over three decades: 1, 2 and 5 of each."""
    assert [2, 5, 10, 20, 50, 100, 200] == [round(t, 9) for t in log_ticks(1.5, 300)]
    assert scale([1, 30], 0, 100, log_allowed=True).log
    assert not scale([1, 15], 0, 100, log_allowed=True).log


@given(st.lists(st.tuples(st.floats(60, 700), st.floats(50, 350)), min_size=2, max_size=6))
def test_labels_stay_inside_the_frame(anchors: list[tuple[float, float]]) -> None:
    """However the points lie, no label leaves the drawing."""
    frame, texts = Box(40, 20, 846, 380), [f"gptq_w4a16_g{n}" for n in range(len(anchors))]
    for (left, base), text in zip(place(anchors, texts, frame, 13), texts, strict=True):
        assert frame.left <= left <= left + text_width(text, 13) <= frame.right
        assert frame.top <= base <= frame.bottom


def test_labels_of_close_points_do_not_overlap() -> None:
    """Four points within a few pixels: each label finds a place of its own."""
    anchors = [(300.0, 200.0), (303.0, 202.0), (306.0, 199.0), (302.0, 206.0)]
    texts = [f"gptq_w4a16_g{n}" for n in range(4)]
    spots = place(anchors, texts, Box(40, 20, 846, 380), 13)
    boxes = [Box(x, y - 11, x + text_width(t, 13), y + 3) for (x, y), t in zip(spots, texts, strict=True)]
    assert all(a.overlap(b) == 0 for n, a in enumerate(boxes) for b in boxes[n + 1 :])


def with_load(made: Decision) -> Decision:
    """The decision with three steps and four blocks for each candidate that was measured, one block left out."""
    found = []
    for one in made.candidates:
        if not one.latency:
            found.append(one)
            continue
        value = one.latency[0].value or 1.0
        steps = [(phase, rate, value * (1 + phase**3)) for phase, rate in enumerate((1.0, 2.0, 4.0))]
        flows = [
            Throughput(profile="steps", phase=phase, requests=200, failed=0, requests_per_s=rate * 0.98, rate=rate,
                       output_tokens_per_s=rate * 16, peak_rss_bytes=None)
            for phase, rate, _ in steps
        ]  # fmt: skip
        figures_ = [
            Latency(profile="steps", phase=phase, metric="ttft_ms", percentile=p, interval=None, requests=200,
                    value=ms if p == 95.0 else None)
            for phase, _, ms in steps for p in (95.0, 99.0)
        ]  # fmt: skip
        spots = tuple(Spot(hours=n / 10, value=value * (1 + n / 50), left_out="hot" * (n == 2)) for n in range(4))
        drift = Drift(profile="closed-4", metric="ttft_ms", spots=spots, change=0.06, interval=None)
        changes = {"latency": (*one.latency, *figures_), "throughput": (*one.throughput, *flows),
                   "probed": Probed(drifts=(drift,))}  # fmt: skip
        found.append(one.model_copy(update=changes))
    return made.model_copy(update={"candidates": tuple(found)})


def test_the_load_curve_has_a_line_for_each_candidate_at_the_percentile_that_its_points_have() -> None:
    """No phase has a p99, all have a p95: three points each, five candidates, in the order of what was offered."""
    made = with_load(decisions.decision())
    (chart,) = loads.load_curves(made, "ttft_ms", made.candidates)
    assert ("p95 TTFT against load, steps", "p95 TTFT, ms") == (chart.title, chart.y_title)
    assert [3] * 5 == [len(line.dots) for line in chart.given]
    assert [0.98, 1.96, 3.92] == [dot.x for dot in chart.given[0].dots]
    assert ["fp8_dynamic"] == [line.label for line in chart.given if line.dashed]
    plain = decisions.decision()
    assert [] == list(loads.load_curves(plain, "ttft_ms", plain.candidates))  # profiles of one phase have no curve


def test_the_drift_chart_is_relative_and_rings_what_was_left_out() -> None:
    """Each candidate's medians over their geometric mean, of the blocks that count."""
    made = with_load(decisions.decision())
    chart = loads.drift(made, "closed-4", made.candidates)
    assert chart is not None
    dots = chart.given[0].dots
    mean = (1.0 * 1.02 * 1.06) ** (1 / 3)
    assert pytest.approx([1 / mean, 1.02 / mean, 1.04 / mean, 1.06 / mean]) == [d.y for d in dots]
    assert ([False, False, True, False], pytest.approx(6.0)) == ([d.hollow for d in dots], dots[1].x)
    assert loads.drift(decisions.decision(), "closed-4", made.candidates[-1:]) is None


def test_charts_of_load_and_drift_are_drawings_of_their_own(tmp_path: Path) -> None:
    """Both stand in the page, drawn wide and narrow, well-formed, and the page still needs nothing else."""
    made = with_load(decisions.decision())
    html, _ = render(made, ReportConfig(), decisions.requests(tmp_path, made, 40))
    drawings = re.findall(r"<svg.*?</svg>", html, re.S)
    named = [ET.fromstring(one).get("aria-label") or "" for one in drawings]
    assert (2, 2) == (sum("against load" in n for n in named), sum(n.startswith("Median TTFT") for n in named))
    found = Page(html)
    assert (0, []) == (found.scripts, found.links)


def test_curves_leave_out_what_is_no_evidence_and_keep_buckets_apart(tmp_path: Path) -> None:
    """Round 0 of one candidate was disturbed: its 8 requests are not drawn. A bucket without requests has no chart."""
    made = decisions.decision()
    hot = Probed(left_out=(LeftOut(profile="closed-4", round=0, reason="hot"),))
    first = made.candidates[0].model_copy(update={"probed": hot})
    made = made.model_copy(update={"candidates": (first, *made.candidates[1:])})
    probe, axis = decisions.requests(tmp_path, made, 40), figures.axis_of(made)
    assert axis is not None
    curves = figures.curves(made, probe, axis, made.candidates)
    assert ["closed-4"] == list(curves)
    assert [31, 39] == [len(curve.values) for curve in curves["closed-4"]][:2]
    long = [f.model_copy(update={"bucket": ">8192"}) for f in first.latency]
    both = first.model_copy(update={"latency": (*first.latency, *long)})
    again = made.model_copy(update={"candidates": (both, *made.candidates[1:])})
    assert ["closed-4"] == list(figures.curves(again, probe, axis, again.candidates))  # nothing was sent in the other


def test_where_no_block_counts_the_curve_is_drawn_dashed(tmp_path: Path) -> None:
    """All rounds of a candidate were disturbed: what was measured is shown, as no evidence."""
    made = decisions.decision()
    out = tuple(LeftOut(profile="closed-4", round=n, reason="hot") for n in range(5))
    first = made.candidates[0].model_copy(update={"probed": Probed(left_out=out)})
    made = made.model_copy(update={"candidates": (first, *made.candidates[1:])})
    axis = figures.axis_of(made)
    assert axis is not None
    probe = decisions.requests(tmp_path, made, 40)
    curve = figures.curves(made, probe, axis, made.candidates)["closed-4"][0]
    assert (39, True) == (len(curve.values), curve.hollow)
