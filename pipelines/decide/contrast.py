"""The difference between two engines on the same items: paired by item, with the gate's own statistics. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.decide import judge
from pipelines.decide.compared import Delta, Refusal
from pipelines.decide.gate import OVERALL, EvalCard
from pipelines.decide.interval import Interval
from pipelines.decide.judge import Item, Pairs

FORMULAS = {
    "difference": "other - base, over the same items; a ratio is other / base",
    "interval of a score": "paired by item. Scores of 0 and 1: Tango's score interval; graded ones: the wider of "
    "paired t and the BCa bootstrap; where items form clusters, both allow for it. No margin enters: it says how large "
    "the difference may be, not whether it is allowed",
    "reads": "better or worse where the whole interval lies on one side of no difference. Every interval holds by "
    "itself; of twenty at 95% one is expected to miss",
}
NOTHING_IN_COMMON = "no item in common, so there is no interval"


@dataclass(frozen=True, slots=True)
class Asked:
    """How to compare: at which two-sided confidence, and whether against all reasons. `names` are base and other."""

    names: tuple[str, str]
    confidence: float
    anyway: bool

    @property
    def other(self) -> str:
        return self.names[1]

    def refuse(self, kind: str, name: str, reasons: Sequence[str], *, missing: bool = False) -> Refusal:
        return Refusal(side=self.other, kind=kind, name=name, reasons=tuple(reasons), missing=missing)


def scores(
    base: Sequence[Item],
    other: Sequence[Item],
    eval_set: str,
    card: EvalCard,
    asked: Asked,
    conditions: Sequence[str],
    edition: Sequence[str],
) -> list[Delta | Refusal]:
    """Compare scores on one eval set and on each of its slices, where it has several.

    conditions: what else differs. edition: what shows that the set is another one, told where no item shows it.
    """
    ours, theirs = ([i for i in side if card.filter in (None, i.filter)] for side in (base, other))
    problem = judge.mismatch(ours, theirs, card)
    reasons = [*([_told(problem, asked)] if problem else edition), *conditions]
    if not reasons:
        return list(_of_set(ours, theirs, eval_set, card, asked, ()))
    if not asked.anyway:
        return [asked.refuse("score", eval_set, reasons)]
    couples = [(a, b) for a, b in judge.align(ours, theirs, card) if a.score is not None and b.score is not None]
    once = len({a.item_id for a, _ in couples}) == len(couples)
    if couples and once:
        return list(_of_set([a for a, _ in couples], [b for _, b in couples], eval_set, card, asked, reasons))
    return [_apart(ours, theirs, eval_set, card, asked, reasons)]


def _told(problem: str, asked: Asked) -> str:
    """What `judge` says of a reference and a candidate, said of these two."""
    base, other = asked.names
    return f"other items: {problem.replace('the reference', base).replace('the candidate', other)}"


def _of_set(
    ours: Sequence[Item], theirs: Sequence[Item], eval_set: str, card: EvalCard, asked: Asked, marks: Sequence[str]
) -> list[Delta]:
    found = [_delta(ours, theirs, eval_set, OVERALL, card, asked, marks)]
    names = sorted({item.slice for item in ours})
    for name in names if len(names) > 1 else ():
        inside = [n for n, item in enumerate(ours) if item.slice == name]
        few, fewer = ([side[n] for n in inside] for side in (ours, _in_order(ours, theirs)))
        found.append(_delta(few, fewer, eval_set, name, card, asked, marks))
    return found


def _in_order(ours: Sequence[Item], theirs: Sequence[Item]) -> list[Item]:
    of_id = {item.item_id: item for item in theirs}
    return [of_id[item.item_id] for item in ours]


def _delta(
    ours: Sequence[Item],
    theirs: Sequence[Item],
    eval_set: str,
    part: str,
    card: EvalCard,
    asked: Asked,
    marks: Sequence[str],
) -> Delta:
    pairs = judge.pair(ours, theirs, card)
    found = _estimate(pairs, card, asked.confidence)
    sign = -1.0 if card.higher_is_better else 1.0  # a loss is a difference the wrong way round
    base, other = pairs.reference_score, pairs.score
    return Delta(
        side=asked.other, kind="score", name=eval_set, part=part, unit=card.metric,
        higher_is_better=card.higher_is_better, base=base, other=other, difference=other - base,
        interval=None if found is None else _turned(found.interval, sign, asked.confidence),
        count=len(pairs.losses), clusters=len(set(pairs.clusters)) if pairs.clusters else None,
        gains=sum(d < 0 for d in pairs.losses), losses=sum(d > 0 for d in pairs.losses),
        method="" if found is None else found.method,
        note="fewer than two independent observations" if found is None else "", marks=tuple(marks),
    )  # fmt: skip


def _estimate(pairs: Pairs, card: EvalCard, confidence: float) -> judge.Finding | None:
    if len(pairs.losses) < 2 or (pairs.clusters and len(set(pairs.clusters)) < 2):
        return None
    return judge.difference(pairs, binary=card.binary, confidence=confidence)


def _turned(bounds: tuple[float, float], sign: float, confidence: float) -> Interval:
    low, high = sorted(sign * bound + 0.0 for bound in bounds)
    return Interval(lower=low, upper=high, confidence=confidence)


def _apart(
    ours: Sequence[Item], theirs: Sequence[Item], eval_set: str, card: EvalCard, asked: Asked, marks: Sequence[str]
) -> Delta | Refusal:
    """Two means over different items: all that can be said of them is how far apart they are."""
    means = [_mean(side) for side in (ours, theirs)]
    base, other = means
    if base is None or other is None:
        return asked.refuse("score", eval_set, [*marks, "there are no two means to compare"], missing=True)
    return Delta(
        side=asked.other, kind="score", name=eval_set, part=OVERALL, unit=card.metric,
        higher_is_better=card.higher_is_better, base=base, other=other, difference=other - base,
        method="means over different items", note=NOTHING_IN_COMMON, marks=tuple(marks),
    )  # fmt: skip


def _mean(items: Sequence[Item]) -> float | None:
    known = [item.score for item in items if item.score is not None]
    return sum(known) / len(known) if known and len(known) == len(items) else None


def card_of(items: Sequence[Item]) -> EvalCard:
    """What is known of an eval set from its scores alone, where no decision holds its card."""
    first = items[0]
    graded = not first.binary and not first.higher_is_better  # a range that nobody knows, as of perplexity
    return EvalCard(
        family="perplexity" if graded else "standard", metric=first.metric, higher_is_better=first.higher_is_better,
        binary=first.binary,
    )  # fmt: skip
