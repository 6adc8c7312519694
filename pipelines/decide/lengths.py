"""Scores by how long an item's prompt is, shown beside verdicts: what fails on long prompts only shows here first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pipelines.decide.gate import EvalCard
from pipelines.decide.judge import Item, align
from pipelines.decide.model import Bucket

EDGES = (0, 128, 512, 2048, 8192)
"""Tokens sent for an item, over all its requests; each bucket begins at one of these."""


def buckets(eval_set: str, reference: Sequence[Item], candidate: Sequence[Item], card: EvalCard) -> Iterator[Bucket]:
    """Sum up both sides by length of the prompt; nothing where all items are of one length class."""
    couples = [(a, b) for a, b in align(reference, candidate, card) if _known(a) and _known(b)]
    if len({_class(a) for a, _ in couples}) < 2:
        return
    sign = 1.0 if card.higher_is_better else -1.0
    for number, least in enumerate(EDGES):
        inside = [(float(a.score or 0), float(b.score or 0)) for a, b in couples if _class(a) == number]
        if inside:
            ours, theirs = (math.fsum(side) / len(inside) for side in zip(*inside, strict=True))
            yield Bucket(
                eval_set=eval_set,
                least=least,
                below=EDGES[number + 1] if number + 1 < len(EDGES) else None,
                items=len(inside),
                reference_score=ours,
                score=theirs,
                loss=sign * (ours - theirs),
                losses=sum(sign * (a - b) > 0 for a, b in inside),
                gains=sum(sign * (a - b) < 0 for a, b in inside),
            )


def _class(item: Item) -> int:
    return max(n for n, least in enumerate(EDGES) if item.tokens_in >= least)


def _known(item: Item) -> bool:
    return item.score is not None and math.isfinite(item.score)
