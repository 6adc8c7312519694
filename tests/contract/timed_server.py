"""A completion server whose timing and faults are known. As a program it prints its port and serves until stdin closes.

The model's name in a request chooses what happens to it (see BEHAVIOURS); GET /log tells what really did, on the clock
of `time.monotonic`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field

from aiohttp import web


@dataclass(frozen=True)
class Behaviour:
    """How a model answers.

    On request number `stall_on` (from 0) the whole server freezes for half a second; on `exit_on` it dies.
    `warming_s` comes before the first token, and gets a tenth shorter with each request. `one_by_one` has requests wait
    until those before them are answered.
    """

    ttft_s: float = 0.03
    itl_s: float = 0.01
    burst: int = 1
    role_chunk: bool = False
    usage: bool = True
    status: int = 200
    fault: str = ""
    stall_on: int = -1
    exit_on: int = -1
    warming_s: float = 0.0
    one_by_one: bool = False
    key: str = ""


BEHAVIOURS = {
    "plain": Behaviour(),
    "slow": Behaviour(itl_s=0.03),
    "burst": Behaviour(burst=4, itl_s=0.02),
    "role": Behaviour(role_chunk=True, ttft_s=0.2),
    "uncounted": Behaviour(usage=False),
    "refusing": Behaviour(status=400),
    "overloaded": Behaviour(status=503),
    "cut": Behaviour(fault="cut"),
    "silent": Behaviour(fault="silent"),
    "hanging": Behaviour(fault="hang"),
    "dying": Behaviour(exit_on=6),
    "stalling": Behaviour(stall_on=3),
    "warming": Behaviour(warming_s=0.5),
    "warming_too": Behaviour(warming_s=0.5),
    "queueing": Behaviour(ttft_s=0.04, one_by_one=True),
    "guarded": Behaviour(key="Bearer sesame"),
}
STALL_S = 0.5
TURN = asyncio.Lock()


@dataclass
class Served:
    """What was done for one request."""

    model: str
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    received_s: float
    written_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)


LOG: list[Served] = []


def frame(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


async def complete(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    served = Served(
        asked["model"], asked["prompt"], asked["max_tokens"], asked.get("ignore_eos", False), time.monotonic()
    )
    number = sum(other.model == served.model for other in LOG)
    LOG.append(served)
    behaviour = BEHAVIOURS[served.model]
    if number == behaviour.stall_on:
        served.stall_s.append(time.monotonic())
        time.sleep(STALL_S)
        served.stall_s.append(time.monotonic())
    if number == behaviour.exit_on:
        os._exit(1)
    if behaviour.key != request.headers.get("Authorization", ""):
        return web.json_response({"error": {"message": "no such key"}}, status=401)
    if behaviour.status != 200:
        return web.json_response({"error": {"message": "as configured"}}, status=behaviour.status)
    if behaviour.fault == "hang":
        await asyncio.sleep(3600)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    if behaviour.role_chunk:
        await response.write(frame({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    if behaviour.one_by_one:
        async with TURN:
            await stream(response, behaviour, served, time.monotonic() - served.received_s)
    else:
        await stream(response, behaviour, served, behaviour.warming_s * 0.9**number)
    return response


async def stream(response: web.StreamResponse, behaviour: Behaviour, served: Served, late_s: float) -> None:
    due_s = served.received_s + behaviour.ttft_s + late_s
    for first in range(0, 0 if behaviour.fault == "silent" else served.max_tokens, behaviour.burst):
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        tokens = min(behaviour.burst, served.max_tokens - first)
        served.written_s.append(time.monotonic())
        await response.write(frame({"choices": [{"text": " w" * tokens, "finish_reason": None}]}))
        due_s += behaviour.itl_s * behaviour.burst
        if behaviour.fault == "cut":
            raise ConnectionAbortedError
    if behaviour.usage:
        await response.write(frame({"choices": [], "usage": {"completion_tokens": served.max_tokens}}))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()


async def log(_: web.Request) -> web.Response:
    return web.json_response([asdict(served) for served in LOG])


async def metrics(_: web.Request) -> web.Response:
    """As vLLM writes them; a tenth of the prompt tokens are said to come from the prefix cache."""
    tokens = 10 * len(LOG)
    lines = [
        'vllm:num_requests_waiting{model_name="timed"} 2.0',
        'vllm:kv_cache_usage_perc{model_name="timed"} 0.25',
        f'vllm:prefix_cache_queries_total{{model_name="timed"}} {tokens}',
        f'vllm:prefix_cache_hits_total{{model_name="timed"}} {tokens / 10}',
    ]
    return web.Response(text="\n".join([*lines, ""]))


async def main() -> None:
    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/log", log), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(closed.set)), daemon=True).start()
    await closed.wait()


if __name__ == "__main__":
    asyncio.run(main())
