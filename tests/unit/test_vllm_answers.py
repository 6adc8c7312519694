"""Answers of the real server (vLLM 0.32.0 with the small real model, on a processor), recorded: read as they came."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from pipelines.engine.endpoint import Capabilities, Endpoint
from pipelines.engine.smoke import BY_RANKS
from pipelines.probe import sse

ANSWERS = Path(__file__).resolve().parents[1] / "golden" / "vllm"
IDS = [504, 3575, 282, 4649, 314, 260, 3575, 282]  # The capital of France is the capital of


def test_a_recorded_score_is_read_by_id() -> None:
    """Two prompts in one answer; the second begins as the first does, and so do its scores."""
    body = (ANSWERS / "ranks.json").read_bytes()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    client = Endpoint("http://engine/v1", "m", Capabilities(prompt_ranks=True), transport=transport)
    long, short = client.score([IDS, IDS[:3]])
    assert (None, -11.769076347351074, -0.30416640639305115) == long.logprobs[:3]
    assert (None, False, True) == long.greedy[:3]
    assert (len(IDS), long.logprobs[:3]) == (len(long.logprobs), short.logprobs)
    (first, _) = client.rank([IDS, IDS[:3]], [2, 2], 2)
    assert (282, 2240) == first.ids[0]
    with pytest.raises(Exception, match="other token ids"):
        client.score([[*IDS[:-1], 5], IDS[:3]])


def test_the_first_check_of_a_bundle_reads_the_same() -> None:
    """What a build asks its server is read by the same rules, the first token left out."""
    answer = json.loads((ANSWERS / "ranks.json").read_text())
    read = BY_RANKS.read(IDS, json.dumps(answer).encode())
    assert (7, -11.769076347351074) == (len(read), read[0])


def test_a_recorded_stream_carries_an_id_for_each_token() -> None:
    """Six tokens were asked for: six by usage, six by ids, the first event brings one."""
    found = sse.read([(0.0, (ANSWERS / "stream.txt").read_bytes())])
    assert (6, None) == (found.tokens, found.error)
    assert 6 == len(found.token_times_s)
