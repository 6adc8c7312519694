"""A running engine as scoring sees it: an OpenAI-compatible server and what it can do.

Answers are either exactly about the ids that were sent, or an EndpointError; nothing is guessed and only a full queue
is tried again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from pipelines.divergence import reading
from pipelines.engine import context_logits, prompt_ranks
from pipelines.engine.capabilities import Capabilities
from pipelines.errors import EndpointError, closest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_WAITS = 60
LONGEST_WAIT_S = 30.0
GREETING_S = 10.0
SOON = (502, 503, 504)
"""Statuses of a server that is starting, or of a gateway whose server is."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Each prompt token's log-probability and whether it was the most probable; None before the wanted start, and for
    the first token, which has no context."""

    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    greedy: tuple[bool | None, ...]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Of the tokens of a prompt from the wanted start on: log-probabilities, and the most probable tokens at each place
    by id, best first, with theirs; those are empty where the server names alternatives by text only."""

    logprobs: tuple[float, ...]
    ids: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A generated text; `finish_reason` is "stop" or "length"."""

    text: str
    finish_reason: str
    tokens_in: int
    tokens_out: int


class Endpoint:
    """Client of one server. `base_url` includes the API's version (http://127.0.0.1:8000/v1).

    `headers` go with every request; what they hold never shows in an error. `text_of` writes token ids for a server
    that takes text only; whether it read the same tokens shows in its counts. `admits` is what the server says it holds
    of a prompt with its answer (max_model_len), known once it is ready, None where it says nothing.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        capabilities: Capabilities,
        timeout_s: float = 600,
        transport: httpx.BaseTransport | None = None,
        headers: Mapping[str, str] | None = None,
        text_of: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.capabilities = capabilities
        self.headers = dict(headers or {})
        self.admits: int | None = None
        self._text_of = text_of
        self._client = httpx.Client(timeout=timeout_s, trust_env=False, transport=transport, headers=self.headers)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def prompt(self, ids: Sequence[int]) -> list[int] | str:
        """Token ids as this server takes them.

        Raises:
            EndpointError: it takes text only, and these ids have none that is read as them.
        """
        if self.capabilities.token_prompts:
            return list(ids)
        if self._text_of is None:
            raise EndpointError(f"{self.base_url}: this server takes no token ids")
        return self._text_of(ids)

    def not_ready(self) -> str:
        """Why the server does not answer yet, "" where it does and has the model, if it tells what it has.

        Raises:
            EndpointError: it answers in a way that waiting does not mend.
        """
        url = f"{self.base_url}/models"
        try:
            response = self._client.get(url, timeout=GREETING_S)
        except httpx.HTTPError as error:
            return self._hidden(f"{type(error).__name__}: {error}")
        if response.status_code in (httpx.codes.TOO_MANY_REQUESTS, *SOON):
            return f"status {response.status_code}: {self._told(response)}"
        if response.status_code == httpx.codes.NOT_FOUND:
            return ""  # a gateway may list nothing
        if response.status_code != httpx.codes.OK:
            raise EndpointError(f"{url}: status {response.status_code}: {self._told(response)}")
        try:
            listed = {str(model["id"]): model.get("max_model_len") for model in response.json()["data"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._nonsense(f"no list of models: {_brief(response.text)}") from None
        if self.model not in listed:
            raise EndpointError(f"{url}: no model {self.model!r} there; {closest(self.model, listed)}")
        admits = listed[self.model]
        self.admits = admits if isinstance(admits, int) else None
        return ""

    def score(self, prompts: Sequence[Sequence[int]], starts: Sequence[int] | None = None) -> list[TokenScore]:
        """Score the tokens of prompts, each from its place in `starts` on (default: all). Prompts that share a prefix
        are cheapest in one call.

        Raises:
            EndpointError: the server cannot score, failed, or answered about other tokens than those sent.
        """
        self._require_scores()
        sent = [list(prompt) for prompt in prompts]
        first = [max(start, 1) for start in starts or [1] * len(sent)]
        if self.capabilities.prompt_ranks:
            return [_scored(ids, n, found) for ids, n, found in self._places(sent, first, 1)]
        if not self.capabilities.prompt_logprobs:
            return [self._score_by_logits(ids) for ids in sent]
        choices = self._echoed(sent, first if starts else None, 1)
        return [self._score(tuple(ids), n, choice) for ids, n, choice in zip(sent, first, choices, strict=True)]

    def rank(self, prompts: Sequence[Sequence[int]], starts: Sequence[int], top: int) -> list[Ranking]:
        """Score prompts as `score` does, with up to `top` alternatives at each place from `starts` on.

        Raises:
            EndpointError: the server cannot score, failed, or answered about other tokens than those sent.
        """
        self._require_scores()
        sent, first = [list(prompt) for prompt in prompts], [max(start, 1) for start in starts]
        if self.capabilities.prompt_ranks:
            top = max(1, min(top, self.capabilities.top_logprobs))
            return [_ranked(found) for _, _, found in self._places(sent, first, top)]
        if not self.capabilities.prompt_logprobs:
            return [self._rank_by_logits(ids, n, top) for ids, n in zip(sent, first, strict=True)]
        choices = self._echoed(sent, first, max(1, min(top, self.capabilities.top_logprobs)))
        return [self._ranking(tuple(ids), n, choice) for ids, n, choice in zip(sent, first, choices, strict=True)]

    def _require_scores(self) -> None:
        if not self.capabilities.scores_prompts:
            raise EndpointError(f"{self.base_url}: this server gives no log-probabilities of prompts")

    def _places(
        self, sent: list[list[int]], starts: list[int], top: int
    ) -> Iterator[tuple[list[int], int, list[prompt_ranks.Place]]]:
        """Each prompt with its start and what the server predicted from there on."""
        if not sent:
            return
        body = {"prompt": [self.prompt(ids) for ids in sent], "prompt_logprobs": top, **prompt_ranks.REQUEST}
        for ids, start, choice in zip(sent, starts, self._choices(self._post(body), len(sent)), strict=True):
            try:
                yield ids, start, prompt_ranks.read(ids, start, top, choice)
            except ValueError as error:
                raise self._nonsense(str(error)) from None

    def _echoed(self, sent: list[list[int]], starts: list[int] | None, top: int) -> list[Json]:
        """The choices of an echo of prompts with log-probabilities."""
        if not sent:
            return []
        prompts = [self.prompt(ids) for ids in sent]
        body: Json = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": top, "temperature": 0}
        body |= {"logprob_start_len": starts} if starts and self.capabilities.logprob_start else {}
        return self._choices(self._post(body), len(sent))

    def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int = 0,
        ignore_eos: bool = False,
    ) -> Completion:
        """Continue a prompt.

        Raises:
            EndpointError: the server failed, cannot do what was asked, or left out counts or reason.
        """
        if ignore_eos and not self.capabilities.ignore_eos:
            raise EndpointError(f"{self.base_url}: this server cannot ignore end-of-text tokens")
        body: Json = {"prompt": self.prompt(ids), "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        body |= {"stop": list(stop)} if stop else {}
        body |= {"ignore_eos": True} if ignore_eos else {}
        answer = self._post(body)
        choice = self._choices(answer, 1)[0]
        text, reason, usage = choice.get("text"), choice.get("finish_reason"), answer.get("usage") or {}
        tokens_in, tokens_out = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not (
            isinstance(text, str)
            and isinstance(reason, str)
            and isinstance(tokens_in, int)
            and isinstance(tokens_out, int)
        ):
            raise self._nonsense(f"text, finish_reason or usage is missing: {_brief(choice)}, usage {usage}")
        if tokens_in != len(ids):
            raise self._nonsense(f"{len(ids)} prompt tokens were sent, it counted {tokens_in}")
        return Completion(text, reason, tokens_in, tokens_out)

    def _ranking(self, ids: tuple[int, ...], start: int, choice: Json) -> Ranking:
        score = self._score(ids, start, choice)
        logprobs = tuple(value for value in score.logprobs[start:] if value is not None)
        given = choice["logprobs"]
        tops, values = (given.get(name) for name in ("top_token_ids", "top_token_logprobs"))
        if not tops or not values:
            return Ranking(logprobs, ((),) * len(logprobs), ((),) * len(logprobs))
        if len(values) != len(ids) or any(
            len(t) != len(v or ()) for t, v in zip(tops[start:], values[start:], strict=True)
        ):
            raise self._nonsense("top_token_logprobs do not match top_token_ids")
        return Ranking(logprobs, tuple(tuple(t) for t in tops[start:]), tuple(tuple(v) for v in values[start:]))

    def _rank_by_logits(self, ids: list[int], start: int, top: int) -> Ranking:
        logits, _ = self._by_logits(ids)
        logprobs, tops, values = reading.rank(logits[start - 1 : -1], ids[start:])
        best = tuple(tuple(row[:top]) for row in tops.tolist())
        return Ranking(tuple(logprobs.tolist()), best, tuple(tuple(row[:top]) for row in values.tolist()))

    def _score_by_logits(self, ids: list[int]) -> TokenScore:
        return self._by_logits(ids)[1]

    def _by_logits(self, ids: list[int]) -> tuple[NDArray[np.float64], TokenScore]:
        """One prompt a request: its logits are tokens times vocabulary numbers, as text."""
        body = self._posted({"prompt": ids, **context_logits.REQUEST})
        try:
            _, logits = context_logits.read(body)
            if logits is None:
                raise ValueError("no context logits came")
            logprobs, greedy = context_logits.score(ids, logits)
        except ValueError as error:
            raise self._nonsense(str(error)) from None
        return logits, TokenScore(tuple(ids), logprobs, greedy)

    def _post(self, body: Json) -> Json:
        content = self._posted(body)
        try:
            answer = json.loads(content)
        except ValueError:
            raise self._nonsense(f"not JSON: {_brief(content.decode(errors='replace'))}") from None
        if not isinstance(answer, dict):
            raise self._nonsense(f"not an object: {_brief(answer)}")
        return answer

    def _posted(self, body: Json) -> bytes:
        url, sent = f"{self.base_url}/completions", {"model": self.model, **body}
        for _ in range(MAX_WAITS):
            try:
                response = self._client.post(url, json=sent)
            except httpx.HTTPError as error:
                raise EndpointError(self._hidden(f"{url}: {type(error).__name__}: {error}")) from error
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
            time.sleep(_wait_s(response))
        if response.status_code != httpx.codes.OK:
            raise EndpointError(f"{url}: status {response.status_code}: {self._told(response)}")
        return response.content

    def _told(self, response: httpx.Response) -> str:
        return self._hidden(_message(response))

    def _hidden(self, said: str) -> str:
        """What a server said, without what we sent it in headers: some repeat a key that they refuse."""
        for value in self.headers.values():
            for secret in filter(None, (value, value.rpartition(" ")[2])):
                said = said.replace(secret, "***")
        return said

    def _choices(self, answer: Json, count: int) -> list[Json]:
        """The choices in the order of the prompts, whatever order they came in."""
        found = answer.get("choices")
        choices = {c.get("index"): c for c in found if isinstance(c, dict)} if isinstance(found, list) else {}
        if set(choices) != set(range(count)):
            raise self._nonsense(f"{count} prompts were sent, choices came for {sorted(choices, key=str)}")
        return [choices[index] for index in range(count)]

    def _score(self, ids: tuple[int, ...], start: int, choice: Json) -> TokenScore:
        given = choice.get("logprobs")
        if not isinstance(given, dict):
            raise self._nonsense("no logprobs: does it support echo with logprobs?")
        logprobs = given.get("token_logprobs") or []
        if len(logprobs) != len(ids):
            raise self._nonsense(f"{len(ids)} prompt tokens were sent, log-probabilities came for {len(logprobs)}")
        if "token_ids" in given and tuple(given["token_ids"]) != ids:
            raise self._nonsense(
                f"it scored other token ids than those sent: {_first_difference(ids, given['token_ids'])}"
            )
        if any(not isinstance(value, float | int) for value in logprobs[start:]):
            raise self._nonsense(f"log-probabilities are missing after token {start}")
        by_id = "top_token_ids" in given
        greedy = self._greedy_by_id(ids, start, given) if by_id else self._greedy_by_value(logprobs, start, given)
        before = (None,) * min(start, len(ids))
        return TokenScore(ids, (*before, *(float(value) for value in logprobs[start:])), (*before, *greedy[start:]))

    def _greedy_by_id(self, ids: tuple[int, ...], start: int, given: Json) -> list[bool]:
        tops = given["top_token_ids"]
        if len(tops) != len(ids) or not all(tops[start:]):
            raise self._nonsense("top_token_ids do not match the tokens")
        return [bool(top) and top[0] == token for token, top in zip(ids, tops, strict=True)]

    def _greedy_by_value(self, logprobs: list[float | None], start: int, given: Json) -> list[bool]:
        """From the standard fields alone: a token was the most probable if no alternative has more."""
        tops = given.get("top_logprobs") or []
        if len(tops) != len(logprobs) or not all(tops[start:]):
            raise self._nonsense("top_logprobs do not match the tokens")
        return [
            value is not None and bool(top) and value >= max(top.values())
            for value, top in zip(logprobs, tops, strict=True)
        ]

    def _nonsense(self, what: str) -> EndpointError:
        return EndpointError(f"{self.base_url}: the server's answer cannot be used: {self._hidden(what)}")


def _scored(ids: Sequence[int], start: int, found: Sequence[prompt_ranks.Place]) -> TokenScore:
    before = (None,) * min(start, len(ids))
    logprobs, greedy = (one.logprob for one in found), (one.greedy for one in found)
    return TokenScore(tuple(ids), (*before, *logprobs), (*before, *greedy))


def _ranked(found: Sequence[prompt_ranks.Place]) -> Ranking:
    return Ranking(
        tuple(one.logprob for one in found), tuple(one.ids for one in found), tuple(one.values for one in found)
    )


def _wait_s(response: httpx.Response) -> float:
    try:
        asked = float(response.headers.get("Retry-After", "1"))
    except ValueError:
        asked = 1.0
    return min(max(asked, 0.05), LONGEST_WAIT_S)


def _message(response: httpx.Response) -> str:
    """The server's own words, whichever way it wraps them."""
    try:
        body = response.json()
    except ValueError:
        return _brief(response.text)
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else _brief(error)


def _first_difference(sent: Sequence[int], came: Sequence[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(sent, came, strict=False)) if a != b), min(len(sent), len(came)))
    return f"position {at}"


def _brief(value: object) -> str:
    shown = value if isinstance(value, str) else repr(value)
    return shown if len(shown) <= 200 else shown[:197] + "..."
