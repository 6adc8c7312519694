"""From recorded bytes to tokens: reads a streamed completion after the fact, so that no parsing delays a timestamp."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Chunk = tuple[float, bytes]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one stream carried.

    token_times_s: arrival of each event that brought tokens. first_tokens: how many the first of them brought.
    tokens: by the server's usage, else by token ids, else one per event.
    """

    token_times_s: tuple[float, ...]
    tokens: int
    first_tokens: int
    error: str | None


@dataclass(frozen=True, slots=True)
class _Token:
    at_s: float
    ids: int
    cumulative: int | None


def read(chunks: Sequence[Chunk]) -> Answer:
    """Read a whole stream of OpenAI completion (or chat) events.

    An event brings tokens if it has token ids or text, so a role-only or empty first event is not the first token.
    A stream that ends without [DONE], finish reason or usage is broken, and so is one with an error event or bad JSON.
    """
    tokens: list[_Token] = []
    usage: int | None = None
    ended = False
    for at_s, payload in _events(chunks):
        if payload == b"[DONE]":
            ended = True
            continue
        try:
            event = json.loads(payload)
        except ValueError:
            return _answer(tokens, usage, "broken_stream")
        if not isinstance(event, dict) or "error" in event:
            return _answer(tokens, usage, "broken_stream")
        counted = _counted(event)
        usage = counted if counted is not None else usage
        for choice in _choices(event):
            ended = ended or bool(choice.get("finish_reason"))
            ids = len(choice.get("token_ids") or ())
            if ids or _text(choice):
                tokens.append(_Token(at_s, ids, counted))
    if not ended and usage is None:
        return _answer(tokens, usage, "broken_stream")
    return _answer(tokens, usage, None if tokens else "empty")


def _events(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """Payloads of the `data:` lines, each with the arrival of the chunk that completed its line."""
    rest = b""
    for at_s, data in chunks:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at_s, line[5:].strip()
    if rest.startswith(b"data:"):
        yield chunks[-1][0], rest[5:].strip()


def _counted(event: dict[str, object]) -> int | None:
    """Tokens so far by the server's own count, where the event tells."""
    told = event.get("usage")
    count = told.get("completion_tokens") if isinstance(told, dict) else None
    return count if isinstance(count, int) else None


def _choices(event: dict[str, object]) -> list[dict[str, Any]]:
    found = event.get("choices")
    return [choice for choice in found if isinstance(choice, dict)] if isinstance(found, list) else []


def _text(choice: dict[str, Any]) -> bool:
    """Whether a choice brings text, in a completion's or a chat's form."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return bool(choice.get("text"))


def _answer(tokens: Sequence[_Token], usage: int | None, error: str | None) -> Answer:
    count = usage if usage is not None else sum(token.ids for token in tokens) or len(tokens)
    first = 0
    if tokens:
        told = tokens[0].ids or tokens[0].cumulative
        first = told if told and told <= count else max(1, count // len(tokens))
    times = tuple(token.at_s for token in tokens)
    return Answer(times, count if tokens else 0, first, error)
