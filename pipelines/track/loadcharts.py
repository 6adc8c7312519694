"""The probe's charts as SVG text: latency against load, and medians over the blocks of a probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.track import drawing
from pipelines.track.axes import Box, Scale, place, scale


@dataclass(frozen=True, slots=True)
class Dot:
    """One point of a line. `hollow` marks one that is no evidence; `told` is shown when it is pointed at."""

    x: float
    y: float
    hollow: bool = False
    told: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One candidate's points in order; `dashed` where none of them is evidence, `named` where each has its text."""

    label: str
    dots: tuple[Dot, ...]
    colour: int
    dashed: bool = False
    named: bool = False


def lines(
    given: Sequence[Line], *, x_title: str, y_title: str, title: str, width: float = 860, level: float | None = None
) -> str:
    """Draw lines through their points over common axes; `level` is drawn across where it is given.

    The height is by ratio where values lie more than twenty times apart, as latencies near saturation do.
    """
    narrow = width < 560
    keys, legend = drawing.legend(list(dict.fromkeys((one.label, one.colour, one.dashed) for one in given)), width)
    frame = Box(54, legend + 38, width - 14, legend + (280 if narrow else 330))
    dots = [dot for one in given for dot in one.dots]
    x = scale([d.x for d in dots], frame.left, frame.right, room=0.05)
    heights = [d.y for d in dots] + ([] if level is None else [level])
    y = scale(heights, frame.bottom, frame.top, room=0.1, log_allowed=True)
    parts = [*keys, *drawing.grid_x(x, frame, 4 if narrow else 7), *drawing.grid_y(y, frame)]
    if level is not None:
        parts.append(drawing.line(frame.left, y(level), frame.right, y(level), "var(--soft)", 1.3, _DASH))
    for one in given:
        parts += _line(one, x, y)
    parts += _names([one for one in given if one.named], dots, x, y, frame)
    parts.append(drawing.text(4, legend + 20, y_title, "soft"))
    parts.append(drawing.text(frame.right, frame.bottom + 36, x_title, "soft", anchor="end"))
    return drawing.svg(parts, width, frame.bottom + 44, title)


_DASH = ' stroke-dasharray="6 4"'


def _line(one: Line, x: Scale, y: Scale) -> list[str]:
    """The path through the points that are evidence, and every point."""
    path = " ".join(f"{x(d.x):.1f},{y(d.y):.1f}" for d in one.dots if one.dashed or not d.hollow)
    dash = _DASH if one.dashed else ""
    stroke = f'stroke="{drawing.colour_of(one.colour)}" stroke-width="2"{dash}'
    return [
        f'<polyline points="{path}" fill="none" {stroke}/>',
        *(drawing.mark(x(d.x), y(d.y), one.colour, d.hollow or one.dashed, 4, _told(one, d)) for d in one.dots),
    ]


def _names(given: Sequence[Line], every: Sequence[Dot], x: Scale, y: Scale, frame: Box) -> list[str]:
    """What each point of a named line is, clear of all points."""
    named = [dot for one in given for dot in one.dots if dot.told]
    others = [Box(x(d.x) - 5, y(d.y) - 5, x(d.x) + 5, y(d.y) + 5) for d in every]
    places = place([(x(d.x), y(d.y)) for d in named], [d.told for d in named], frame, 12, others)
    return [drawing.text(at, base, d.told, "halo soft small") for d, (at, base) in zip(named, places, strict=True)]


def _told(one: Line, dot: Dot) -> str:
    where = f", {dot.told}" if dot.told else ""
    return f"{one.label}{where}: {drawing.number(dot.x)}; {drawing.number(dot.y)}"
