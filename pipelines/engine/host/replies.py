"""The JSON that goes back, in OpenAI's two dialects: text completions and chat completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipelines.engine.host.decoder import PromptScore, Ranked
from pipelines.engine.host.desk import Delta
from pipelines.engine.host.text import TokenNames

if TYPE_CHECKING:
    from starlette.responses import Response

Json = dict[str, Any]


@dataclass(slots=True)
class LogProbs:
    """The `logprobs` of a choice: OpenAI's parallel lists, beside them exact ids and what belongs to each of them
    (`token_ids`, `top_token_ids`, `top_token_logprobs`): names may be shared by tokens."""

    names: TokenNames
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    top_token_ids: list[list[int] | None] = field(default_factory=list)
    top_token_logprobs: list[list[float] | None] = field(default_factory=list)

    def add(self, token: int, logprob: float | None, ranked: Ranked | None) -> None:
        """Append one token. As with vLLM the chosen token is always among the alternatives."""
        name = self.names[token]
        self.tokens.append(name)
        self.token_ids.append(token)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(None if ranked is None or logprob is None else self._top(token, logprob, ranked))
        self.top_token_ids.append(None if ranked is None else [other for other, _ in ranked])
        self.top_token_logprobs.append(None if ranked is None else [value for _, value in ranked])
        self.text_offset.append(self.offset)
        self.offset += len(name)

    def add_prompt(self, score: PromptScore) -> None:
        """Append every token of a scored prompt."""
        for token, logprob, ranked in zip(score.ids, score.logprobs, score.ranked, strict=True):
            self.add(token, logprob, ranked)

    def _top(self, token: int, logprob: float, ranked: Ranked) -> dict[str, float]:
        shown: dict[str, float] = {}
        for other, value in (*ranked, (token, logprob)):
            name = self.names[other]
            if name in shown and other != token:
                name = f"token_id:{other}"
            shown.setdefault(name, value)
        return shown

    def json(self) -> Json:
        """The lists as a response field."""
        listed = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "token_ids")
        return {name: getattr(self, name) for name in (*listed, "top_token_ids", "top_token_logprobs")}


@dataclass(slots=True)
class Choice:
    """A finished or growing answer."""

    text: str = ""
    finish: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogProbs | None = None

    def take(self, delta: Delta) -> None:
        """Append one generated token."""
        self.text += delta.text
        self.finish = delta.finish
        self.token_ids.append(delta.token)
        if self.logprobs is not None:
            self.logprobs.add(delta.token, delta.logprob, delta.ranked)


def usage(tokens_in: int, tokens_out: int) -> Json:
    """Token counts. A generated end-of-text token counts, as it does for vLLM."""
    return {"prompt_tokens": tokens_in, "completion_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}


class Reply:
    """One response: the fields that all its parts share, and how this dialect writes a part."""

    def __init__(self, model: str, chat: bool, show_ids: bool) -> None:
        self._chat, self._show_ids = chat, show_ids
        self._kind = (
            "chat.completion" if chat else "text_completion",
            "chat.completion.chunk" if chat else "text_completion",
        )
        prefix = "chatcmpl-" if chat else "cmpl-"
        self._shared = {"id": prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}
        self._spoken: set[int] = set()

    def whole(self, choices: Sequence[Choice], counts: Json) -> Json:
        """The response when it is not streamed."""
        parts = [
            self._choice(i, c, {"message": {"role": "assistant", "content": c.text}}) for i, c in enumerate(choices)
        ]
        return {**self._shared, "object": self._kind[0], "choices": parts, "usage": counts}

    def chunk(self, index: int, part: Choice) -> Json:
        """One event of a stream. The role travels with the first text of a chat, not in an event of its own."""
        role = {} if index in self._spoken else {"role": "assistant"}
        self._spoken.add(index)
        choice = self._choice(index, part, {"delta": {**role, "content": part.text}})
        return {**self._shared, "object": self._kind[1], "choices": [choice]}

    def last(self, counts: Json) -> Json:
        """The event with the counts, after all choices."""
        return {**self._shared, "object": self._kind[1], "choices": [], "usage": counts}

    def _choice(self, index: int, part: Choice, spoken: Mapping[str, Any]) -> Json:
        logprobs = None if part.logprobs is None else part.logprobs.json()
        ids = {"token_ids": part.token_ids} if self._show_ids else {}
        body = spoken if self._chat else {"text": part.text}
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": part.finish, **ids}


def json_response(data: Json, status: int = 200) -> Response:
    """A JSON response."""
    from starlette.responses import Response

    body = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return Response(body.encode("utf-8", "replace"), status, media_type="application/json")


def sse(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


def error_body(message: str, kind: str, param: str | None) -> Json:
    """OpenAI's error object."""
    return {"message": message, "type": kind, "param": param, "code": None}


def error_response(message: str, status: int, kind: str, param: str | None = None) -> Response:
    """OpenAI's error object as a response."""
    return json_response({"error": error_body(message, kind, param)}, status)
