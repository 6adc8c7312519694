"""From verdicts and speed to promote, hold or reject: for each candidate, then for the campaign. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.decide import choice, stats, vetoes
from pipelines.decide.engineloss import exceeded
from pipelines.decide.gate import GateConfig
from pipelines.decide.model import Candidate, Decision, Outcome, Verdict, Veto

REFERENCE_REASON = "the reference every variant is compared with"
_ABOUT_ANSWERS = ("empty", "loop", "length", "must_pass", "not_finite")


@dataclass(frozen=True, slots=True)
class Finding:
    """What speaks against promotion: for good (`rejects`) or for now (`holds`), and what would settle it."""

    rejects: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    settles: tuple[str, ...] = ()

    def __add__(self, other: Finding) -> Finding:
        return Finding(self.rejects + other.rejects, self.holds + other.holds, self.settles + other.settles)


def decide(
    campaign: str,
    candidates: Sequence[Candidate],
    reference: str,
    gate: GateConfig,
    conditions: Mapping[str, str],
    base: Mapping[str, str],
) -> Decision:
    """Judge every candidate and the campaign.

    Candidates come with their verdicts, latencies and speed; `vetoes` are completed here, and `outcome`, `reasons`
    and `pareto` filled in.
    """
    on_front = choice.on_front(candidates, gate)
    known = next((c for c in candidates if c.label == reference and c.status == "ok" and not c.unjudged), None)
    candidates = [_vetoed(c, known, gate, base) for c in candidates]
    adjusted = _adjusted(candidates, gate)
    judged, settles = [], []
    for one in candidates:
        if one.label == reference:
            why = _of_reference(one)
            judged.append(one.model_copy(update={"reasons": (why,), "pareto": one.label in on_front}))
            continue
        finding = _weigh(one, known, gate, adjusted.get(one.label))
        outcome: Outcome = "reject" if finding.rejects else "hold" if finding.holds else "promote"
        reasons = (*finding.rejects, *finding.holds) or (_merit(one),)
        judged.append(one.model_copy(update={"outcome": outcome, "reasons": reasons, "pareto": one.label in on_front}))
        settles += [f"{one.label}: {s}" for s in finding.settles] if outcome == "hold" else []
    promotable = [c for c in judged if c.outcome == "promote"]
    chosen = choice.choose(promotable, known, gate) if known else None
    winner = next(c for c in judged if c.label == chosen.standings[0].label) if chosen else None
    outcome = _overall(judged)
    return Decision(
        version=1,
        campaign=campaign,
        outcome=outcome,
        winner=winner.label if winner else None,
        headline=_headline(outcome, winner, judged),
        detail=_detail(judged),
        would_change=_would_change(outcome, winner, settles),
        reference=reference,
        candidates=tuple(judged),
        gate=gate.model_dump(mode="json"),
        conditions=dict(conditions),
        base=dict(base),
        choice=chosen,
    )


def _of_reference(one: Candidate) -> str:
    if one.status == "failed":
        return f"the reference itself failed: {one.failure}"
    return f"the reference itself was built, not judged: {one.unjudged}" if one.unjudged else REFERENCE_REASON


def gating(candidate: Candidate) -> list[Verdict]:
    """The verdicts that decide."""
    return [v for v in candidate.verdicts if v.gates]


def _adjusted(candidates: Sequence[Candidate], gate: GateConfig) -> dict[str, float]:
    """Give each variant's largest p-value, after Holm over the variants tested in engines that could be promoted.

    A comparison judged at a level of its own enters as p * alpha / level, so that all are on the scale of the gate's.
    """
    largest = {}
    for candidate in candidates:
        p_values = [min(1.0, v.p_value * gate.alpha / v.alpha) for v in gating(candidate) if v.p_value is not None]
        if p_values and candidate.native and not candidate.reference and not candidate.simulated:
            largest[candidate.label] = max(p_values)
    if gate.several_variants == "none":
        return largest
    return dict(zip(largest, stats.holm(list(largest.values())), strict=True))


def _vetoed(one: Candidate, reference: Candidate | None, gate: GateConfig, base: Mapping[str, str]) -> Candidate:
    """The candidate with everything that rules it out; a reference is not judged."""
    if one.reference or one.unjudged or reference is None:
        return one
    if one.status == "failed":
        built = Veto(kind="build", text=f"could not be made: {one.failure}")
        return one.model_copy(update={"vetoes": (built,)})
    sure, unsure = vetoes.inspect(one, reference, gate, base)
    return one.model_copy(update={"vetoes": sure, "undecided": unsure})


def _weigh(one: Candidate, reference: Candidate | None, gate: GateConfig, adjusted_p: float | None) -> Finding:
    if one.status == "failed":
        return Finding(rejects=(f"could not be made: {one.failure}",))
    if one.unjudged:
        return Finding(
            holds=(f"built, not judged: {one.unjudged}",), settles=("its scores and latency on the device it is for",)
        )
    if reference is None:
        return Finding(holds=("there is no reference to compare with",), settles=("a reference that can be scored",))
    simulated = next((c.label for c in (one, reference) if c.simulated), None)
    if simulated is not None:
        return Finding(
            holds=(f"{simulated} was made by a simulated container, which is evidence of nothing",),
            settles=("the same run with a real container runtime",),
        )
    faulty = next(exceeded(reference.divergences, gate.engine_loss), None)
    if faulty is not None:
        return Finding(holds=(f"{reference.label}, {faulty}",), settles=("a reference engine that is its checkpoint",))
    accuracy = _accuracy(one)
    if not (accuracy.rejects or accuracy.holds):
        accuracy += _multiplicity(adjusted_p, gate)
    speed = _speed(one, gate)
    if speed.holds and not one.native and not (accuracy.rejects or accuracy.holds):
        speed = Finding(holds=(f"accuracy passes, {speed.holds[0]}",), settles=speed.settles)
    return _ruled_out(one) + accuracy + speed


def _ruled_out(one: Candidate) -> Finding:
    def told(veto: Veto) -> str:
        return f"{veto.where}: {veto.text}" if veto.kind in _ABOUT_ANSWERS else veto.text

    return Finding(
        rejects=tuple(f"veto, {told(v)}" for v in one.vetoes),
        holds=tuple(f"not cleared, {told(v)}" for v in one.undecided),
        settles=tuple(f"a clear answer on {v.kind}: {told(v)}" for v in one.undecided),
    )


def _accuracy(one: Candidate) -> Finding:
    found = Finding() if gating(one) else Finding(holds=("no eval set was scored",), settles=("scores on an eval set",))
    for v in gating(one):
        where = name(v)
        if v.verdict == "fail":
            found += Finding(rejects=(f"{where}: loses more than {v.margin:.4g} ({_loss(v)})",))
        elif v.verdict == "veto" and not any(veto.where == v.eval_set for veto in one.vetoes):
            found += Finding(rejects=(f"{where}: vetoed ({v.note})",))
        elif v.verdict == "invalid":
            found += Finding(holds=(f"{where}: no verdict, {v.note}",), settles=(f"matching evidence on {where}",))
        elif v.verdict == "inconclusive":
            found += Finding(
                holds=(f"{where}: inconclusive at margin {v.margin:.4g} ({_loss(v)})",), settles=(_items(v),)
            )
    return found


def _multiplicity(adjusted_p: float | None, gate: GateConfig) -> Finding:
    if adjusted_p is None or adjusted_p <= gate.alpha:
        return Finding()
    return Finding(
        holds=(f"passes alone, but not among all variants tried (Holm p = {adjusted_p:.3g} > {gate.alpha:g})",),
        settles=("more items, or fewer variants in one campaign",),
    )


def _speed(one: Candidate, gate: GateConfig) -> Finding:
    if not one.native:
        note = one.native_note or "the engine emulates this format"
        return Finding(
            holds=(f"latency is not evidence: {note}",),
            settles=(
                "its device stated (engine.served_on), if nothing else runs there"
                if one.doubt == "remote"
                else "a target that runs this format natively",
            ),
        )
    if not gate.require_speed:
        return Finding()
    speed, least = one.speed, gate.speed.min_speedup
    if speed is None or not speed.evidence or speed.interval is None:
        note = speed.note if speed else "no latency was measured"
        return Finding(holds=(f"no speed evidence: {note}",), settles=(f"a sound probe ({note})",))
    shown = f"{speed.ratio or 0:.2f}x, {speed.interval.lower:.2f} to {speed.interval.upper:.2f}; asked {least:g}x"
    if speed.interval.lower > least:
        return Finding()
    if speed.interval.upper <= least:
        return Finding(rejects=(f"brings no speed ({speed.metric} at {speed.profile}: {shown})",))
    return Finding(
        holds=(f"speed is undecided ({speed.metric} at {speed.profile}: {shown})",), settles=("more probe rounds",)
    )


def name(v: Verdict) -> str:
    """An eval set, the slice where it is one, and whom it is compared with where that is the champion."""
    where = v.eval_set if v.slice == "all" else f"{v.eval_set}/{v.slice}"
    return where if v.against == "reference" else f"{where} against the champion"


def _loss(v: Verdict) -> str:
    if v.loss is None or v.interval is None:
        return v.note or "no interval"
    return f"loss {v.loss:+.4f}, {v.interval.lower:+.4f} to {v.interval.upper:+.4f}, {v.items} items"


def _items(v: Verdict) -> str:
    if v.interval is None:
        return f"{name(v)}: {v.note}"
    more = (
        f"{v.more_items} more items would decide" if v.more_items else "unlikely to pass whatever the number of items"
    )
    return f"{name(v)}: {more}"


def _merit(one: Candidate) -> str:
    passed = len(gating(one))
    faster = f", {one.speed.ratio:.2f}x as fast as the reference" if one.speed and one.speed.ratio else ""
    return f"within the margin on {passed} of {passed} comparisons{faster}"


def _overall(judged: Sequence[Candidate]) -> Outcome:
    outcomes = {c.outcome for c in [c for c in judged if not c.unjudged] or judged}
    return "promote" if "promote" in outcomes else "hold" if "hold" in outcomes or outcomes <= {None} else "reject"


def _headline(outcome: Outcome, winner: Candidate | None, judged: Sequence[Candidate]) -> str:
    if winner is not None:
        return f"PROMOTE {winner.label}: {winner.reasons[0]}"
    variants = sorted((c for c in judged if c.outcome is not None), key=lambda c: bool(c.unjudged))
    if not variants:
        return "HOLD: there is no variant to judge"
    if outcome == "hold":
        held = [c for c in variants if c.outcome == "hold"]
        return f"HOLD: none of {len(variants)} variants may be promoted yet; {held[0].label}: {held[0].reasons[0]}"
    return f"REJECT: none of {len(variants)} variants may be promoted; {variants[0].label}: {variants[0].reasons[0]}"


def _detail(judged: Sequence[Candidate]) -> str:
    return "; ".join(f"{c.label} {c.outcome} ({c.reasons[0]})" for c in judged if c.outcome is not None)


def _would_change(outcome: Outcome, winner: Candidate | None, settles: Sequence[str]) -> tuple[str, ...]:
    """Name the promoted candidate's closest call, then what every held candidate waits for."""
    if winner is not None:
        room = [(v.margin - v.interval.upper, v, v.interval.upper) for v in gating(winner) if v.interval]
        _, closest, upper = min(room, key=lambda r: r[0])
        call = f"{winner.label}: a loss above {closest.margin:.4g} on {name(closest)}, its closest call"
        return (f"{call} (upper bound {upper:+.4f})", *settles)
    if settles:
        return tuple(settles)
    return ("a variant to judge" if outcome == "hold" else "no further measurement: another variant is needed",)
