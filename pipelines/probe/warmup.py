"""Warm-up: equal batches of requests that count for nothing, until the server is steady or the bound is reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelines.probe import latency, sse
from pipelines.probe.client import Client, Exchange, Request
from pipelines.probe.steady import both, level, steady


@dataclass(frozen=True, slots=True)
class Warmth:
    """What came of a warm-up: see `steady.steady`. failure: an error class, where a whole batch went unanswered."""

    steady: bool | None
    requests: int
    failure: str | None = None
    interrupted: bool = False


def warm_up(
    client: Client,
    requests: Sequence[Request],
    *,
    batch: int,
    most_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Warmth:
    """Send `requests` in batches of `batch`, of which each must ask the same; begin none after `most_s`.

    A batch in which a request fails is not like the others, so the levels begin anew after it.
    """
    began_s, sent = clock(), 0
    first: list[float] = []  # levels of TTFT, batch by batch
    whole: list[float] = []  # of E2E
    verdict: bool | None = None
    while sent + batch <= len(requests) and (sent == 0 or clock() - began_s < most_s):
        answered = client.run(requests[sent : sent + batch])
        sent += batch
        errors = [exchange.failure or sse.read(exchange.chunks).error for exchange in answered.exchanges]
        if answered.interrupted:
            return Warmth(None, sent, interrupted=True)
        if all(errors):
            return Warmth(None, sent, failure=errors[0])
        levels = _levels(answered.exchanges) if not any(errors) else None
        if levels is None:
            first, whole, verdict = [], [], None
            continue
        first.append(levels[0])
        whole.append(levels[1])
        verdict = both([steady(first), steady(whole)])
        if verdict:
            break
    return Warmth(verdict, sent)


def _levels(exchanges: Sequence[Exchange]) -> tuple[float, float] | None:
    """Levels of TTFT and E2E of one batch."""
    times = [(exchange.sent_s, sse.read(exchange.chunks).token_times_s) for exchange in exchanges]
    first = level([latency.ttft_ms(sent_s, at_s) for sent_s, at_s in times])
    whole = level([latency.e2e_ms(sent_s, at_s) for sent_s, at_s in times])
    return None if first is None or whole is None else (first, whole)
