"""decision.md: the decision for a reader who believes nothing yet. Pure: a Decision in, Markdown out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipelines.decide import divergences, probing
from pipelines.decide.gate import GateConfig
from pipelines.decide.markup import bullets, number, pairs, table
from pipelines.decide.model import Candidate, Choice, Decision
from pipelines.decide.sections import sections
from pipelines.probe.latency import FORMULAS as LATENCY_FORMULAS

FORMULAS = {
    "loss": "mean over items of reference score - candidate score (turned where lower is better); positive is worse",
    "verdict": "PASS: the whole interval of the loss is below the margin. FAIL: the whole interval is above it. "
    "Otherwise INCONCLUSIVE, which never promotes. INVALID: the two sides did not answer the same prompts",
    "binary metrics": "score test of paired proportions (Nam 1997, Tango 1998), T = (gains - losses + n margin) / "
    "sqrt(n (2q + d(1 - d))) with d = -margin and q the maximum-likelihood rate of losses under d; "
    "the interval inverts the same test",
    "relative margins": "the same for p_candidate = (1 - r) p_reference (Nam and Blackwelder 2002, Tang 2003); of "
    "graded metrics a linear contrast, loss - r * reference score",
    "graded metrics": "the wider of two intervals of the paired differences: t, with z^2 full-scale changes added to "
    "the sum of squares, so that agreement on a few items is not taken for certainty; and BCa bootstrap (Efron 1987)",
    "clusters": "items sharing a cluster are counted as n / design effect independent ones, and t has clusters - 1 "
    "degrees of freedom",
    "more items": "(z_alpha + z_power)^2 variance / (margin - loss)^2 - n, variance from the upper 80% bound of flips",
    "Holm": "the largest p-value of each variant, adjusted over all variants tried in this campaign",
    "looks": "every look at growing data is judged at Pocock's level for the plan made beforehand (0.05 over 2 equal "
    "looks: 0.0304 each; over 3: 0.0232)",
    "VETO": "decided before any statistic: broken or looping answers, their length, items that must stay right, "
    "memory, promises, perplexity, licence, labels",
    "choice": "sum of weight * ln(ratio to the reference) over quality (lower bound of the mean score), latency or "
    "goodput, cost (tokens/s), memory and size, among those on the Pareto front of quality, latency, tokens/s and size",
}
LIMITS = (
    "Nothing here speaks of tasks, languages or lengths outside the eval sets named here.",
    "A pass bounds the loss on these items by the margin; it does not show that there is none.",
    "Latency holds for the device, threads and load named here, and no other.",
)


def markdown(decision: Decision) -> str:
    """Render the whole document: what to do and why in ten lines, then conditions, figures and conclusion."""
    gate = GateConfig.model_validate(decision.gate)
    parts = [
        f"# {decision.headline}\n\n" + _first(decision),
        "## 1. Conditions\n\n" + pairs({**_prefixed(decision.base), **decision.conditions, **_rules(gate)}),
        "## 2. Figures",
        *(f"### {heading}\n\n{text}" for heading, text in sections(decision, gate)),
        "## 3. Conclusion",
        "### Each candidate\n\n" + bullets([f"**{c.label}**: {r}" for c in decision.candidates for r in c.reasons]),
        "### Choice\n\n" + _choice(decision.choice),
        "### What would change this\n\n" + bullets(decision.would_change),
        "### What this does not show\n\n" + bullets(limits(decision, gate)),
        "## Evidence\n\n" + _evidence(decision.candidates),
        "## Formulas\n\n" + pairs({**FORMULAS, **probing.FORMULAS, **divergences.FORMULAS, **LATENCY_FORMULAS}),
    ]
    return "\n\n".join(parts) + "\n"


def limits(decision: Decision, gate: GateConfig) -> tuple[str, ...]:
    """What the decision does not show: what none of its kind does, and what this one lacks."""
    return (*LIMITS, *_own_limits(decision, gate))


def _own_limits(decision: Decision, gate: GateConfig) -> Iterator[str]:
    emulated, remote = ([c.label for c in decision.candidates if c.doubt == kind] for kind in ("emulated", "remote"))
    if emulated:
        yield f"The latency of {', '.join(emulated)} is that of an emulated format, evidence of nothing."
    if remote:
        yield (
            f"{', '.join(remote)} is a remote: its format and device are not known, and its latency, measured with the "
            "network, is evidence about that server and no other."
        )
    prior = decision.base.get("prior quantization", "none")
    if prior not in ("none", ""):
        yield f"The base has been quantized before ({prior}); losses against an unquantized base would be larger."
    champion = decision.conditions.get("champion", "")
    if champion and not champion.endswith("on the same items"):
        yield f"Losses that add up over releases are bounded against the base only; champion: {champion}."
    marked = sorted({f.profile for c in decision.candidates for f in c.latency if not f.evidence})
    if marked:
        yield f"No block of {', '.join(marked)} counts for some candidate: figures marked † are no evidence."
    axis = gate.latency
    unbounded = sorted(
        {f.requests for c in decision.candidates for f in c.latency
         if (f.profile, f.metric, f.percentile) == (axis.profile, axis.metric, axis.percentile) and f.interval is None}
    )  # fmt: skip
    if unbounded:
        yield (
            f"{axis.metric} p{axis.percentile:g} at {axis.profile} has no interval with {unbounded[0]} requests "
            "(a p99 takes 299 to be bounded from above at 95%, 368 on both sides)."
        )


def _first(decision: Decision) -> str:
    """What to do, why, what would change it and what to beware of, a line each."""
    chosen = next((c for c in decision.candidates if c.label == decision.winner), None)
    do = {
        "promote": f"promote `{decision.winner}`: `quantgate promote campaign={decision.campaign}`",
        "hold": "promote nothing yet; the champion stays",
        "reject": "promote none of these; another variant is needed",
    }[decision.outcome]
    why = "; ".join(chosen.reasons) if chosen else decision.headline.partition(": ")[2]
    lines = {
        "Do": do,
        "Why": why,
        "Would change it": decision.would_change[0] if decision.would_change else "nothing known",
        "Beware": LIMITS[1],
        "All": f"campaign `{decision.campaign}`, reference `{decision.reference}`: {decision.detail}",
    }
    return pairs(lines)


def _rules(gate: GateConfig) -> dict[str, str]:
    planned = gate.looks
    shares = ", ".join(f"{share:.0%}" for share in planned.at)
    return {
        "gate": f"one-sided risk {gate.alpha:g}, {gate.several_variants} over variants, slices {gate.slices}",
        "looks": f"{planned.number} of {len(planned.at)} planned (at {shares} of the items)",
    }


def _choice(choice: Choice | None) -> str:
    if choice is None:
        return "Nobody may be promoted, so there was nothing to choose."
    weights = ", ".join(f"{name} {weight:g}" for name, weight in choice.weights.items())
    told = [f"Role `{choice.role}`: {weights}; weighted log-ratios to the reference."]
    if choice.left_out:
        told.append(f"Left out, since not measured on all: {', '.join(choice.left_out)}.")
    if choice.off_front:
        told.append(f"Not ranked, since another is as good in everything: {', '.join(choice.off_front)}.")
    first = choice.standings[0]
    told.append(f"{first.label} stays first under {first.first_share:.0%} of weights drawn at random.")
    priced = any(s.cost_per_1000_tokens is not None for s in choice.standings)
    head = ("candidate", "score", *(f"{name}, times" for name in choice.weights), "first under random weights",
            *([f"{choice.currency} per 1,000 output tokens"] if priced else []))  # fmt: skip
    rows = [
        (s.label, f"{s.score:+.4f}", *(f"{s.ratios[name]:.3f}" for name in choice.weights), f"{s.first_share:.1%}",
         *([number(s.cost_per_1000_tokens, ".5f")] if priced else []))
        for s in choice.standings
    ]  # fmt: skip
    return " ".join(told) + "\n\n" + table(head, rows)


def _evidence(candidates: Sequence[Candidate]) -> str:
    return table(("candidate", "artifact", "key"), [(c.label, k, v) for c in candidates for k, v in c.keys.items()])


def _prefixed(base: dict[str, str]) -> dict[str, str]:
    return {f"base {key}": value for key, value in base.items() if value}
