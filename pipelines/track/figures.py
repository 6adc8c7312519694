"""What the charts and tables show, drawn from a decision: which points, rows and curves, and in what words."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from pipelines.decide import latencies, loadsections, pareto, phases
from pipelines.decide.interval import Interval
from pipelines.decide.model import Candidate, Decision, Verdict
from pipelines.decide.probed import Latency
from pipelines.track.charts import Curve, Point, Row, Span

WHOLE = "all"
MOST_DRAWN, MOST_NAMED = 12, 40
"""Candidates that a chart has room for, and points of the scatter whose names it has room for."""
NONE = "\u2014"
MOVED = ("perplexity", "divergence", "engine_loss")
"""Vetoes about how far predictions moved, which layers may explain."""
METRICS = {
    "ttft_ms": "time to first token (TTFT)",
    "tpot_ms": "time per output token (TPOT)",
    "e2e_ms": "end-to-end latency (E2E)",
}


@dataclass(frozen=True, slots=True)
class Axis:
    """The one latency figure that the chart and the gate speak of."""

    profile: str
    metric: str
    percentile: float

    @property
    def short(self) -> str:
        return f"p{self.percentile:g} {self.metric.removesuffix('_ms').upper()}"

    @property
    def title(self) -> str:
        return f"p{self.percentile:g} {METRICS.get(self.metric, self.metric)}, ms \u00b7 {self.profile} \u2190 better"


def axis_of(decision: Decision) -> Axis | None:
    """The gate's own latency figure; without one, the highest percentile up to 99 that most candidates have."""
    gate = decision.gate.get("latency")
    if isinstance(gate, dict) and {"profile", "metric", "percentile"} <= gate.keys():
        return Axis(str(gate["profile"]), str(gate["metric"]), float(gate["percentile"]))
    seen: dict[Axis, int] = {}
    for one in decision.candidates:
        for figure in one.latency:
            if figure.value is not None and figure.percentile <= 99:
                at = Axis(figure.profile, figure.metric, figure.percentile)
                seen[at] = seen.get(at, 0) + 1
    asked = next((one.speed for one in decision.candidates if one.speed is not None), None)
    wanted = (asked.profile, asked.metric) if asked else ("", "")
    return max(seen, key=lambda a: ((a.profile, a.metric) == wanted, seen[a], a.percentile), default=None)


def latency_at(candidate: Candidate, axis: Axis | None) -> Latency | None:
    """A candidate's figure on an axis, where it has one; of several phases and buckets the slowest."""
    found = latencies.at(candidate.latency, axis.profile, axis.metric, axis.percentile) if axis else None
    return found if found and found.value is not None else None


def featured(decision: Decision, axis: Axis | None) -> tuple[Candidate, ...]:
    """The candidates that charts draw: all, or of many the reference, the winner, the front, what was ruled out for how
    far it moved predictions, then the best mean scores."""
    if len(decision.candidates) <= MOST_DRAWN:
        return decision.candidates
    front = _front(decision, axis)

    def rank(one: Candidate) -> tuple[bool, bool, bool, bool, float]:
        moved = any(veto.kind in MOVED for veto in one.vetoes)
        score = math.inf if one.mean_score is None else -one.mean_score
        return not one.reference, one.label != decision.winner, one.label not in front, not moved, score

    kept = {one.label for one in sorted(decision.candidates, key=rank)[:MOST_DRAWN]}
    return tuple(one for one in decision.candidates if one.label in kept)


def colours(decision: Decision, drawn: Sequence[Candidate] = ()) -> dict[str, int]:
    """A colour per candidate, the reference always grey (0); those drawn come first, so that fewer share one."""
    found = {one.label: 0 for one in decision.candidates if one.reference}
    order = dict.fromkeys(one.label for one in (*drawn, *decision.candidates) if not one.reference)
    return found | {label: 1 + n % 7 for n, label in enumerate(order)}


def points(decision: Decision, axis: Axis | None) -> tuple[list[Point], list[str]]:
    """The scatter's points, and a sentence for each candidate that cannot be drawn."""
    shown = featured(decision, axis)
    colour, found, missing = colours(decision, shown), [], []
    drawn, named = _front(decision, axis), {one.label for one in shown}
    crowded = len(decision.candidates) > MOST_NAMED
    for one in decision.candidates:
        at = latency_at(one, axis)
        if one.mean_score is None or at is None or at.value is None:
            why = one.failure or ("no score" if one.mean_score is None else f"no {axis.short if axis else 'latency'}")
            missing.append(f"{one.label}: {why}")
            continue
        half = half_width(one)
        y = (
            Span(one.mean_score)
            if half is None
            else Span(one.mean_score, one.mean_score - half[0], one.mean_score + half[1])
        )
        found.append(
            Point(
                one.label,
                Span(at.value, *_ends(at.interval)),
                y,
                colour[one.label],
                hollow=not (one.native and at.evidence),
                front=one.label in drawn,
                strong=one.label == decision.winner,
                named=not crowded or one.label in named,
            )
        )
    return found, missing


def _front(decision: Decision, axis: Axis | None) -> frozenset[str]:
    """The front on the two figures that are drawn; a candidate's own `pareto` is about more of them."""
    found = []
    for one in decision.candidates:
        at = latency_at(one, axis)
        slow = None if at is None or at.value is None or not at.evidence else -at.value
        found.append(pareto.Point(one.label, (one.mean_score, slow), one.native and one.status == "ok"))
    return pareto.front(found)


def half_width(candidate: Candidate) -> tuple[float, float] | None:
    """How far the mean score may lie lower and higher: each eval set's interval of loss, added in squares.

    Eval sets are independent samples, so variances of their mean add. None where a set has no interval, or where
    the sets compared are not those that the mean score is over.
    """
    mine = [v for v in candidate.verdicts if v.against == "reference"]
    whole = [v for v in mine if v.slice == WHOLE and v.higher_is_better]
    scores = [v.score for v in whole if v.score is not None]
    sides = [side for v in whole if (side := _sides(v)) is not None]
    if not whole or not len(scores) == len(sides) == len(whole) or candidate.mean_score is None:
        return None
    if not math.isclose(math.fsum(scores) / len(scores), candidate.mean_score, rel_tol=1e-6):
        return None
    return math.hypot(*(a for a, _ in sides)) / len(sides), math.hypot(*(b for _, b in sides)) / len(sides)


def _sides(verdict: Verdict) -> tuple[float, float] | None:
    if verdict.interval is None or verdict.loss is None:
        return None
    return verdict.interval.upper - verdict.loss, verdict.loss - verdict.interval.lower


def rows(drawn: Sequence[Candidate]) -> list[Row]:
    """The forest plot: a heading per candidate, then its eval sets, then their slices."""
    found: list[Row] = []
    for one in drawn:
        if one.verdicts:
            found.append(Row(loadsections.shown(one, one.label)))
            ordered = sorted(one.verdicts, key=lambda v: (v.against != "reference", v.eval_set, v.slice != WHOLE))
            found += [_row(v) for v in ordered]
    return found


def _row(verdict: Verdict) -> Row:
    inner = verdict.slice != WHOLE
    text = f"{verdict.eval_set} \u00b7 {verdict.slice}" if inner else verdict.eval_set
    text += "" if verdict.against == "reference" else " \u00b7 champion"
    figures = f"{signed(verdict.loss)} {between(verdict.interval)} of {plain(verdict.margin)}"
    if verdict.loss is None or verdict.margin <= 0:
        return Row(text, None, figures, verdict.verdict, inner, verdict.gates)
    low, high = _ends(verdict.interval)
    over = verdict.margin
    span = Span(verdict.loss / over, None if low is None else low / over, None if high is None else high / over)
    return Row(text, span, figures, verdict.verdict, inner, verdict.gates)


def curves(decision: Decision, latency: Path, axis: Axis, drawn: Sequence[Candidate]) -> dict[str, list[Curve]]:
    """Each drawn candidate's sorted latencies on the axis's profile and metric, by phase and bucket.

    Failed requests are left out, and blocks that are no evidence, where others are.
    """
    colour, names = colours(decision, drawn), phases.names(decision.candidates)
    sampled = _samples(latency, axis, {one.keys.get("engine", "")[:16] for one in drawn})
    found: dict[str, list[Curve]] = {}
    groups = ((f.phase, f.bucket) for c in drawn for f in c.latency if f.profile == axis.profile)
    for phase, bucket in dict.fromkeys(groups):
        place = loadsections.place(axis.profile, phase, bucket, names)
        for one in drawn:
            out = _left_out(one, axis.profile)
            mine = sampled.get((one.keys.get("engine", "")[:16], phase, bucket), [])
            counted = [value for at, value in mine if at not in out]
            values = tuple(sorted(counted or [value for _, value in mine]))
            if len(values) >= 2:
                hollow = not one.native or not counted
                found.setdefault(place, []).append(Curve(one.label, values, colour[one.label], hollow=hollow))
    return found


def _samples(latency: Path, axis: Axis, engines: Set[str]) -> dict[tuple[str, int, str], list[tuple[int, float]]]:
    """Rounds and values of the requests answered, by engine, phase and bucket."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    columns = ["engine", "profile", "phase", "bucket", "round", "ok", axis.metric]
    table = pq.read_table(latency / "requests.parquet", columns=columns)
    ours = pc.is_in(table["engine"], value_set=pa.array(sorted(engines), pa.string()))
    asked = pc.and_(pc.equal(table["profile"], axis.profile), pc.and_(pc.equal(table["ok"], True), ours))
    table = table.filter(asked)
    found: dict[tuple[str, int, str], list[tuple[int, float]]] = {}
    for row in table.to_pylist():
        if row[axis.metric] is not None:
            found.setdefault((row["engine"], row["phase"], row["bucket"]), []).append((row["round"], row[axis.metric]))
    return found


def _left_out(one: Candidate, profile: str) -> frozenset[int]:
    """The rounds of a profile that are no evidence."""
    return frozenset(block.round for block in one.probed.left_out if block.profile == profile)


def _ends(interval: Interval | None) -> tuple[float | None, float | None]:
    return (None, None) if interval is None else (interval.lower, interval.upper)


def plain(value: float | None, digits: int = 3) -> str:
    """A number for a table, or a dash where there is none."""
    if value is None or not math.isfinite(value):
        return NONE
    text = f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"
    if "e" in text:
        text = f"{value:.6f}".rstrip("0").rstrip(".") if abs(value) >= 1e-6 or value == 0 else text
    return text.replace("-", "\u2212")


def signed(value: float | None) -> str:
    """A difference with its sign and three decimals."""
    return NONE if value is None or not math.isfinite(value) else f"{value:+.3f}".replace("-", "\u2212")


def between(interval: Interval | None, digits: int = 3) -> str:
    """An interval in brackets, or a dash."""
    if interval is None:
        return NONE
    return f"[{interval.lower:.{digits}f}, {interval.upper:.{digits}f}]".replace("-", "\u2212")


def size(value: int | None) -> str:
    """Bytes in MiB."""
    return NONE if value is None else f"{value / 2**20:,.0f} MiB"
