"""From recorded exchanges to rows, with clocks read from a script; and against vLLM's own benchmark formulas."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest

from pipelines.probe import profiles, rows, sse, tally
from pipelines.probe.arrivals import Arrival
from pipelines.probe.client import Exchange
from pipelines.probe.prompts import Prompt

OPEN = profiles.Open(name="o", mode="open", rate=4.0, requests=1)
CLOSED = profiles.Closed(name="c", mode="closed", concurrency=3, requests=1)
SPIKE = profiles.Spike(name="s", mode="spike", base=2, peak=9, requests=9)
PROMPT = Prompt("p", tuple(range(200)))


def event(text: str, **more: object) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None} | more
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage(**counts: object) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def exchange(chunks: Sequence[sse.Chunk], failure: str | None = None) -> Exchange:
    """Due at 1.0 s, sent 20 ms late."""
    return Exchange(1.0, 1.02, 9.0, tuple(chunks), failure)


def row(profile: profiles.LoadProfile, one: Exchange, phase: int = 0) -> rows.RequestRow:
    arrival = Arrival(request=7, prompt=0, due_s=1.0, phase=phase, max_tokens=4)
    return rows.request_row(rows.Place("engine", 2, 5, 1), profile, arrival, PROMPT, one)


def vllm(start_s: float, event_times_s: Sequence[float], output_tokens: int) -> tuple[float, float, list[float], float]:
    """TTFT, TPOT, ITLs and E2E in ms as `vllm bench serve` has them.

    TTFT = first event - start; ITL = each later event - the one before; latency = last event - start;
    TPOT = (latency - TTFT) / (output tokens - 1).
    """
    ttft = event_times_s[0] - start_s
    gaps = [b - a for a, b in itertools.pairwise(event_times_s)]
    latency = event_times_s[-1] - start_s
    return ttft * 1e3, (latency - ttft) / (output_tokens - 1) * 1e3, [gap * 1e3 for gap in gaps], latency * 1e3


@pytest.mark.parametrize("times", [(1.2, 1.3, 1.45, 1.5), (1.07, 1.08, 1.08, 2.9)])
@pytest.mark.parametrize("profile", [CLOSED, OPEN])
def test_figures_are_vllms(profile: profiles.LoadProfile, times: tuple[float, ...]) -> None:
    """A token an event: TTFT, TPOT, ITL and E2E are those of vLLM's benchmark; an open loop starts when it was due."""
    found = row(profile, exchange([*((at, event(" w")) for at in times), (3.0, usage(completion_tokens=4) + DONE)]))
    ttft, tpot, gaps, e2e = vllm(1.0 if profile is OPEN else 1.02, times, 4)
    assert (found.ttft_ms, found.tpot_ms, found.e2e_ms) == pytest.approx((ttft, tpot, e2e))
    assert list(found.itl_ms) == pytest.approx(gaps)


def test_several_tokens_an_event_are_where_vllm_is_off() -> None:
    """16 tokens in 4 events 40 ms apart are 10 ms a token, where vLLM's formula gives 8."""
    times = (1.05, 1.09, 1.13, 1.17)
    found = row(OPEN, exchange([*((at, event(" w" * 4)) for at in times), (1.2, usage(completion_tokens=16) + DONE)]))
    assert found.tpot_ms == pytest.approx(10.0)
    assert vllm(1.0, times, 16)[1] == pytest.approx(8.0)


def test_role_first_and_usage_late() -> None:
    """An event without a token does not set TTFT, and usage half a second after the last token does not set E2E."""
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    token = b'data: {"choices":[{"delta":{"content":"w"}}]}\n\n'
    chunks = [(1.01, role), (1.3, token), (1.4, token), (1.9, usage(completion_tokens=2)), (2.4, DONE)]
    found = row(OPEN, exchange(chunks))
    assert (found.ttft_ms, found.e2e_ms, found.tpot_ms) == pytest.approx((300, 400, 100))


def test_what_a_server_counts_stands_beside_what_was_counted_here() -> None:
    """Usage, ids and the finish reason have columns of their own; the bucket is that of all that was sent."""
    told = usage(prompt_tokens=201, completion_tokens=5, prompt_tokens_details={"cached_tokens": 64})
    chunks = [
        (1.1, event("a", token_ids=[3])),
        (1.2, event("b", token_ids=[4, 5], finish_reason="length") + told + DONE),
    ]
    found = row(OPEN, exchange(chunks))
    assert (201, 5, 3, 64) == (
        found.usage_input_tokens, found.usage_output_tokens, found.counted_tokens, found.cached_tokens,
    )  # fmt: skip
    assert (201, "128-1024", 4, "length", 5) == (
        found.input_tokens, found.bucket, found.asked_tokens, found.finish_reason, found.output_tokens,
    )  # fmt: skip


def test_a_server_that_counts_nothing() -> None:
    """Without usage and ids the columns are empty, and each event is a token."""
    found = row(OPEN, exchange([(1.1, event("a")), (1.2, event("b") + DONE)]))
    assert (None, None, None, None, 2) == (
        found.usage_input_tokens, found.usage_output_tokens, found.counted_tokens, found.cached_tokens,
        found.output_tokens,
    )  # fmt: skip


def test_phases_of_a_spike_have_their_own_concurrency() -> None:
    """The peak is the second phase; a closed loop starts when a request was sent."""
    found = [row(SPIKE, exchange([(1.1, event("a") + DONE)]), phase) for phase in (0, 1, 2)]
    assert [2, 9, 2] == [one.concurrency for one in found]
    assert [0, 1, 2] == [one.phase for one in found]
    assert found[1].ttft_ms == pytest.approx(80)


@pytest.mark.parametrize("failure", ["timeout", "refused", "4xx", "5xx", "broken_stream", "interrupted"])
def test_a_failure_has_no_latency_even_with_tokens(failure: str) -> None:
    """What came before a failure is counted, but its times are not latencies."""
    found = row(OPEN, exchange([(1.1, event("a"))], failure))
    assert (False, failure, None, None, (), 1) == (
        found.ok, found.error, found.ttft_ms, found.e2e_ms, found.itl_ms, found.output_tokens,
    )  # fmt: skip


def test_tally_counts_mismatches_and_lag() -> None:
    """One answer counted alike, one counted twice, one not counted; each was sent 20 ms after it was due."""
    ids = event("a", token_ids=[3, 4])
    found = [
        row(OPEN, exchange([(1.1, ids + usage(prompt_tokens=201, completion_tokens=2) + DONE)])),
        row(OPEN, exchange([(1.1, ids + usage(prompt_tokens=150, completion_tokens=4) + DONE)])),
        row(OPEN, exchange([(1.1, event("a") + DONE)])),
        row(OPEN, exchange([], "timeout")),
    ]
    facts = tally.facts(found, [tally.Effort(requests=4, cpu_s=0.002, wall_s=0.5, real_time=True)])
    assert (1, 1, 1, 1) == (
        facts["input_count_mismatches"], facts["output_count_mismatches"], facts["uncounted_by_server"],
        facts["uncounted_by_ids"],
    )  # fmt: skip
    assert ("timeout 1", True) == (facts["errors"], facts["client_real_time"])
    assert facts["schedule_lag_max_ms"] == pytest.approx(20)
    assert facts["client_cpu_ms_per_request"] == pytest.approx(0.5)
    assert facts["client_busy_percent"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("lags", "cpu_s", "said"),
    [
        ([0.1] * 1000, 0.2, ""),
        ([0.1] * 991 + [50.0] * 9, 0.2, ""),
        ([0.1] * 989 + [50.0] * 11, 0.2, "the client sent 11 of 1000 requests more than 10 ms late"),
        ([0.1] * 9 + [50.0], 0.2, ""),
        ([], 0.9, "the client was busy 90% of the time; one process cannot take this load"),
    ],
)
def test_a_client_that_is_at_fault_says_so(lags: list[float], cpu_s: float, said: str) -> None:
    """More than one request in a hundred sent late, or no CPU to spare, spoils a load; a single one does not."""
    assert said == tally.fault(lags, tally.Effort(requests=10, cpu_s=cpu_s, wall_s=1.0, real_time=True))
