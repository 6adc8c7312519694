"""One engine's turn in a round: start its server, warm it up, send the loads, stop it. A failure becomes rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urljoin

from pipelines.errors import EndpointError
from pipelines.probe import ended, recording, rows, search
from pipelines.probe.bandwidth import BandwidthProbe
from pipelines.probe.client import Address, Client, Request, completion_body
from pipelines.probe.config import ProbeConfig
from pipelines.probe.pace import Pace
from pipelines.probe.profiles import Search
from pipelines.probe.prompts import PromptSet
from pipelines.probe.recording import Context, Recorded, Turn
from pipelines.probe.rounds import Load, Round
from pipelines.probe.sampler import Sampler
from pipelines.probe.warmup import Warmth, warm_up

if TYPE_CHECKING:
    from pipelines.engine.serving import Served


BROKEN = ("refused", "broken_stream")
SETTLE_S = 0.5


class Serve(Protocol):
    """Starts an engine's server and stops it when the block ends."""

    def __call__(self, engine_dir: Path, *, threads: int, log: Path | None) -> AbstractContextManager[Served]: ...


@dataclass(frozen=True, slots=True)
class Setup:
    """What is the same in every turn."""

    config: ProbeConfig
    prompts: PromptSet
    threads: int
    bandwidth: BandwidthProbe
    serve: Serve
    logs: Path
    pace: Pace

    def context(self, place: rows.Place) -> Context:
        return Context(place, self.prompts, self.threads, self.config.limits)


def take(setup: Setup, engine: Path, place: rows.Place, plan: Round) -> Turn:
    """Run one turn. Ctrl-C ends it early, with what there is; so does the end of its server."""
    began_s = time.monotonic()
    log = setup.logs / f"{place.block:03d}-{engine.name}.log"
    turn: _Turn | None = None
    try:
        with setup.serve(engine, threads=setup.threads, log=log) as served:
            turn = _Turn(setup, served, setup.context(place), plan)
            turn.run()
    except EndpointError as error:
        return missed(setup, place, plan, str(error))
    except KeyboardInterrupt:
        if turn is None:
            return Turn(interrupted=True)
        turn.interrupted = True
    setup.pace.turn_ended(time.monotonic() - began_s)
    return turn.result()


def missed(setup: Setup, place: rows.Place, plan: Round, failure: str) -> Turn:
    """Make the rows of a turn whose server did not start, so that what is missing is on record."""
    recorded = []
    for load in plan.loads:
        recorded.append(recording.unsent(load, rows.NOT_STARTED))
        setup.pace.load_ended(load, None)
    setup.pace.turn_ended(0.0)
    return recording.turn(setup.context(place), recorded, failure=failure)


@dataclass(slots=True)
class _Turn:
    """A turn while its server runs."""

    setup: Setup
    served: Served
    context: Context
    plan: Round
    sampler: Sampler = field(init=False)
    recorded: list[Recorded] = field(default_factory=list)
    warmth: Warmth | None = None
    idle_until_s: float = 0.0
    ended: str = ""
    interrupted: bool = False

    def __post_init__(self) -> None:
        endpoint = self.served.endpoint
        path = endpoint.capabilities.metrics
        self.sampler = Sampler(self.served.pid, urljoin(endpoint.base_url, path) if path else "")

    def run(self) -> None:
        """Warm up, then send every load; none is sent to a server that answered no warm-up request."""
        endpoint, config = self.served.endpoint, self.setup.config
        can = endpoint.capabilities
        if not can.stream:
            raise EndpointError(
                f"{endpoint.base_url}: it streams no answers with usage, so nobody can tell when tokens came"
            )
        headers = endpoint.headers | ({} if can.keeps_connections else {"Connection": "close"})
        address = Address(endpoint.base_url, endpoint.model, can.ignore_eos, can.token_ids, headers, endpoint.prompt)
        with self.sampler:
            self.sampler.wait()
            self.idle_until_s = time.monotonic()
            with Client(address.base_url, timeout_s=config.timeout_s, headers=address.headers) as client:
                self.warmth = self._warm_up(client, address)
                if self.warmth.interrupted:
                    raise KeyboardInterrupt
                self.ended = ended.soon(self.served.pid, SETTLE_S if self.warmth.failure in BROKEN else 0.0)
                for load in self.plan.loads:
                    self._take(load, lambda part: self._send(client, address, part))

    def result(self) -> Turn:
        """What came of it."""
        return recording.turn(
            self.context, self.recorded, samples=self.sampler.samples, notes=self.sampler.notes, ended=self.ended,
            interrupted=self.interrupted, warmth=self.warmth, ready_s=self.served.ready_s,
            idle_until_s=self.idle_until_s,
        )  # fmt: skip

    def _warm_up(self, client: Client, address: Address) -> Warmth:
        config, plan, requests = self.setup.config, self.plan, []
        size = config.warmup_requests
        for k, serial in enumerate(plan.warmup):
            prompt = plan.warmup_prompts[k % size % len(plan.warmup_prompts)]  # every batch asks the same
            ids = self.setup.prompts.request_ids(prompt, serial)
            requests.append(Request(completion_body(address, ids, config.max_tokens), among=plan.warmup_concurrency))
        return warm_up(client, requests, batch=size, most_s=config.warmup_max_s)

    def _take(self, load: Load, send: Callable[[Load], Recorded]) -> None:
        """Send a load whole, or of a search what its results ask for: one rate after another."""
        failure = self.warmth.failure if self.warmth is not None else None
        if failure is not None:
            self.recorded.append(recording.unsent(load, failure, partial=bool(self.ended)))
            self.setup.pace.load_ended(load, None)
            return
        began_s, profile, lost = time.monotonic(), load.profile, bool(self.ended)
        if isinstance(profile, Search):
            slo, grid = profile.slo, profile.grid
            search.bisect(
                len(grid), lambda phase: search.meets(slo, recording.requests(self.context, send(load.part(phase))))
            )
        else:
            send(load)
        self.setup.pace.load_ended(load, None if lost else time.monotonic() - began_s)

    def _send(self, client: Client, address: Address, load: Load) -> Recorded:
        """Send a load, or a part of one; nothing to a server that is gone.

        Raises:
            KeyboardInterrupt: Ctrl-C came; what there is has been recorded.
        """
        if self.ended:
            self.recorded.append(recording.unsent(load, "refused", partial=True))
            return self.recorded[-1]
        requests = [
            Request(
                completion_body(address, ids, arrival.max_tokens), arrival.due_s, load.concurrency_of(arrival.phase)
            )
            for arrival, ids in zip(load.arrivals, load.ids(self.setup.prompts), strict=True)
        ]
        bandwidth_gb_s = self.setup.bandwidth.measure_gb_s()
        started = recording.now()
        sent = client.run(requests)
        broken = any(exchange.failure in BROKEN for exchange in sent.exchanges)
        self.ended = ended.soon(self.served.pid, SETTLE_S if broken else 0.0)
        partial = sent.interrupted or bool(self.ended)
        self.recorded.append(Recorded(load, started, sent, time.monotonic(), bandwidth_gb_s, partial))
        if sent.interrupted:
            raise KeyboardInterrupt
        return self.recorded[-1]
