"""Connections to one server: as many as there are requests in flight, kept for the next ones.

A piece of an answer gets its time in the same call in which the event loop hands it over; no task has to wake first.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from pipelines.errors import InputError
from pipelines.probe.response import Response
from pipelines.probe.sse import Chunk

KEEPALIVE_S = 2.0  # shorter than any server's own, so that no request meets a connection the server is just closing
Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class Flight:
    """One request on its way. Times by the client's clock; `ended_s` is None until it ended, which `landed` hears."""

    body: bytes
    due_s: float
    landed: Callable[[], None]
    sent_s: float = 0.0
    ended_s: float | None = None
    chunks: list[Chunk] = field(default_factory=list)
    failure: str | None = None
    timer: asyncio.TimerHandle | None = None
    connection: Connection | None = None


class Connections:
    """Sends flights to one URL."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, clock: Clock) -> None:
        where = urlsplit(url)
        if where.scheme not in ("http", "https") or not where.hostname:
            raise InputError(f"{url!r} is no http or https URL")
        self.clock = clock
        self.opened: set[Connection] = set()
        self.idle: list[Connection] = []
        self._host = where.hostname
        self._tls = ssl.create_default_context() if where.scheme == "https" else None
        self._port = where.port or (80 if self._tls is None else 443)
        self._timeout_s = timeout_s
        self._head = _head(where.path or "/", where.query, where.netloc.rpartition("@")[2], headers)
        self._stale: list[Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()

    def send(self, flight: Flight) -> None:
        """Send a request, over a connection that is there or a new one; it ends by itself, in time or not."""
        flight.sent_s = self.clock()
        flight.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire, flight)
        while self.idle:
            connection = self.idle.pop()
            if connection.closing:
                continue
            if connection.fresh(flight.sent_s):
                connection.start(flight)
                return
            self._stale += [*self.idle, connection]  # those below were used even earlier
            self.idle.clear()
        task = asyncio.get_running_loop().create_task(self._connect(flight))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def request(self, body: bytes) -> bytes:
        """The bytes of a request."""
        return b"%sContent-Length: %d\r\n\r\n%s" % (self._head, len(body), body)

    def land(self, flight: Flight, at_s: float, failure: str | None) -> None:
        """End a flight."""
        flight.ended_s, flight.failure, flight.connection = at_s, failure, None
        if flight.timer is not None:
            flight.timer.cancel()
        if self._stale:  # one at a time: closing many at once would hold up whatever arrives meanwhile
            self._stale.pop().close()
        flight.landed()

    async def close(self) -> None:
        """Close every connection, whatever is on its way."""
        for task in list(self._connecting):
            task.cancel()
        for connection in list(self.opened):
            connection.close()
        await asyncio.sleep(0)

    async def _connect(self, flight: Flight) -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self), self._host, self._port, ssl=self._tls
            )
        except OSError:
            if flight.ended_s is None:
                self.land(flight, self.clock(), "refused")
            return
        if flight.ended_s is None:
            connection.start(flight)
        else:
            connection.close()

    def _expire(self, flight: Flight) -> None:
        connection = flight.connection
        self.land(flight, self.clock(), "timeout")
        if connection is not None:
            connection.close()


class Connection(asyncio.Protocol):
    """One connection, with at most one request on it."""

    def __init__(self, owner: Connections) -> None:
        self._owner = owner
        self._clock = owner.clock
        self._flight: Flight | None = None
        self._response = Response()
        self._used_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport."""
        self._transport = cast("asyncio.Transport", transport)
        self._owner.opened.add(self)

    def start(self, flight: Flight) -> None:
        """Send a request."""
        self._flight, self._response = flight, Response()
        flight.connection = self
        self._transport.write(self._owner.request(flight.body))

    @property
    def closing(self) -> bool:
        """Whether it is on its way out, or gone."""
        return self._transport.is_closing()

    def fresh(self, now_s: float) -> bool:
        """Whether the server surely keeps this connection open still."""
        return now_s - self._used_s < KEEPALIVE_S

    def close(self) -> None:
        """Close at once; what is on its way is nobody's any more."""
        self._flight = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Note a piece of an answer with its time."""
        at_s = self._clock()
        flight, response = self._flight, self._response
        if flight is None:  # bytes that nobody asked for
            self.close()
            return
        try:
            payload = response.feed(data)
        except ValueError:
            self._end(flight, at_s, "broken_stream")
            return
        if payload:
            flight.chunks.append((at_s, payload))
        if response.done:
            self._end(flight, at_s, None)

    def connection_lost(self, error: Exception | None) -> None:
        """End what was on its way: it is whole only if its end was to be the connection's."""
        self._owner.opened.discard(self)
        if self in self._owner.idle:
            self._owner.idle.remove(self)
        if self._flight is not None:
            whole = self._response.closed() and error is None
            self._end(self._flight, self._clock(), None if whole else "broken_stream")

    def _end(self, flight: Flight, at_s: float, failure: str | None) -> None:
        response, self._flight, self._used_s = self._response, None, at_s
        if failure is None and response.reusable and not self._transport.is_closing():
            self._owner.idle.append(self)
        else:
            self._transport.abort()
        if failure is None and response.status != 200:
            flight.chunks.clear()
            failure = f"{response.status // 100}xx"
        self._owner.land(flight, at_s, failure)


def _head(path: str, query: str, host: str, headers: Mapping[str, str]) -> bytes:
    """A request's head, less its length."""
    fields = {
        "Host": host,
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",
        **headers,
    }
    wrong = [name for name, value in fields.items() if not (name + value).isprintable() or not value.isascii()]
    if wrong:
        raise InputError(f"header {', '.join(wrong)}: holds what no header may")
    lines = [f"POST {path}{'?' + query if query else ''} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items()), ""]
    return "\r\n".join(lines).encode("ascii")
