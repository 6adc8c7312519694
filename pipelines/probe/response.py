"""An HTTP/1.1 response as its bytes arrive: read just far enough to know its status, its body and where it ends.

Half of a general HTTP library's work is spent on what a probe never uses, between an arrival and its timestamp.
"""

from __future__ import annotations

import enum

LONGEST_HEAD = 65536


class _Body(enum.Enum):
    SIZED = enum.auto()
    CHUNKED = enum.auto()
    UNTIL_CLOSED = enum.auto()


class Response:
    """One response. `feed` bytes until `done`; then `reusable` says whether its connection may carry another."""

    __slots__ = ("_body", "_last", "_left", "_rest", "_skip", "done", "reusable", "status")

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.reusable = True
        self._body: _Body | None = None
        self._rest = b""  # an unfinished line: of the head, or a chunk's size
        self._left = 0  # bytes of the body, or of its current chunk, still to come
        self._skip = 0  # of the line end behind a chunk
        self._last = False  # the chunk of size 0 came; what follows are trailers

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they arrived and return those of the body.

        Raises:
            ValueError: this is not HTTP.
        """
        if self._body is None:
            data = self._read_heads(self._rest + data)
            if self._body is None or self.done:
                return b""
        if self._body is _Body.CHUNKED:
            return self._chunked(data)
        if self._body is _Body.UNTIL_CLOSED:
            return data
        payload = data[: self._left]
        self._left -= len(payload)
        self.done = self._left == 0
        return payload

    def closed(self) -> bool:
        """Take note that the connection is gone; return whether the response was whole."""
        self.done = self.done or self._body is _Body.UNTIL_CLOSED
        self.reusable = False
        return self.done

    def _read_heads(self, data: bytes) -> bytes:
        """Read the head, behind any interim responses; return what follows it, or keep all and return nothing."""
        while (end := data.find(b"\r\n\r\n")) >= 0:
            head, data = data[:end], data[end + 4 :]
            self._read_head(head.decode("latin1").split("\r\n"))
            if self.status >= 200:
                self._rest = b""
                return data
            self._body, self.done = None, False
        if len(data) > LONGEST_HEAD:
            raise ValueError("no end of the response's head")
        self._rest = data
        return b""

    def _read_head(self, lines: list[str]) -> None:
        version, status, *_ = [*lines[0].split(" ", 2), ""]
        if not version.startswith("HTTP/1."):
            raise ValueError(f"not an HTTP/1 response: {lines[0][:80]!r}")
        self.status = int(status)
        fields = dict(_field(line) for line in lines[1:])
        self.reusable = version == "HTTP/1.1" and "close" not in fields.get("connection", "")
        if "chunked" in fields.get("transfer-encoding", ""):
            self._body = _Body.CHUNKED
        elif "content-length" in fields or self.status == 204:
            self._body, self._left = _Body.SIZED, int(fields.get("content-length", "0"))
            self.done = self._left == 0
        else:
            self._body = _Body.UNTIL_CLOSED

    def _chunked(self, data: bytes) -> bytes:
        """Strip the framing. A chunk may be spread over reads and a read may hold several."""
        data, self._rest = self._rest + data, b""
        found, at, end = [], 0, len(data)
        while at < end:
            if self._left:
                piece = data[at : at + self._left]
                found.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._skip = 0 if self._left else 2
            elif self._skip:
                step = min(self._skip, end - at)
                at, self._skip = at + step, self._skip - step
            else:
                line_end = data.find(b"\r\n", at)
                if line_end < 0:
                    self._rest = data[at:]
                    break
                self._line(data[at:line_end])
                at = line_end + 2
                if self.done:
                    break
        return found[0] if len(found) == 1 else b"".join(found)

    def _line(self, line: bytes) -> None:
        """A chunk's size, or a trailer; the empty line behind the last ends the response."""
        if self._last:
            self.done = not line
            return
        self._left = int(line.partition(b";")[0], 16)
        self._last = self._left == 0


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.lower().partition(":")
    return name.strip(), value.strip()
