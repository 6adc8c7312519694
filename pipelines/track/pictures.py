"""Every chart of the report: what it shows, how it is drawn at a width, and its copies as files (SVG and PNG)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from pipelines.decide.loadsections import METRIC
from pipelines.decide.model import Candidate, Decision
from pipelines.track import charts, drawing, errormaps, figures, heatmap, loads, memorysplit
from pipelines.track.errormaps import Maps
from pipelines.track.memorysplit import Cache, Split

WIDE, NARROW = 860.0, 380.0
PNG_ZOOM = 2
MAPS_TOGETHER = 4
"""Heat maps in one drawing of the page, so that it fits a printed sheet."""
NOT_DRAWN = "No candidate has both a score and a latency"
OF_ALL = (
    "A point is a load profile, named at the first candidate; lines join closed loops, and open loads, in the order of "
    "what was offered. Of several input lengths the slowest. A ring is no evidence."
)
OF_ONE = "A point is a phase of the load, in the order of what was offered. A ring is no evidence."
FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")


@dataclass(frozen=True, slots=True)
class Picture:
    """One chart. `pieces` are what a page shows of it where it is too tall for one sheet; `note` is its caption's."""

    name: str
    draw: Callable[[float], str]
    title: str = ""
    note: str = ""
    pieces: tuple[Callable[[float], str], ...] = ()

    @property
    def shown(self) -> tuple[str, ...]:
        """Each piece for wide pages and again for narrow ones, since text in a shrunken drawing cannot be read."""
        return tuple(
            f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'
            for draw in self.pieces or (self.draw,)
        )


@dataclass(frozen=True, slots=True)
class Pictures:
    """All charts of a decision; what nothing is known for is None or empty."""

    pareto: Picture
    points: int
    missing: tuple[str, ...]
    forest: Picture | None = None
    latency: tuple[Picture, ...] = ()
    loads: tuple[Picture, ...] = ()
    drift: Picture | None = None
    memory: Picture | None = None
    splits: tuple[Split, ...] = ()
    layers: Picture | None = None
    maps: Maps = field(default_factory=lambda: Maps((), ()))

    def __iter__(self) -> Iterator[Picture]:
        some = (self.pareto, self.forest, *self.latency, *self.loads, self.drift, self.memory, self.layers)
        yield from (picture for picture in some if picture is not None)


def pictures(
    decision: Decision,
    axis: figures.Axis | None,
    drawn: Sequence[Candidate],
    *,
    latency: Path | None = None,
    variants: Sequence[Path] = (),
    caches: Mapping[str, Cache] | None = None,
) -> Pictures:
    """The charts of a decision and, where they are given, of its requests and its variants' layers."""
    points, missing = figures.points(decision, axis)
    curves = figures.curves(decision, latency, axis, drawn) if latency is not None and axis else {}
    splits, maps = memorysplit.splits(drawn, caches or {}), errormaps.maps(drawn, variants)
    return Pictures(
        pareto=_pareto(points, axis) if points else Picture("pareto", lambda _: charts.nothing(NOT_DRAWN)),
        points=len(points),
        missing=tuple(missing),
        forest=_forest(drawn),
        latency=_unlike(_latency(place, found, axis) for place, found in curves.items()),
        loads=_unlike(_loads(decision, axis, drawn)),
        drift=_drift(decision, axis, drawn),
        memory=Picture("memory", lambda w: memorysplit.draw(splits, w)) if splits else None,
        splits=splits,
        layers=_layers(maps) if maps.drawn else None,
        maps=maps,
    )


def _pareto(points: list[charts.Point], axis: figures.Axis | None) -> Picture:
    x_title = "latency"
    if axis:
        x_title = f"p{axis.percentile:g} {_metric(axis)}, ms, {axis.profile} (lower is better)"
    title = f"Mean score against {axis.short if axis else 'latency'}: {', '.join(p.label for p in points)}"
    return Picture(
        "pareto",
        lambda w: charts.scatter(
            points, x_title=x_title, y_title="mean score (higher is better)", title=title, width=w
        ),
    )


def _metric(axis: figures.Axis) -> str:
    return axis.metric.removesuffix("_ms").upper()


def _forest(drawn: Sequence[Candidate]) -> Picture | None:
    """Whole as a file; on the page a drawing for each candidate."""
    title = "Loss against the margin, each comparison"

    def drawing_of(some: Sequence[Candidate]) -> Callable[[float], str]:
        rows = figures.rows(some)
        return lambda w: charts.forest(rows, title=f"{title}: {', '.join(c.label for c in some)}", width=w)

    judged = [one for one in drawn if one.verdicts]
    return Picture("forest", drawing_of(judged), pieces=tuple(drawing_of([c]) for c in judged)) if judged else None


def _latency(place: str, curves: list[charts.Curve], axis: figures.Axis | None) -> Picture:
    metric = _metric(axis) if axis else ""
    title = f"Share of requests within each {metric}, {place}"
    note = ", ".join(f"{c.label} {len(c.values)}" for c in curves) + "."
    note += " Dashed: no evidence." if any(c.hollow for c in curves) else ""
    return Picture(
        f"latency-{_slug(place)}",
        lambda w: charts.ecdf(curves, x_title=f"{metric}, ms", title=title, width=w),
        place,
        note,
    )


def _loads(decision: Decision, axis: figures.Axis | None, drawn: Sequence[Candidate]) -> Iterator[Picture]:
    """TTFT against load, and the gate's own metric where it is another one."""
    asked = [axis.metric] if axis else []
    for metric in dict.fromkeys(name for name in ("ttft_ms", *asked) if name in METRIC):
        every = loads.across(decision, metric, drawn)
        if every is not None:
            yield Picture(f"load-{metric.removesuffix('_ms')}-all", every.draw, every.title, OF_ALL)
        for chart in loads.load_curves(decision, metric, drawn):
            yield Picture(f"load-{_slug(chart.title)}", chart.draw, chart.title, OF_ONE)


def _drift(decision: Decision, axis: figures.Axis | None, drawn: Sequence[Candidate]) -> Picture | None:
    chart = loads.drift(decision, axis.profile, drawn) if axis else None
    return None if chart is None else Picture("drift", chart.draw, chart.title)


def _layers(maps: Maps) -> Picture:
    bounds = tuple(errormaps.BOUNDS.values())

    def drawing_of(some: Sequence[heatmap.HeatMap]) -> Callable[[float], str]:
        title = f"Error of each layer: {', '.join(one.label for one in some)}"
        return lambda w: heatmap.draw(some, bounds=bounds, title=title, width=w)

    every, n = maps.drawn, MAPS_TOGETHER
    together = tuple(drawing_of(every[start : start + n]) for start in range(0, len(every), n))
    return Picture("layers", drawing_of(maps.drawn), pieces=together)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _unlike(given: Iterable[Picture]) -> tuple[Picture, ...]:
    """Pictures whose names differ, so that each has a file."""
    found: dict[str, Picture] = {}
    for one in given:
        names = chain((one.name,), (f"{one.name}-{n}" for n in range(2, 10_000)))
        name = next(name for name in names if name not in found)
        found[name] = Picture(name, one.draw, one.title, one.note, one.pieces)
    return tuple(found.values())


def write(found: Iterable[Picture], out: Path) -> int:
    """Write each chart as SVG, light and dark, and as PNG, light; give their number."""
    out.mkdir()
    every = tuple(found)
    for picture in every:
        chart = picture.draw(WIDE)
        (out / f"{picture.name}.svg").write_text(drawing.standalone(chart), encoding="utf-8")
        (out / f"{picture.name}.png").write_bytes(png(chart))
    return len(every)


def png(chart: str) -> bytes:
    """A chart in pixels; its font is the one that comes with matplotlib, since a server may have none."""
    import resvg_py

    spec = find_spec("matplotlib")
    at = Path(spec.origin).parent / "mpl-data/fonts/ttf" if spec and spec.origin else None
    fonts = [str(at / name) for name in FONTS if at is not None and (at / name).is_file()]
    return resvg_py.svg_to_bytes(
        svg_string=drawing.plain(chart),
        zoom=PNG_ZOOM,
        font_files=fonts or None,
        skip_system_fonts=bool(fonts),
        font_family="DejaVu Sans",
        sans_serif_family="DejaVu Sans",
    )
