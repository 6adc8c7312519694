"""What was measured, read from artifacts into memory. The only reader of files in this room."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines.decide.judge import Item
from pipelines.decide.measured import Block, Measured, Request
from pipelines.decide.model import Noise
from pipelines.decide.probing import searched
from pipelines.decide.throughput import Limits
from pipelines.divergence import figures
from pipelines.divergence.figures import Row
from pipelines.errors import EvidenceError
from pipelines.flow.store import Manifest, manifest

_ITEM = ("eval_set", "item_id", "score", "prompt_hash", "template_id", "slice", "cluster", "filter", "metric",
         "higher_is_better", "binary", "truncated", "empty", "looping", "not_finite", "must_pass", "tokens_in",
         "tokens_out", "finish_reason")  # fmt: skip
_REQUEST = tuple(one.name for one in fields(Request))
_BLOCK = tuple(one.name for one in fields(Block) if one.name not in ("started_s", "excused"))
_LOAD = {
    "threads": "threads",
    "load_average": "load average",
    "foreign_cpu_percent": "CPU taken by others, %",
    "bandwidth_gb_s": "memory bandwidth, GB/s",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was measured, in memory. Manifests and scores by key16, items by scores key and eval set,
    what the probe measured by engine, promises by searched profile."""

    variants: Mapping[str, Manifest]
    engines: Mapping[str, Manifest]
    scores: Mapping[str, Manifest]
    items: Mapping[str, Mapping[str, Sequence[Item]]]
    latency: Manifest | None
    measured: Mapping[str, Measured]
    searched: Mapping[str, Limits]
    load: Mapping[str, str]
    divergences: Mapping[str, Sequence[Row]]
    noise: Sequence[Noise]


def read(
    *,
    scores: Sequence[Path],
    latency: Path | None,
    engines: Sequence[Path],
    variants: Sequence[Path],
    divergences: Sequence[Path] = (),
    noise: Sequence[Path] = (),
) -> Evidence:
    """Read every artifact a decision rests on.

    Raises:
        EvidenceError: a manifest or table that is missing, unreadable or lacks a column.
    """
    probe = manifest(latency) if latency else None
    blocks = _rows(latency / "blocks.parquet", (*_BLOCK, "started")) if latency else []
    requests = _rows(latency / "requests.parquet", _REQUEST) if latency else []
    return Evidence(
        variants={path.name: manifest(path) for path in variants},
        engines={path.name: manifest(path) for path in engines},
        scores={path.name: manifest(path) for path in scores},
        items={path.name: _items(path) for path in scores},
        latency=probe,
        measured=_measured(requests, blocks, excused=probe is not None and probe.config.get("disturbed") == "kept"),
        searched=searched(probe.config) if probe else {},
        load=_load(blocks),
        divergences={path.name: figures.read(path) for path in divergences},
        noise=[_noise(path) for path in noise],
    )


def _measured(
    requests: Sequence[Mapping[str, Any]], blocks: Sequence[Mapping[str, Any]], *, excused: bool
) -> dict[str, Measured]:
    """Rows by engine, with figures as numbers."""
    sent: dict[str, list[Request]] = {row["engine"]: [] for row in requests}
    loads: dict[str, list[Block]] = {engine: [] for engine in sent}
    for row in requests:
        known = {name: row[name] for name in _REQUEST} | {"itl_ms": array("d", row["itl_ms"] or ())}
        sent[row["engine"]].append(Request(**known))
    for row in blocks:
        at_s = datetime.fromisoformat(row["started"]).timestamp()
        block = Block(**{name: row[name] for name in _BLOCK}, started_s=at_s, excused=excused)
        loads.setdefault(row["engine"], []).append(block)
    return {engine: Measured(sent.get(engine, []), found) for engine, found in loads.items()}


def _noise(path: Path) -> Noise:
    found = manifest(path).facts
    try:
        return Noise.model_validate({name: found[name] for name in Noise.model_fields})
    except (KeyError, ValueError) as error:
        raise EvidenceError(f"{path}: no A/A run ({error}); run `quantgate verify`") from None


def _items(path: Path) -> dict[str, list[Item]]:
    found: dict[str, list[Item]] = {}
    for row in _rows(path / "items.parquet", _ITEM):
        fields = {name: row[name] for name in _ITEM if name not in ("eval_set", "finish_reason")}
        ended = row["finish_reason"]
        item = Item(**fields, generated=ended is not None, cut=ended == "length")
        found.setdefault(row["eval_set"], []).append(item)
    return found


def _load(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Say what the machine was doing while latency was measured, as ranges over blocks."""
    found = {}
    for column, what in _LOAD.items():
        values = [row[column] for row in rows if row.get(column) is not None]
        if values:
            low, high = f"{min(values):.4g}", f"{max(values):.4g}"
            found[what] = low if low == high else f"{low} to {high}"
    return found


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise EvidenceError(f"{path}: cannot be read ({error}); run `quantgate verify`") from None
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise EvidenceError(f"{path}: no column {', '.join(missing)}; it was made by another version, measure again")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows
