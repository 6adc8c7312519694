"""The report's charts of accuracy and latency as SVG text, from plain numbers."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.track import drawing
from pipelines.track.axes import Box, Scale, place, scale, text_width


@dataclass(frozen=True, slots=True)
class Span:
    """A value with its confidence interval, where there is one."""

    value: float
    lower: float | None = None
    upper: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        low = self.value if self.lower is None else min(self.lower, self.value)
        return low, self.value if self.upper is None else max(self.upper, self.value)


@dataclass(frozen=True, slots=True)
class Point:
    """One candidate in the scatter. `hollow` marks a figure that is no evidence; `strong` the winner.

    Only a `named` one has its label and its bars beside it; every one is named when it is pointed at.
    """

    label: str
    x: Span
    y: Span
    colour: int
    hollow: bool = False
    front: bool = False
    strong: bool = False
    named: bool = True

    @property
    def told(self) -> str:
        """What is shown when it is pointed at."""
        no_evidence = ", no evidence" if self.hollow else ""
        return f"{self.label}: {drawing.number(self.x.value)}{no_evidence}; {drawing.number(self.y.value)}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the forest plot, in units of its margin; a row without a span is a heading."""

    text: str
    span: Span | None = None
    figures: str = ""
    verdict: str = ""
    inner: bool = False
    decides: bool = True

    @property
    def word(self) -> str:
        """The verdict as it is printed: in brackets where it decides nothing."""
        return self.verdict if self.decides else f"({self.verdict})"


@dataclass(frozen=True, slots=True)
class Curve:
    """A sample of which the share below each value is drawn; `values` are sorted."""

    label: str
    values: tuple[float, ...]
    colour: int
    hollow: bool = False


def scatter(points: Sequence[Point], *, x_title: str, y_title: str, title: str, width: float = 860) -> str:
    """Accuracy (y, higher is better) against latency (x, lower is better): labelled points and the Pareto front."""
    narrow = width < 560
    frame = Box(46 if narrow else 58, 30, width - 14, (340 if narrow else 420) - 44)
    across = [v for p in points for v in (p.x.ends if p.named else (p.x.value,))]
    upright = [v for p in points for v in (p.y.ends if p.named else (p.y.value,))]
    x = scale(across, frame.left, frame.right, room=0.1, log_allowed=True)
    y = scale(upright, frame.bottom, frame.top, room=0.1)
    parts = [*drawing.grid_x(x, frame, 4 if narrow else 7), *drawing.grid_y(y, frame)]
    parts.append(drawing.text(frame.left - (38 if narrow else 44), 16, y_title, "soft"))
    parts.append(drawing.text(frame.right, frame.bottom + 36, x_title, "soft", anchor="end"))
    parts.append(_front([p for p in points if p.front], x, y, frame))
    named = [p for p in points if p.named]
    for p in named:
        parts += _bars(p, x, y)
    for p in points:
        radius = 7 if p.strong else 5.5 if p.named else 3.5
        parts.append(drawing.mark(x(p.x.value), y(p.y.value), p.colour, p.hollow, radius, p.told))
    parts += _labels(named, points, x, y, frame)
    return drawing.svg(parts, width, frame.bottom + 44, title)


def nothing(words: str, width: float = 860) -> str:
    """A drawing that says why it is empty."""
    return drawing.svg([drawing.text(16, 44, words, "soft")], width, 80, words)


def forest(rows: Sequence[Row], *, title: str, width: float = 860) -> str:
    """Loss of each comparison over its margin: 0 is no loss, 1 is the margin, an interval left of 1 is a pass."""
    narrow = width < 560
    step, head = (40, 44) if narrow else (25, 44)
    left, right = (14.0, width - 14) if narrow else (width * 0.30, width * 0.60)
    x = Scale(-2.0, 3.0, left, right)
    bottom = head + step * len(rows) + 4
    parts = []
    for tick in (-2, -1, 0, 1, 2, 3):
        colour, stroke = ("var(--bad)", 1.6) if tick == 1 else ("var(--soft)", 1.3) if tick == 0 else ("var(--line)", 1)
        dash = ' stroke-dasharray="5 3"' if tick == 1 else ""
        parts.append(drawing.line(x(tick), head - 8, x(tick), bottom, colour, stroke, dash))
        text = "margin" if tick == 1 else drawing.number(tick)
        parts.append(drawing.text(x(tick), head - 14, text, "soft", anchor="middle"))
    parts.append(drawing.text(x(-2), 14, "\u2190 better", "soft"))
    parts.append(drawing.text(x(3), 14, "worse \u2192", "soft", anchor="end"))
    for n, row in enumerate(rows):
        parts += _forest_row(row, x, head + step * n, step, width, narrow)
    return drawing.svg(parts, width, bottom + 6, title)


def ecdf(curves: Sequence[Curve], *, x_title: str, title: str, width: float = 860, points: int = 160) -> str:
    """The share of requests answered within each latency, one curve per candidate, with guides at p50, p95 and p99."""
    narrow = width < 560
    keys, legend = drawing.legend([(c.label, c.colour, c.hollow) for c in curves], width)
    frame = Box(46, legend + 12, width - 14, legend + (270 if narrow else 330))
    ends = [v for c in curves for v in (c.values[0], c.values[min(len(c.values) - 1, int(len(c.values) * 0.999))])]
    x = scale(ends, frame.left, frame.right, room=0.03, log_allowed=True)
    y = Scale(0.0, 1.0, frame.bottom, frame.top)
    parts = [*keys, *drawing.grid_x(x, frame, 4 if narrow else 7)]
    for share, text in ((0.0, "0%"), (0.25, "25%"), (0.5, "p50"), (0.75, "75%"), (0.95, "p95"), (0.99, "p99")):
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>'
        )
        drop = 11 if share == 0.95 else 2 if share == 0.99 else 4
        parts.append(drawing.text(frame.left - 6, y(share) + drop, text, "soft", anchor="end"))
    for curve in curves:
        path = " ".join(f"{x(v):.1f},{y(s):.1f}" for v, s in _steps(curve.values, points) if x.low <= v <= x.high)
        dash = ' stroke-dasharray="6 4"' if curve.hollow else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{drawing.colour_of(curve.colour)}" stroke-width="2"{dash}>'
            f"{drawing.hover(curve.label)}</polyline>"
        )
    parts.append(drawing.text(frame.right, frame.bottom + 36, x_title, "soft", anchor="end"))
    return drawing.svg(parts, width, frame.bottom + 44, title)


def _bars(p: Point, x: Scale, y: Scale) -> list[str]:
    (x_low, x_high), (y_low, y_high), colour = p.x.ends, p.y.ends, drawing.colour_of(p.colour)
    faint = ' stroke-opacity="0.55"'
    across = drawing.line(x(x_low), y(p.y.value), x(x_high), y(p.y.value), colour, 1.6, faint)
    return [across, drawing.line(x(p.x.value), y(y_low), x(p.x.value), y(y_high), colour, 1.6, faint)]


def _front(front: Sequence[Point], x: Scale, y: Scale, frame: Box) -> str:
    """The staircase of what no other candidate beats on both axes."""
    if not front:
        return ""
    ordered = sorted(front, key=lambda p: (p.x.value, -p.y.value))
    steps = [(x(ordered[0].x.value), frame.bottom)]
    for p in ordered:
        steps += [(x(p.x.value), steps[-1][1]), (x(p.x.value), y(p.y.value))]
    steps.append((frame.right, steps[-1][1]))
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in steps)
    return f'<polyline points="{path}" fill="none" stroke="var(--soft)" stroke-width="1.4" stroke-dasharray="2 4"/>'


def _labels(points: Sequence[Point], every: Sequence[Point], x: Scale, y: Scale, frame: Box) -> list[str]:
    anchors = [(x(p.x.value), y(p.y.value)) for p in points]
    bars = [b for p in points for b in _bar_boxes(p, x, y)]
    others = [(x(p.x.value), y(p.y.value)) for p in every if not p.named]
    bars += [Box(ax - 4, ay - 4, ax + 4, ay + 4) for ax, ay in others]
    parts = []
    for p, (ax, ay), (left, base) in zip(
        points, anchors, place(anchors, [p.label for p in points], frame, 13, bars), strict=True
    ):
        far = abs(base - 4 - ay) > 24
        if far:
            parts.append(
                drawing.line(ax, ay, left + 6 if left > ax else ax, base - 4, drawing.colour_of(p.colour), 0.8)
            )
        parts.append(
            drawing.text(left, base, p.label, "halo strong" if p.strong else "halo", fill=drawing.colour_of(p.colour))
        )
    return parts


def _bar_boxes(p: Point, x: Scale, y: Scale) -> list[Box]:
    (x_low, x_high), (y_low, y_high) = p.x.ends, p.y.ends
    at_x, at_y = x(p.x.value), y(p.y.value)
    return [Box(x(x_low), at_y - 2, x(x_high), at_y + 2), Box(at_x - 2, y(y_high), at_x + 2, y(y_low))]


def _forest_row(row: Row, x: Scale, top: float, step: float, width: float, narrow: bool) -> list[str]:
    line = top + (30 if narrow else step / 2 + 4)
    if row.span is None and not row.figures:
        return [drawing.text(4, top + step - (14 if narrow else 4), row.text, "strong")]
    indent = 26 if row.inner else 14
    room = width - indent - 24 - text_width(row.word, 13) if narrow else x.start - indent - 8
    style = "halo soft" if row.inner else "halo"
    parts = [drawing.text(indent, top + 14 if narrow else line + 4, drawing.cut(row.text, room), style)]
    tone = {"pass": "var(--good)", "inconclusive": "var(--warn)"}.get(row.verdict, "var(--bad)")
    if row.span is not None:
        parts += _forest_span(row.span, x, line, tone, row.inner)
    if narrow:
        return [*parts, drawing.text(width - 8, top + 14, row.word, "halo", anchor="end", fill=tone)]
    return [
        *parts,
        drawing.text(x.end + 14, line + 4, row.figures),
        drawing.text(width - 4, line + 4, row.word, anchor="end", fill=tone),
    ]


def _forest_span(span: Span, x: Scale, y: float, tone: str, inner: bool) -> list[str]:
    """An interval and its dot, cut at the axis ends with an arrow head where it goes on."""
    low, high = span.ends
    seen = [min(max(v, x.low), x.high) for v in (low, high)]
    parts = [drawing.line(x(seen[0]), y, x(seen[1]), y, tone, 2.2)]
    for value, end, way in ((low, x.low, -1), (high, x.high, 1)):
        if (value - end) * way > 0:
            tip = x(end)
            parts.append(f'<path d="M{tip + 6 * way:.1f},{y:.1f} l{-7 * way},-4.5 v9 z" fill="{tone}"/>')
    if x.low <= span.value <= x.high:
        radius = 3.6 if inner else 4.8
        parts.append(f'<circle cx="{x(span.value):.1f}" cy="{y:.1f}" r="{radius}" fill="{tone}"/>')
    return parts


def _steps(values: Sequence[float], points: int) -> list[tuple[float, float]]:
    """A thinned empirical distribution that keeps the tail: shares are exact at every point kept."""
    n = len(values)
    shares = [k / points for k in range(1, points + 1)]
    kept = sorted({min(n, max(1, round(s * n))) for s in shares} | set(range(max(1, int(n * 0.98)), n + 1)))
    exact = [(values[k - 1], bisect.bisect_right(values, values[k - 1]) / n) for k in kept]
    return [(values[0], 0.0), *exact]
