"""What an eval set can show at its size, before anything runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipelines.config import Strict
from pipelines.decide import stats
from pipelines.decide.gate import OVERALL, EvalCard, GateConfig, Relative


@dataclass(frozen=True, slots=True)
class Size:
    """Items of a set or slice, and how many clusters they form where they do."""

    items: int
    clusters: int | None = None

    @property
    def design_effect(self) -> float:
        """How many items count as one, with the prior correlation of `stats.PRIOR_ICC` inside clusters."""
        return 1.0 + (self.items / self.clusters - 1.0) * stats.PRIOR_ICC if self.clusters else 1.0


class Resolution(Strict):
    """What a set or slice of this size can show. A relative margin is in points of a reference that scores 1.

    `decides` is false for slices that are only shown.
    """

    eval_set: str
    slice: str = OVERALL
    items: int
    margin: float
    relative: bool = False
    smallest_loss: float
    items_needed: int
    enough: bool
    decides: bool = True

    @property
    def name(self) -> str:
        return self.eval_set if self.slice == OVERALL else f"{self.eval_set}/{self.slice}"


def resolutions(eval_set: str, sizes: Mapping[str, Size], card: EvalCard, gate: GateConfig) -> tuple[Resolution, ...]:
    """Resolve a whole set and, where it has several, its slices; `sizes` are by slice, with the whole under "all"."""
    parts = sorted(sizes.keys() - {OVERALL})
    names = [OVERALL, *(parts if len(parts) > 1 else ())]
    return tuple(_resolution(eval_set, name, sizes[name], card, gate) for name in names)


def _resolution(eval_set: str, part: str, size: Size, card: EvalCard, gate: GateConfig) -> Resolution:
    """Say the smallest loss that can be ruled out here, and how many items the margin takes.

    Assumes `expected_flips` and no loss.
    """
    rule = gate.rule(eval_set, card, part)
    margin, effect = rule.points(1.0), size.design_effect
    smallest = math.inf
    if size.items:
        smallest = stats.smallest_loss(max(1.0, size.items / effect), gate.expected_flips, rule.alpha, rule.power)
    return Resolution(
        eval_set=eval_set,
        slice=part,
        items=size.items,
        margin=margin,
        relative=isinstance(rule.margin, Relative),
        smallest_loss=smallest if math.isfinite(smallest) else 1.0,
        items_needed=math.ceil(effect * stats.items_needed(gate.expected_flips, margin, rule.alpha, rule.power)),
        enough=smallest <= margin,
        decides=part == OVERALL or gate.slices == "gate",
    )
