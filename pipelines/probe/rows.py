"""Rows of requests: what was recorded of each, in figures. Engines are named by their key."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.probe import latency, profiles, rounds, sse
from pipelines.probe.arrivals import Arrival
from pipelines.probe.client import Exchange
from pipelines.probe.profiles import LoadProfile
from pipelines.probe.prompts import Prompt, bucket

NOT_STARTED = "not_started"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the interleaving a load ran.

    round: repetition of the whole comparison. block: number of the server start, over the whole probe.
    position: the engine's place in its round, 0 for the one measured first.
    """

    engine: str
    round: int
    block: int
    position: int


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request. Seconds count from the start of its load; scheduled_s is when it was due (closed: its slot free).

    A request that failed has no latencies: its time is not one. error: timeout, refused, 4xx, 5xx, broken_stream,
    empty, not_started or interrupted. phase: number of the step, of the part of a spike, or of the rate in a search's
    grid. bucket: of input_tokens, which is what was sent. output_tokens: by the server's usage, else by ids, else by
    events. usage_*, cached_tokens: what the server told of them; counted_tokens: output tokens by their ids in the
    stream. None where it did not tell.
    """

    engine: str
    profile: str
    mode: str
    concurrency: int | None
    rate: float | None
    round: int
    block: int
    position: int
    request: int
    prompt_id: str
    input_tokens: int
    output_tokens: int
    scheduled_s: float
    sent_s: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    itl_ms: tuple[float, ...]
    ok: bool
    error: str | None
    phase: int
    bucket: str
    asked_tokens: int
    usage_input_tokens: int | None
    usage_output_tokens: int | None
    counted_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None


def request_row(place: Place, profile: LoadProfile, arrival: Arrival, prompt: Prompt, exchange: Exchange) -> RequestRow:
    """Turn what was recorded of one request into its figures; a failed request has none."""
    answer = sse.read(exchange.chunks)
    error = exchange.failure or answer.error
    start_s = exchange.scheduled_s if profiles.is_open(profile) else exchange.sent_s
    input_tokens = rounds.input_tokens(profile, len(prompt.ids))
    times = answer.token_times_s if error is None else ()
    ttft, e2e = latency.ttft_ms(start_s, times), latency.e2e_ms(start_s, times)
    tpot = None
    if ttft is not None and e2e is not None:
        tpot = latency.tpot_ms(e2e, ttft, answer.tokens, answer.first_tokens)
    return RequestRow(
        engine=place.engine,
        profile=profile.name,
        mode=profile.mode,
        concurrency=profiles.concurrency_of(profile, arrival.phase),
        rate=profiles.rate_of(profile, arrival.phase),
        round=place.round,
        block=place.block,
        position=place.position,
        request=arrival.request,
        prompt_id=prompt.id,
        input_tokens=input_tokens,
        output_tokens=answer.tokens,
        scheduled_s=exchange.scheduled_s,
        sent_s=exchange.sent_s,
        ttft_ms=ttft,
        tpot_ms=tpot,
        e2e_ms=e2e,
        itl_ms=latency.itl_ms(times),
        ok=error is None,
        error=error,
        phase=arrival.phase,
        bucket=bucket(input_tokens),
        asked_tokens=arrival.max_tokens,
        usage_input_tokens=answer.usage.input_tokens,
        usage_output_tokens=answer.usage.output_tokens,
        counted_tokens=answer.counted,
        cached_tokens=answer.usage.cached_tokens,
        finish_reason=answer.finish_reason,
    )
