"""One engine's turn in a round: start its server, warm it up, send the loads, stop it. A failure becomes rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipelines.errors import EndpointError
from pipelines.probe import rows, sse
from pipelines.probe.bandwidth import BandwidthProbe
from pipelines.probe.client import Address, Client, Exchange, Request, completion_body
from pipelines.probe.config import ProbeConfig
from pipelines.probe.prompts import PromptSet
from pipelines.probe.rounds import Load, Round
from pipelines.probe.sampler import Sample, Sampler, usage

if TYPE_CHECKING:
    from pipelines.engine.serving import Served


class Serve(Protocol):
    """Starts an engine's server and stops it when the block ends."""

    def __call__(self, engine_dir: Path, *, threads: int, log: Path | None) -> AbstractContextManager[Served]: ...


@dataclass(frozen=True, slots=True)
class Setup:
    """What is the same in every turn. `finished` is told the number of requests after each load."""

    config: ProbeConfig
    prompts: PromptSet
    threads: int
    bandwidth: BandwidthProbe
    serve: Serve
    logs: Path
    finished: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One load as it went. Times in seconds of the client's clock."""

    load: Load
    started: str
    started_s: float
    ended_s: float
    exchanges: tuple[Exchange, ...]
    bandwidth_gb_s: float | None


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn gives. `failure` says why the server did not start; then every row has failed."""

    requests: tuple[rows.RequestRow, ...]
    blocks: tuple[rows.BlockRow, ...]
    failure: str | None


def take(setup: Setup, engine: Path, place: rows.Place, plan: Round) -> Turn:
    """Run one turn."""
    log = setup.logs / f"{place.block:03d}-{engine.name}.log"
    try:
        with setup.serve(engine, threads=setup.threads, log=log) as served, Sampler(served.pid) as sampler:
            endpoint = served.endpoint
            address = Address(endpoint.base_url, endpoint.model, endpoint.capabilities.ignore_eos)
            recorded = _measure(setup, address, plan)
    except EndpointError as error:
        return missed(setup, place, plan, str(error))
    return _rows(setup, place, recorded, sampler.samples, None)


def missed(setup: Setup, place: rows.Place, plan: Round, failure: str) -> Turn:
    """Make the rows of a turn whose server did not start, so that what is missing is on record."""
    recorded = [_unsent(setup, load, rows.NOT_STARTED) for load in plan.loads]
    return _rows(setup, place, recorded, (), failure)


def _measure(setup: Setup, address: Address, plan: Round) -> list[Recorded]:
    """Warm up, then send every load; none is sent to a server that answered no warm-up request."""
    with Client(address.base_url, timeout_s=setup.config.timeout_s) as client:
        failure = _warm_up(setup, client, address, plan)
        if failure is not None:
            return [_unsent(setup, load, failure) for load in plan.loads]
        return [_send(setup, client, address, load) for load in plan.loads]


def _warm_up(setup: Setup, client: Client, address: Address, plan: Round) -> str | None:
    """Send requests that count for nothing; return the first's error class if none was answered."""
    count = len(setup.prompts.prompts)
    requests = [Request(_body(setup, address, k % count, serial)) for k, serial in enumerate(plan.warmup)]
    _, exchanges = client.run(requests, concurrency=plan.warmup_concurrency)
    errors = [exchange.failure or sse.read(exchange.chunks).error for exchange in exchanges]
    return errors[0] if all(errors) else None


def _send(setup: Setup, client: Client, address: Address, load: Load) -> Recorded:
    requests = [
        Request(_body(setup, address, arrival.prompt, serial), arrival.due_s)
        for arrival, serial in zip(load.arrivals, load.serials, strict=True)
    ]
    bandwidth_gb_s = setup.bandwidth.measure_gb_s()
    started = _now()
    started_s, exchanges = client.run(requests, concurrency=load.profile.concurrency)
    recorded = Recorded(load, started, started_s, time.monotonic(), tuple(exchanges), bandwidth_gb_s)
    setup.finished(len(requests))
    return recorded


def _body(setup: Setup, address: Address, prompt: int, serial: int) -> bytes:
    return completion_body(address, setup.prompts.request_ids(prompt, serial), setup.config.max_tokens)


def _unsent(setup: Setup, load: Load, failure: str) -> Recorded:
    due = [arrival.due_s or 0.0 for arrival in load.arrivals]
    setup.finished(len(due))
    return Recorded(load, _now(), 0.0, 0.0, tuple(Exchange(at_s, at_s, at_s, (), failure) for at_s in due), None)


def _rows(
    setup: Setup, place: rows.Place, recorded: Sequence[Recorded], samples: Sequence[Sample], failure: str | None
) -> Turn:
    requests: list[rows.RequestRow] = []
    blocks: list[rows.BlockRow] = []
    for one in recorded:
        profile = one.load.profile
        found = [
            rows.request_row(place, profile, arrival, setup.prompts.prompts[arrival.prompt], exchange)
            for arrival, exchange in zip(one.load.arrivals, one.exchanges, strict=True)
        ]
        conditions = rows.Conditions(
            started=one.started,
            wall_s=0.0 if one.bandwidth_gb_s is None else max(exchange.ended_s for exchange in one.exchanges),
            usage=usage(samples, one.started_s, one.ended_s, os.cpu_count() or 1),
            threads=setup.threads,
            bandwidth_gb_s=one.bandwidth_gb_s,
        )
        requests += found
        blocks.append(rows.block_row(place, found, conditions))
    return Turn(tuple(requests), tuple(blocks), failure)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
