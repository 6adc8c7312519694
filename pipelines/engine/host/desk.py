"""Where HTTP meets the model: a bounded queue in front of one decode thread.

The thread owns the decoder and never touches the event loop except through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.engine.host.decoder import DecodeFailed, Decoder, PromptScore, Ranked, Sampling, Token, Turn
from pipelines.engine.host.text import Detokenizer, StopCutter
from pipelines.errors import QuantgateError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Wish:
    """One completion as a client asked for it."""

    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ScoreWish:
    """Prompts whose own tokens are to be scored, each from its place in `starts` on; `follow`, if given, wishes for one
    greedy token after each of them."""

    prompts: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    ranked: int
    follow: tuple[Wish, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """One generated token of choice `index`, the text that it settled (often none), and why it was the last, if so."""

    index: int
    text: str
    token: int
    logprob: float | None
    ranked: Ranked
    finish: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The work of a ticket cannot be done."""

    message: str


Event = Delta | PromptScore | Failed


class QueueFull(QuantgateError):
    """No place in the queue; the client should come back."""

    retry_after_s = 1


class Ticket:
    """One request in the house. Events arrive by `events`; leaving the `with` block withdraws what is unfinished."""

    def __init__(self, desk: Desk, wishes: Sequence[Wish] | ScoreWish) -> None:
        self.wishes = wishes
        self.cancelled, self.cut_short = False, False
        self.left = len(wishes.prompts) if isinstance(wishes, ScoreWish) else len(wishes)
        self._desk = desk
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    def __enter__(self) -> Ticket:
        self._desk.open_tickets += 1
        self._desk.inbox.put(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._desk.open_tickets -= 1
        self.cancel()

    def cancel(self) -> None:
        """Stop the work, if any is left, and end `events`."""
        self.cancelled = True
        self._desk.inbox.put(None)
        self._events.put_nowait(None)

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until every choice is finished, the work failed, or the ticket was cancelled."""
        while self.left > 0:
            event = await self._events.get()
            if event is None or isinstance(event, Failed):
                self.left, self.cut_short = 0, True
            elif self._ends(event):
                self.left -= 1
            if event is not None:
                yield event

    def _ends(self, event: Delta | PromptScore) -> bool:
        """Whether this is the last event of one choice."""
        if isinstance(event, PromptScore):
            return isinstance(self.wishes, ScoreWish) and not self.wishes.follow
        return event.finish is not None

    def post(self, event: Event) -> None:
        """Deliver an event from the decode thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class _Speech:
    """A running completion: counts tokens, makes text, and decides when it ends."""

    def __init__(self, ticket: Ticket, index: int, wish: Wish, tokenizer: Tokenizer, eos: frozenset[int]) -> None:
        self.ticket, self.wish = ticket, wish
        self._index, self._eos, self._count = index, eos, 0
        self._text = Detokenizer(tokenizer, wish.ids)
        self._cutter = StopCutter(wish.stops)

    def take(self, token: Token) -> Delta:
        self._count += 1
        ended = token.id in self._eos and not self.wish.ignore_eos
        text, finish = "", "stop" if ended else None
        if not ended:
            text, stopped = self._cutter.push(self._text.add(token.id))
            finish = "stop" if stopped else "length" if self._count >= self.wish.max_tokens else None
            if stopped:
                return Delta(self._index, text, token.id, token.logprob, token.ranked, finish)
        if finish is not None:
            tail, stopped = self._cutter.push(self._text.flush())
            text += tail if stopped else tail + self._cutter.rest()
            finish = "stop" if stopped else finish
        return Delta(self._index, text, token.id, token.logprob, token.ranked, finish)


class Desk:
    """Takes tickets, keeps at most `max_batch` sequences running and `max_queue` more requests waiting."""

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, eos: Sequence[int], max_batch: int, max_queue: int
    ) -> None:
        self._decoder, self._tokenizer, self._eos = decoder, tokenizer, frozenset(eos)
        self._max_batch, self._max_open = max_batch, max_batch + max_queue
        self.open_tickets = 0
        self.inbox: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._closing = False
        self._waiting: deque[_Speech] = deque()
        self._running: dict[int, _Speech] = {}
        self._scores: deque[Ticket] = deque()
        self._scoring: tuple[Ticket, Iterator[PromptScore]] | None = None
        self._next_key = 0
        self._thread = threading.Thread(target=self._work, name="decode", daemon=True)
        self.on_death: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start the decode thread."""
        self._thread.start()

    def close(self) -> None:
        """End the decode thread after the step it is in."""
        self._closing = True
        self.inbox.put(None)
        self._thread.join(timeout=10)

    @property
    def alive(self) -> bool:
        """Whether the decode thread can still do work."""
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Sequences in the batch right now."""
        return len(self._running)

    def ticket(self, wishes: Sequence[Wish] | ScoreWish, continues: bool = False) -> Ticket:
        """Make a ticket to be entered with `with`; one that continues a request already taken in is never turned away.

        Raises:
            QueueFull: as many requests as allowed are in the house.
        """
        if not continues and self.open_tickets >= self._max_open:
            raise QueueFull(f"{self.open_tickets} requests are running or waiting, the most allowed; try again shortly")
        return Ticket(self, wishes)

    def _work(self) -> None:
        try:
            while not self._closing:
                self._receive()
                self._admit()
                if self._running:
                    self._step()
                self._score()
        finally:
            self._lose([s.ticket for s in [*self._running.values(), *self._waiting]], "the server is going down")
            self._lose([*self._scores, *([self._scoring[0]] if self._scoring else [])], "the server is going down")
            if not self._closing:
                self.on_death()

    def _receive(self) -> None:
        """Read the inbox, sleeping on it when there is nothing else to do."""
        busy = self._running or self._waiting or self._scoring or self._scores
        try:
            ticket = self.inbox.get(block=not busy)
            while True:
                if ticket is not None:
                    self._file(ticket)
                ticket = self.inbox.get_nowait()
        except queue.Empty:
            pass
        for key in [key for key, speech in self._running.items() if speech.ticket.cancelled]:
            self._end(key)

    def _file(self, ticket: Ticket) -> None:
        if isinstance(ticket.wishes, ScoreWish):
            self._scores.append(ticket)
            return
        for index, wish in enumerate(ticket.wishes):
            self._waiting.append(_Speech(ticket, index, wish, self._tokenizer, self._eos))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            speech = self._waiting.popleft()
            if speech.ticket.cancelled:
                continue
            self._next_key += 1
            wish = speech.wish
            self._running[self._next_key] = speech
            self._decoder.add(Turn(self._next_key, wish.ids, wish.max_tokens, wish.sampling, wish.logprobs))

    def _step(self) -> None:
        try:
            tokens = self._decoder.step()
        except DecodeFailed as error:
            self._lose([self._running.pop(key).ticket for key in error.keys if key in self._running], str(error))
            return
        for token in tokens:
            speech = self._running[token.key]
            delta = speech.take(token)
            speech.ticket.post(delta)
            if delta.finish is not None:
                self._end(token.key)

    def _end(self, key: int) -> None:
        self._decoder.drop(key)
        del self._running[key]

    def _score(self) -> None:
        """Score one prompt of the oldest scoring request, so that running completions wait for no more than that."""
        while self._scoring is None and self._scores:
            ticket = self._scores.popleft()
            if not ticket.cancelled and isinstance(ticket.wishes, ScoreWish):
                wish = ticket.wishes
                self._scoring = ticket, self._decoder.score(wish.prompts, wish.starts, wish.ranked, bool(wish.follow))
        if self._scoring is None:
            return
        ticket, scores = self._scoring
        try:
            score = None if ticket.cancelled else next(scores, None)
        except DecodeFailed as error:
            self._lose([ticket], str(error))
            score = None
        if score is None:
            self._scoring = None
            return
        ticket.post(score)
        if score.next is not None and isinstance(ticket.wishes, ScoreWish) and ticket.wishes.follow:
            follow = ticket.wishes.follow[score.index]
            ticket.post(_Speech(ticket, score.index, follow, self._tokenizer, self._eos).take(score.next))

    def _lose(self, tickets: Sequence[Ticket], reason: str) -> None:
        for ticket in tickets:
            ticket.cancelled = True
            ticket.post(Failed(reason))
