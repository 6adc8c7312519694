"""Reading HTTP responses off a connection: the body and its end, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.probe.response import Response

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes, trailers: bytes = b"") -> bytes:
    return CHUNKED + b"".join(b"%X;x=y\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailers + b"\r\n"


def read(pieces: list[bytes]) -> tuple[bytes, list[bool], Response]:
    response = Response()
    body, done = b"", []
    for piece in pieces:
        body += response.feed(piece)
        done.append(response.done)
    return body, done, response


@given(data=st.data())
@pytest.mark.parametrize(
    ("stream", "body"),
    [
        (chunked(b"data: 0\r\n\r\n", b"0\r\n\r\n", b"data: [DONE]\n\n"), b"data: 0\r\n\r\n0\r\n\r\ndata: [DONE]\n\n"),
        (chunked(b"a", trailers=b"X-Took: 3\r\n"), b"a"),
        (HEAD + b"Content-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(b"late"), b"late"),
    ],
    ids=["looks like an end", "trailers", "sized", "interim"],
)
def test_however_it_is_cut(stream: bytes, body: bytes, data: st.DataObject) -> None:
    """The body is the same, and the response is over with the last byte and not before."""
    places = data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=8, unique=True).map(sorted))
    found, done, response = read([stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)])
    assert (body, 200, True) == (found, response.status, response.reusable)
    assert [False] * (len(done) - 1) + [True] == done


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    """An old server closes to say that it is done; the connection cannot be used again."""
    body, done, response = read([b"HTTP/1.0 200 OK\r\n\r\nda", b"ta"])
    assert (b"data", [False, False]) == (body, done)
    assert response.closed()
    assert not response.reusable


@pytest.mark.parametrize("stream", [b"", CHUNKED, CHUNKED + b"5\r\nhel", HEAD + b"Content-Length: 5\r\n\r\nhe"])
def test_a_connection_that_goes_too_early_leaves_it_unfinished(stream: bytes) -> None:
    """A response cut short is not whole."""
    assert not read([stream])[2].closed()


def test_a_server_that_will_close_is_believed() -> None:
    """Connection: close means that no further request goes there."""
    assert not read([HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n"])[2].reusable


@pytest.mark.parametrize(
    "stream", [b"SSH-2.0-OpenSSH_9.6\r\n\r\n", CHUNKED + b"zz\r\n", b"x" * 70_000, b"HTTP/1.1 ok\r\n\r\n"]
)
def test_what_is_not_http_is_refused(stream: bytes) -> None:
    """Garbage is an error, not a body."""
    with pytest.raises(ValueError):
        read([stream])
