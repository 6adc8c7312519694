"""The load generator: one lean asyncio client that sends on an absolute schedule and only records bytes and times.

Nothing is parsed, and no garbage is collected, while load runs; `sse.read` does the rest afterwards.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from pipelines.probe.alarm import Alarm
from pipelines.probe.connection import Clock, Connections, Flight
from pipelines.probe.sse import Chunk

if TYPE_CHECKING:
    from types import TracebackType

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a model is served. `base_url` includes the API's version, as OpenAI clients have it (http://host:port/v1).

    token_ids: the server adds the ids of generated tokens to its events when asked. headers go with every request;
    they may hold a secret, so they are not shown. prompt writes token ids for a server that takes text only.
    """

    base_url: str
    model: str
    ignore_eos: bool
    token_ids: bool = False
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    prompt: Callable[[Sequence[int]], list[int] | str] = list


@dataclass(frozen=True, slots=True)
class Request:
    """A request ready to be sent, in the order of the load.

    due_s: not before this, from the start of the load. among: not before fewer than this many are in flight.
    An open loop has the first, a closed loop the second; `among` may change within a load (a spike).
    """

    body: bytes
    due_s: float | None = None
    among: int | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """What happened to one request, in seconds since the start of the load.

    `failure` is an error class (timeout, refused, 4xx, 5xx, broken_stream, interrupted), or None if HTTP went well.
    A request never sent has sent_s equal to scheduled_s and no chunks.
    """

    scheduled_s: float
    sent_s: float
    ended_s: float
    chunks: tuple[Chunk, ...]
    failure: str | None


@dataclass(frozen=True, slots=True)
class Sent:
    """A load as it went: when it started by the client's clock, one exchange per request in the order given.

    cpu_s: what this process spent meanwhile. real_time: it went before other processes, where the kernel allows that.
    interrupted: Ctrl-C came; requests without an answer say so.
    """

    started_s: float
    exchanges: tuple[Exchange, ...]
    cpu_s: float
    real_time: bool
    interrupted: bool


def completion_body(address: Address, ids: Sequence[int], max_tokens: int) -> bytes:
    """Serialize a greedy streaming completion request of token ids."""
    body: dict[str, object] = {
        "model": address.model,
        "prompt": address.prompt(ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if address.ignore_eos:
        body["ignore_eos"] = True
    if address.token_ids:
        body["return_token_ids"] = True
    return json.dumps(body, separators=(",", ":")).encode()


class Client:
    """Sends loads to one server. Connections are kept between loads and their number is not limited."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        clock: Clock = time.monotonic,
        real_time: bool = True,
    ) -> None:
        self._connections = Connections(f"{base_url.rstrip('/')}/completions", headers or {}, timeout_s, clock)
        self._clock = clock
        self._real_time = real_time

    def __enter__(self) -> Self:
        import uvloop

        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._runner.run(self._connections.close())
        finally:
            self._runner.close()

    def run(self, requests: Sequence[Request]) -> Sent:
        """Send all requests and wait for all answers; Ctrl-C ends it early, with what there is."""
        load = _Load(self._connections, requests)
        interrupted = False
        with undisturbed(real_time=self._real_time) as real_time:
            spent_s = time.process_time()
            load.started_s = self._clock()
            try:
                self._runner.run(load.send_all())
            except KeyboardInterrupt:
                interrupted = True
            spent_s = time.process_time() - spent_s
        return Sent(load.started_s, load.exchanges(self._clock()), spent_s, real_time, interrupted)


class _Load:
    """One load on its way."""

    def __init__(self, connections: Connections, requests: Sequence[Request]) -> None:
        self._connections = connections
        self._clock = connections.clock
        self._requests = requests
        self._flights: list[Flight] = []
        self._in_flight = 0
        self._landed: asyncio.Event
        self.started_s = 0.0

    async def send_all(self) -> None:
        """Start every request at its absolute due time: an early or late one does not move those after it."""
        self._landed, due = asyncio.Event(), asyncio.Event()
        with Alarm(due.set) as alarm:
            for request in self._requests:
                due_s = None if request.due_s is None else self.started_s + request.due_s
                while due_s is not None and (left_s := due_s - self._clock()) > 0:
                    due.clear()
                    alarm.set(left_s)
                    await due.wait()
                while request.among is not None and self._in_flight >= request.among:
                    await self._one_more_landed()
                flight = Flight(request.body, self._clock() if due_s is None else due_s, self._one_landed)
                self._flights.append(flight)
                self._in_flight += 1
                self._connections.send(flight)
                await asyncio.sleep(0)  # answers that are there are read before the next request goes out
        while self._in_flight:
            await self._one_more_landed()

    def _one_landed(self) -> None:
        self._in_flight -= 1
        self._landed.set()

    async def _one_more_landed(self) -> None:
        self._landed.clear()
        await self._landed.wait()

    def exchanges(self, now_s: float) -> tuple[Exchange, ...]:
        """What happened to each request; those without an end were interrupted at `now_s`."""
        zero = self.started_s
        found = [_exchange(flight, zero, now_s) for flight in self._flights]
        for request in self._requests[len(found) :]:
            due_s = now_s - zero if request.due_s is None else request.due_s
            found.append(Exchange(due_s, due_s, due_s, (), INTERRUPTED))
        return tuple(found)


def _exchange(flight: Flight, zero: float, now_s: float) -> Exchange:
    chunks = tuple((at_s - zero, data) for at_s, data in flight.chunks)
    ended_s, failure = (now_s, INTERRUPTED) if flight.ended_s is None else (flight.ended_s, flight.failure)
    return Exchange(flight.due_s - zero, flight.sent_s - zero, ended_s - zero, chunks, failure)


@contextmanager
def undisturbed(*, real_time: bool = True, priority: int = 1) -> Iterator[bool]:
    """Keep the garbage collector out, and other processes if this one may ask for that, in the middle of a load.

    A client that has to wait for a CPU would count that wait as the server's. It takes little of one itself. Yields
    whether the kernel agreed. Of two such processes the one of higher `priority` goes first.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    before = _ask_for_real_time(priority) if real_time else None
    try:
        yield before is not None
    finally:
        if before is not None:
            with suppress(OSError):
                os.sched_setscheduler(0, before, os.sched_param(0))
        gc.enable()
        gc.unfreeze()


def _ask_for_real_time(priority: int) -> int | None:
    """Ask the kernel to run this thread whenever it can; return the policy before, None if that was refused."""
    if not hasattr(os, "sched_setscheduler"):
        return None
    before = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except OSError:
        return None
    return before
