"""What a campaign and its candidates look like in MLflow: names, values and texts, without MLflow.

Differences of quality are `delta`: candidate - reference with more always better, so a loss is negative whatever the
metric's direction. A candidate passes where `lower_bound` lies above -`margin`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

from pipelines.decide import licences
from pipelines.decide.model import Candidate, Decision, Verdict
from pipelines.divergence.figures import Row
from pipelines.intake.licence import UNKNOWN
from pipelines.quantize.scheme import Scheme, parse
from pipelines.track import drawing, figures

NOTE = "mlflow.note.content"
RUN_COLOUR = "mlflow.runColor"
NOTE_CHARACTERS = 7800
DOUBTS = {
    "": "",
    "emulated": " (emulated: its latency is no evidence)",
    "remote": " (remote: its format is not known; its latency is evidence about that server alone)",
}
PARAM_CHARACTERS = 500
RATES = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s", "goodput_per_s")
BUCKETS = {"<=128": "in_to_128", "128-1024": "in_to_1024", "1024-8192": "in_to_8192", ">8192": "in_above_8192"}
"""Buckets of input lengths as MLflow's names can have them."""


def metric_name(*parts: str) -> str:
    """A name with slashes between its parts; what MLflow does not take becomes an underscore."""
    return "/".join(re.sub(r"[^A-Za-z0-9_\-. ]", "_", part) for part in parts)


def latency_name(profile: str, metric: str, percentile: float, place: Sequence[str] = ()) -> str:
    """`latency/<profile>/ttft_p99_ms`, with the phase and bucket between them where there are several."""
    return metric_name("latency", profile, *place, f"{metric.removesuffix('_ms')}_p{percentile:g}_ms")


def params(candidate: Candidate, decision: Decision, calibration: str = "") -> dict[str, str]:
    """What the candidate is. `calibration` is the key of the set it was made with, "none" where that was no data."""
    scheme = _scheme(candidate.scheme)
    given = {
        "method": candidate.quantizer,
        "scheme": candidate.scheme,
        "group_size": str(scheme.group_size) if scheme is not None and scheme.group_size else "",
        "library": candidate.library,
        "target": candidate.target,
        "variant": candidate.variant,
        "engine": candidate.engine,
        "calibration": calibration,
        "device": decision.conditions.get("device", ""),
        "native": str(candidate.native).lower(),
        "native_note": candidate.native_note,
    }
    return {name: text[:PARAM_CHARACTERS] for name, text in given.items() if text}


def _scheme(name: str) -> Scheme | None:
    """The scheme of that name; None for a name that is no scheme of ours, as a server elsewhere may state."""
    try:
        return parse(name)
    except ValueError:
        return None


def metrics(candidate: Candidate, decision: Decision | None = None) -> dict[str, float]:
    """What was found about it. A figure that is missing or not finite is left out, never stored as another number."""
    found: dict[str, float | None] = {
        "quality/mean_score": candidate.mean_score,
        "perplexity": candidate.perplexity,
        "engine_kl": candidate.engine_kl,
        "size/variant_gib": _gib(candidate.variant_bytes),
        "size/engine_gib": _gib(candidate.engine_bytes),
        "speed/ratio": candidate.speed.ratio if candidate.speed else None,
    }
    found["vetoes"] = float(len(candidate.vetoes))
    for name, score in candidate.scores.items():
        found[metric_name("quality", name, figures.WHOLE, "score")] = score
    for row in candidate.divergences:
        for figure, value in divergence_figures(row).items():
            found[metric_name("divergence", row.loss, row.text, figure)] = value
    for v in candidate.verdicts:
        at = ("quality" if v.against == "reference" else "against_champion", v.eval_set, v.slice)
        found[metric_name(*at, "score")] = v.score
        found[metric_name(*at, "delta")] = None if v.loss is None else 0.0 - v.loss
        found[metric_name(*at, "lower_bound")] = 0.0 - v.interval.upper if v.interval else None
        found[metric_name(*at, "margin")] = v.margin
    found |= load_metrics(candidate)
    if decision is not None and decision.choice is not None:
        mine = next((s for s in decision.choice.standings if s.label == candidate.label), None)
        found["cost/per_1000_tokens"] = mine.cost_per_1000_tokens if mine is not None else None
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def axis_name(decision: Decision, axis: figures.Axis) -> str:
    """The metric that an axis is: where its profile has several phases or buckets, that of the slowest."""
    for one in decision.candidates:
        if (f := figures.latency_at(one, axis)) is not None:
            return latency_name(f.profile, f.metric, f.percentile, _places(one)(f.profile, f.phase, f.bucket))
    return latency_name(axis.profile, axis.metric, axis.percentile)


def _places(candidate: Candidate) -> Callable[[str, int, str], list[str]]:
    """Say where in a profile a figure belongs: its phase and bucket, where there are several."""
    groups = {(f.profile, f.phase, f.bucket) for f in candidate.latency}
    phases = Counter(profile for profile, _ in {(profile, phase) for profile, phase, _ in groups})
    buckets = Counter((profile, phase) for profile, phase, _ in groups)

    def place(profile: str, phase: int, bucket: str) -> list[str]:
        parts = [f"phase_{phase + 1}"] if phases[profile] > 1 else []
        return parts + ([BUCKETS.get(bucket, bucket)] if bucket and buckets[profile, phase] > 1 else [])

    return place


def load_metrics(candidate: Candidate) -> dict[str, float | None]:
    """Figures of the probe: by profile, and by phase and bucket where it has several; of a search the saturation."""
    found: dict[str, float | None] = {}
    searched, place = {s.profile for s in candidate.probed.saturations}, _places(candidate)
    for f in candidate.latency:
        if f.profile not in searched:
            found[latency_name(f.profile, f.metric, f.percentile, place(f.profile, f.phase, f.bucket))] = f.value
    for t in candidate.throughput:
        if t.profile not in searched:
            at = ("throughput", t.profile, *place(t.profile, t.phase, t.bucket))
            found |= {metric_name(*at, name): getattr(t, name) for name in RATES}
            found[metric_name("success", *at[1:], "share")] = t.success
            found[metric_name("memory", t.profile, "peak_rss_gib")] = _gib(t.peak_rss_bytes)
    for s in candidate.probed.saturations:
        found[metric_name("throughput", s.profile, "saturation_requests_per_s")] = s.rate
    for d in candidate.probed.differences:
        at = ("speed", d.profile, *place(d.profile, d.phase, d.bucket))
        found[metric_name(*at, f"{d.metric.removesuffix('_ms')}_ratio_by_{d.by}")] = d.ratio
    for r in candidate.probed.resources:
        found[metric_name("memory", r.profile, "peak_gpu_gib")] = _gib(r.gpu_memory_peak_bytes)
        found[metric_name("energy", r.profile, "j_per_output_token")] = r.energy_per_output_token_j
    found["memory/peak_gib"] = _gib(_peak_bytes(candidate))
    found["latency/blocks_left_out"] = float(len(candidate.probed.left_out)) if candidate.latency else None
    return found


def _peak_bytes(candidate: Candidate) -> int | None:
    """The most memory that serving took under any load: the GPU's where it was measured, else the processes' own."""
    on_gpu = [r.gpu_memory_peak_bytes for r in candidate.probed.resources if r.gpu_memory_peak_bytes is not None]
    resident = [t.peak_rss_bytes for t in candidate.throughput if t.peak_rss_bytes is not None]
    return max(on_gpu or resident, default=None)


def divergence_figures(row: Row) -> dict[str, float | None]:
    """The figures of a comparison by name; a KL that is a lower bound is named so."""
    f, kl = row.figures, "kl" if row.figures.exact else "kl_at_least"
    return {
        f"{kl}_mean": f.kl_mean,
        f"{kl}_median": f.kl_median,
        f"{kl}_p99": f.kl_p99,
        f"{kl}_p999": f.kl_p999,
        "same_top": f.same_top,
        "dp_mean": f.dp_mean,
        "dp_rms": f.dp_rms,
        "perplexity_log_ratio": f.log_ratio,
    }


def tags(candidate: Candidate, decision: Decision, campaign_key: str) -> dict[str, str]:
    """What the candidate is searched by."""
    return {
        "kind": "variant",
        "campaign": decision.campaign,
        "campaign_key": campaign_key,
        "candidate": candidate.label,
        "verdict": "failed" if candidate.status == "failed" else candidate.outcome or "reference",
        "pareto": str(candidate.pareto).lower(),
        "winner": str(candidate.label == decision.winner).lower(),
        "native": str(candidate.native).lower(),
        "latency_evidence": str(bool(candidate.latency) and all(f.evidence for f in candidate.latency)).lower(),
        **licence(decision),
        **_why(candidate),
        **_colour(candidate, decision),
        NOTE: candidate_text(candidate)[:NOTE_CHARACTERS],
    } | {f"{kind}_key": key for kind, key in candidate.keys.items() if kind in ("variant", "engine")}


def _colour(candidate: Candidate, decision: Decision) -> dict[str, str]:
    """The colour that the report draws it in, where there are enough of them; MLflow's own often coincide."""
    colour = figures.colours(decision).get(candidate.label)
    if colour is None or len(decision.candidates) > drawing.COLOURS:
        return {}
    return {RUN_COLOUR: drawing.LIGHT[f"c{colour}"]}


def licence(decision: Decision) -> dict[str, str]:
    """What everything made from the base may be used under, and who says so."""
    given = {
        "licence": licences.of(decision.base) or UNKNOWN,
        "licence_source": decision.base.get("licence source", ""),
    }
    return {name: text for name, text in given.items() if text}


def _why(candidate: Candidate) -> dict[str, str]:
    """Why it is not promoted, to search by: the kind of each veto, and the first reason in words."""
    kind, reason = _fate(candidate)
    found = {"failure": reason if kind in ("Failed", "Vetoed", "Invalid") else ""}
    found["vetoes"] = ", ".join(dict.fromkeys(veto.kind for veto in candidate.vetoes))
    return {name: text[:PARAM_CHARACTERS] for name, text in found.items() if text}


def _fate(candidate: Candidate) -> tuple[str, str]:
    """What became of a candidate, in a word, and why: that it failed, was ruled out, or lacks evidence comes first."""
    if candidate.status == "failed":
        return "Failed", _line(candidate.failure or "no reason recorded")
    if candidate.reference:
        return "Reference", ""
    if candidate.vetoes:
        return "Vetoed", _line(candidate.vetoes[0].text)
    invalid = next((v for v in candidate.verdicts if v.verdict == "invalid"), None)
    if invalid is not None:
        return "Invalid", _line(f"{invalid.eval_set}, {invalid.slice}: {invalid.note or 'the evidence does not match'}")
    ruled_out = next((v for v in candidate.verdicts if v.verdict == "veto"), None)
    if ruled_out is not None:
        return "Vetoed", _line(f"{ruled_out.eval_set}, {ruled_out.slice}: {ruled_out.note or 'ruled out there'}")
    return (candidate.outcome or "no outcome").capitalize(), _line(candidate.reasons[0]) if candidate.reasons else ""


def candidate_text(candidate: Candidate) -> str:
    """A candidate's description: what became of it and why in the first line, then everything else."""
    word, reason = _fate(candidate)
    if word == "Reference":
        first = "**Reference** of this campaign."
    else:
        first = f"**{word}**" if not reason else f"**{word}:** {reason}"
        if word in ("Vetoed", "Invalid") and candidate.outcome:
            first += f" (outcome: {candidate.outcome})"
        first += DOUBTS[candidate.doubt]
    lines = [first, "", *(f"- {said}" for said in candidate.reasons)]
    if candidate.verdicts:
        lines += ["", "| eval set | slice | loss | interval | margin | verdict |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {_set(v)} | {_cell(v.slice)} | {figures.signed(v.loss)} | {figures.between(v.interval)} "
            f"| {figures.plain(v.margin)} | {v.verdict} |"
            for v in candidate.verdicts
        ]
    return "\n".join(lines)


def _set(verdict: Verdict) -> str:
    return _cell(verdict.eval_set) + ("" if verdict.against == "reference" else " (champion)")


def campaign_text(decision: Decision) -> str:
    """The campaign's description: the decision in two lines, since the page shows few of them, then a table."""
    axis = figures.axis_of(decision)
    latency = f"{axis.short}, ms" if axis else "latency"
    lines = [f"**{_line(decision.headline)}**  ", _line(decision.detail), ""]
    lines += [f"| candidate | outcome | mean score | {latency} | size | reason |", "|---|---|---|---|---|---|"]
    for one in decision.candidates:
        at = figures.latency_at(one, axis)
        reason = one.failure or (one.reasons[0] if one.reasons else "")
        outcome = "failed" if one.status == "failed" else one.outcome or "reference"
        name = f"**{_cell(one.label)}**" if one.label == decision.winner else _cell(one.label)
        cells = (
            name,
            outcome,
            figures.plain(one.mean_score),
            figures.plain(at.value if at else None),
            figures.size(one.engine_bytes),
            _cell(reason),
        )
        lines.append("| " + " | ".join(cells) + " |")
    if decision.would_change:
        lines += ["", "What would change it:", *(f"- {_line(text)}" for text in decision.would_change)]
    kept: list[str] = []
    for line in lines:
        if sum(map(len, kept)) + len(kept) + len(line) > NOTE_CHARACTERS:
            return "\n".join([*kept, "", "(the rest is in decision.md)"])
        kept.append(line)
    return "\n".join(kept)


def _gib(value: int | None) -> float | None:
    return None if value is None else value / 2**30


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")
