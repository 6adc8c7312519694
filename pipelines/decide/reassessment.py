"""A champion judged again: whether the decision that promoted it still holds, and what moved since. Pure.

The verdicts are those of the gate; nothing here is a statistic of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pipelines.config import Strict
from pipelines.decide.decision import gating, name
from pipelines.decide.gate import EvalCard, GateConfig
from pipelines.decide.judge import Item, judge
from pipelines.decide.model import Candidate, Outcome, Verdict
from pipelines.decide.probed import Speed

Standing = Literal["still holds", "in doubt", "no longer holds"]
STANDINGS: Mapping[Outcome, Standing] = {
    "promote": "still holds",
    "hold": "in doubt",
    "reject": "no longer holds",
}
FORMULAS = {
    "still holds, in doubt, no longer holds": "what the gate of now says of the champion's engine against the "
    "reference: promote, hold, reject",
    "known items, new items": "the same comparison on the items that were scored then, from the same prompts, and on "
    "those that were not; shown, and decided by neither alone",
    "moved": "the champion's own scores now against then, on the same items; positive is worse",
}
Of = Literal["checkpoint", "recipe", "toolchain"]
What = Literal["data", "toolchain", "checkpoint", "calibration", "recipe", "code", "device", "load", "gate", "again"]


class Moved(Strict):
    """One thing that is not as it was: what it belongs to, and both values."""

    what: What
    where: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.where}: {self.before or 'none'} -> {self.now or 'none'}"


class Comparison(Strict):
    """The champion on one eval set or slice, then and now.

    known, new: now, on the items that were scored then and on the others; None where all items are of one kind.
    moved: its own scores now against then, on known items; None where they are the same artifact, or were not kept.
    """

    eval_set: str
    slice: str
    then: Verdict | None
    now: Verdict | None
    known: Verdict | None = None
    new: Verdict | None = None
    moved: Verdict | None = None


class Rebuilt(Strict):
    """The champion's recipe made again from what there is now, and what the gate says of it.

    of: what is not as it was. speed: against the champion's own engine, in the same probe.
    """

    label: str
    of: Of
    decision_key: str = ""
    engine_key: str = ""
    outcome: Outcome | None = None
    reasons: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    perplexity: tuple[float | None, float | None] = (None, None)
    engine_kl: tuple[float | None, float | None] = (None, None)
    speed: Speed | None = None


class Reassessment(Strict):
    """Whether a champion's decision still holds, why, what changed, and what to do."""

    version: Literal[1] = 1
    campaign: str
    champion: str
    label: str
    engine_key: str
    decision_key: str
    decided: str
    outcome: Standing
    headline: str
    reasons: tuple[str, ...]
    to_do: tuple[str, ...]
    changes: tuple[Moved, ...]
    then: Outcome | None
    now: Outcome | None
    comparisons: tuple[Comparison, ...]
    speed_then: Speed | None
    speed_now: Speed | None
    latency: str
    rebuilt: Rebuilt | None = None
    conditions: dict[str, str]


Columns = Mapping[str, Sequence[Item]]
"""Scored items by eval set."""


def compare(
    then: Sequence[Verdict],
    now: Sequence[Verdict],
    before: tuple[Columns, Columns],
    after: tuple[Columns, Columns],
    cards: Mapping[str, EvalCard],
    gate: GateConfig,
) -> tuple[Comparison, ...]:
    """Set the verdicts of then and now side by side, eval set by eval set, each with its slices.

    `before` and `after` are the columns of the reference and of the champion.
    """
    was, is_now = _by_place(then), _by_place(now)
    found = []
    for eval_set, card in cards.items():
        parts = _parts(eval_set, card, gate, before, after)
        places = [p for p in dict.fromkeys([*is_now, *was]) if p[0] == eval_set]
        for place in places:
            split = {kind: verdicts.get(place) for kind, verdicts in parts.items()}
            found.append(
                Comparison(eval_set=eval_set, slice=place[1], then=was.get(place), now=is_now.get(place), **split)
            )
    gone = [p for p in was if p[0] not in cards]
    return (*found, *(Comparison(eval_set=s, slice=part, then=was[s, part], now=None) for s, part in gone))


Place = tuple[str, str]


def _by_place(verdicts: Sequence[Verdict]) -> dict[Place, Verdict]:
    return {(v.eval_set, v.slice): v for v in verdicts if v.against == "reference"}


def _parts(
    eval_set: str, card: EvalCard, gate: GateConfig, before: tuple[Columns, Columns], after: tuple[Columns, Columns]
) -> dict[str, dict[Place, Verdict]]:
    """The comparison on known and on new items, and the champion against itself, by place."""
    (_, old), (ours, mine) = ([side.get(eval_set, ()) for side in sides] for sides in (before, after))
    both = known_ids(before, after, eval_set)
    found: dict[str, dict[Place, Verdict]] = {}
    if both and len(both) < len({item.item_id for item in mine}):
        inside = [[i for i in side if i.item_id in both] for side in (ours, mine)]
        outside = [[i for i in side if i.item_id not in both] for side in (ours, mine)]
        found["known"] = _by_place(judge(inside[0], inside[1], eval_set, card, gate))
        found["new"] = _by_place(judge(outside[0], outside[1], eval_set, card, gate))
    if both and list(old) != list(mine):
        then, now = ([i for i in side if i.item_id in both] for side in (old, mine))
        found["moved"] = _by_place(judge(then, now, eval_set, card, gate))
    return found


def known_ids(before: tuple[Columns, Columns], after: tuple[Columns, Columns], eval_set: str) -> frozenset[str]:
    """The items that the champion was scored on then and now from the same prompt."""
    then, now = (
        {(i.item_id, i.prompt_hash, i.template_id) for i in sides[1].get(eval_set, ())} for sides in (before, after)
    )
    return frozenset(item_id for item_id, _, _ in then & now)


def reasons(then: Candidate, now: Candidate, changes: Sequence[Moved]) -> tuple[str, ...]:
    """Why the champion stands as it does: what the gate says now, which verdicts turned, and what it was then."""
    return tuple(_reasons(then, now, changes))


def _reasons(then: Candidate, now: Candidate, changes: Sequence[Moved]) -> Iterator[str]:
    yield from now.reasons
    was = _by_place(then.verdicts)
    for place, verdict in _by_place(gating(now)).items():
        before = was.get(place)
        if before is None:
            yield f"{name(verdict)}: not compared then, {verdict.verdict} now"
        elif before.verdict != verdict.verdict:
            yield f"{name(verdict)}: {before.verdict} then, {verdict.verdict} now"
    if then.outcome != "promote":
        yield f"the decision then was {then.outcome or 'none'}; a person promoted it all the same"
    if not changes:
        yield "nothing changed since"


def headline(standing: Standing, label: str, why: Sequence[str], changes: Sequence[Moved]) -> str:
    """One line: how the champion stands, and the first reason."""
    kinds = ", ".join(sorted({c.what for c in changes})) or "nothing"
    return f"{standing.upper()}: champion {label}, {why[0] if why else 'no reason'} (changed since: {kinds})"


def to_do(
    standing: Standing, now: Candidate | None, rebuilt: Rebuilt | None, named: str, previous: str | None
) -> tuple[str, ...]:
    """Exact commands. `named` are the overrides that name the campaign, `previous` the version to go back to."""
    return tuple(_to_do(standing, now, rebuilt, f" {named}" if named else "", previous))


def _to_do(
    standing: Standing, now: Candidate | None, rebuilt: Rebuilt | None, named: str, previous: str | None
) -> Iterator[str]:
    if rebuilt is not None and rebuilt.outcome == "promote":
        yield f"promote the rebuilt engine: quantgate promote{named}"
    if standing == "no longer holds":
        if previous is not None:
            yield f"go back to version {previous}: quantgate rollback{named} --reason 'reassessed: no longer holds'"
        else:
            yield f"there is no version to go back to: quantgate run{named} with other variants"
    elif standing == "in doubt":
        unsure = [v for v in gating(now) if v.verdict == "inconclusive" and v.more_items] if now else []
        if unsure:
            most = max(unsure, key=lambda v: v.more_items or 0)
            yield f"add {most.more_items} items of {name(most)}, then: quantgate reassess{named}"
        yield f"measure once more: quantgate reassess{named} --again"
    elif rebuilt is None or rebuilt.outcome != "promote":
        yield "nothing: the champion stays"
