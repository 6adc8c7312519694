"""`compare --html`: a page that needs nothing else, with what differs, the forest of differences and latency curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.decide import contrast, contrastload, contrastread
from pipelines.decide.compared import Compared, Comparison, Delta
from pipelines.release.comparison import Distribution, Shown
from pipelines.track import charts, contrastcharts, contrasts, drawing, figures
from pipelines.track.charts import Curve

if TYPE_CHECKING:
    from jinja2 import Environment


HERE = Path(__file__).parent
WIDE, NARROW, HALF = 860.0, 380.0, 560.0
METRICS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


@dataclass(frozen=True, slots=True)
class Section:
    """One comparison as the page shows it."""

    comparison: Comparison
    colours: dict[str, int]
    forests: tuple[tuple[str, str], ...]
    curves: tuple[tuple[str, str], ...]

    def of(self, *kinds: str) -> list[tuple[str, list[Delta]]]:
        """The figures of some kinds by name, each part of all sides together."""
        mine = [d for d in self.comparison.deltas if d.kind in kinds]
        parts = list(dict.fromkeys((d.name, d.part) for d in mine))
        ordered = sorted(mine, key=lambda d: parts.index((d.name, d.part)))
        names = dict.fromkeys(d.name for d in mine)
        return [(name, [d for d in ordered if d.name == name]) for name in names]

    @property
    def marks(self) -> list[tuple[str, ...]]:
        """Why figures are marked, each set of reasons once; a figure has the number of its own."""
        return list(dict.fromkeys(d.marks for d in self.comparison.deltas if d.marks))

    def why(self, shown: Sequence[tuple[str, Sequence[Delta]]]) -> list[tuple[int, str]]:
        """The numbered reasons behind what a table shows."""
        used = {d.marks for _, rows in shown for d in rows}
        return [(n, "; ".join(some)) for n, some in enumerate(self.marks, start=1) if some in used]


def page(compared: Compared, shown: list[Shown], *, made: str, links: Mapping[int, str]) -> str:
    """Write the page. `made` says when; `links` are MLflow's own comparisons of the runs, where there are any."""
    sections = [_section(one) for one in shown]
    template = _environment().get_template("compare.html.j2")
    formulas = contrast.FORMULAS | contrastload.FORMULAS | contrastread.FORMULAS
    return template.render(
        title=title(compared), c=compared, sections=sections, made=made, links=links, say=contrasts,
        chart_style=drawing.STYLE, formulas=list(formulas.items()), load=contrasts.LOAD,
        colour=drawing.colour_of,
    )  # fmt: skip


def title(compared: Compared) -> str:
    """What is compared with what, in one line."""
    first = compared.comparisons[0] if len(compared.comparisons) == 1 else None
    names = [side.name for side in first.sides] if first else list(compared.asked)
    return f"{', '.join(names[1:])} against {names[0]}"


def _section(one: Shown) -> Section:
    colours = {side.name: n % drawing.COLOURS for n, side in enumerate(one.comparison.sides)}
    return Section(
        one.comparison, colours, tuple(_forests(one.comparison, colours)),
        tuple(_curves(one.distributions, colours)),
    )  # fmt: skip


def _forests(comparison: Comparison, colours: dict[str, int]) -> Iterator[tuple[str, str]]:
    for higher, told in ((True, "Scores, higher is better"), (False, "Scores, lower is better")):
        if lines := contrasts.score_lines(comparison, colours, higher=higher):
            yield told, _both(_differences(lines, told, better_right=higher))
    if lines := contrasts.ratio_lines(comparison, colours):
        told = "Latency as a multiple of the base's, lower is faster"
        yield told, _both(lambda w: contrastcharts.ratios(lines, title=told, better_right=False, width=w))


def _differences(lines: list[contrastcharts.Line], told: str, *, better_right: bool) -> Callable[[float], str]:
    return lambda w: contrastcharts.differences(lines, title=told, better_right=better_right, width=w)


def _curves(distributions: tuple[Distribution, ...], colours: dict[str, int]) -> Iterator[tuple[str, str]]:
    for one in distributions:
        curves = [
            Curve(name, values, colours[name], hollow=name in one.doubtful) for name, values in one.values.items()
        ]
        metric = METRICS[one.metric]
        yield f"{metric}, {one.place}", _both(_ecdf(curves, metric), HALF)


def _ecdf(curves: list[Curve], metric: str) -> Callable[[float], str]:
    title = f"Share of requests within each {metric}"
    return lambda w: charts.ecdf(curves, x_title=f"{metric}, ms", title=title, width=w)


def _both(draw: Callable[[float], str], wide: float = WIDE) -> str:
    """A chart drawn for wide pages and again for narrow ones."""
    return f'<div class="wide">{draw(wide)}</div><div class="narrow">{draw(NARROW)}</div>'


def write(path: Path, html: str) -> None:
    """Put the page where it was asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.filters.update({"signed": figures.signed, "between": figures.between})
    return found
