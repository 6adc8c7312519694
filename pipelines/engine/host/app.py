"""The HTTP side: routes and what they ask of the desk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from pipelines.engine.host.desk import Desk, QueueFull, ScoreWish, Wish
from pipelines.engine.host.engine import Engine
from pipelines.engine.host.replies import Choice, LogProbs, Reply, error_response, json_response
from pipelines.engine.host.wire import ChatBody, CompletionBody, Refused, read
from pipelines.engine.host.work import Work

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from pipelines.engine.host.metrics import Metrics

DEFAULT_MAX_TOKENS = 16


class Server:
    """Answers requests from one engine through one desk."""

    def __init__(self, engine: Engine, desk: Desk, metrics: Metrics) -> None:
        self._engine, self._desk, self._metrics = engine, desk, metrics
        self._card = engine.card

    def app(self) -> Starlette:
        """The ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.scrape),
                Route("/v1/models", self.models),
                Route("/v1/completions", self._guarded("completions", self.completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded("chat", self.chat), methods=["POST"]),
            ]
        )

    async def health(self, _: Request) -> Response:
        """200 while the decode thread lives."""
        return (
            json_response({"status": "ok"})
            if self._desk.alive
            else error_response("the decode thread has ended", 503, "server_error")
        )

    async def models(self, _: Request) -> Response:
        """The one model of this engine."""
        card = {"id": self._card.model_id, "object": "model", "created": 0, "owned_by": "quantgate"}
        return json_response({"object": "list", "data": [{**card, "max_model_len": self._card.max_length}]})

    async def scrape(self, _: Request) -> Response:
        """Prometheus text."""
        from starlette.responses import Response

        body, kind = self._metrics.page(self._desk.open_tickets, self._desk.running)
        return Response(body, media_type=kind)

    def _guarded(
        self, route: str, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Turn refusals into OpenAI's error bodies and count every answer."""

        async def answer(request: Request) -> Response:
            try:
                response = await handler(request)
            except Refused as error:
                response = error_response(str(error), error.status, error.kind, error.param)
            except QueueFull as error:
                response = error_response(str(error), 429, "rate_limit_error")
                response.headers["Retry-After"] = str(error.retry_after_s)
            self._metrics.answered(route, response.status_code)
            return response

        return answer

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = read(CompletionBody, await request.body())
        self._check_model(body.model)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        given = body.prompts
        prompts = tuple([await self._encode(p) if isinstance(p, str) else p for p in given])
        self._check_prompts(prompts, max_tokens)
        wishes = [
            Wish(ids, max_tokens, body.sampling, body.stops, bool(body.ignore_eos), body.logprobs) for ids in prompts
        ]
        reply = Reply(self._card.model_id, chat=False, show_ids=bool(body.return_token_ids))
        choices = [self._start(body, given[i], ids) for i, ids in enumerate(prompts)]
        work = self._work(reply, choices, wishes, sum(map(len, prompts)))
        if body.echo and body.logprobs is not None:
            follow = max_tokens == 1 and body.sampling.temperature == 0
            work.score = ScoreWish(prompts, body.starts(len(prompts)), body.logprobs, tuple(wishes) if follow else ())
        return await work.respond(request, bool(body.stream), body.include_usage)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = read(ChatBody, await request.body())
        self._check_model(body.model)
        if body.logprobs:
            raise Refused("logprobs are not supported for chat by this server: use /v1/completions", "logprobs")
        ids = await self._encode(self._engine.render(body.conversation), special=False)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        max_tokens = max(self._card.max_length - len(ids), 1) if asked is None else asked
        self._check_prompts((ids,), max_tokens)
        wish = Wish(ids, max_tokens, body.sampling, body.stops, bool(body.ignore_eos))
        reply = Reply(self._card.model_id, chat=True, show_ids=bool(body.return_token_ids))
        work = self._work(reply, [Choice()], [wish], len(ids))
        return await work.respond(request, bool(body.stream), body.include_usage)

    def _work(self, reply: Reply, choices: list[Choice], wishes: list[Wish], tokens_in: int) -> Work:
        """Everything a request needs; nothing to generate where `max_tokens` is 0."""
        work = Work(self._desk, self._metrics, reply, tokens_in)
        work.choices, work.wishes = choices, [wish for wish in wishes if wish.max_tokens]
        for choice, wish in zip(choices, wishes, strict=True):
            choice.finish = None if wish.max_tokens else "length"
        return work

    def _start(self, body: CompletionBody, prompt: str | tuple[int, ...], ids: tuple[int, ...]) -> Choice:
        """A choice before its first token, with the prompt in it if it is to be echoed."""
        choice = Choice(logprobs=None if body.logprobs is None else LogProbs(self._engine.names))
        if body.echo:
            text = prompt if isinstance(prompt, str) else self._engine.text_of(ids)
            choice.text = text
        return choice

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._card.model_id:
            raise Refused(
                f"model {name!r} is not here; this server has {self._card.model_id!r}", "model", 404, "not_found_error"
            )

    def _check_prompts(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> None:
        limit = self._card.max_length
        for ids in prompts:
            if not ids:
                raise Refused("prompt: no tokens", "prompt")
            if len(ids) + max_tokens > limit:
                raise Refused(
                    f"{len(ids)} prompt tokens and max_tokens={max_tokens} exceed the {limit} that this model can hold",
                    "prompt" if len(ids) >= limit else "max_tokens",
                )
            if min(ids) < 0 or max(ids) >= self._card.vocab_size:
                raise Refused(f"prompt: token ids must be from 0 to {self._card.vocab_size - 1}", "prompt")

    async def _encode(self, text: str, special: bool = True) -> tuple[int, ...]:
        encoded = await asyncio.to_thread(self._engine.tokenizer.encode, text, add_special_tokens=special)
        return tuple(encoded.ids)
