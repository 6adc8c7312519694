"""One request from queue to answer: scoring first if asked for, then generation, streamed or whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from pipelines.engine.host.decoder import PromptScore
from pipelines.engine.host.desk import Delta, Desk, Event, Failed, ScoreWish, Ticket, Wish
from pipelines.engine.host.metrics import Metrics
from pipelines.engine.host.replies import Choice, LogProbs, Reply, error_body, error_response, json_response, sse, usage

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class Work:
    """What one request asks of the desk, and how its events become an answer."""

    def __init__(self, desk: Desk, metrics: Metrics, reply: Reply, tokens_in: int) -> None:
        self._desk, self._metrics, self._reply, self._tokens_in = desk, metrics, reply, tokens_in
        self._tokens_out, self._started = 0, time.perf_counter()
        self._first: float | None = None
        self._ticket: Ticket | None = None
        self._gone = False
        self.choices: list[Choice] = []
        self.wishes: list[Wish] = []
        self.score: ScoreWish | None = None

    async def respond(self, request: Request, stream: bool, include_usage: bool) -> Response:
        """Answer, once there is something to answer with: a refusal still has its own status code.

        Raises:
            QueueFull: no place in the queue; nothing has been sent.
        """
        from starlette.responses import StreamingResponse

        if not stream:
            return await self._whole(request)
        events = self._stream(request, include_usage)
        first = await anext(events)
        return StreamingResponse(_chain(first, events), media_type="text/event-stream")

    async def _whole(self, request: Request) -> Response:
        async for event in self._watched(request):
            if isinstance(event, Failed):
                return error_response(f"the model failed: {event.message}", 500, "server_error")
            if isinstance(event, Delta):
                self.choices[event.index].take(event)
        return json_response(self._reply.whole(self.choices, usage(self._tokens_in, self._tokens_out)))

    async def _stream(self, request: Request, include_usage: bool) -> AsyncIterator[bytes]:
        if self.score is None:
            for index, choice in enumerate(self.choices):
                if choice.text or choice.finish:
                    yield sse(self._reply.chunk(index, choice))
        async for event in self._watched(request):
            if isinstance(event, Failed):
                yield sse({"error": error_body(f"the model failed: {event.message}", "server_error", None)})
                return
            part = self._part(event) if isinstance(event, Delta) else self.choices[event.index]
            yield sse(self._reply.chunk(event.index, part))
        if include_usage:
            yield sse(self._reply.last(usage(self._tokens_in, self._tokens_out)))
        yield b"data: [DONE]\n\n"

    def _part(self, delta: Delta) -> Choice:
        """The piece of a choice that one streamed event carries."""
        whole = self.choices[delta.index].logprobs
        part = Choice(logprobs=None if whole is None else LogProbs(whole.names, whole.offset))
        part.take(delta)
        if whole is not None and part.logprobs is not None:
            whole.offset = part.logprobs.offset
        return part

    async def _watched(self, request: Request) -> AsyncIterator[Event]:
        """Yield the desk's events, counted; stop the work when the client has gone."""
        watch = asyncio.create_task(self._until_gone(request))
        try:
            async for event in self._events():
                if isinstance(event, Delta):
                    self._first = self._first or time.perf_counter()
                    self._tokens_out += 1
                elif isinstance(event, PromptScore):
                    self._write_score(event)
                yield event
            if not self._gone:
                self._metrics.finished(self._started, self._first, self._tokens_in, self._tokens_out)
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _events(self) -> AsyncIterator[Event]:
        with self._desk.ticket(self.score or self.wishes) as self._ticket:
            async for event in self._ticket.events():
                yield event
        if self.score is None or self.score.follow or not self.wishes or self._ticket.cut_short:
            return
        with self._desk.ticket(self.wishes, continues=True) as self._ticket:
            async for event in self._ticket.events():
                yield event

    def _write_score(self, score: PromptScore) -> None:
        choice = self.choices[score.index]
        if choice.logprobs is not None:
            choice.logprobs.add_prompt(score)
        if not self.wishes:
            choice.finish = "length"

    async def _until_gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._ticket is not None:
            self._ticket.cancel()


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for item in rest:
        yield item
