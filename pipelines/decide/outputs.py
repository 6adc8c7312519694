"""What answers look like apart from being right: cut, empty, looping, longer or shorter; items that must stay right.

What is wrong here vetoes a candidate before any statistic of its scores is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.decide import stats
from pipelines.decide.gate import EvalCard, Vetoes
from pipelines.decide.interval import Interval
from pipelines.decide.judge import Item, align
from pipelines.decide.model import Outputs, Veto

CONFIDENCE = 0.95
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Findings:
    """What one eval set's answers show: figures, what vetoes the candidate, and what too few answers leave open."""

    outputs: Outputs
    vetoes: tuple[Veto, ...] = ()
    undecided: tuple[Veto, ...] = ()


def describe(eval_set: str, side: Sequence[Item], card: EvalCard) -> Outputs:
    """Count one side's answers."""
    items = [item for item in side if card.filter in (None, item.filter)]
    made = [i for i in items if i.generated]
    return Outputs(
        eval_set=eval_set,
        items=len(items),
        generated=len(made),
        truncated=sum(i.truncated for i in items),
        empty=sum(i.empty for i in made),
        cut=sum(i.cut for i in made),
        looping=sum(i.looping for i in made),
        not_finite=sum(i.not_finite for i in items),
        mean_tokens_out=math.fsum(i.tokens_out for i in made) / len(made) if made else None,
        length_ratio=None,
        length_interval=None,
    )


def inspect(
    eval_set: str, reference: Sequence[Item], candidate: Sequence[Item], card: EvalCard, rules: Vetoes
) -> Findings:
    """Compare a candidate's answers with the reference's on the same items; `vetoes` of the gate say what is too much.

    One item alone is never a share, so empty and looping answers veto from two on.
    """
    couples = align(reference, candidate, card)
    outputs = describe(eval_set, candidate, card)
    vetoes = [*_broken(eval_set, couples, rules), *_turned_wrong(eval_set, couples)]
    lengths = _lengths(couples)
    if lengths is None:
        return Findings(outputs, tuple(vetoes))
    ratio, interval = lengths
    outputs = outputs.model_copy(update={"length_ratio": ratio, "length_interval": interval})
    least, most = rules.length
    told = f"answers are {ratio:.2f} times as long as the reference's, allowed {least:g} to {most:g}"
    if interval is not None and (interval.lower > most or interval.upper < least):
        vetoes.append(Veto(kind="length", where=eval_set, text=told))
    elif not least <= ratio <= most:
        few = Veto(kind="length", where=eval_set, text=f"{told}, too few answers to say so for sure")
        return Findings(outputs, tuple(vetoes), (few,))
    return Findings(outputs, tuple(vetoes))


Couples = Sequence[tuple[Item, Item]]


def _broken(eval_set: str, couples: Couples, rules: Vetoes) -> Iterator[Veto]:
    made = [(ours, theirs) for ours, theirs in couples if theirs.generated]
    empty = [b.item_id for a, b in made if b.empty and not a.empty]
    if len(empty) > max(1.0, rules.empty * len(made)):
        told = f"{len(empty)} of {len(made)} answers are empty where the reference's are not ({_listed(empty)})"
        yield Veto(kind="empty", where=eval_set, text=told)
    loops = [b.item_id for a, b in made if b.looping and not a.looping]
    if len(loops) > max(1.0, rules.loops * len(made)):
        told = f"{len(loops)} of {len(made)} answers end in a loop where the reference's do not ({_listed(loops)})"
        yield Veto(kind="loop", where=eval_set, text=told)
    wild = [b.item_id for a, b in couples if b.not_finite and not a.not_finite]
    if wild:
        told = f"NaN or infinite log-probabilities on {len(wild)} of {len(couples)} items ({_listed(wild)})"
        yield Veto(kind="not_finite", where=eval_set, text=told)


def _turned_wrong(eval_set: str, couples: Couples) -> Iterator[Veto]:
    lost = [b.item_id for a, b in couples if b.must_pass and a.score == 1.0 and b.score == 0.0]
    if lost:
        told = f"{len(lost)} items that must not turn wrong did ({_listed(lost)})"
        yield Veto(kind="must_pass", where=eval_set, text=told)


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(ids[:SHOWN]) + (f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else "")


def _lengths(couples: Couples) -> tuple[float, Interval | None] | None:
    """The ratio of answer lengths with its t interval, that of a ratio estimator: residuals are b - ratio * a."""
    made = [(a, b) for a, b in couples if a.generated and b.generated and not (a.empty and b.empty)]
    ours, theirs = [float(a.tokens_out) for a, _ in made], [float(b.tokens_out) for _, b in made]
    if not made or not any(ours):
        return None
    ratio = math.fsum(theirs) / math.fsum(ours)
    clusters = [a.cluster or f"item {a.item_id}" for a, _ in made]
    if len(set(clusters)) < 2:
        return ratio, None
    estimate = stats.cluster_t([b - ratio * a for a, b in zip(ours, theirs, strict=True)], clusters)
    half = stats.critical(CONFIDENCE, estimate.df) * estimate.se * len(made) / math.fsum(ours)
    return ratio, Interval(lower=ratio - half, upper=ratio + half, confidence=CONFIDENCE)
