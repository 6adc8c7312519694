"""What clients may send, checked: a wrong type is an error with the field's name, an unknown field is ignored.

A field that is known and would change the answer, but is not supported, is refused unless it is neutral.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipelines.engine.host.decoder import Sampling
from pipelines.errors import QuantgateError

MAX_LOGPROBS = 20
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "use_beam_search": (None, False),
    "stop_token_ids": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "structured_outputs": (None,),
    "audio": (None,),
}


class Refused(QuantgateError):
    """A request that cannot be served, with the HTTP status and the field at fault."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "invalid_request_error"
    ) -> None:
        self.param, self.status, self.kind = param, status, kind
        super().__init__(message)


class StreamOptions(BaseModel):
    """`include_usage` adds a last event with the token counts."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool | None = None


class _Body(BaseModel):
    """Fields that completions and chat share."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen; OpenAI's default temperature is 1."""
        temperature = 1.0 if self.temperature is None else self.temperature
        seed = None if self.seed is None else self.seed % 2**63
        return Sampling(temperature, self.top_p or 1.0, max(self.top_k or 0, 0), seed)

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, however they were written."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stops:
            raise Refused("stop: a stop string must not be empty", "stop")
        return stops

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    logprob_start_len: Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] | None = None

    def starts(self, count: int) -> tuple[int, ...]:
        """Where each of `count` prompts' log-probabilities begin (the name is SGLang's): at 0 unless said otherwise."""
        given = self.logprob_start_len or 0
        if isinstance(given, int):
            return (given,) * count
        if len(given) != count:
            raise Refused(f"logprob_start_len: {len(given)} numbers for {count} prompts", "logprob_start_len")
        return tuple(given)

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """One or several prompts, each text or token ids."""
        value = self.prompt
        if isinstance(value, str) or _are_ids(value):
            value = [value]
        if not isinstance(value, list) or not value:
            raise Refused(
                "prompt: expected a string, a list of strings, token ids, or a list of token id lists", "prompt"
            )
        found: list[str | tuple[int, ...]] = []
        for place, item in enumerate(value):
            if not isinstance(item, str) and not _are_ids(item):
                raise Refused(f"prompt[{place}]: expected a string or a list of integers, not empty", "prompt")
            found.append(item if isinstance(item, str) else tuple(item))
        return found


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = None

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Messages as a chat template wants them: content as one string."""
        return [{**message, "content": _content(message, place)} for place, message in enumerate(self.messages)]


B = TypeVar("B", bound=_Body)


def read(model: type[B], raw: bytes) -> B:
    """Parse a request body.

    Raises:
        Refused: not JSON, a wrong type, or something this server does not do.
    """
    try:
        data = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise Refused("the body must be a JSON object")
    for name, allowed in NEUTRAL.items():
        if data.get(name) not in allowed:
            raise Refused(f"{name}={data[name]!r} is not supported by this server (allowed: {allowed[-1]!r})", name)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refused(
            f"{where}: {first['msg']} (got {_brief(first['input'])})", where.partition(".")[0] or None
        ) from None


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _content(message: dict[str, Any], place: int) -> str:
    content = message.get("content")
    if not isinstance(message.get("role"), str):
        raise Refused(f"messages[{place}].role: expected a string", "messages")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not texts or len(texts) != len(parts):
        raise Refused(f"messages[{place}].content: expected a string or text parts", "messages")
    return "".join(texts)


def _brief(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
