"""The tables of a probe on disk: requests.parquet, blocks.parquet, resources.parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.probe.blocks import BlockRow, ResourceRow
from pipelines.probe.rows import RequestRow

if TYPE_CHECKING:
    import pyarrow

Row = RequestRow | BlockRow | ResourceRow


def write(
    out: Path, requests: Sequence[RequestRow], blocks: Sequence[BlockRow], resources: Sequence[ResourceRow]
) -> None:
    """Write the tables into `out`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    written: tuple[tuple[str, Sequence[Row], type[Row]], ...] = (
        ("requests.parquet", requests, RequestRow),
        ("blocks.parquet", blocks, BlockRow),
        ("resources.parquet", resources, ResourceRow),
    )
    for name, rows, kind in written:
        pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=_schema(kind)), out / name)


def _schema(row: type[Row]) -> pyarrow.Schema:
    """Derive the columns from a row's annotations, so that an empty or all-null column keeps its type."""
    import pyarrow as pa

    types = {
        "str": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "tuple[float, ...]": pa.list_(pa.float64()),
    }
    return pa.schema([(name, types[kind.removesuffix(" | None")]) for name, kind in row.__annotations__.items()])
