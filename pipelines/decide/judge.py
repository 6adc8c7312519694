"""One verdict from two columns of item scores. Evidence first: pairs that do not match are never compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipelines.decide import stats
from pipelines.decide.gate import OVERALL, EvalCard, GateConfig
from pipelines.decide.model import Interval, Verdict, VerdictName

FLIPS_CONFIDENCE = 0.6  # two-sided; its upper limit is the one-sided 80% bound of the share of flips


@dataclass(frozen=True, slots=True)
class Item:
    """One scored item, under one filter."""

    item_id: str
    score: float | None
    prompt_hash: str
    template_id: str
    slice: str = OVERALL
    cluster: str | None = None
    filter: str = "none"
    metric: str = ""
    higher_is_better: bool = True
    binary: bool = False
    truncated: bool = False
    empty: bool = False
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two columns aligned by item; losses are signed so that positive is worse."""

    losses: tuple[float, ...]
    clusters: tuple[str, ...] | None
    reference_score: float
    score: float
    scale: float


@dataclass(frozen=True, slots=True)
class _Finding:
    """What a test on pairs gave, in losses."""

    interval: tuple[float, float]
    p_value: float
    variance: float
    method: str


def judge(
    reference: Sequence[Item] | None, candidate: Sequence[Item] | None, eval_set: str, card: EvalCard, gate: GateConfig
) -> tuple[Verdict, ...]:
    """Compare a candidate with the reference on a whole eval set and on each of its slices (where it has several).

    Missing or mismatched evidence gives one INVALID verdict and no others.
    """
    ours, theirs = _one_filter(reference or (), card), _one_filter(candidate or (), card)
    whole = Verdict(
        eval_set=eval_set, slice=OVERALL, metric=card.metric, higher_is_better=card.higher_is_better,
        binary=card.binary, items=len(theirs), clusters=None, reference_score=None, score=None, loss=None,
        interval=None, margin=gate.margin(eval_set, card), gains=None, losses=None, p_value=None, method="none",
        verdict="invalid", more_items=None, note="", gates=True,
    )  # fmt: skip
    problem = mismatch(ours, theirs, card)
    if problem:
        return (whole.model_copy(update={"note": problem}),)
    verdicts = [_compare(whole, pair(ours, theirs, card), gate, _counted(ours, theirs))]
    names = sorted({item.slice for item in ours})
    for name in names if len(names) > 1 else ():
        part = whole.model_copy(
            update={"slice": name, "margin": gate.margin(eval_set, card, name), "gates": gate.slices == "gate"}
        )
        inside = {item.item_id for item in ours if item.slice == name}
        few, fewer = ([i for i in side if i.item_id in inside] for side in (ours, theirs))
        verdicts.append(_compare(part, pair(few, fewer, card), gate, _counted(few, fewer)))
    return tuple(verdicts)


def mismatch(reference: Sequence[Item], candidate: Sequence[Item], card: EvalCard) -> str:
    """Say why two columns may not be compared, naming the first item that differs; empty when they may."""
    for who, side in (("reference", reference), ("candidate", candidate)):
        if not side:
            return f"the {who} has no scores on this eval set"
        ids = [item.item_id for item in side]
        if len(set(ids)) < len(ids):
            twice = min(i for i in set(ids) if ids.count(i) > 1)
            several = len({item.filter for item in side}) > 1
            hint = "; several filters are present: name one in the card's `filter`" if several else ""
            return f"item {twice}: scored more than once by the {who}{hint}"
    theirs = {item.item_id: item for item in candidate}
    ours = {item.item_id: item for item in reference}
    for item_id in sorted(ours.keys() | theirs.keys()):
        if item_id not in theirs or item_id not in ours:
            count = f"{len(ours)} items against {len(theirs)}"
            return f"item {item_id}: missing from the {'reference' if item_id in theirs else 'candidate'} ({count})"
        problem = _item_mismatch(ours[item_id], theirs[item_id], card)
        if problem:
            return f"item {item_id}: {problem}"
    return ""


def _item_mismatch(ours: Item, theirs: Item, card: EvalCard) -> str:
    for name in ("prompt_hash", "template_id", "slice", "cluster", "filter", "metric", "higher_is_better", "binary"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            return f"{name} differs (reference {_short(a)}, candidate {_short(b)})"
    for name in ("metric", "higher_is_better", "binary"):
        a, b = getattr(ours, name), getattr(card, name)
        if a != b:
            return f"{name} is {_short(a)}, but the eval set's card says {_short(b)}"
    for who, item in (("reference", ours), ("candidate", theirs)):
        if item.score is None or not math.isfinite(item.score):
            return f"the {who} has no score ({item.score})"
        if item.binary and item.score not in (0.0, 1.0):
            return f"the {who}'s score {item.score} is neither 0 nor 1, but the metric is binary"
    return ""


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "…"


def _one_filter(side: Sequence[Item], card: EvalCard) -> list[Item]:
    return sorted((i for i in side if card.filter in (None, i.filter)), key=lambda item: item.item_id)


def pair(reference: Sequence[Item], candidate: Sequence[Item], card: EvalCard) -> Pairs:
    """Align two columns already found to match; an item without a cluster is a cluster of its own.

    `scale` is the largest change an item could show: the metric's range (at least 1), or for perplexity, which has
    none, the largest change seen.
    """
    theirs = {item.item_id: item for item in candidate}
    couples = [(ours, theirs[ours.item_id]) for ours in reference]
    ours = [float(a.score or 0.0) for a, _ in couples]
    others = [float(b.score or 0.0) for _, b in couples]
    sign = 1.0 if reference[0].higher_is_better else -1.0
    clustered = any(item.cluster is not None for item in reference)
    clusters = tuple(f"c {i.cluster}" if i.cluster is not None else f"i {i.item_id}" for i in reference)
    losses = tuple(sign * (a - b) for a, b in zip(ours, others, strict=True))
    scale = max(map(abs, losses)) if card.family == "perplexity" else max(1.0, max(ours + others) - min(ours + others))
    return Pairs(
        losses=losses,
        clusters=clusters if clustered else None,
        reference_score=math.fsum(ours) / len(ours),
        score=math.fsum(others) / len(others),
        scale=scale,
    )


def _compare(blank: Verdict, pairs: Pairs, gate: GateConfig, remarks: Sequence[str]) -> Verdict:
    n, groups = len(pairs.losses), len(set(pairs.clusters)) if pairs.clusters else None
    losses, gains = sum(d > 0 for d in pairs.losses), sum(d < 0 for d in pairs.losses)
    loss = math.fsum(pairs.losses) / n
    seen = blank.model_copy(
        update={"items": n, "clusters": groups, "reference_score": pairs.reference_score, "score": pairs.score,
                "loss": loss, "gains": gains, "losses": losses}
    )  # fmt: skip
    if n < 2 or groups == 1:
        return seen.model_copy(update={"verdict": "inconclusive", "note": "fewer than two independent observations"})
    finding = (_binary if blank.binary else _graded)(pairs, blank.margin, gate)
    low, high = finding.interval
    verdict: VerdictName = "pass" if high < blank.margin else "fail" if low > blank.margin else "inconclusive"
    more = stats.more_items(n, finding.variance, loss, blank.margin, gate.alpha, gate.power)
    notes = [*([_what_next(more)] if verdict == "inconclusive" else []), *remarks]
    return seen.model_copy(
        update={"interval": Interval(lower=low, upper=high, confidence=round(gate.confidence, 12)),
                "p_value": finding.p_value, "method": finding.method, "verdict": verdict,
                "more_items": more if verdict == "inconclusive" else None, "note": "; ".join(notes)}
    )  # fmt: skip


def _binary(pairs: Pairs, margin: float, gate: GateConfig) -> _Finding:
    """Nam/Tango; clustered items count as so many fewer independent ones, with t in place of the normal."""
    n, df, effect = len(pairs.losses), math.inf, 1.0
    method = "paired score test (Nam/Tango)"
    if pairs.clusters:
        effect = stats.design_effect(pairs.losses, pairs.clusters, 1.0)
        df = len(set(pairs.clusters)) - 1.0
        method += f", design effect {effect:.2f}, t with {df:.0f} df"
    lost = sum(d > 0 for d in pairs.losses) / effect
    won = sum(d < 0 for d in pairs.losses) / effect
    size = n / effect
    low, high = stats.paired_score_interval(won, lost, size, gate.confidence, df)
    flips = stats.wilson(lost + won, size, FLIPS_CONFIDENCE)[1]
    loss = max(0.0, (lost - won) / size)
    p = stats.noninferiority_p(won, lost, size, margin, df)
    return _Finding((-high, -low), p, effect * max(0.0, flips - loss * loss), method)


def _graded(pairs: Pairs, margin: float, gate: GateConfig) -> _Finding:
    """Paired t, with the variance of whole clusters where there are any."""
    estimate = stats.cautious_t(pairs.losses, pairs.clusters, pairs.scale, gate.confidence)
    mirrored = replace(estimate, mean=-estimate.mean)
    method = f"paired t, {estimate.df:.0f} df"
    if pairs.clusters:
        effect = stats.design_effect(pairs.losses, pairs.clusters, pairs.scale)
        method = f"paired t, cluster-robust (design effect {effect:.2f}), {estimate.df:.0f} df"
    n = len(pairs.losses)
    return _Finding(estimate.interval(gate.confidence), mirrored.p_at_most(-margin), estimate.se**2 * n, method)


def _what_next(more: int | None) -> str:
    return "unlikely to pass: stop" if more is None else f"{more} more items would decide"


def _counted(reference: Sequence[Item], candidate: Sequence[Item]) -> list[str]:
    """Count what makes answers suspect, on both sides, where there is any."""
    found = []
    for name, what in {"truncated": "prompts truncated", "empty": "outputs empty", "cut": "outputs cut short"}.items():
        ours, theirs = (sum(getattr(item, name) for item in side) for side in (reference, candidate))
        if ours or theirs:
            found.append(f"{what}: reference {ours}, candidate {theirs}")
    return found
