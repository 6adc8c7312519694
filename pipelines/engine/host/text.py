"""From token ids to text, one token at a time: never half a character, never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BROKEN = "\ufffd"
LOOK_BACK = 5


class Detokenizer:
    """Turns a growing sequence into text deltas.

    Each delta is the difference of two decodings of the last few tokens, so that tokenizers which write a space
    between words but not before the first one agree with decoding the whole sequence.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-LOOK_BACK:])
        self._settled = len(self._window)
        self._before = self._decode().rstrip(BROKEN)

    def add(self, token: int) -> str:
        """Take a token; give the text that is now certain, often "" inside a character of several tokens."""
        self._window.append(token)
        now = self._decode()
        if now.endswith(BROKEN) or len(now) <= len(self._before):
            return ""
        return self._settle(now)

    def flush(self) -> str:
        """Give what is left, with U+FFFD for bytes that never became a character."""
        return self._settle(self._decode())

    def _settle(self, now: str) -> str:
        delta = now[len(self._before) :]
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._before = self._decode()
        return delta

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=True)
        return text


class StopCutter:
    """Passes text through up to the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take text; give what may be sent, and whether a stop string was met (nothing after it is ever sent)."""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            out, self._held = self._held[: min(found)], ""
            return out, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out, False

    def rest(self) -> str:
        """Give back what was held; the text has ended without a stop string."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class TokenNames:
    """The text of single tokens, as log-probability fields show them; `token_id:N` where a token alone is no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        anchor = tokenizer.encode("a", add_special_tokens=False).ids
        self._anchor = anchor[-1:]
        self._before = len(self._decode(self._anchor))
        self._names: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._names:
            text = self._decode([*self._anchor, token])[self._before :]
            self._names[token] = f"token_id:{token}" if not text or BROKEN in text else text
        return self._names[token]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text
