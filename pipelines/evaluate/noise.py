"""The A/A stage: an engine scored again on items it was scored on, in another order and in batches of another size.

What changes between two scorings of one engine is noise; a variant's flips mean little until they exceed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from pipelines.config import Strict
from pipelines.errors import EvidenceError
from pipelines.evaluate import harness
from pipelines.evaluate.evalset import EvalsetConfig, load
from pipelines.flow.store import Fact

TOGETHER, IN_FLIGHT = 24, 3  # neither divides, nor is divided by, what scoring itself sends at once


class NoiseConfig(Strict):
    """Which items are scored again, with the digest they had when planned, and the seed of their order."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"evalset"})

    evalset: EvalsetConfig
    digest: str
    seed: int = Field(1, ge=0)


def run(config: NoiseConfig, out: Path, *, engine: Path, scores: Path) -> dict[str, Fact]:
    """Score again, write items.parquet, and count what changed against `scores`.

    Raises:
        EvidenceError: the eval set changed since it was planned, or none of its items was scored before.
    """
    from pipelines.evaluate.adapter import Pace

    evalset = load(config.evalset)
    if evalset.digest != config.digest:
        raise EvidenceError(f"evalset.{evalset.name}: changed since this campaign was planned; run it again")
    pace = Pace(together=TOGETHER, in_flight=IN_FLIGHT, shuffle=config.seed)
    rows = harness.rows_of(evalset, engine, pace)
    harness.write(rows, out)
    gated = evalset.card.filter or rows[0]["filter"]
    again = {str(r["item_id"]): r for r in rows if r["filter"] == gated}
    return {"eval_set": evalset.name, **changes(_first(scores, str(gated)), again)}


def _first(scores: Path, gated: str) -> dict[str, Mapping[str, Any]]:
    import pyarrow.parquet as pq

    columns = ["item_id", "filter", "score", "prediction", "prompt_hash"]
    table: Sequence[Mapping[str, Any]] = pq.read_table(scores / harness.ITEMS, columns=columns).to_pylist()
    return {row["item_id"]: row for row in table if row["filter"] == gated}


def changes(first: Mapping[str, Mapping[str, Any]], again: Mapping[str, Mapping[str, Any]]) -> dict[str, Fact]:
    """Count, over the items both have, scores that went up or down, and answers that are others.

    Raises:
        EvidenceError: no item is in both, or one was asked differently.
    """
    both = sorted(first.keys() & again.keys())
    if not both:
        raise EvidenceError("no item was scored twice: the first scores are of other items")
    other = [i for i in both if first[i]["prompt_hash"] != again[i]["prompt_hash"]]
    if other:
        raise EvidenceError(f"item {other[0]}: the second scoring sent another prompt than the first")
    moved = [float(again[i]["score"]) - float(first[i]["score"]) for i in both]
    return {
        "items": len(both),
        "gains": sum(d > 0 for d in moved),
        "losses": sum(d < 0 for d in moved),
        "answers_changed": sum(first[i]["prediction"] != again[i]["prediction"] for i in both),
        "mean_change": sum(moved) / len(both),
    }
