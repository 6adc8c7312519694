"""The load generator: one lean asyncio client that sends on an absolute schedule and only records bytes and times.

Nothing is parsed, and no garbage is collected, while load runs; `sse.read` does the rest afterwards.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from pipelines.probe.sse import Chunk

if TYPE_CHECKING:
    from types import TracebackType

    import aiohttp

KEEPALIVE_S = 2.0  # shorter than any server's own, so that no request meets a connection the server is just closing


@dataclass(frozen=True, slots=True)
class Address:
    """Where a model is served. `base_url` includes the API's version, as OpenAI clients have it (http://host:port/v1)."""

    base_url: str
    model: str
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A request ready to be sent; `due_s` counts from the start of the load, None in a closed loop."""

    body: bytes
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """What happened to one request, in seconds since the start of the load.

    `failure` is an error class (timeout, refused, 4xx, 5xx, broken_stream), or None if HTTP went well.
    """

    scheduled_s: float
    sent_s: float
    ended_s: float
    chunks: tuple[Chunk, ...]
    failure: str | None


@dataclass(slots=True)
class Recording:
    """Exchanges of one load by position in its schedule."""

    started_s: float
    exchanges: dict[int, Exchange] = field(default_factory=dict)


def completion_body(address: Address, ids: Sequence[int], max_tokens: int) -> bytes:
    """Serialize a greedy streaming completion request of token ids."""
    body: dict[str, object] = {
        "model": address.model,
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if address.ignore_eos:
        body["ignore_eos"] = True
    return json.dumps(body, separators=(",", ":")).encode()


class Client:
    """Sends loads to one server. Connections are kept between loads and their number is not limited."""

    def __init__(self, base_url: str, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = f"{base_url.rstrip('/')}/completions"
        self._timeout_s = timeout_s
        self._clock = clock

    def __enter__(self) -> Self:
        import uvloop

        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._session = self._runner.run(self._open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._runner.run(self._session.close())
        finally:
            self._runner.close()

    def run(self, requests: Sequence[Request], *, concurrency: int | None) -> tuple[float, list[Exchange]]:
        """Send all requests: with `concurrency` in flight, or each at its due time when that is None.

        Returns the clock at the start of the load, and one exchange per request in the order given.
        """
        with _collector_at_rest():
            recording = Recording(self._clock())
            if concurrency is None:
                self._runner.run(self._open_loop(requests, recording))
            else:
                self._runner.run(self._closed_loop(requests, recording, concurrency))
        return recording.started_s, [recording.exchanges[k] for k in range(len(requests))]

    async def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    async def _open_loop(self, requests: Sequence[Request], recording: Recording) -> None:
        """Start every request at its absolute due time: an early or late one does not move those after it."""
        async with asyncio.TaskGroup() as group:
            for k, request in enumerate(requests):
                due_s = recording.started_s + (request.due_s or 0.0)
                while (left_s := due_s - self._clock()) > 0:
                    await asyncio.sleep(left_s)
                group.create_task(self._record(k, request.body, due_s, recording))

    async def _closed_loop(self, requests: Sequence[Request], recording: Recording, concurrency: int) -> None:
        waiting = iter(enumerate(requests))

        async def stream_after_stream() -> None:
            for k, request in waiting:
                await self._record(k, request.body, self._clock(), recording)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(stream_after_stream())

    async def _record(self, k: int, body: bytes, due_s: float, recording: Recording) -> None:
        chunks: list[Chunk] = []
        sent_s = self._clock()
        failure = await self._exchange(body, chunks)
        zero = recording.started_s
        since_start = tuple((at_s - zero, data) for at_s, data in chunks)
        recording.exchanges[k] = Exchange(due_s - zero, sent_s - zero, self._clock() - zero, since_start, failure)

    async def _exchange(self, body: bytes, chunks: list[Chunk]) -> str | None:
        """Send one request and note each piece of the answer as it arrives; return the error class, if any."""
        import aiohttp

        try:
            async with self._session.post(self._url, data=body) as response:
                if response.status != 200:
                    return f"{response.status // 100}xx"
                while data := await response.content.readany():
                    chunks.append((self._clock(), data))
        except TimeoutError:
            return "timeout"
        except aiohttp.ClientConnectorError:
            return "refused"
        except (aiohttp.ClientError, ConnectionError):
            return "broken_stream"
        return None


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Keep the garbage collector from pausing the client in the middle of a load."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
