"""One verdict from two columns of item scores. Evidence first: pairs that do not match are never compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipelines.decide import stats
from pipelines.decide.bootstrap import RESAMPLES, bca
from pipelines.decide.gate import OVERALL, EvalCard, GateConfig, Relative, Rule
from pipelines.decide.interval import Interval
from pipelines.decide.model import Verdict, VerdictName

FLIPS_CONFIDENCE = 0.6  # two-sided; its upper limit is the one-sided 80% bound of the share of flips
_ALIKE = ("prompt_hash", "template_id", "slice", "cluster", "filter", "metric", "higher_is_better", "binary")


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
    looping: bool = False
    not_finite: bool = False
    must_pass: bool = False
    generated: bool = False
    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two columns aligned by item; losses are signed so that positive is worse. `reference` holds its own scores."""

    losses: tuple[float, ...]
    clusters: tuple[str, ...] | None
    reference: tuple[float, ...]
    score: float
    scale: float

    @property
    def reference_score(self) -> float:
        return math.fsum(self.reference) / len(self.reference)


@dataclass(frozen=True, slots=True)
class Finding:
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
    rule = gate.rule(eval_set, card)
    whole = Verdict(
        eval_set=eval_set, slice=OVERALL, metric=card.metric, higher_is_better=card.higher_is_better,
        binary=card.binary, items=len(theirs), clusters=None, reference_score=None, score=None, loss=None,
        interval=None, margin=rule.points(1.0), gains=None, losses=None, p_value=None, method="none",
        verdict="invalid", more_items=None, note="", gates=True, alpha=rule.alpha,
        relative=rule.margin.relative if isinstance(rule.margin, Relative) else None,
    )  # fmt: skip
    problem = mismatch(ours, theirs, card)
    if problem:
        return (whole.model_copy(update={"note": problem}),)
    verdicts = [_compare(whole, pair(ours, theirs, card), rule, _counted(ours, theirs))]
    names = sorted({item.slice for item in ours})
    for name in names if len(names) > 1 else ():
        rule = gate.rule(eval_set, card, name)
        relative = rule.margin.relative if isinstance(rule.margin, Relative) else None
        changes = {"slice": name, "gates": gate.slices == "gate", "alpha": rule.alpha, "relative": relative}
        inside = {item.item_id for item in ours if item.slice == name}
        few, fewer = ([i for i in side if i.item_id in inside] for side in (ours, theirs))
        part = whole.model_copy(update=changes)
        verdicts.append(_compare(part, pair(few, fewer, card), rule, _counted(few, fewer)))
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
    for name in _ALIKE:
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


def align(reference: Sequence[Item], candidate: Sequence[Item], card: EvalCard) -> list[tuple[Item, Item]]:
    """Give the items that both sides answered from the same prompt, side by side."""
    theirs = {item.item_id: item for item in _one_filter(candidate, card)}
    couples = [(ours, theirs.get(ours.item_id)) for ours in _one_filter(reference, card)]
    return [(a, b) for a, b in couples if b and (a.prompt_hash, a.template_id) == (b.prompt_hash, b.template_id)]


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
        reference=tuple(ours),
        score=math.fsum(others) / len(others),
        scale=scale,
    )


def _compare(blank: Verdict, pairs: Pairs, rule: Rule, remarks: Sequence[str]) -> Verdict:
    n, groups = len(pairs.losses), len(set(pairs.clusters)) if pairs.clusters else None
    loss, margin = math.fsum(pairs.losses) / n, rule.points(pairs.reference_score)
    counts = _Counts.of(pairs)
    seen = blank.model_copy(
        update={"items": n, "clusters": groups, "reference_score": pairs.reference_score, "score": pairs.score,
                "loss": loss, "gains": counts.gains, "losses": counts.losses, "margin": margin}
        | (_table(pairs, counts, rule) if blank.binary else {})
    )  # fmt: skip
    if blank.higher_is_better and not any(pairs.reference):
        nothing = f"the reference scores 0 on all {n} items: nothing can be lost here"
        return seen.model_copy(update={"verdict": "inconclusive", "note": nothing})
    if n < 2 or groups == 1:
        return seen.model_copy(update={"verdict": "inconclusive", "note": "fewer than two independent observations"})
    finding = (_binary if blank.binary else _graded)(pairs, margin, rule)
    low, high = finding.interval
    verdict: VerdictName = "pass" if high < margin else "fail" if low > margin else "inconclusive"
    more = stats.more_items(n, finding.variance, loss, margin, rule.alpha, rule.power)
    notes = [*([_what_next(more)] if verdict == "inconclusive" else []), *remarks]
    if blank.binary and all(pairs.reference):
        notes.append("the reference is right on every item: only losses can be seen")
    return seen.model_copy(
        update={"interval": _interval(low, high, rule), "p_value": finding.p_value, "method": finding.method,
                "verdict": verdict, "more_items": more if verdict == "inconclusive" else None,
                "note": "; ".join(notes)}
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Counts:
    """The 2x2 table of a binary metric; of a graded one, items that fell and rose."""

    both: int
    gains: int
    losses: int

    @classmethod
    def of(cls, pairs: Pairs) -> _Counts:
        losses, gains = sum(d > 0 for d in pairs.losses), sum(d < 0 for d in pairs.losses)
        both = sum(d == 0 and ours > 0 for d, ours in zip(pairs.losses, pairs.reference, strict=True))
        return cls(both, gains, losses)


def _table(pairs: Pairs, counts: _Counts, rule: Rule) -> dict[str, object]:
    """The 2x2 table with what two other methods make of it, which decides nothing."""
    neither = len(pairs.losses) - counts.both - counts.gains - counts.losses
    shown: dict[str, object] = {"both_right": counts.both, "both_wrong": neither}
    shown["mcnemar_p"] = stats.mcnemar_exact(counts.gains, counts.losses)
    if pairs.clusters is None:
        low, high = stats.newcombe_interval(counts.both, counts.gains, counts.losses, neither, rule.confidence)
        shown["newcombe"] = _interval(-high, -low, rule)
    return shown


def _interval(low: float, high: float, rule: Rule) -> Interval:
    return Interval(lower=low, upper=high, confidence=round(rule.confidence, 12))


def difference(pairs: Pairs, *, binary: bool, confidence: float) -> Finding:
    """Estimate the loss with the methods of a verdict, without a margin; `p_value` is that of a candidate no better."""
    rule = Rule(margin=0.0, alpha=(1.0 - confidence) / 2.0, power=0.8)
    return (_binary if binary else _graded)(pairs, 0.0, rule)


def _binary(pairs: Pairs, margin: float, rule: Rule) -> Finding:
    """Nam/Tango; clustered items count as so many fewer independent ones, with t in place of the normal."""
    n, df, effect = len(pairs.losses), math.inf, 1.0
    clustered = ""
    if pairs.clusters:
        effect = stats.design_effect(_contrast(pairs, rule), pairs.clusters, 1.0)
        df = len(set(pairs.clusters)) - 1.0
        clustered = f", design effect {effect:.2f}, t with {df:.0f} df"
    counts = _Counts.of(pairs)
    both, won, lost, size = (x / effect for x in (counts.both, counts.gains, counts.losses, n))
    flips = stats.wilson(lost + won, size, FLIPS_CONFIDENCE)[1]
    loss = max(0.0, (lost - won) / size)
    variance = effect * max(0.0, flips - loss * loss)
    if isinstance(rule.margin, Relative):
        at = pairs.reference_score
        least, most = stats.ratio_interval(both, won, lost, size, rule.confidence, df)
        p = stats.upper_tail(stats.ratio_score(both, won, lost, size, 1.0 - rule.margin.relative), df)
        bounds = ((1.0 - most) * at, (1.0 - least) * at)
        return Finding(bounds, p, variance, f"score test of paired ratios (Nam/Blackwelder){clustered}")
    low, high = stats.paired_score_interval(won, lost, size, rule.confidence, df)
    p = stats.noninferiority_p(won, lost, size, margin, df)
    return Finding((-high, -low), p, variance, f"paired score test (Nam/Tango){clustered}")


def _contrast(pairs: Pairs, rule: Rule) -> Sequence[float]:
    """Per item what a relative margin is about, loss - relative * reference score; else the loss itself."""
    if not isinstance(rule.margin, Relative):
        return pairs.losses
    allowed = rule.margin.relative
    return [loss - allowed * abs(ours) for loss, ours in zip(pairs.losses, pairs.reference, strict=True)]


def _graded(pairs: Pairs, margin: float, rule: Rule) -> Finding:
    """Paired t, with the variance of whole clusters where there are any, and the BCa bootstrap: the wider of both."""
    values = _contrast(pairs, rule)
    shift = margin if isinstance(rule.margin, Relative) else 0.0  # back on the scale of the loss
    estimate = stats.cautious_t(values, pairs.clusters, pairs.scale, rule.confidence)
    mirrored = replace(estimate, mean=-estimate.mean)
    low, high = estimate.interval(rule.confidence)
    p, kind = mirrored.p_at_most(shift - margin), "paired t"
    resampled = bca(values, pairs.clusters)
    if resampled is not None:
        lower, upper = resampled.interval(rule.confidence)
        low, high, p = min(low, lower), max(high, upper), max(p, resampled.p_at_least(margin - shift))
        kind = f"wider of paired t and BCa bootstrap ({RESAMPLES} resamples)"
    method = f"{kind}, {estimate.df:.0f} df"
    if pairs.clusters:
        effect = stats.design_effect(values, pairs.clusters, pairs.scale)
        method = f"{kind}, cluster-robust (design effect {effect:.2f}), {estimate.df:.0f} df"
    return Finding((low + shift, high + shift), p, estimate.se**2 * len(values), method)


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
