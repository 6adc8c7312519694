"""A completion server whose timing is known: what the client is measured against.

As a program (`python -m pipelines.probe.known --ttft-ms 50 --itl-ms 10`) it prints its port and serves until its
standard input closes. GET /truth tells what it really did, on the clock of `time.monotonic`, and forgets it.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import math
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from pipelines.probe.alarm import Alarm
from pipelines.probe.client import undisturbed

LATE_USAGE_S = 0.1
MODEL = "known"
USAGES = ("end", "late", "none")


@dataclass(frozen=True, slots=True)
class Timing:
    """How it answers, in milliseconds.

    burst: tokens an event. role: an event without a token comes at once. usage: with the last token, later, or never.
    spread: how much prompts differ (standard deviation of the logarithm), the same on every server for one prompt,
    whatever its first token. noise: how much the same request differs from time to time.
    """

    ttft_ms: float = 50.0
    itl_ms: float = 10.0
    burst: int = 1
    role: bool = False
    usage: str = "end"
    spread: float = 0.0
    noise: float = 0.0
    seed: int = 0


@dataclass(slots=True, eq=False)
class _Stream:
    """One answer on its way. Times in seconds."""

    out: asyncio.Transport
    chat: bool
    ids: bool
    counted: bool
    prompt: list[int]
    left: int
    received_s: float
    due_s: float
    gap_s: float
    usage: dict[str, Any]
    written_s: list[float] = field(default_factory=list)

    def truth(self) -> dict[str, object]:
        """What was done for it; `first_id` tells requests apart."""
        first = self.prompt[0] if self.prompt else None
        return {"first_id": first, "received_s": self.received_s, "written_s": self.written_s}


class Agenda:
    """Calls things at their time, while the block lasts."""

    def __init__(self) -> None:
        self._alarm = Alarm(self._ring)
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def __enter__(self) -> Self:
        self._alarm.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._alarm.__exit__()

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Call at a time of the monotonic clock."""
        heapq.heappush(self._waiting, (when_s, next(self._number), call))
        if self._waiting[0][0] == when_s:
            self._alarm.set(max(0.0, when_s - time.monotonic()))

    def _ring(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            heapq.heappop(self._waiting)[2]()
        if self._waiting:
            self._alarm.set(max(0.0, self._waiting[0][0] - time.monotonic()))


class Server:
    """Answers requests in its own time, and remembers when it did."""

    def __init__(self, timing: Timing, agenda: Agenda) -> None:
        self.timing = timing
        self._agenda = agenda
        self._truth: list[_Stream] = []
        self._chance = random.Random(f"noise/{timing.seed}")

    def answer(self, out: asyncio.Transport, path: str, body: bytes) -> None:
        """Begin to answer one request."""
        received_s = time.monotonic()
        if not path.endswith("/completions"):
            out.write(_json(self._told(path)))
            return
        asked = json.loads(body)
        prompt = asked.get("prompt") or asked.get("messages") or ""
        ids = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else []
        tokens = int(asked.get("max_completion_tokens") or asked.get("max_tokens") or 16)
        factor = self._factor(ids[1:])
        stream = _Stream(
            out=out, chat="chat" in path, ids=bool(asked.get("return_token_ids")), prompt=ids, left=tokens,
            counted=bool((asked.get("stream_options") or {}).get("include_usage")),
            received_s=received_s, due_s=received_s + factor * self.timing.ttft_ms / 1e3,
            gap_s=factor * self.timing.itl_ms / 1e3, usage=_usage(len(ids) or len(str(prompt)) // 4, tokens),
        )  # fmt: skip
        self._truth.append(stream)
        role = _event(_payload(stream.chat, "", role=True)) if self.timing.role else b""
        out.write(HEAD + role)
        self._agenda.at(stream.due_s, lambda: self._step(stream))

    def _told(self, path: str) -> object:
        if path.startswith("/truth"):
            streams, self._truth = self._truth, []
            return [stream.truth() for stream in streams]
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "quantgate"}]}

    def _factor(self, prompt: list[int]) -> float:
        timing = self.timing
        if not timing.spread and not timing.noise:
            return 1.0
        own = random.Random(repr(prompt)).gauss(0.0, timing.spread)
        return math.exp(own + self._chance.gauss(0.0, timing.noise))

    def _step(self, stream: _Stream) -> None:
        """Write one event, and plan the next one from when this one was due."""
        if stream.out.is_closing():
            return
        tokens = min(self.timing.burst, stream.left)
        stream.left -= tokens
        stream.written_s.append(time.monotonic())
        stream.out.write(_frame(stream.chat, stream.ids, tokens, stream.left == 0))
        if stream.left:
            stream.due_s += stream.gap_s * self.timing.burst
            self._agenda.at(stream.due_s, lambda: self._step(stream))
        elif self.timing.usage == "late":
            self._agenda.at(stream.due_s + LATE_USAGE_S, lambda: self._finish(stream))
        else:
            self._finish(stream)

    def _finish(self, stream: _Stream) -> None:
        told = stream.counted and self.timing.usage != "none"
        usage = _event(_envelope(stream.chat, [], usage=stream.usage)) if told else b""
        stream.out.write(usage + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


class Connection(asyncio.Protocol):
    """Reads requests off one connection."""

    def __init__(self, server: Server) -> None:
        self._server, self._rest = server, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport."""
        self._out: Any = transport

    def data_received(self, data: bytes) -> None:
        """Answer each request that is whole."""
        self._rest += data
        while (end := self._rest.find(b"\r\n\r\n")) >= 0:
            head = self._rest[:end].decode("latin1").lower()
            length = int(head.partition("content-length:")[2].partition("\r")[0] or 0)
            if len(self._rest) < end + 4 + length:
                return
            body, self._rest = self._rest[end + 4 : end + 4 + length], self._rest[end + 4 + length :]
            self._server.answer(self._out, head.split(" ", 2)[1], body)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_FRAMES: dict[tuple[bool, bool, int, bool], bytes] = {}


def _frame(chat: bool, ids: bool, tokens: int, last: bool) -> bytes:
    """The bytes of an event of so many tokens; made once."""
    key = (chat, ids, tokens, last)
    if key not in _FRAMES:
        more: dict[str, Any] = {"token_ids": [7] * tokens} if ids else {}
        _FRAMES[key] = _event(_payload(chat, " w" * tokens, reason="length" if last else None, **more))
    return _FRAMES[key]


def _payload(chat: bool, text: str, *, role: bool = False, reason: str | None = None, **more: object) -> object:
    delta = {"role": "assistant", "content": text} if role else {"content": text}
    brought = {"delta": delta} if chat else {"text": text}
    choice = {"index": 0, **brought, "logprobs": None, "finish_reason": reason, **more}
    return _envelope(chat, [choice])


def _envelope(chat: bool, choices: list[object], **more: object) -> object:
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": f"cmpl-{'0' * 32}", "object": kind, "created": 0, "model": MODEL, "choices": choices, **more}


def _event(payload: object) -> bytes:
    return _chunk(b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _usage(prompt: int, output: int) -> dict[str, Any]:
    details = {"cached_tokens": 0}
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
            "prompt_tokens_details": details}  # fmt: skip


def _json(document: object) -> bytes:
    body = json.dumps(document).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def serve(timing: Timing) -> None:
    """Serve on a free loopback port until standard input closes."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    with Agenda() as agenda:
        known = Server(timing, agenda)
        listening = await loop.create_server(lambda: Connection(known), "127.0.0.1", 0, backlog=4096)
        print(listening.sockets[0].getsockname()[1], flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(closed.set)), daemon=True).start()
        await closed.wait()


def main() -> None:
    """Read the timing from the command line and serve."""
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("ttft-ms", 50.0), ("itl-ms", 10.0), ("spread", 0.0), ("noise", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, number in (("burst", 1), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--role", action="store_true")
    parser.add_argument("--usage", choices=USAGES, default="end")
    timing = Timing(**vars(parser.parse_args()))
    with undisturbed(priority=2), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(timing))


if __name__ == "__main__":
    main()
