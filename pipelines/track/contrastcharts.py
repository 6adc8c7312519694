"""The forest plot of differences, or of ratios, each side in its colour: SVG text from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pipelines.track import drawing
from pipelines.track.axes import Scale, text_width, ticks
from pipelines.track.charts import Span

WIDEST = 3.0
"""How many times as far as the middle one an axis of differences goes at most."""
MOST = 4.0
"""No axis of ratios goes beyond this, or below one over it."""
RATIOS = (1.0, 0.5, 2.0, 0.25, 4.0, 0.67, 1.5, 0.8, 1.25, 0.9, 1.1, 0.95, 1.05)
"""What an axis of ratios may name; of two that are too near each other the first."""
TONES = {"better": "var(--good)", "worse": "var(--bad)"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the plot; without a span it is a heading. `side` names whose it is, where there are several."""

    text: str
    span: Span | None = None
    figures: str = ""
    colour: int = 0
    hollow: bool = False
    inner: bool = False
    word: str = ""
    side: str = ""


def differences(lines: Sequence[Line], *, title: str, better_right: bool, width: float = 860) -> str:
    """Differences around 0; an interval that is many times as long as most ends in an arrow."""
    reach = [max(map(abs, one.span.ends)) for one in lines if one.span]
    far = min(max(reach), WIDEST * median(reach)) * 1.08 if any(reach) else 1.0
    far = far or max(reach)
    return _forest(lines, Scale(-far, far, *_plot(lines, width)), 0.0, ticks(-far, far, 4), title, better_right, width)


def ratios(lines: Sequence[Line], *, title: str, better_right: bool, width: float = 860) -> str:
    """Ratios around 1, evenly by their logarithm; what goes beyond four times ends in an arrow."""
    ends = [end for one in lines if one.span for end in one.span.ends if end > 0]
    far = min(MOST, max((math.exp(abs(math.log(end))) for end in ends), default=1.1) * 1.03)
    x = Scale(1.0 / far, far, *_plot(lines, width), log=True)
    shown: list[float] = []
    for tick in RATIOS:
        if x.low <= tick <= x.high and all(abs(x(tick) - x(other)) > 40 for other in shown):
            shown.append(tick)
    return _forest(lines, x, 1.0, shown, title, better_right, width)


def _narrow(width: float) -> bool:
    return width < 560


def _plot(lines: Sequence[Line], width: float) -> tuple[float, float]:
    """Where the axis begins and ends: on wide pages between the names, which may be two, and the figures."""
    names = 0.38 if any(one.side for one in lines) else 0.3
    return (22.0, width - 22.0) if _narrow(width) else (width * names, width * 0.665)


def _forest(
    lines: Sequence[Line], x: Scale, none: float, shown: Sequence[float], title: str, better_right: bool, width: float
) -> str:
    step, head = (38.0, 44.0) if _narrow(width) else (24.0, 44.0)
    bottom = head + step * len(lines) + 4
    parts = []
    for tick in shown:
        colour, stroke = ("var(--ink)", 1.4) if tick == none else ("var(--line)", 1.0)
        parts.append(drawing.line(x(tick), head - 8, x(tick), bottom, colour, stroke))
        parts.append(drawing.text(x(tick), head - 14, _tick(tick, log=x.log), "soft", anchor="middle"))
    left, right = ("worse", "better") if better_right else ("better", "worse")
    parts.append(drawing.text(x.start, 14, f"\u2190 {left}", "soft"))
    parts.append(drawing.text(x.end, 14, f"{right} \u2192", "soft", anchor="end"))
    for n, one in enumerate(lines):
        parts += _line(one, x, head + step * n, step, width)
    return drawing.svg(parts, width, bottom + 6, title)


def _tick(tick: float, *, log: bool) -> str:
    return f"\u00d7{tick:g}" if log else ("+" if tick > 0 else "") + drawing.number(tick)


def _line(one: Line, x: Scale, top: float, step: float, width: float) -> list[str]:
    narrow = _narrow(width)
    if one.span is None:
        return [drawing.text(4, top + step - (10 if narrow else 5), one.text, "strong")]
    y = top + (29 if narrow else step / 2 + 4)
    indent, base = (26 if one.inner else 14), top + 15 if narrow else y + 4
    tone = TONES.get(one.word, "var(--soft)")
    word = one.word if one.word in TONES else ""  # that there is none to be seen, the line says
    text = " \u00b7 ".join(filter(None, (one.text, one.side))) if narrow else one.text
    room = (width - indent - 16 - text_width(word, 13)) if narrow else x.start - indent - 18
    room -= 0.0 if narrow else text_width(one.side, 13)
    parts = [drawing.text(indent, base, cut(text, room), "halo soft" if one.inner else "halo")]
    if not narrow and one.side:
        parts.append(drawing.text(x.start - 8, base, one.side, "halo soft", anchor="end"))
    parts += _span(one, one.span, x, y)
    if narrow:
        return [*parts, drawing.text(width - 6, base, word, "halo", anchor="end", fill=tone)]
    parts.append(drawing.text(x.end + 14, base, one.figures))
    return [*parts, drawing.text(width - 4, base, word, anchor="end", fill=tone)]


def _span(one: Line, span: Span, x: Scale, y: float) -> list[str]:
    """An interval and its dot, cut at the ends of the axis with an arrow head where it goes on."""
    colour, (low, high) = drawing.colour_of(one.colour), span.ends
    seen = [min(max(end, x.low), x.high) for end in (low, high)]
    parts = [drawing.line(x(seen[0]), y, x(seen[1]), y, colour, 2.2)]
    for end, edge, way in ((low, x.low, -1), (high, x.high, 1)):
        if (end - edge) * way > 0:
            tip = x(edge)
            parts.append(f'<path d="M{tip + 6 * way:.1f},{y:.1f} l{-7 * way},-4.5 v9 z" style="fill:{colour}"/>')
    if x.low <= span.value <= x.high:
        parts.append(drawing.mark(x(span.value), y, one.colour, one.hollow, 3.4 if one.inner else 4.6))
    return parts


def cut(text: str, room: float) -> str:
    """Shorten a text that would not fit."""
    if text_width(text, 13) <= room:
        return text
    keep = next((n for n in range(len(text) - 1, 0, -1) if text_width(text[:n] + "\u2026", 13) <= room), 0)
    return text[:keep].rstrip() + "\u2026" if keep else ""
