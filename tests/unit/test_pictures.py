"""The report's charts of layers, memory and many candidates, and their copies as files."""

from __future__ import annotations

import re
import struct
import time
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path

from pipelines.decide.model import Candidate, Decision, Veto
from pipelines.decide.probed import Probed, Resources
from pipelines.engine.memory import Footprint
from pipelines.quantize.coverage import KEPT, Layer
from pipelines.track import drawing, errormaps, figures, loads, memorysplit, pictures
from pipelines.track.memorysplit import Cache
from pipelines.track.report import ReportConfig, render, run
from tests import decisions

SVG = "{http://www.w3.org/2000/svg}"
MIB = 2**20


def layer(module: str, error: float | None, scheme: str = "W4A16_G64") -> Layer:
    return Layer(module=module, scheme=scheme, bits=4, error=error)


def test_a_layers_shade_is_its_error_over_the_median_of_its_variant() -> None:
    """Errors 1, 2, 4, 8, 64 have the median 4: a quarter, a half, one, two and sixteen times, each its own shade."""
    errors = (1.0, 2.0, 4.0, 8.0, 64.0)
    found = errormaps.heat_map("v", [layer(f"model.layers.{n}.mlp.up_proj", e) for n, e in enumerate(errors)])
    assert found is not None
    assert (("up_proj",), 5) == (found.rows, found.columns)
    assert [2, 3, 4, 5, 7] == [cell.shade for cell in found.cells]
    assert "model.layers.4.mlp.up_proj: 64, 16 times the median" == found.cells[4].told
    assert found.note.startswith("1 to 64, median 4, on the library's own scale; 5 of 5 layers quantized")


def test_a_layer_without_an_error_says_why_instead() -> None:
    """One that was left as it was is an outline, one of which the library says nothing is grey; neither is a zero."""
    kept = Layer(module="model.layers.1.mlp.up_proj", scheme=KEPT, bits=16, reason="ignored by 'mlp'")
    found = errormaps.heat_map(
        "v", [layer("model.layers.0.mlp.up_proj", 1.0), kept, layer("model.layers.2.mlp.up_proj", None)]
    )
    assert found is not None
    assert [4, "kept", "unknown"] == [cell.shade for cell in found.cells]
    assert "left as it was (ignored by 'mlp')" in found.cells[1].told
    assert "2 of 3 layers quantized" in found.note


def test_experts_share_a_square_which_shows_the_worst() -> None:
    """Modules that differ by a number inside one layer are one kind; their square names the one it is about."""
    names = [f"model.layers.0.mlp.experts.{n}.w1" for n in range(3)]
    found = errormaps.heat_map("v", [layer(n, e) for n, e in zip(names, (1.0, 8.0, 2.0), strict=True)])
    assert found is not None
    (cell,) = found.cells
    assert (("w1",), 6) == (found.rows, cell.shade)
    assert cell.told.startswith(f"{names[1]}: 8, 4 times the median, the worst of 3")


def test_names_of_projections_are_as_long_as_it_takes_to_tell_them_apart() -> None:
    """q_proj stands alone; two out_proj need what they belong to."""
    names = ("self_attn.q_proj", "self_attn.out_proj", "cross_attn.out_proj")
    found = errormaps.heat_map("v", [layer(f"model.decoder.layers.0.{n}", 1.0) for n in names])
    assert found is not None
    assert names == found.rows
    short = errormaps.heat_map("v", [layer(f"h.0.{n}", 1.0) for n in ("attn.c_attn", "mlp.c_fc")])
    assert short is not None
    assert ("c_attn", "c_fc") == short.rows


def test_a_variant_whose_library_gives_no_error_has_no_map_and_is_named(tmp_path: Path) -> None:
    """The reference is not: nothing was done to it. A variant in two engines has one map."""
    made = decisions.decision()
    variants = decisions.variants(tmp_path, made)
    (variants[2] / "layers.json").write_text('[{"module": "model.layers.0.q", "scheme": "W4A16_G64", "bits": 4}]')
    twice = made.candidates[1].model_copy(update={"label": "again@other"})
    found = errormaps.maps((*made.candidates, twice), variants)
    assert ["gptq_w4a16_g64", "rtn_w4a16_g64", "fp8_dynamic"] == [one.label for one in found.drawn]
    assert ("awq_w4a16_g64: its library gives no error by layer",) == found.missing


def resources(**given: int | str) -> Resources:
    empty = dict.fromkeys(Resources.model_fields)
    return Resources.model_validate(empty | {"profile": "closed-4"} | given)


def measured(one: Candidate, *found: Resources) -> Candidate:
    return one.model_copy(update={"probed": Probed(resources=found)})


def test_memory_is_split_by_differences_of_what_was_measured() -> None:
    """Files of 100 MiB, 130 held when ready, 150 at the peak of the heavier load: 30 runtime, 20 grown."""
    one = decisions.candidate("v", score=0.7, ttft=30, changes={"engine_bytes": 100 * MIB})
    light = resources(profile="closed-1", idle_rss_bytes=130 * MIB, peak_rss_bytes=140 * MIB)
    heavy = resources(idle_rss_bytes=130 * MIB, peak_rss_bytes=150 * MIB)
    cache = Cache(token=1024, size=8 * MIB, requests=4, tokens=2048)
    (found,) = memorysplit.splits([measured(one, light, heavy)], {"v": cache})
    assert ("process", "closed-4", 100 * MIB) == (found.place, found.profile, found.weights)
    assert (30 * MIB, 20 * MIB, cache) == (found.runtime, found.grown, found.cache)


def test_files_larger_than_what_is_held_are_not_taken_for_weights_in_memory() -> None:
    """Files that are read as needed: how much of them is held is not known, and it is said."""
    one = decisions.candidate("v", score=0.7, ttft=30, changes={"engine_bytes": 900 * MIB})
    (found,) = memorysplit.splits([measured(one, resources(idle_rss_bytes=500 * MIB, peak_rss_bytes=520 * MIB))], {})
    assert (None, None, 20 * MIB) == (found.weights, found.runtime, found.grown)
    assert "weights are not set apart" in found.note
    svg = ET.fromstring(memorysplit.draw([found], 860))
    assert "held when ready, not split" in [t.text for t in svg.iter(f"{SVG}text")]


def test_on_a_gpu_the_weights_are_in_its_memory_and_the_process_is_shown_beside() -> None:
    """Two bars: the GPU's with weights and the estimate, the process's without either."""
    one = decisions.candidate("v", score=0.7, ttft=30, changes={"engine_bytes": 100 * MIB})
    both = resources(
        idle_rss_bytes=60 * MIB, peak_rss_bytes=61 * MIB,
        gpu_memory_idle_bytes=300 * MIB, gpu_memory_peak_bytes=310 * MIB,
    )  # fmt: skip
    cache = Cache(token=16384, size=MIB, requests=1, tokens=64)
    gpu, process = memorysplit.splits([measured(one, both)], {"v": cache})
    assert ("GPU", 200 * MIB, cache) == (gpu.place, gpu.runtime, gpu.cache)
    assert ("process", None, None) == (process.place, process.weights, process.cache)


def test_what_nobody_measured_has_no_bar_and_what_is_unknown_no_estimate() -> None:
    """No resources, no split; a cache of which neither a token nor the whole is known is left out."""
    assert () == memorysplit.splits(decisions.decision().candidates, {})
    known = Footprint("host", 1, weights=1, token=2, requests=4, tokens=2048, cache=16384, device=None)
    unknown = Footprint("host", 1, weights=1, token=None, requests=4, tokens=None, cache=None, device=None)
    token = Footprint("host", 1, weights=1, token=2, requests=4, tokens=None, cache=None, device=None)
    found = memorysplit.caches({"a": known, "b": unknown, "c": None, "d": token})
    whole = Cache(token=2, size=16384, requests=4, tokens=2048)
    assert {"a": whole, "d": Cache(token=2, size=None, requests=4, tokens=None)} == found


def test_a_cache_of_unknown_length_is_told_by_the_token() -> None:
    """No frame in the chart, and the bytes of one token in the table."""
    one = decisions.candidate("v", score=0.7, ttft=30, changes={"engine_bytes": 100 * MIB})
    measured_one = measured(one, resources(idle_rss_bytes=130 * MIB, peak_rss_bytes=150 * MIB))
    made = decisions.decision().model_copy(update={"candidates": (measured_one,), "winner": None})
    caches = {"v": Cache(token=46080, size=None, requests=1, tokens=None)}
    html, drawn = render(made, ReportConfig(caches=caches))
    assert "46,080 B a token" in html and drawn.memory is not None
    assert memorysplit.ESTIMATE not in drawn.memory.draw(860)
    framed = render(made, ReportConfig(caches={"v": Cache(token=1, size=MIB, requests=1, tokens=64)}))[1].memory
    assert framed is not None and memorysplit.ESTIMATE in framed.draw(860)


def test_throughput_against_latency_joins_closed_loops_and_open_loads_apart() -> None:
    """Two closed loops in the order of their concurrency, one open load: two lines of one candidate, one legend key."""
    made = decisions.decision()
    one = made.candidates[1]
    rates = {"closed-1": (1, None, 20.0), "closed-4": (4, None, 60.0), "open-2": (None, 2.0, 24.0)}
    flows = tuple(
        t.model_copy(update={"concurrency": c, "rate": r, "output_tokens_per_s": v})
        for t in one.throughput for c, r, v in [rates[t.profile]]
    )  # fmt: skip
    chart = loads.across(made, "ttft_ms", [one.model_copy(update={"throughput": flows})])
    assert chart is not None
    assert [[20.0, 60.0], [24.0]] == [[dot.x for dot in line.dots] for line in chart.given]
    assert ["closed-1", "closed-4"] == [dot.told for dot in chart.given[0].dots]
    assert ("p99 TTFT against throughput, all loads", "output tokens/s") == (chart.title, chart.x_title)
    svg = ET.fromstring(chart.draw(860))
    assert 1 == [t.text for t in svg.iter(f"{SVG}text")].count("gptq_w4a16_g64")


def many(count: int) -> Decision:
    """A decision of many candidates: the best scores come last, one early one is on the front, one was ruled out."""
    made = decisions.decision()
    found: list[Candidate] = [made.candidates[0]]
    for n in range(count - 1):
        changes: dict[str, object] = {
            "latency": decisions.latencies(40.0 + n % 7),
            "keys": dict(made.candidates[1].keys),
        }
        if n == 5:
            changes["vetoes"] = (Veto(kind="divergence", text="mean KL is too high"),)
        if n == 3:
            changes["latency"] = decisions.latencies(10.0)
        label, score = f"variant_{n}", 0.5 + n / 10_000
        one = decisions.candidate(label, score=score, ttft=40, outcome="hold", changes=changes)
        verdicts = [v.model_copy(update={"score": score}) for v in made.candidates[1].verdicts]
        found.append(one.model_copy(update={"verdicts": tuple(verdicts)}))
    return made.model_copy(update={"candidates": tuple(found), "winner": "variant_7"})


def test_of_many_candidates_charts_draw_those_a_person_asks_about() -> None:
    """The reference, the winner, the front, what was ruled out for how far it moved predictions, the best scores."""
    made = many(100)
    shown = [one.label for one in figures.featured(made, figures.axis_of(made))]
    assert figures.MOST_DRAWN == len(shown)
    assert {"baseline", "variant_3", "variant_5", "variant_7", "variant_98"} <= set(shown)
    few = decisions.decision()
    assert few.candidates == figures.featured(few, figures.axis_of(few))


def test_a_crowded_scatter_names_those_and_every_other_point_when_it_is_pointed_at() -> None:
    """All hundred points are there, with a title each; a dozen have a label; the page says which."""
    made = many(100)
    html, drawn = render(made, ReportConfig())
    svg = ET.fromstring(drawn.pareto.draw(860))
    assert (100, 100) == (len(list(svg.iter(f"{SVG}circle"))), len(list(svg.iter(f"{SVG}title"))))
    labels = [t.text for t in svg.iter(f"{SVG}text") if (t.text or "").startswith(("variant_", "baseline"))]
    assert figures.MOST_DRAWN == len(set(labels)) == len(labels)
    assert f"Charts draw {figures.MOST_DRAWN} of 100 candidates" in " ".join(html.split())
    assert "<summary>Comparisons of 88 more candidates</summary>" in html


def test_a_page_of_four_hundred_candidates_takes_no_longer_than_its_tables(tmp_path: Path) -> None:
    """Every one is in the table, and four times the candidates take at most some six times the time."""

    def seconds(count: int) -> float:
        made = many(count)
        begun = time.process_time()
        html, _ = render(made, ReportConfig(), decisions.requests(tmp_path / str(count), made, 2))
        taken = time.process_time() - begun
        assert 2 <= html.count(f"variant_{count - 2}")
        return taken

    seconds(20)  # imports
    few = seconds(100)
    assert seconds(400) < 6 * few + 1


def test_each_chart_is_written_light_as_png_and_both_ways_as_svg(tmp_path: Path) -> None:
    """PNG of twice the drawing's size, with ink on it; SVG that is well-formed and follows the reader's scheme."""
    made = decisions.decision()
    out = tmp_path / "out"
    out.mkdir()
    facts = run(
        ReportConfig(), out, decision=decisions.decided(tmp_path, made),
        latency=decisions.requests(tmp_path, made, 40), variants=decisions.variants(tmp_path, made),
    )  # fmt: skip
    names = {p.stem for p in (out / "charts").glob("*.svg")}
    assert names == {p.stem for p in (out / "charts").glob("*.png")}
    assert {"pareto", "forest", "latency-closed-4", "load-ttft-all", "layers"} == names
    assert len(names) == facts["charts"]
    for path in (out / "charts").glob("*.svg"):
        text = path.read_text()
        size = ET.fromstring(text)
        assert "prefers-color-scheme:dark" in text
        data = path.with_suffix(".png").read_bytes()
        assert b"\x89PNG" == data[:4]
        width, height = struct.unpack(">II", data[16:24])
        assert (2 * int(size.get("width", "0")), 2 * int(size.get("height", "0"))) == (width, height)
        assert 10 <= len(_shades(data))


def _shades(data: bytes) -> set[int]:
    """Bytes that a PNG's compressed rows are made of: a blank sheet has next to none."""
    at, rows = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            rows += data[at + 8 : at + 8 + length]
        at += 12 + length
    return set(zlib.decompress(rows))


def test_text_is_drawn_in_a_png(tmp_path: Path) -> None:
    """Words make another picture than none: a font was found."""

    def draw(words: str) -> bytes:
        return pictures.png(drawing.svg([drawing.text(10, 20, words)], 100, 30, "t"))

    assert draw("ink") != draw("")


def test_no_variable_is_left_for_readers_that_know_none() -> None:
    """Colours in the drawing that becomes a PNG are plain values; a label that looks like one stays a label."""
    made = decisions.decision()
    odd = made.candidates[1].model_copy(update={"label": "var(--odd)"})
    made = made.model_copy(update={"candidates": (made.candidates[0], odd, *made.candidates[2:])})
    text = drawing.plain(render(made, ReportConfig())[1].pareto.draw(860))
    assert set() == set(re.findall(r"var\(--(\w+)\)", text)) - {"odd"}
    assert "var(--odd)" in text
