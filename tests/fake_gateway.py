"""A gateway as companies put before their servers, with its own ideas of what to let through to our scripted host."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from pipelines.engine.card import EngineCard
from pipelines.engine.host.app import Server
from pipelines.engine.host.desk import Desk
from pipelines.engine.host.engine import Engine
from pipelines.engine.host.metrics import Metrics
from tests.byte_model import EOS, Scripted, byte_tokenizer

MODEL = "acme-7b"
WORDS = 257
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass
class Gateway:
    """What it lets through: only requests with `key`, only text, without `ignores`, and none with a field of `refuses`.

    The first `busy` requests find no server behind it. `seen` holds the bodies that came.
    """

    key: str = ""
    text_only: bool = False
    ignores: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    busy: int = 0
    seen: list[Message] = field(default_factory=list)
    url: str = ""
    app: Any = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        refused = await self._pass(scope, receive, send)
        if refused is not None:
            status, message = refused
            body = json.dumps({"error": {"message": message}}).encode()
            head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": head})
            await send({"type": "http.response.body", "body": body})

    async def _pass(self, scope: Message, receive: Receive, send: Send) -> tuple[int, str] | None:
        """Pass a request on, or say why not."""
        sent = dict(scope["headers"]).get(b"authorization", b"").decode()
        body = b""
        while (message := await receive()).get("body") or message.get("more_body"):
            body += message["body"]
            if not message.get("more_body"):
                break
        if self.busy > 0:
            self.busy -= 1
            return 503, "no server yet"
        if self.key and sent != f"Bearer {self.key}":
            return 401, f"Authentication Error. Received={sent.removeprefix('Bearer ')}"
        if body:
            asked = json.loads(body)
            self.seen.append(asked)
            prompts = asked["prompt"] if isinstance(asked["prompt"], list) else [asked["prompt"]]
            if self.text_only and not all(isinstance(prompt, str) for prompt in prompts):
                return 400, "prompt: expected a string"
            for name in self.refuses:
                if name in asked:
                    return 400, f"unknown field {name}"
            body = json.dumps({name: value for name, value in asked.items() if name not in self.ignores}).encode()
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(parts, None) or await receive()

        await self.app(scope, replay, send)
        return None


@contextmanager
def running(gateway: Gateway, directory: Path, reply: str = "yes") -> Iterator[Gateway]:
    """Serve a gateway on loopback; its server's files lie in `directory`, and it says `reply` and ends."""
    tokenizer = byte_tokenizer()
    decoder = Scripted(tokenizer, reply, ends=True)
    desk = Desk(decoder, tokenizer, [EOS], 4, 64)
    card = EngineCard(
        target="scripted", native=True, native_note="", max_length=256, eos_token_ids=[EOS], bos_token_id=None,
        vocab_size=WORDS, model_id=MODEL,
    )  # fmt: skip
    gateway.app = Server(Engine(directory, card, tokenizer), desk, Metrics()).app()
    server = uvicorn.Server(uvicorn.Config(gateway, log_level="error", lifespan="off", ws="none"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    desk.start()
    thread.start()
    gateway.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    try:
        yield gateway
    finally:
        server.should_exit = True
        thread.join(10)
        desk.close()
        listener.close()


def variant(directory: Path) -> Path:
    """The checkpoint it is said to serve: its tokenizer and configuration, no weights."""
    directory.mkdir()
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    about = {"vocab_size": WORDS, "eos_token_id": EOS, "bos_token_id": None, "max_position_embeddings": 256}
    (directory / "config.json").write_text(json.dumps(about))
    return directory
