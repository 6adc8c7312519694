"""From recorded bytes to tokens: reads a streamed completion after the fact, so that no parsing delays a timestamp."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Chunk = tuple[float, bytes]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server counted. Each is None where it did not tell."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one stream carried.

    token_times_s: arrival of each event that brought tokens. first_tokens: how many the first of them brought.
    tokens: by the server's usage, else by token ids, else one per event. counted: by token ids alone, None without.
    """

    token_times_s: tuple[float, ...]
    tokens: int
    first_tokens: int
    error: str | None
    counted: int | None = None
    usage: Usage = Usage()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class _Token:
    """An event that brought tokens: token ids and characters in it, tokens so far by the server's own count."""

    at_s: float
    ids: int
    characters: int
    cumulative: int | None


def read(chunks: Sequence[Chunk]) -> Answer:
    """Read a whole stream of OpenAI completion (or chat) events.

    An event brings tokens if it has token ids or text, so a role-only or empty first event is not the first token, and
    usage that comes late is not the last. A stream that ends without [DONE], finish reason or usage is broken, and so
    is one with an error event or bad JSON.
    """
    tokens: list[_Token] = []
    usage = Usage()
    reason: str | None = None
    done = False
    for at_s, payload in _events(chunks):
        if payload == b"[DONE]":
            done = True
            continue
        try:
            event = json.loads(payload)
        except ValueError:
            return _answer(tokens, usage, reason, "broken_stream")
        if not isinstance(event, dict) or event.get("error"):
            return _answer(tokens, usage, reason, "broken_stream")
        told = _usage(event)
        usage = told or usage
        for choice in _choices(event):
            reason = choice.get("finish_reason") or reason
            ids, characters = len(choice.get("token_ids") or ()), _characters(choice)
            if ids or characters:
                tokens.append(_Token(at_s, ids, characters, told.output_tokens if told else None))
    if not done and reason is None and usage.output_tokens is None:
        return _answer(tokens, usage, reason, "broken_stream")
    return _answer(tokens, usage, reason, None if tokens else "empty")


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


def _usage(event: dict[str, object]) -> Usage | None:
    """Tokens so far by the server's own count, where the event tells."""
    told = event.get("usage")
    if not isinstance(told, dict):
        return None
    details = told.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(_count(told.get("prompt_tokens")), _count(told.get("completion_tokens")), _count(cached))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _choices(event: dict[str, object]) -> list[dict[str, Any]]:
    found = event.get("choices")
    return [choice for choice in found if isinstance(choice, dict)] if isinstance(found, list) else []


def _characters(choice: dict[str, Any]) -> int:
    """Characters a choice brings, in a completion's or a chat's form."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        named = (delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))
        return sum(len(value) for value in named if isinstance(value, str | list))
    text = choice.get("text")
    return len(text) if isinstance(text, str) else 0


def _answer(tokens: Sequence[_Token], usage: Usage, reason: str | None, error: str | None) -> Answer:
    counted = sum(token.ids for token in tokens) or None
    told = usage.output_tokens
    count = told if told is not None else counted or len(tokens)
    times = tuple(token.at_s for token in tokens)
    first = _first_tokens(tokens, count) if tokens else 0
    return Answer(times, count if tokens else 0, first, error, counted, usage, reason)


def _first_tokens(tokens: Sequence[_Token], count: int) -> int:
    """Tokens of the first event: as told, else its share of the text where events bring several tokens each.

    With hardly more tokens than events every event brings one, but for those without text of their own.
    """
    told = tokens[0].ids or tokens[0].cumulative
    if told and told <= count:
        return told
    if count < 1.5 * len(tokens):
        return 1
    characters = sum(token.characters for token in tokens)
    share = round(count * tokens[0].characters / characters) if characters else count // len(tokens)
    return min(max(1, share), max(1, count - len(tokens) + 1))
