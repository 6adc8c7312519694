"""The judgements about one step of a rollout: scores, failures and latency of the canary against the control. Pure.

The gate judges pairs; of arms that different users met it is the same non-inferiority, without the pairing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.config import Strict
from pipelines.decide import arms
from pipelines.decide.gate import OVERALL, Axis, EvalCard, GateConfig, Slo, SpeedRule
from pipelines.decide.judge import Item, judge
from pipelines.decide.measured import Request
from pipelines.decide.model import Verdict
from pipelines.decide.promises import promise
from pipelines.decide.rollout import Need, Plan, Step, promise_name
from pipelines.decide.traffic import Line, Traffic

State = Literal["pass", "fail", "open", "few", "missing"]
PRODUCTION = "production"
AT_LEAST = 2


class Finding(Strict):
    """One judgement. A loss is how much worse the canary is; of errors the figures are shares of failed requests, of a
    promise milliseconds.

    lower and upper: one-sided bounds of the loss (of the percentile), at the level for rolling back and for going on.
    state: pass (the upper bound is within the limit), fail (the lower one is beyond it), open, few (requests), missing.
    """

    what: str
    state: State
    limit: float
    canary: float | None = None
    control: float | None = None
    lower: float | None = None
    upper: float | None = None
    canary_requests: int = 0
    control_requests: int = 0
    canary_needed: int = 0
    control_needed: int = 0
    gates: bool = True
    note: str = ""

    @property
    def told(self) -> str:
        return f"{self.what}: {self.note}"


@dataclass(frozen=True, slots=True)
class Levels:
    """One-sided levels of a look: for going on and for rolling back; of promises, whose bounds are at 95%."""

    go: float
    back: float
    promise_go: float
    promise_back: float


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What is compared between two arms: how a line counts, what may be lost, and how many lines that takes."""

    what: str
    value: Callable[[Line], float]
    margin: float
    canary: int
    control: int
    binary: bool


def findings(plan: Plan, step: Step, traffic: Traffic, levels: Levels) -> tuple[Finding, ...]:
    """Judge all that the plan asks of a step; at the last one there is no control to compare with."""
    needs = {need.what: need for need in step.needs}
    scored = [(a, b) for a, b in traffic.pairs if a.as_pair is not None]
    found = list(_paired(plan, scored, traffic.binary, levels)) if scored else []
    if not step.last:
        alone = _alone(plan, traffic, needs["quality"], levels)
        found += [f.model_copy(update={"gates": f.gates and (not scored or f.state == "fail")}) for f in alone]
        found.append(_errors(plan, traffic, needs["errors"], levels))
    return (*found, *(_promise(slo, traffic, needs[promise_name(slo)], levels) for slo in plan.promises))


# Scores


def _alone(plan: Plan, traffic: Traffic, need: Need, levels: Levels) -> Iterator[Finding]:
    """Scores of the split traffic; where pairs decide, these only show harm."""
    control, canary = ([line for line in side if line.graded is not None] for side in (traffic.control, traffic.canary))
    whole = _Comparison("quality", _score, plan.quality.margin, need.canary, need.control, traffic.binary)
    yield _compared(whole, control, canary, levels)
    names = sorted({line.slice for line in (*control, *canary)} | plan.quality.slices.keys())
    for name in names if len(names) > 1 else ():
        margin = plan.quality.slices.get(name, plan.quality.margin)
        part = _Comparison(f"quality/{name}", _score, margin, AT_LEAST, AT_LEAST, traffic.binary)
        ours, theirs = ([line for line in side if line.slice == name] for side in (control, canary))
        yield _compared(part, ours, theirs, levels).model_copy(update={"gates": name in plan.quality.slices})


def _score(line: Line) -> float:
    return line.graded or 0.0


def _paired(plan: Plan, pairs: Sequence[tuple[Line, Line]], binary: bool, levels: Levels) -> Iterator[Finding]:
    """The gate's own verdict on prompts that both arms answered, once at each level."""
    control, canary = ([_item(pair[side], binary) for pair in pairs] for side in (0, 1))
    card = EvalCard(
        family="standard", metric="score", binary=binary, margin=plan.quality.margin, slices=dict(plan.quality.slices)
    )
    going, back = (judge(control, canary, PRODUCTION, card, _gate(level, plan)) for level in (levels.go, levels.back))
    for go, bad in zip(going, back, strict=True):
        whole = go.slice == OVERALL
        needed = plan.quality.pairs if whole else AT_LEAST
        yield _settled(
            _of_verdict(go, bad, "quality (pairs)" if whole else f"quality/{go.slice} (pairs)", needed)
        ).model_copy(update={"gates": whole or go.slice in plan.quality.slices})


def _gate(level: float, plan: Plan) -> GateConfig:
    """The gate at the level of this look; its speed and latency are not asked."""
    return GateConfig(
        alpha=level, power=plan.power, speed=SpeedRule(profile=PRODUCTION), latency=Axis(profile=PRODUCTION)
    )


def _item(line: Line, binary: bool) -> Item:
    return Item(
        item_id=line.request_id or "", score=line.as_pair, prompt_hash="", template_id="", slice=line.slice,
        cluster=line.user, metric="score", binary=binary,
    )  # fmt: skip


def _of_verdict(go: Verdict, bad: Verdict, name: str, needed: int) -> Finding:
    return Finding(
        what=name, state="open", limit=go.margin, canary=go.score, control=go.reference_score,
        lower=bad.interval.lower if bad.interval else None, upper=go.interval.upper if go.interval else None,
        canary_requests=go.items, control_requests=go.items, canary_needed=needed, control_needed=needed, note=go.note,
    )  # fmt: skip


# Arms that different users met


def _errors(plan: Plan, traffic: Traffic, need: Need, levels: Levels) -> Finding:
    """The share of failed requests; one line that does not say whether it failed leaves the others no evidence."""
    comparison = _Comparison("errors", _answered, plan.errors.margin, need.canary, need.control, binary=True)
    found = _compared(comparison, traffic.control, traffic.canary, levels)
    if found.control is not None and found.canary is not None:
        failed = {"control": 1.0 - found.control, "canary": 1.0 - found.canary}
        found = found.model_copy(update={**failed, "note": found.note.replace(" lost,", " more fail,")})
    silent = sum(not line.says("error") for line in (*traffic.control, *traffic.canary))
    if silent and found.state != "fail":
        told = f"{silent} lines do not say whether they failed (`error`)"
        return found.model_copy(update={"state": "missing", "note": told})
    return found


def _answered(line: Line) -> float:
    return 0.0 if line.failed else 1.0


def _compared(c: _Comparison, control: Sequence[Line], canary: Sequence[Line], levels: Levels) -> Finding:
    """A share or a mean of two arms, with its loss bounded at the levels of this look."""
    blank = Finding(
        what=c.what, state="missing", limit=c.margin, canary_requests=len(canary), control_requests=len(control),
        canary_needed=c.canary, control_needed=c.control, note="no line of one arm or of both has it",
    )  # fmt: skip
    if not control or not canary:
        return blank
    ours, theirs = ([c.value(line) for line in side] for side in (control, canary))
    means = {"control": sum(ours) / len(ours), "canary": sum(theirs) / len(theirs)}
    found = blank.model_copy(update={"state": "open", "note": "", **means})
    users, others = _clusters(control), _clusters(canary)
    if min(len(set(users or range(len(ours)))), len(set(others or range(len(theirs))))) < AT_LEAST:
        return _settled(found.model_copy(update={"note": "fewer than two independent requests on an arm"}))
    if not any(ours):
        return _settled(found.model_copy(update={"note": "the control has nothing right, so nothing can be lost"}))
    if c.binary:
        shares = arms.share(ours, users), arms.share(theirs, others)
        lower, upper = arms.share_bounds(*shares, below=levels.back, above=levels.go)
    else:
        graded = arms.Graded(ours, users), arms.Graded(theirs, others)
        lower, upper = arms.mean_bounds(*graded, below=levels.back, above=levels.go)
    return _settled(found.model_copy(update={"lower": lower, "upper": upper}))


def _clusters(lines: Sequence[Line]) -> list[str] | None:
    """Whose requests they are; None where no line says, and where some do, a line that does not is alone."""
    if not any(line.user for line in lines):
        return None
    return [f"u {line.user}" if line.user else f"r {n}" for n, line in enumerate(lines)]


def _settled(f: Finding) -> Finding:
    """Find the state by bounds and counts, and put it in words."""
    lost = 0.0 if f.canary is None or f.control is None else f.control - f.canary
    margin = f"the margin is {f.limit:g}"
    if f.lower is not None and f.lower > f.limit:
        return f.model_copy(update={"state": "fail", "note": f"{lost:.4f} lost, at least {f.lower:.4f}; {margin}"})
    sides = (("canary", f.canary_requests, f.canary_needed), ("control", f.control_requests, f.control_needed))
    lacking = [f"{needed - n} more of the {arm} ({n} of {needed})" for arm, n, needed in sides if n < needed]
    if lacking:
        return f.model_copy(update={"state": "few", "note": " and ".join(lacking)})
    if f.upper is None:
        return f
    if f.upper < f.limit:
        return f.model_copy(update={"state": "pass", "note": f"{lost:.4f} lost, at most {f.upper:.4f}; {margin}"})
    hope = "; half of it or more seems lost, so more requests are unlikely to help" if lost >= f.limit / 2 else ""
    return f.model_copy(update={"note": f"{lost:.4f} lost, perhaps {f.upper:.4f}; {margin}{hope}"})


# Promises


def _promise(slo: Slo, traffic: Traffic, need: Need, levels: Levels) -> Finding:
    """The canary's percentile against its limit. Where the control breaks it too, the canary is not to blame.

    A line that does not say how long it took is late where the promise is to be kept, and took no time where harm is to
    be shown.
    """
    lines = [line for line in traffic.canary if not _not_applicable(line, slo)]
    silent = sum(not line.failed and line.latency(slo.metric) is None for line in lines)
    go = promise(_requests(lines, slo, None), slo, confidence=1.0 - levels.promise_go)
    bad = promise(_requests(lines, slo, 0.0), slo, confidence=1.0 - levels.promise_back)
    state: State = "open"
    note = f"perhaps {'any time' if go.upper is None else f'{go.upper:.1f} ms'}; the promise is {slo.max_ms:g} ms"
    if bad.state == "broken":
        theirs = promise(_requests(traffic.control, slo, 0.0), slo, confidence=1.0 - levels.promise_go)
        least = "more requests fail than it allows" if bad.lower is None else f"at least {bad.lower:.1f} ms"
        state, note = "fail", f"{least}; the promise is {slo.max_ms:g} ms"
        if theirs.state == "broken":
            state, note = "open", f"{note}; but the control breaks it too, so it is not the canary's doing"
    elif silent or not lines:
        state, note = "missing", f"{silent or 'all'} canary lines do not say {slo.metric}"
    elif len(lines) < need.canary:
        state, note = "few", f"{need.canary - len(lines)} more of the canary ({len(lines)} of {need.canary})"
    elif go.state == "kept":
        state, note = "pass", f"at most {go.upper:.1f} ms; the promise is {slo.max_ms:g} ms"
    return Finding(
        what=promise_name(slo), state=state, limit=slo.max_ms, canary=None if silent else go.value,
        lower=bad.lower, upper=go.upper, canary_requests=len(lines) - silent, canary_needed=need.canary, note=note,
    )  # fmt: skip


def _not_applicable(line: Line, slo: Slo) -> bool:
    """An answer of one token has no time per further token, which the line says with a null."""
    return slo.metric == "tpot_ms" and not line.failed and line.says("tpot_ms") and line.tpot_ms is None


def _requests(lines: Sequence[Line], slo: Slo, unsaid: float | None) -> list[Request]:
    """The lines as requests of a probe, with `unsaid` for a latency that a line does not say."""

    def told(value: float | None) -> float | None:
        return unsaid if value is None else value

    return [
        Request(
            engine=line.arm, profile=slo.profile, round=0, ok=not line.failed, ttft_ms=told(line.ttft_ms),
            tpot_ms=told(line.tpot_ms), e2e_ms=told(line.e2e_ms),
        )
        for line in lines
    ]  # fmt: skip
