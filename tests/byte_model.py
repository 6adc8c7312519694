"""A tokenizer whose ids are bytes, and a decoder that says what it is told to: the host's tests run without a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipelines.engine.host.decoder import DecodeFailed, PromptScore, Token, Turn

EOS = 0


def byte_tokenizer() -> Tokenizer:
    """Ids are UTF-8 bytes in the order of their byte-level letters; id 0 is the end of text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": EOS, **{letter: i + 1 for i, letter in enumerate(letters)}}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


class Scripted:
    """Answers every turn with `reply` over and over; waits at `gate` before each step; remembers what it was asked."""

    def __init__(self, tokenizer: Tokenizer, reply: str = "ok", ends: bool = False) -> None:
        self.ids = [*tokenizer.encode(reply).ids, *([EOS] if ends else [])]
        self.gate = threading.Event()
        self.gate.set()
        self.turns: list[Turn] = []
        self.dropped: list[int] = []
        self.fails: DecodeFailed | None = None
        self.breaks = False
        self._running: dict[int, int] = {}

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._running[turn.key] = 0

    def drop(self, key: int) -> None:
        self.dropped.append(key)
        self._running.pop(key, None)

    def step(self) -> list[Token]:
        self.gate.wait(10)
        if self.breaks:
            raise ZeroDivisionError("a fault of the program")
        if self.fails is not None:
            failed, self.fails = DecodeFailed(list(self._running), str(self.fails)), None
            self._running.clear()
            raise failed
        tokens = []
        for key, at in self._running.items():
            self._running[key] = at + 1
            tokens.append(Token(key, self.ids[at % len(self.ids)], -0.5, ((self.ids[at % len(self.ids)], -0.5),)))
        return tokens

    def score(
        self, prompts: Sequence[tuple[int, ...]], starts: Sequence[int], ranked: int, follow: bool
    ) -> Iterator[PromptScore]:
        """Every token has log-probability -id; the most probable token is always id 7 at -0.25. Last prompt first."""
        for index in reversed(range(len(prompts))):
            ids = prompts[index]
            top = ((7, -0.25),)
            given = Token(-1, 7, -0.25, top) if follow else None
            before = (None,) * min(max(starts[index], 1), len(ids))
            logprobs = (*before, *(-0.25 if i == 7 else -float(i) for i in ids[len(before) :]))
            yield PromptScore(index, ids, logprobs, (*before, *([top] * (len(ids) - len(before)))), given)
