"""The seam: what the server asks of a model. One thread calls a decoder; nothing here is thread-safe.

A decoder yields token ids. End of text, stop strings and lengths are judged once, by the desk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipelines.errors import QuantgateError

Ranked = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch those filters off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One sequence to continue. `key` is the caller's; `logprobs`: how many ranked alternatives a token carries."""

    key: int
    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token of the turn `key`; `logprob` and `ranked` only where the turn asked for them."""

    key: int
    id: int
    logprob: float | None = None
    ranked: Ranked = ()


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Log-probabilities of one prompt. Entries before the wanted start are None, and so is the first: nothing comes
    before it.

    `ranked[i]` holds the most probable tokens at position i, best first. `next` is the greedy token that would follow.
    """

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    ranked: tuple[Ranked | None, ...]
    next: Token | None


class Decoder(Protocol):
    """A model that can continue several sequences at a time and score prompts."""

    def add(self, turn: Turn) -> None:
        """Take a sequence in; its first token comes from a later `step`."""

    def drop(self, key: int) -> None:
        """Forget a sequence, finished or not; unknown keys are ignored."""

    def step(self) -> list[Token]:
        """Advance everything that runs by a bounded amount of work; at most one token per sequence.

        Raises:
            DecodeFailed: the model could not run; the named turns are lost.
        """

    def score(
        self, prompts: Sequence[tuple[int, ...]], starts: Sequence[int], ranked: int, follow: bool
    ) -> Iterator[PromptScore]:
        """Score each prompt from its start on, in whatever order is cheapest; work is done as the iterator is advanced.

        Raises:
            DecodeFailed: the model could not run.
        """


class DecodeFailed(QuantgateError):
    """The model failed on these turns (none for a scoring request)."""

    def __init__(self, keys: Sequence[int], reason: str) -> None:
        self.keys = tuple(keys)
        super().__init__(reason)
