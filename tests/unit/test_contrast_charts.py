"""The forest of differences and the words around it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from pipelines.decide.compared import Delta
from pipelines.decide.interval import Interval
from pipelines.track import contrasts
from pipelines.track.charts import Span
from pipelines.track.contrastcharts import Line, cut, differences, ratios

SVG = "{http://www.w3.org/2000/svg}"


def drawn(text: str) -> ET.Element:
    return ET.fromstring(text)


def texts(chart: ET.Element) -> list[str]:
    return ["".join(t.itertext()) for t in chart.iter(f"{SVG}text")]


def dots(chart: ET.Element) -> list[tuple[float, str]]:
    return [(float(c.attrib["cx"]), c.attrib["fill"]) for c in chart.iter(f"{SVG}circle")]


@pytest.mark.parametrize("width", [380.0, 860.0])
def test_a_dot_lies_on_its_side_of_no_difference(width: float) -> None:
    """Better to the right where more is better; what is not like with like is a ring."""
    lines = [
        Line("intent (acc)"),
        Line("all items", Span(0.1, 0.05, 0.15), "+0.100", 1, word="better"),
        Line("odd", Span(-0.1, -0.2, 0.0), "", 2, hollow=True, inner=True),
    ]
    chart = drawn(differences(lines, title="t", better_right=True, width=width))
    (right, filled), (left, ring) = dots(chart)
    middle = (right + left) / 2  # equally far from 0
    assert left < middle < right
    assert ("var(--c1)", "var(--paper)") == (filled, ring)
    said = texts(chart)
    assert {"intent (acc)", "all items", "odd", "better", "\u2190 worse", "better \u2192"} <= set(said)


def test_a_ratio_and_its_inverse_are_equally_far_from_1() -> None:
    """The axis is even in logarithms; an interval beyond four times ends in an arrow, with no dot outside."""
    lines = [Line("a", Span(2.0, 1.5, 30.0)), Line("b", Span(0.5)), Line("c", Span(9.0))]
    chart = drawn(ratios(lines, title="t", better_right=False))
    (twice, _), (half, _) = dots(chart)
    one = next(float(t.attrib["x"]) for t in chart.iter(f"{SVG}text") if t.text == "\u00d71")
    assert pytest.approx(twice - one, abs=0.2) == one - half
    assert 2 == len(list(chart.iter(f"{SVG}path")))
    assert {"\u00d70.5", "\u00d72"} <= set(texts(chart))


def test_one_wild_interval_does_not_squeeze_the_others() -> None:
    """The axis follows the middle of them; the wild one is cut, and shows it."""
    lines = [Line(f"set {n}", Span(0.0, -0.1, 0.1)) for n in range(4)] + [Line("wild", Span(0.0, -6.0, 6.0))]
    chart = drawn(differences(lines, title="t", better_right=True))
    assert 2 == len(list(chart.iter(f"{SVG}path")))
    ends = [float(tick.replace("\u2212", "-")) for tick in texts(chart) if re.fullmatch(r"[+\u2212]?\d\.?\d*", tick)]
    assert 0.1 <= max(ends) <= 0.33


def test_a_text_too_long_is_cut() -> None:
    """With an ellipsis, to nothing where there is no room at all."""
    assert ("short", "delivery\u2026") == (cut("short", 200), cut("delivery and returns", 62))
    assert "" == cut("delivery", 2)


def delta(**given: object) -> Delta:
    return Delta.model_validate({"side": "b", "kind": "latency", "name": "p", "higher_is_better": False} | given)


def test_a_change_in_words() -> None:
    """A ratio where there is one, else the signed difference, each with its interval."""
    interval = Interval(lower=0.7, upper=1.25, confidence=0.95)
    assert "\u00d70.900 [0.700, 1.250]" == contrasts.change(delta(ratio=0.9, ratio_interval=interval))
    found = delta(difference=-0.25, interval=Interval(lower=-0.5, upper=0.1, confidence=0.95))
    assert "\u22120.250 [\u22120.500, 0.100]" == contrasts.change(found)
    assert "\u2014" == contrasts.change(delta())
    assert ("12.5%", "100 MiB", "\u2014") == (
        contrasts.value(0.125, "share"), contrasts.value(100 * 2**20, "bytes"), contrasts.value(None, "ms")
    )  # fmt: skip


def test_bytes_that_are_nearly_equal_are_the_same() -> None:
    """A file's header is no better or worse engine; a megabyte of a hundred is."""
    assert "no difference shown" == delta(kind="size", exact=True, difference=127.0, ratio=1.0000002).reading
    assert "worse" == delta(kind="size", exact=True, difference=1e6, ratio=1.01).reading
