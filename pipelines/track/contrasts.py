"""A comparison in words and lines: one way to say a figure's change, for the terminal, the page and its charts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipelines.decide.compared import Comparison, Delta, Refusal
from pipelines.decide.gate import OVERALL
from pipelines.decide.interval import Interval
from pipelines.track import figures
from pipelines.track.charts import Span
from pipelines.track.contrastcharts import Line

LOAD = ("latency", "throughput", "memory", "energy", "cost")
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")
HEADLINE = ("by request", "p99")
"""What of a latency is said first."""


def value(amount: float | None, unit: str) -> str:
    """A figure of one side."""
    if amount is None:
        return figures.NONE
    if unit == "bytes":
        return figures.size(round(amount))
    if unit == "share":
        return f"{amount:.1%}"
    return figures.plain(amount, 4 if unit not in ("ms", "tokens/s") else 3)


def change(delta: Delta) -> str:
    """The change with its interval: a ratio where there is one, else the difference."""
    if delta.ratio is not None:
        return f"\u00d7{times(delta.ratio)}" + (f" {span(delta.ratio_interval)}" if delta.ratio_interval else "")
    if delta.difference is None:
        return figures.NONE
    return figures.signed(delta.difference) + (f" {figures.between(delta.interval)}" if delta.interval else "")


def step(delta: Delta) -> str:
    """The difference with its interval, in the figure's own unit, where that says more than the ratio."""
    if delta.unit != "ms" or delta.difference is None:
        return figures.NONE
    shown = f"{delta.difference:+.3g}".replace("-", "\u2212")
    if delta.interval is None:
        return shown
    low, high = (f"{end:.3g}".replace("-", "\u2212") for end in (delta.interval.lower, delta.interval.upper))
    return f"{shown} [{low}, {high}]"


def times(ratio: float) -> str:
    """A ratio; three decimals near 1, from which it has to be told."""
    if 0.2 <= ratio < 5:
        return f"{ratio:.3f}"
    return f"{ratio:.3g}" if ratio < 1000 else f"{ratio:.1e}"


def span(interval: Interval) -> str:
    return f"[{times(interval.lower)}, {times(interval.upper)}]"


def count(delta: Delta) -> str:
    """What an interval is taken over."""
    what = {"score": "items", "perplexity": "windows", "divergence": "windows"}.get(delta.kind, "rounds")
    what = what.removesuffix("s") if delta.count == 1 else what
    shown = "" if delta.count is None else f"{delta.count} {what}"
    return f"{shown}, {delta.clusters} clusters" if delta.clusters else shown


def figure(delta: Delta) -> str:
    """What a figure is called in a list of all of them."""
    name = {"score": delta.name, "perplexity": f"perplexity of {delta.name}"}.get(delta.kind, delta.name)
    part = "" if delta.kind == "score" and delta.part == OVERALL else delta.part
    unit = f" ({delta.unit})" if delta.kind == "score" and not part else ""
    return f"{name}: {part}" if part else f"{name}{unit}"


def brief(comparison: Comparison, side: str) -> list[Delta]:
    """What the terminal shows of one side; the document and the page hold everything."""
    mine = [d for d in comparison.deltas if d.side == side]
    return [d for d in mine if d.kind != "latency" or d.part.endswith(HEADLINE)]


def shortened(text: str | None) -> str:
    """A value of what differs; of a digest its beginning, of a date no zone, a dash for what is not there."""
    if text is None:
        return figures.NONE
    if DATE.fullmatch(text):
        return text[:19].replace("T", " ")
    return f"{text[:12]}\u2026" if len(text) == 64 and set(text) <= set("0123456789abcdef") else text


def refused(refusal: Refusal) -> str:
    """A refusal in one line."""
    return f"{refusal.kind} {refusal.name}, {refusal.side}: {'; '.join(refusal.reasons)}"


def score_lines(comparison: Comparison, colours: dict[str, int], *, higher: bool) -> list[Line]:
    """The forest of score differences that go the same way: a heading per eval set, a line per slice and side."""
    scores = [d for d in comparison.deltas if d.kind == "score" and d.higher_is_better is higher]
    found: list[Line] = []
    for name in dict.fromkeys(d.name for d in scores):
        mine = [d for d in scores if d.name == name]
        found.append(Line(f"{name} ({mine[0].unit})"))
        parts = dict.fromkeys(d.part for d in mine)
        for part in parts:
            rows = [d for d in mine if d.part == part]
            text = "all items" if part == OVERALL else part
            found += _lines(rows, text, comparison, colours, inner=part != OVERALL)
    return found


def ratio_lines(comparison: Comparison, colours: dict[str, int]) -> list[Line]:
    """The forest of latency ratios: a heading per load, a line per figure and side."""
    latencies = [d for d in comparison.deltas if d.kind == "latency" and d.part.endswith(HEADLINE)]
    found: list[Line] = []
    for name in dict.fromkeys(d.name for d in latencies):
        mine = [d for d in latencies if d.name == name]
        found.append(Line(name))
        for part in dict.fromkeys(d.part for d in mine):
            rows = [d for d in mine if d.part == part]
            found += _lines(rows, part, comparison, colours, inner=not part.endswith(HEADLINE[0]))
    return found


def _lines(
    rows: Sequence[Delta], text: str, comparison: Comparison, colours: dict[str, int], *, inner: bool
) -> Iterator[Line]:
    several = len(comparison.sides) > 2
    for n, d in enumerate(rows):
        at, interval = (d.ratio, d.ratio_interval) if d.ratio is not None else (d.difference, d.interval)
        if at is not None:
            ends = (None, None) if interval is None else (interval.lower, interval.upper)
            yield Line(
                text if n == 0 else "", Span(at, *ends), change(d), colours[d.side], hollow=bool(d.marks),
                inner=inner, word=d.reading, side=d.side if several else "",
            )  # fmt: skip
