"""What a server that is not ours can do, found out by a few small requests where it is not declared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipelines.config import Strict
from pipelines.engine.capabilities import Capabilities
from pipelines.errors import EndpointError

if TYPE_CHECKING:
    from pipelines.engine.endpoint import Endpoint

RANKS = (20, 5, 1)
"""How many alternatives are asked for until a server gives them: our own host's most, OpenAI's, one."""
LONG = 64
"""Tokens within which a short answer should have ended by itself."""
FEW = 4
TIMEOUT_S = 120.0
Able = dict[str, Any]
"""Fields of capabilities."""


class Declared(Strict):
    """What a server can do; null: it is asked.

    token_prompts: it takes token ids; false sends text, whose tokens are counted here and held to the server's count.
    prompt_logprobs: it echoes prompts with log-probabilities. stream: it streams, and tells usage at the end.
    ignore_eos: it goes on after an end token when asked to.
    """

    token_prompts: bool = True
    prompt_logprobs: bool | None = None
    stream: bool | None = None
    ignore_eos: bool | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What came out. `begins` is the token that a server puts before texts by itself; `notes` say what it refused."""

    capabilities: Capabilities
    begins: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Questions:
    """What to ask: a client of the server for capabilities and a token that texts begin with; a few token ids; ids that
    ask for a short answer; and the token that texts of this model begin with, None where they begin with none."""

    client: Callable[[Capabilities, int | None], Endpoint]
    prompt: Sequence[int]
    short: Sequence[int]
    begins: int | None


def ask(questions: Questions, declared: Declared) -> Found:
    """Find out what a server can do.

    Raises:
        EndpointError: it answers neither as it must, nor as was declared, or counts other tokens than were sent.
    """
    with ExitStack() as stack:

        def opened(able: Capabilities, begins: int | None) -> Endpoint:
            return stack.enter_context(closing(questions.client(able, begins)))

        return _ask(replace(questions, client=opened), declared)


def _ask(questions: Questions, declared: Declared) -> Found:
    notes: list[str] = []
    least = Capabilities(
        token_prompts=declared.token_prompts, stream=False, prompt_logprobs=False, top_logprobs=0, ignore_eos=False
    )
    begins = _opening(questions, least)

    def client(**able: Any) -> Endpoint:
        return questions.client(replace(least, **able), begins)

    def tried(name: str, told: bool | None, question: Callable[[], Able], trusted: Able | None = None) -> Able:
        if told is False:
            return {}
        if told and trusted is not None:
            return trusted
        try:
            return question()
        except EndpointError as error:
            if told:
                raise EndpointError(f"engine.capabilities.{name} is declared, but {error}") from None
            notes.append(f"{name}: {error}")
        return {}

    found = tried("prompt_logprobs", declared.prompt_logprobs, lambda: _ranks(client, questions.prompt))
    found |= tried("stream", declared.stream, lambda: _streams(client(), questions.prompt), {"stream": True})
    goes_on = {"ignore_eos": True}
    found |= tried("ignore_eos", declared.ignore_eos, lambda: _goes_on(client(**goes_on), questions.short), goes_on)
    return Found(replace(least, **found), begins, tuple(notes))


def _opening(questions: Questions, able: Capabilities) -> int | None:
    """Have one token made; of a server of texts, find out whether it puts a token before them."""
    prompt, begins = questions.prompt, questions.begins
    try:
        questions.client(able, None).generate(prompt, max_tokens=1)
        return None
    except EndpointError as error:
        if able.token_prompts:
            told = "if it takes no token ids, only text, say so: engine.capabilities.token_prompts=false"
            raise EndpointError(f"{error} ({told})") from None
        if begins is None:
            raise
    questions.client(able, begins).generate([begins, *prompt], max_tokens=1)
    return begins


def _ranks(client: Callable[..., Endpoint], prompt: Sequence[int]) -> Able:
    """How the server tells log-probabilities of a prompt, and how many alternatives to each token it ranks."""
    ways: list[Able] = [
        {way: True, "top_logprobs": top} for way in ("prompt_ranks", "prompt_logprobs") for top in RANKS
    ]
    for way in ways[:-1]:
        try:
            client(**way).rank([prompt], [1], way["top_logprobs"])
            return way
        except EndpointError:
            continue
    client(**ways[-1]).rank([prompt], [1], ways[-1]["top_logprobs"])
    return ways[-1]


def _goes_on(endpoint: Endpoint, short: Sequence[int]) -> Able:
    """Whether an answer that would end by itself does not when it is asked not to."""
    if endpoint.generate(short, max_tokens=LONG).finish_reason != "stop":
        raise EndpointError(f"not found out: no answer ended by itself within {LONG} tokens")
    return {"ignore_eos": endpoint.generate(short, max_tokens=LONG, ignore_eos=True).tokens_out == LONG}


def _streams(endpoint: Endpoint, prompt: Sequence[int]) -> Able:
    """Whether a stream has text, an end, and the usage that a probe asks for; and whether it has ids where asked to."""
    try:
        events = _stream(endpoint, prompt, {"return_token_ids": True})
    except EndpointError:
        events = _stream(endpoint, prompt, {})
    choices = [choice for event in events for choice in event.get("choices") or ()]
    return {"stream": True, "token_ids": any(choice.get("token_ids") for choice in choices)}


def _stream(endpoint: Endpoint, prompt: Sequence[int], more: dict[str, object]) -> list[dict[str, Any]]:
    import httpx

    body = {
        "model": endpoint.model, "prompt": endpoint.prompt(prompt), "max_tokens": FEW, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip
    url, headers = f"{endpoint.base_url}/completions", endpoint.headers
    try:
        with httpx.stream("POST", url, json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False) as response:
            if response.status_code != httpx.codes.OK:
                raise EndpointError(f"a streamed request has status {response.status_code}")
            events = list(_events(response.iter_lines()))
    except httpx.HTTPError as error:
        raise EndpointError(f"a streamed request fails: {type(error).__name__}") from None
    texts = sum(bool(choice.get("text")) for event in events for choice in event.get("choices") or ())
    counts = [event["usage"].get("prompt_tokens") for event in events if isinstance(event.get("usage"), dict)]
    if not texts or not counts:
        raise EndpointError(f"a stream of {len(events)} events has {'no usage' if texts else 'no text'}")
    if counts[-1] != len(prompt):
        raise EndpointError(f"{len(prompt)} prompt tokens were sent, a stream counts {counts[-1]}")
    return events


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            event = json.loads(data)
        except ValueError:
            raise EndpointError("a stream has an event that is no JSON") from None
        if isinstance(event, dict):
            yield event
