"""The report: one HTML file that needs nothing else, and its charts as files of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from pipelines.config import Strict
from pipelines.decide import divergences, loadsections, probing
from pipelines.decide.engineloss import EngineLoss
from pipelines.decide.markup import Table
from pipelines.decide.model import Candidate, Decision, Verdict
from pipelines.errors import EvidenceError
from pipelines.flow.store import Fact, manifest
from pipelines.probe.latency import FORMULAS
from pipelines.radar import RadarEntry
from pipelines.track import drawing, figures, pictures
from pipelines.track.memorysplit import Cache

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
CHARTS = "charts"
LONG_TABLE = 150
"""Rows of a table that a page shows at once; longer ones are folded."""
JUDGEMENT = {
    "loss": "how much worse than the reference on the same items, in the metric's own unit; positive is worse",
    "pass": "the upper end of the interval of loss lies below the margin (non-inferiority, tested one-sided)",
    "mean score": "unweighted mean over eval sets; its bar adds the intervals of loss in squares",
    "Pareto front": "no other native candidate is at least as good on both axes and better on one",
}


class ReportConfig(Strict):
    """How the report looks; what it says comes from the decision, but for estimates of caches (by candidate) and the
    entries of the technology radar."""

    title: str = ""
    radar: tuple[RadarEntry, ...] = ()
    caches: dict[str, Cache] = Field(default_factory=dict)


def run(
    config: ReportConfig, out: Path, *, decision: Path, latency: Path | None = None, variants: Sequence[Path] = ()
) -> dict[str, Fact]:
    """Write report.html and its charts from a decision and, where there are any, its requests and its variants."""
    made = read(decision)
    html, drawn = render(made, config, latency, variants)
    (out / "report.html").write_text(html, encoding="utf-8")
    count = pictures.write(drawn, out / CHARTS)
    size = len(html.encode())
    return {"outcome": made.outcome, "candidates": len(made.candidates), "html_bytes": size, "charts": count}


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


def render(
    decision: Decision, config: ReportConfig, latency: Path | None = None, variants: Sequence[Path] = ()
) -> tuple[str, pictures.Pictures]:
    """The page, as text, and the charts in it."""
    axis = figures.axis_of(decision)
    drawn = figures.featured(decision, axis)
    shown = pictures.pictures(decision, axis, drawn, latency=latency, variants=variants, caches=config.caches)
    labels = {one.label for one in drawn}
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
            doubtful=[one for one in drawn if one.doubt],
            drawn=drawn,
            folded=[one for one in decision.candidates if one.label not in labels],
            long_table=LONG_TABLE,
            chart_style=drawing.STYLE,
            charts=shown,
            tables=[_filled(table) for table in loadsections.tables(decision.candidates) if table.rows],
            losses=_losses(decision),
            measured=_measured(latency),
            formulas=list((FORMULAS | JUDGEMENT | probing.FORMULAS | divergences.FORMULAS).items()),
            gate=list(_flat(decision.gate)),
        )
    )
    return page, shown


def _headline(decision: Decision) -> str:
    """The headline without the outcome's own word, which the page shows as a badge."""
    text = decision.headline.removeprefix(decision.outcome.upper()).lstrip(": ")
    return text[:1].upper() + text[1:] if decision.winner is None else text


def _losses(decision: Decision) -> dict[str, object]:
    """The tables of divergences: heads and rows, mean KL of the three losses first, then every figure."""
    found = list(divergences.lines(decision.candidates))
    rules = EngineLoss.model_validate(decision.gate.get("engine_loss") or {})
    return {
        "head": divergences.SUMMARY,
        "rows": [divergences.summary(line, rules) for line in found],
        "all_head": divergences.DETAILS[:-1],  # what lies between stands below each row
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


def _judged(verdict: Verdict) -> str:
    """How a comparison was judged, and what would settle it."""
    more = "" if verdict.more_items is None or verdict.note else f"{verdict.more_items:,} more items would decide"
    said = ("" if verdict.gates else "shown only", verdict.method, verdict.note, more)
    return "; ".join(text for text in said if text and text != "none")


def _filled(table: Table) -> Table:
    """A table without the columns in which there is nothing; those that could have had figures are named above it."""
    columns = list(zip(*table.rows, strict=True))
    kept = [n for n, cells in enumerate(columns) if n == 0 or {*cells} - {"", "\u2013"}]
    lost = [name for name, cells in zip(table.head, columns, strict=True) if {*cells} == {"\u2013"}]
    told = f"{table.told} Not known of any: {', '.join(lost)}.".strip() if lost else table.told
    rows = [tuple(row[n] for n in kept) for row in table.rows]
    return Table(table.heading, tuple(table.head[n] for n in kept), rows, told)


def _explained(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of whom there is something to say beside figures."""
    return [c for c in candidates if c.reasons or c.failure or (c.speed is not None and c.speed.note)]


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    words = {"plain": figures.plain, "signed": figures.signed, "between": figures.between, "size": figures.size}
    words |= {"noise": divergences.noise, "judged": _judged, "explained": _explained}
    found.filters.update(words)
    return found
