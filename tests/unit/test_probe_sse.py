"""Reading recorded streams: timestamps, token counts and errors from bytes as real servers send them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.probe import sse


def event(text: str = "", **more: object) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None} | more
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage_event(tokens: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_plain_stream() -> None:
    """Each event has the arrival time of its chunk; the usage event and [DONE] are not tokens."""
    answer = sse.read([(0.5, event("a")), (0.6, event("b")), (0.7, event("c") + usage_event(3) + DONE)])
    assert answer == sse.Answer((0.5, 0.6, 0.7), 3, 1, None, usage=sse.Usage(output_tokens=3))


@given(data=st.data())
def test_cuts_between_chunks_do_not_matter(data: st.DataObject) -> None:
    """However the network cuts the bytes, the same tokens come out, each when its line was complete."""
    stream = b"".join([event("α"), event("b"), event(" c"), usage_event(3), DONE])
    places = data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=12, unique=True).map(sorted))
    pieces = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
    answer = sse.read([(float(k), piece) for k, piece in enumerate(pieces)])
    line_ends = [len(event("α")) - 1, len(event("α") + event("b")) - 1, len(event("α") + event("b") + event(" c")) - 1]
    expected = tuple(float(sum(place < end for place in places)) for end in line_ends)
    assert (answer.tokens, answer.error, answer.token_times_s) == (3, None, expected)


def test_role_only_first_chunk_is_not_the_first_token() -> None:
    """A chat server's role chunk with empty content comes before any token and must not set TTFT."""
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    token = b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'
    assert sse.read([(0.0, role), (0.9, token), (1.0, token + DONE)]).token_times_s == (0.9, 1.0)


def test_reasoning_counts_as_output() -> None:
    """A model that thinks first is answering from its first reasoning token on."""
    thinking = b'data: {"choices":[{"delta":{"reasoning_content":"Hm"}}]}\n\n'
    assert sse.read([(0.2, thinking), (0.3, thinking + DONE)]).token_times_s == (0.2, 0.3)


def test_several_tokens_an_event_by_usage() -> None:
    """16 tokens in 4 equal events: the first brought 4."""
    chunks = [(0.1 * k, event("abcd")) for k in range(4)]
    answer = sse.read([*chunks, (0.5, usage_event(16) + DONE)])
    assert (answer.tokens, answer.first_tokens) == (16, 4)


@pytest.mark.parametrize(
    ("events", "tokens", "first"),
    [
        (["aaaa"] * 4 + ["aa"], 18, 4),  # the last event is short: 18 // 5 would say 3
        (["a"] * 16, 16, 1),
        (["aaaaaa", "a", "a"], 3, 1),  # one token may have more text than others
        (["a"] * 15, 16, 1),  # the end-of-text token has no text of its own
        (["aaaaaaaa", "a"], 3, 2),  # every later event brought at least one
    ],
)
def test_what_the_first_event_brought_by_its_share_of_the_text(events: list[str], tokens: int, first: int) -> None:
    """Where only the total is known, several tokens an event are shared out by the text; one an event stays one."""
    chunks = [(0.1 * k, event(text)) for k, text in enumerate(events)]
    assert first == sse.read([*chunks, (9.0, usage_event(tokens) + DONE)]).first_tokens


def test_several_tokens_an_event_by_ids() -> None:
    """Token ids tell exactly how many the first event brought, however uneven the events are."""
    answer = sse.read([(0.1, event("a", token_ids=[7])), (0.2, event("bcd", token_ids=[8, 9, 10]) + DONE)])
    assert (answer.tokens, answer.first_tokens) == (4, 1)


def test_token_without_text_counts_by_its_id() -> None:
    """Half a character has no text yet, but its id says that a token arrived."""
    answer = sse.read([(0.1, event("", token_ids=[7])), (0.2, event("é", token_ids=[8]) + DONE)])
    assert (answer.token_times_s, answer.tokens) == ((0.1, 0.2), 2)


def test_continuous_usage_tells_the_first_event() -> None:
    """Where every event carries the count so far, the first one's count is what it brought."""

    def counted(tokens: int) -> bytes:
        told = {"choices": [{"text": "xy"}], "usage": {"completion_tokens": tokens}}
        return b"data: " + json.dumps(told).encode() + b"\n\n"

    answer = sse.read([(0.1, counted(3)), (0.2, counted(4)), (0.3, counted(6) + DONE)])
    assert (answer.tokens, answer.first_tokens) == (6, 3)


def test_without_usage_each_event_is_a_token() -> None:
    """A server that does not count is counted by its events."""
    assert sse.read([(0.1, event("a")), (0.2, event("b", finish_reason="length"))]).tokens == 2


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (event("a"), "broken_stream"),
        (b"", "broken_stream"),
        (event("a") + b"data: {not json\n\n", "broken_stream"),
        (event("a") + b'data: {"error": {"message": "out of memory"}}\n\n' + DONE, "broken_stream"),
        (event("a") + b"data: 7\n\n" + DONE, "broken_stream"),
        (DONE, "empty"),
        (event("") + DONE, "empty"),
        (event("a") + DONE, None),
        (event("a", finish_reason="stop"), None),
        (event("a") + usage_event(1), None),
        (b": comment\n\n" + event("a").replace(b"\n", b"\r\n") + b"data: [DONE]", None),
    ],
)
def test_error_classes(stream: bytes, error: str | None) -> None:
    """A stream cut short or garbled is broken, one that ends well without a token is empty."""
    assert sse.read([(0.1, stream)]).error == error
