"""The two tables a probe writes: one row per request, one per load on one engine. Engines are named by their key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.probe import latency, sse
from pipelines.probe.arrivals import Arrival
from pipelines.probe.client import Exchange
from pipelines.probe.config import LoadProfile
from pipelines.probe.prompts import Prompt
from pipelines.probe.sampler import Usage

if TYPE_CHECKING:
    import pyarrow

NOT_STARTED = "not_started"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the interleaving a load ran.

    round: repetition of the whole comparison. block: number of the server start, over the whole probe.
    position: the engine's place in its round, 0 for the one measured first.
    """

    engine: str
    round: int
    block: int
    position: int


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request. Seconds count from the start of its load; scheduled_s is when it was due (closed: its slot free).

    A request that failed has no latencies: its time is not one.
    """

    engine: str
    profile: str
    mode: str
    concurrency: int | None
    rate: float | None
    round: int
    block: int
    position: int
    request: int
    prompt_id: str
    input_tokens: int
    output_tokens: int
    scheduled_s: float
    sent_s: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    itl_ms: tuple[float, ...]
    ok: bool
    error: str | None


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One load on one engine, with what the machine did meanwhile. bandwidth_gb_s was read just before it."""

    engine: str
    profile: str
    round: int
    block: int
    position: int
    started: str
    wall_s: float
    requests: int
    failed: int
    requests_per_s: float
    output_tokens_per_s: float
    peak_rss_bytes: int | None
    cpu_percent: float | None
    load_average: float | None
    foreign_cpu_percent: float | None
    threads: int
    bandwidth_gb_s: float | None


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a load ran under."""

    started: str
    wall_s: float
    usage: Usage
    threads: int
    bandwidth_gb_s: float | None


def request_row(place: Place, profile: LoadProfile, arrival: Arrival, prompt: Prompt, exchange: Exchange) -> RequestRow:
    """Turn what was recorded of one request into its figures; a failed request has none."""
    answer = sse.read(exchange.chunks)
    error = exchange.failure or answer.error
    start_s = exchange.scheduled_s if profile.mode == "open" else exchange.sent_s
    times = answer.token_times_s if error is None else ()
    ttft, e2e = latency.ttft_ms(start_s, times), latency.e2e_ms(start_s, times)
    tpot = None
    if ttft is not None and e2e is not None:
        tpot = latency.tpot_ms(e2e, ttft, answer.tokens, answer.first_tokens)
    return RequestRow(
        engine=place.engine,
        profile=profile.name,
        mode=profile.mode,
        concurrency=profile.concurrency,
        rate=profile.rate,
        round=place.round,
        block=place.block,
        position=place.position,
        request=arrival.request,
        prompt_id=prompt.id,
        input_tokens=len(prompt.ids) + 1,
        output_tokens=answer.tokens,
        scheduled_s=exchange.scheduled_s,
        sent_s=exchange.sent_s,
        ttft_ms=ttft,
        tpot_ms=tpot,
        e2e_ms=e2e,
        itl_ms=latency.itl_ms(times),
        ok=error is None,
        error=error,
    )


def block_row(place: Place, requests: Sequence[RequestRow], conditions: Conditions) -> BlockRow:
    """Sum up one load."""
    answered = [row for row in requests if row.ok]
    return BlockRow(
        engine=place.engine,
        profile=requests[0].profile,
        round=place.round,
        block=place.block,
        position=place.position,
        started=conditions.started,
        wall_s=conditions.wall_s,
        requests=len(requests),
        failed=len(requests) - len(answered),
        requests_per_s=latency.per_second(len(answered), conditions.wall_s),
        output_tokens_per_s=latency.per_second(sum(row.output_tokens for row in answered), conditions.wall_s),
        peak_rss_bytes=conditions.usage.peak_rss_bytes,
        cpu_percent=conditions.usage.cpu_percent,
        load_average=conditions.usage.load_average,
        foreign_cpu_percent=conditions.usage.foreign_cpu_percent,
        threads=conditions.threads,
        bandwidth_gb_s=conditions.bandwidth_gb_s,
    )


def write(out: Path, requests: Sequence[RequestRow], blocks: Sequence[BlockRow]) -> None:
    """Write requests.parquet and blocks.parquet into `out`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, rows, schema in (
        ("requests.parquet", requests, _schema(RequestRow)),
        ("blocks.parquet", blocks, _schema(BlockRow)),
    ):
        pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema), out / name)


def _schema(row: type[RequestRow] | type[BlockRow]) -> pyarrow.Schema:
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
