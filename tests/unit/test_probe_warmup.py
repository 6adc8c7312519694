"""Warm-up against a scripted client: when it goes on, when it ends, and what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pipelines.probe.client import Exchange, Request, Sent
from pipelines.probe.steady import LEAST
from pipelines.probe.warmup import Warmth, warm_up

BATCH = 2
REQUESTS = [Request(b"%d" % k) for k in range(20)]


def answered(seconds: float) -> Exchange:
    """A token after half the time and one at its end."""
    words = [b"data: " + json.dumps({"choices": [{"text": " w", "finish_reason": None}]}).encode() + b"\n\n"] * 2
    chunks = ((seconds / 2, words[0]), (seconds, words[1] + b"data: [DONE]\n\n"))
    return Exchange(0.0, 0.0, seconds, chunks, None)


def failed(error: str) -> Exchange:
    return Exchange(0.0, 0.0, 0.1, (), error)


class Scripted:
    """Answers one batch after another as told, and keeps what it was sent; its clock is the sum of their times."""

    def __init__(self, script: Sequence[Sequence[Exchange]], interrupted_at: int = -1) -> None:
        self._script, self._interrupted_at = iter(script), interrupted_at
        self.sent: list[list[bytes]] = []
        self.now_s = 0.0

    def run(self, requests: Sequence[Request]) -> Sent:
        self.sent.append([request.body for request in requests])
        exchanges = tuple(next(self._script))
        self.now_s += max(exchange.ended_s for exchange in exchanges)
        return Sent(0.0, exchanges, 0.0, False, len(self.sent) - 1 == self._interrupted_at)


def warmed(script: Sequence[Sequence[Exchange]], *, most_s: float = 1e9, **changes: Any) -> tuple[Warmth, Scripted]:
    client = Scripted(script, **changes)
    warmth = warm_up(client, REQUESTS, batch=BATCH, most_s=most_s, clock=lambda: client.now_s)  # type: ignore[arg-type]
    return warmth, client


def batches(*seconds: float) -> Iterator[list[Exchange]]:
    """One batch for each time, its requests 1% apart."""
    yield from ([answered(each), answered(each * 1.01)] for each in seconds)


def test_it_ends_with_the_first_batch_that_shows_the_server_steady() -> None:
    """An even server takes as few batches as the test can do with, each of its own requests, in order."""
    warmth, client = warmed(list(batches(*[1.0, 1.001, 0.999, 1.0, 1.001, 1.0] * 2)))
    assert Warmth(True, BATCH * (LEAST + 1)) == warmth
    assert [request.body for request in REQUESTS[: warmth.requests]] == [body for one in client.sent for body in one]


def test_a_server_that_drifts_is_sent_all_there_is_and_said_to_drift() -> None:
    """Ten per cent faster with every batch: the bound ends it, and the verdict stands."""
    warmth, _ = warmed(list(batches(*(5.0 * 0.9**k for k in range(10)))))
    assert Warmth(False, len(REQUESTS)) == warmth


def test_time_is_a_bound_too() -> None:
    """No batch begins after it; the first always does."""
    warmth, client = warmed(list(batches(*[5.0, 4.0, 3.0, 2.0])), most_s=8.0)
    assert (None, 2 * BATCH, 2) == (warmth.steady, warmth.requests, len(client.sent))
    assert BATCH == warmed(list(batches(9.0)), most_s=1e-9)[0].requests


@pytest.mark.parametrize("error", ["timeout", "5xx"])
def test_a_batch_with_a_failure_begins_the_levels_anew(error: str) -> None:
    """Batches before and after it do not count together."""
    even = list(batches(*[1.0] * LEAST))
    warmth, _ = warmed([*even, [answered(1.0), failed(error)], *batches(1.0, 1.001, 0.999, 1.0, 1.001)])
    assert Warmth(True, BATCH * (LEAST + 1 + LEAST + 1)) == warmth


def test_a_server_that_answers_nothing_is_left_alone() -> None:
    """One whole batch without an answer, and its error class is the outcome."""
    warmth, client = warmed([*batches(1.0), [failed("refused"), failed("broken_stream")]])
    assert Warmth(None, 2 * BATCH, "refused") == warmth
    assert 2 == len(client.sent)


def test_ctrl_c_ends_it() -> None:
    """No further batch is sent."""
    warmth, client = warmed(list(batches(1.0, 1.0, 1.0)), interrupted_at=1)
    assert (True, 2) == (warmth.interrupted, len(client.sent))
