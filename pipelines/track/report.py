"""The report: one HTML file that needs nothing else, and the accuracy-latency chart as a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.config import Strict
from pipelines.decide import divergences, loadsections, probing
from pipelines.decide.engineloss import EngineLoss
from pipelines.decide.model import Decision
from pipelines.errors import EvidenceError
from pipelines.flow.store import Fact, manifest
from pipelines.probe.latency import FORMULAS
from pipelines.radar import RadarEntry
from pipelines.track import charts, drawing, figures, loads

if TYPE_CHECKING:
    from jinja2 import Environment

WIDE, NARROW = 860.0, 380.0
HERE = Path(__file__).parent
JUDGEMENT = {
    "loss": "how much worse than the reference on the same items, in the metric's own unit; positive is worse",
    "pass": "the upper end of the interval of loss lies below the margin (non-inferiority, tested one-sided)",
    "mean score": "unweighted mean over eval sets; its bar adds the intervals of loss in squares",
    "Pareto front": "no other native candidate is at least as good on both axes and better on one",
}


class ReportConfig(Strict):
    """How the report looks; what it says comes from the decision, but for the entries of the technology radar."""

    title: str = ""
    radar: tuple[RadarEntry, ...] = ()


def run(config: ReportConfig, out: Path, *, decision: Path, latency: Path | None = None) -> dict[str, Fact]:
    """Write report.html and pareto.svg from a decision and, where there are any, its measured requests."""
    made = read(decision)
    html, pareto = render(made, config, latency)
    (out / "report.html").write_text(html, encoding="utf-8")
    (out / "pareto.svg").write_text(pareto, encoding="utf-8")
    return {"outcome": made.outcome, "candidates": len(made.candidates), "html_bytes": len(html.encode())}


def read(decision: Path) -> Decision:
    """Read a decision artifact.

    Raises:
        EvidenceError: there is no readable decision.json.
    """
    path = decision / "decision.json"
    try:
        return Decision.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path}: no readable decision ({error}); run `quantgate decide` again") from None


def render(decision: Decision, config: ReportConfig, latency: Path | None = None) -> tuple[str, str]:
    """The page and the standalone chart, as text."""
    axis = figures.axis_of(decision)
    points, missing = figures.points(decision, axis)
    rows = figures.rows(decision)
    curves = figures.curves(decision, latency, axis) if latency is not None and axis else {}
    drifted = loads.drift(decision, axis.profile) if axis else None
    pareto = _pareto(points, axis)
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=config.title or decision.campaign,
            d=decision,
            headline=_headline(decision),
            radar=config.radar,
            axis=axis,
            at={one.label: f.value if (f := figures.latency_at(one, axis)) else None for one in decision.candidates},
            emulated=[one for one in decision.candidates if not one.native],
            chart_style=drawing.STYLE,
            pareto=_both(pareto) if points else "",
            missing=missing,
            forest=_both(lambda w: charts.forest(rows, title="Loss against the margin, each comparison", width=w))
            if rows
            else "",
            ecdf=[(place, _drawn(found, axis), found) for place, found in curves.items()],
            load_curves=[(one.title, _both(one.draw)) for one in loads.load_curves(decision, "ttft_ms")],
            drift=(drifted.title, _both(drifted.draw)) if drifted else None,
            tables=list(loadsections.tables(decision.candidates)),
            losses=_losses(decision),
            measured=_measured(latency),
            formulas=list((FORMULAS | JUDGEMENT | probing.FORMULAS | divergences.FORMULAS).items()),
            gate=list(_flat(decision.gate)),
        )
    )
    return page, drawing.standalone(pareto(WIDE)) if points else drawing.standalone(_empty())


def _headline(decision: Decision) -> str:
    """The headline without the outcome's own word, which the page shows as a badge."""
    text = decision.headline.removeprefix(decision.outcome.upper()).lstrip(": ")
    return text[:1].upper() + text[1:] if decision.winner is None else text


def _pareto(points: list[charts.Point], axis: figures.Axis | None) -> Callable[[float], str]:
    x_title = axis.title if axis else "latency"
    if axis:
        names = f"p{axis.percentile:g} {axis.metric.removesuffix('_ms').upper()}, ms, {axis.profile} (lower is better)"
        x_title = names
    title = f"Mean score against {axis.short if axis else 'latency'}: {', '.join(p.label for p in points)}"
    return lambda w: charts.scatter(
        points, x_title=x_title, y_title="mean score (higher is better)", title=title, width=w
    )


def _drawn(curves: list[charts.Curve], axis: figures.Axis | None) -> str:
    """The distributions of one group, in both sizes."""
    metric = axis.metric.removesuffix("_ms").upper() if axis else ""
    title = f"Share of requests within each {metric}"
    return _both(lambda w: charts.ecdf(curves, x_title=f"{metric}, ms", title=title, width=w))


def _empty() -> str:
    return charts.scatter(
        [
            charts.Point(
                "no candidate has both a score and a latency", charts.Span(1.0), charts.Span(1.0), 0, hollow=True
            )
        ],
        x_title="latency",
        y_title="mean score",
        title="No candidate has both a score and a latency",
    )


def _both(draw: Callable[[float], str]) -> str:
    """A chart drawn for wide pages and again for narrow ones, since text in a shrunken drawing cannot be read."""
    return f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'


def _losses(decision: Decision) -> dict[str, object]:
    """The tables of divergences: heads and rows, mean KL of the three losses first, then every figure."""
    found = list(divergences.lines(decision.candidates))
    rules = EngineLoss.model_validate(decision.gate.get("engine_loss") or {})
    return {
        "head": divergences.SUMMARY,
        "rows": [divergences.summary(line, rules) for line in found],
        "all_head": divergences.DETAILS,
        "all_rows": [row for line in found for row in divergences.details(line)],
    }


def _flat(data: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names and texts."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield prefix + name, ", ".join(str(v) for v in value)
        else:
            yield prefix + name, str(value)


def _measured(latency: Path | None) -> str:
    """When and on what the requests were measured, so that a reused measurement never passes for a fresh one."""
    if latency is None:
        return ""
    record = manifest(latency)
    device = record.facts.get("device") or ", ".join((record.device or {}).values())
    return f"Measured {record.facts.get('started') or record.started} on {device}"


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    words = {"plain": figures.plain, "signed": figures.signed, "between": figures.between, "size": figures.size}
    words |= {"noise": divergences.noise}
    found.filters.update(words)
    return found
