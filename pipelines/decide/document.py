"""decision.md: the decision for a reader who believes nothing yet. Pure: a Decision in, Markdown out."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.decide import divergences
from pipelines.decide.decision import name
from pipelines.decide.gate import GateConfig
from pipelines.decide.model import Candidate, Decision, Interval, Verdict
from pipelines.probe.latency import FORMULAS as LATENCY_FORMULAS

FORMULAS = {
    "loss": "mean over items of reference score - candidate score (turned where lower is better); positive is worse",
    "verdict": "PASS: the whole interval of the loss is below the margin. FAIL: the whole interval is above it. "
    "Otherwise INCONCLUSIVE, which never promotes. INVALID: the two sides did not answer the same prompts",
    "binary metrics": "score test of paired proportions (Nam 1997, Tango 1998), T = (gains - losses + n margin) / "
    "sqrt(n (2q + d(1 - d))) with d = -margin and q the maximum-likelihood rate of losses under d; "
    "the interval inverts the same test",
    "graded metrics": "t interval of the paired differences, with z^2 full-scale changes added to the sum of squares, "
    "so that agreement on a few items is not taken for certainty",
    "clusters": "items sharing a cluster are counted as n / design effect independent ones, and t has clusters - 1 "
    "degrees of freedom",
    "more items": "(z_alpha + z_power)^2 variance / (margin - loss)^2 - n, variance from the upper 80% bound of flips",
    "Holm": "the largest p-value of each variant, adjusted over all variants tried in this campaign",
    "speed": "exp(mean over rounds of ln(reference latency / candidate latency)), t interval over rounds; "
    "all engines meet the same requests in every round",
    "interval of a percentile": "order statistics, distribution-free, 95%; requests of one run are not quite "
    "independent, so it is a lower bound of the doubt; a dash where there are too few requests",
}
LIMITS = (
    "Nothing here speaks of tasks, languages or lengths outside the eval sets named above.",
    "A pass bounds the loss on these items by the margin; it does not show that there is none.",
    "Latency holds for the device, threads and load named above, and no other.",
)


def markdown(decision: Decision) -> str:
    """Render the whole document."""
    gate = GateConfig.model_validate(decision.gate)
    parts = [
        f"# {decision.headline}",
        f"Campaign `{decision.campaign}`, reference `{decision.reference}`. {decision.detail}.",
        "**What would change this:**\n\n" + _bullets(decision.would_change),
        "## Candidates\n\n" + _candidates(decision, gate),
        "## Why\n\n" + _bullets([f"**{c.label}**: {r}" for c in decision.candidates for r in c.reasons]),
        "## Accuracy\n\n" + _accuracy_intro(gate) + "\n\n" + _verdicts(decision),
        "## Divergence\n\n" + _divergence(decision.candidates, gate),
        "## Speed\n\n" + _speed(decision.candidates, gate),
        "## Latency\n\n" + _latency(decision.candidates),
        "## Throughput\n\n" + _throughput(decision.candidates),
        "## Conditions\n\n" + _pairs({**_prefixed(decision.base), **decision.conditions}),
        "## What this does not show\n\n" + _bullets(LIMITS),
        "## Evidence\n\n" + _evidence(decision.candidates),
        "## Formulas\n\n" + _pairs({**FORMULAS, **divergences.FORMULAS, **LATENCY_FORMULAS}),
    ]
    return "\n\n".join(parts) + "\n"


def _candidates(decision: Decision, gate: GateConfig) -> str:
    axis = gate.latency
    head = ("candidate", "method", "scheme", "target", "engine MB", "mean score", "perplexity", "KL to checkpoint",
            f"{axis.metric} p{axis.percentile:g} at {axis.profile}", "Pareto", "outcome")  # fmt: skip
    rows = []
    for c in decision.candidates:
        at = [
            f for f in c.latency if (f.profile, f.metric, f.percentile) == (axis.profile, axis.metric, axis.percentile)
        ]
        rows.append(
            (c.label, c.quantizer, c.scheme, _shown(c, c.target),
             _number(c.engine_bytes and c.engine_bytes / 1e6, ".1f"), _number(c.mean_score, ".4f"),
             _number(c.perplexity, ".3f"), _number(c.engine_kl, ".2g"), _number(at[0].value if at else None, ".1f"),
             "front" if c.pareto else "", (c.outcome or "reference").upper())
        )  # fmt: skip
    return _table(head, rows)


def _accuracy_intro(gate: GateConfig) -> str:
    shown = "Slices decide too." if gate.slices == "gate" else "Rows marked * are slices, shown but not deciding."
    return (
        f"Loss in the metric's own unit, interval at {gate.confidence:.0%} (one-sided risk {gate.alpha:g}). "
        f"p is that of a true loss of the margin or more. {shown}"
    )


def _divergence(candidates: Sequence[Candidate], gate: GateConfig) -> str:
    found = list(divergences.lines(candidates))
    if not found:
        return "None was measured."
    told = (
        "Mean KL in nats, token by token on given texts: what quantization lost, what the engine lost against its own "
        "checkpoint, and what a user gets in all. The three are measured apart and need not add up."
    )
    short = _table(divergences.SUMMARY, [divergences.summary(line, gate.engine_loss) for line in found])
    whole = _table(divergences.DETAILS, [row for line in found for row in divergences.details(line)])
    return f"{told}\n\n{short}\n\n{whole}"


def _verdicts(decision: Decision) -> str:
    head = ("candidate", "eval set", "metric", "n", "clusters", "reference", "score", "loss", "interval", "margin",
            "lost", "gained", "A/A flips", "p", "verdict", "method", "note")  # fmt: skip
    rows = [_verdict_row(c, v, divergences.noise(v, decision.noise)) for c in decision.candidates for v in c.verdicts]
    return _table(head, rows)


def _verdict_row(c: Candidate, v: Verdict, noise: str) -> tuple[str, ...]:
    return (
        c.label, name(v) + ("" if v.gates else " *"), v.metric, str(v.items), _number(v.clusters, "d"),
        _number(v.reference_score, ".4f"), _number(v.score, ".4f"), _number(v.loss, "+.4f"),
        _interval(v.interval, "+.4f"), f"{v.margin:.4g}", _number(v.losses, "d"), _number(v.gains, "d"),
        noise, _number(v.p_value, ".3g"), v.verdict.upper(), v.method, v.note,
    )  # fmt: skip


def _speed(candidates: Sequence[Candidate], gate: GateConfig) -> str:
    rule = gate.speed
    asked = f"Asked: {rule.metric} p{rule.percentile:g} at `{rule.profile}`, the interval above {rule.min_speedup:g}x."
    rows = [
        (c.label, c.speed.metric, c.speed.profile, _number(c.speed.ratio, ".3f"), _interval(c.speed.interval, ".3f"),
         "yes" if c.speed.evidence else "no", c.speed.note)
        for c in candidates if c.speed
    ]  # fmt: skip
    return (
        asked
        + "\n\n"
        + _table(("candidate", "metric", "profile", "times as fast", "interval", "evidence", "note"), rows)
    )


def _latency(candidates: Sequence[Candidate]) -> str:
    rows = [
        (_shown(c, c.label), f.profile, f.metric, f"p{f.percentile:g}",
         _number(f.value, ".2f"), _interval(f.interval, ".2f"), str(f.requests))
        for c in candidates for f in c.latency
    ]  # fmt: skip
    return _table(("candidate", "profile", "metric", "percentile", "ms", "interval", "requests"), rows)


def _throughput(candidates: Sequence[Candidate]) -> str:
    rows = [
        (_shown(c, c.label), t.profile, str(t.requests), str(t.failed),
         f"{t.requests_per_s:.2f}", f"{t.output_tokens_per_s:.1f}",
         _number(t.peak_rss_bytes and t.peak_rss_bytes / 1e6, ".0f"))
        for c in candidates for t in c.throughput
    ]  # fmt: skip
    return _table(("candidate", "profile", "requests", "failed", "requests/s", "output tokens/s", "peak MB"), rows)


def _shown(c: Candidate, text: str) -> str:
    return text if c.native or c.status == "failed" else f"{text} (emulated)"


def _evidence(candidates: Sequence[Candidate]) -> str:
    return _table(("candidate", "artifact", "key"), [(c.label, k, v) for c in candidates for k, v in c.keys.items()])


def _prefixed(base: dict[str, str]) -> dict[str, str]:
    return {f"base {key}": value for key, value in base.items() if value}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "None."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join("- " + " ".join(line.split()) for line in lines)


def _pairs(pairs: dict[str, str]) -> str:
    return _bullets([f"**{key}**: {value}" for key, value in pairs.items()])


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _interval(interval: Interval | None, form: str) -> str:
    return "–" if interval is None else f"{interval.lower:{form}} to {interval.upper:{form}}"
