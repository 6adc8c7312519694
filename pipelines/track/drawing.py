"""What charts are drawn from, as SVG text. Colours come from CSS variables, so a page sets the scheme."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from pipelines.track.axes import Box, Scale, text_width

COLOURS = 8
SHADES = 8
"""Steps of the one scale that heat maps have, from least to most."""
LIGHT = {
    "ink": "#1b2430", "soft": "#566272", "line": "#d5dbe3", "paper": "#fff",
    "good": "#146c43", "bad": "#b3261e", "warn": "#8a5a00",
    "c0": "#46515f", "c1": "#1d5fc4", "c2": "#b4491a", "c3": "#15754f",
    "c4": "#8436a8", "c5": "#946200", "c6": "#c2274f", "c7": "#0b7285",
    "h0": "#eaf2f8", "h1": "#cfe1ee", "h2": "#a9cde3", "h3": "#78b2d4",
    "h4": "#4b8fc0", "h5": "#3b68a8", "h6": "#45398a", "h7": "#3f0a52",
}  # fmt: skip
DARK = {
    "ink": "#e8edf4", "soft": "#a5b1c1", "line": "#39434f", "paper": "#151a21",
    "good": "#5fd39a", "bad": "#ff8a80", "warn": "#f0b649",
    "c0": "#b4bfcc", "c1": "#7fb0ff", "c2": "#ff9d6b", "c3": "#57d3a0",
    "c4": "#d49cf2", "c5": "#e6bd58", "c6": "#ff8aa8", "c7": "#5fcfe0",
    "h0": "#1f2c3a", "h1": "#21445f", "h2": "#256083", "h3": "#307fa6",
    "h4": "#4da0c0", "h5": "#83c1d0", "h6": "#bfdfd6", "h7": "#f8f6c4",
}  # fmt: skip
PRINT = LIGHT | {"ink": "#000", "soft": "#333", "line": "#bbb"}
FONT = 'font-family:system-ui,-apple-system,"Segoe UI","Helvetica Neue",Arial,"DejaVu Sans",sans-serif;font-size:13px'
RULES = """
svg.chart text{fill:var(--ink)}svg.chart .soft{fill:var(--soft)}svg.chart .grid{stroke:var(--line);stroke-width:1}
svg.chart .halo{paint-order:stroke;stroke:var(--paper);stroke-width:3.5px;stroke-linejoin:round}
svg.chart .back{fill:var(--paper)}svg.chart .strong{font-weight:650}svg.chart .small{font-size:12px}
""".strip()


def _declared(colours: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in colours.items())


STYLE = f"""
svg.chart{{{_declared(LIGHT)};{FONT}}}
@media (prefers-color-scheme:dark){{svg.chart{{{_declared(DARK)}}}}}
@media print{{svg.chart{{{_declared(PRINT)}}}}}
{RULES}
""".strip()


def number(value: float) -> str:
    """A tick's text: no needless zeros, thin spaces between thousands."""
    text = f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
    return text.replace(",", "\u202f").replace("-", "\u2212")


def standalone(chart: str) -> str:
    """Make a chart a file of its own: style inside, and a background."""
    return _file(chart, STYLE)


def plain(chart: str) -> str:
    """The same in light colours only, with none of CSS's variables, which few readers of SVG beside browsers know."""
    return re.sub(
        r"var\(--(\w+)\)", lambda name: LIGHT.get(name[1], name[0]), _file(chart, f"svg.chart{{{FONT}}}\n{RULES}")
    )


def _file(chart: str, style: str) -> str:
    head, body = chart.split(">", 1)
    inner = f'<style>{style}</style><rect class="back" width="100%" height="100%"/>'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}>{inner}{body}'


def svg(parts: Sequence[str], width: float, height: float, title: str) -> str:
    """Close a drawing, named for those who cannot see it."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    body = "\n".join(parts)
    named = f'class="chart" role="img" aria-label="{escape(title)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {named} {size}>{body}</svg>'


def colour_of(index: int) -> str:
    """A candidate's colour, as the page's scheme has it."""
    return f"var(--c{index % COLOURS})"


def text(x: float, y: float, words: str, style: str = "", *, anchor: str = "start", fill: str = "") -> str:
    """Words at a place."""
    place_at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    paint = f' style="fill:{fill}"' if fill else ""
    return f'<text class="{style}" {place_at}{paint}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, stroke: float, more: str = "") -> str:
    """A straight line."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{stroke}"{more}/>'


def mark(x: float, y: float, colour: int, hollow: bool, radius: float, told: str = "") -> str:
    """A dot, or a ring where it is no evidence; `told` is shown when it is pointed at."""
    fill = "var(--paper)" if hollow else colour_of(colour)
    shape = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="{colour_of(colour)}" stroke-width="2"'
    return f"<circle {shape}/>" if not told else f"<circle {shape}>{hover(told)}</circle>"


def rect(box: Box, fill: str, more: str = "", told: str = "") -> str:
    """A filled rectangle; `told` is shown when it is pointed at."""
    size = f'width="{box.right - box.left:.2f}" height="{box.bottom - box.top:.2f}"'
    shape = f'x="{box.left:.2f}" y="{box.top:.2f}" {size} fill="{fill}"{more}'
    return f"<rect {shape}/>" if not told else f"<rect {shape}>{hover(told)}</rect>"


def hover(told: str) -> str:
    """What browsers show of a shape that is pointed at."""
    return f"<title>{escape(told)}</title>"


def cut(text: str, room: float, size: float = 13) -> str:
    """Shorten a text that would not fit."""
    if text_width(text, size) <= room:
        return text
    keep = next((n for n in range(len(text) - 1, 0, -1) if text_width(text[:n] + "\u2026", size) <= room), 0)
    return text[:keep].rstrip() + "\u2026"


def grid_x(x: Scale, frame: Box, about: int) -> list[str]:
    """Upright lines with their values below."""
    parts = []
    for tick in x.ticks(about):
        parts.append(line(x(tick), frame.top, x(tick), frame.bottom, "var(--line)", 1))
        parts.append(text(x(tick), frame.bottom + 17, number(tick), "soft", anchor="middle"))
    return parts


def grid_y(y: Scale, frame: Box) -> list[str]:
    """Level lines with their values to the left."""
    parts = []
    for tick in y.ticks(5):
        parts.append(line(frame.left, y(tick), frame.right, y(tick), "var(--line)", 1))
        parts.append(text(frame.left - 6, y(tick) + 4, number(tick), "soft", anchor="end"))
    return parts


def legend(keys: Sequence[tuple[str, int, bool]], width: float) -> tuple[list[str], float]:
    """Lines with names, each (name, colour, dashed), and where the last of their rows is."""
    parts, x, y = [], 4.0, 16.0
    for label, colour, hollow in keys:
        wide = 34 + text_width(label, 13) + 14
        if x + wide > width and x > 4:
            x, y = 4.0, y + 21
        dash = ' stroke-dasharray="6 4"' if hollow else ""
        parts.append(line(x, y - 4, x + 24, y - 4, colour_of(colour), 2.4, dash))
        parts.append(text(x + 30, y, label))
        x += wide
    return parts, y
