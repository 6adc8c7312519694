"""The figures of a decision as Markdown tables, one function a section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipelines.decide import divergences, loadsections
from pipelines.decide.decision import name
from pipelines.decide.gate import GateConfig
from pipelines.decide.latencies import at
from pipelines.decide.loadsections import shown
from pipelines.decide.markup import between, number, table
from pipelines.decide.model import Candidate, Decision, Verdict


def sections(decision: Decision, gate: GateConfig) -> Iterator[tuple[str, str]]:
    """Every section with its heading; those about what nobody asked for or has are left out."""
    yield "Candidates", _candidates(decision, gate)
    yield "Accuracy", _accuracy_intro(gate) + "\n\n" + _verdicts(decision)
    yield "Flips", _flips(decision)
    if any(c.lengths for c in decision.candidates):
        yield "By length of prompt", _lengths(decision.candidates)
    yield "Answers", _answers(decision.candidates)
    yield "Divergence", _divergence(decision.candidates, gate)
    rule = gate.speed
    asked = f"Asked: {rule.metric} p{rule.percentile:g} at `{rule.profile}`, the interval above {rule.min_speedup:g}x."
    yield from (one.section for one in loadsections.tables(decision.candidates, asked))


def _candidates(decision: Decision, gate: GateConfig) -> str:
    axis = gate.latency
    head = ("candidate", "method", "scheme", "target", "engine MB", "mean score", "perplexity", "KL to checkpoint",
            f"{axis.metric} p{axis.percentile:g} at {axis.profile}", "Pareto", "outcome")  # fmt: skip
    rows = []
    for c in decision.candidates:
        found = at(c.latency, axis.profile, axis.metric, axis.percentile)
        rows.append(
            (c.label, c.quantizer, c.scheme, shown(c, c.target),
             number(c.engine_bytes and c.engine_bytes / 1e6, ".1f"), number(c.mean_score, ".4f"),
             number(c.perplexity, ".3f"), number(c.engine_kl, ".2g"), number(found.value if found else None, ".1f"),
             "front" if c.pareto else "", (c.outcome or "reference").upper())
        )  # fmt: skip
    return table(head, rows)


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
    short = table(divergences.SUMMARY, [divergences.summary(line, gate.engine_loss) for line in found])
    whole = table(divergences.DETAILS, [row for line in found for row in divergences.details(line)])
    return f"{told}\n\n{short}\n\n{whole}"


def _verdicts(decision: Decision) -> str:
    head = ("candidate", "eval set", "metric", "n", "clusters", "reference", "score", "loss", "interval", "margin",
            "lost", "gained", "A/A flips", "p", "verdict", "method", "note")  # fmt: skip
    rows = [_verdict_row(c, v, divergences.noise(v, decision.noise)) for c in decision.candidates for v in c.verdicts]
    return table(head, rows)


def _verdict_row(c: Candidate, v: Verdict, noise: str) -> tuple[str, ...]:
    return (
        c.label, name(v) + ("" if v.gates else " *"), v.metric, str(v.items), number(v.clusters, "d"),
        number(v.reference_score, ".4f"), number(v.score, ".4f"), number(v.loss, "+.4f"),
        between(v.interval, "+.4f"), f"{v.margin:.4g}", number(v.losses, "d"), number(v.gains, "d"),
        noise, number(v.p_value, ".3g"), v.verdict.upper(), v.method, v.note,
    )  # fmt: skip


def _flips(decision: Decision) -> str:
    """The 2x2 table of each binary comparison, and what two other methods make of it."""
    head = ("candidate", "eval set", "both right", "lost", "gained", "both wrong", "flips", "McNemar p (two-sided)",
            "Newcombe's interval")  # fmt: skip
    rows = [
        (c.label, name(v), number(v.both_right, "d"), number(v.losses, "d"), number(v.gains, "d"),
         number(v.both_wrong, "d"), f"{(v.flips or 0) / v.items:.1%}", number(v.mcnemar_p, ".3g"),
         between(v.newcombe, "+.4f"))
        for c in decision.candidates for v in c.verdicts if v.both_right is not None
    ]  # fmt: skip
    return "Binary metrics; shown beside the verdict, deciding nothing.\n\n" + table(head, rows)


def _lengths(candidates: Sequence[Candidate]) -> str:
    head = ("candidate", "eval set", "tokens sent for an item", "n", "reference", "score", "loss", "lost", "gained")
    rows = [
        (c.label, b.eval_set, f"{b.least} to {b.below - 1}" if b.below else f"{b.least} and more", str(b.items),
         f"{b.reference_score:.4f}", f"{b.score:.4f}", f"{b.loss:+.4f}", str(b.losses), str(b.gains))
        for c in candidates for b in c.lengths
    ]  # fmt: skip
    return "Shown only: figures without a test.\n\n" + table(head, rows)


def _answers(candidates: Sequence[Candidate]) -> str:
    head = ("candidate", "eval set", "items", "prompts truncated", "answers generated", "empty", "cut short", "looping",
            "not finite", "mean tokens", "times the reference's")  # fmt: skip
    rows = [
        (c.label, o.eval_set, str(o.items), str(o.truncated), str(o.generated), str(o.empty), str(o.cut),
         str(o.looping), str(o.not_finite), number(o.mean_tokens_out, ".1f"),
         number(o.length_ratio, ".3f") + (f" ({between(o.length_interval, '.3f')})" if o.length_interval else ""))
        for c in candidates for o in c.outputs
    ]  # fmt: skip
    return table(head, rows)
