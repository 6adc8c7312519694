"""Log-probabilities of a prompt as servers of vLLM's kind give them: at each place by token id, never by text.

Two tokens may share a text, so an echo that names tokens is ambiguous; here nothing is. A place holds the prompt's own
token and the best ones. What weights in bfloat16 make equal are ties: a token was the most probable if none has more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REQUEST = {"max_tokens": 1, "temperature": 0, "return_token_ids": True}
"""One token is generated and thrown away: no server of this kind scores without."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a server predicted at one place of a prompt; alternatives by id, best first."""

    logprob: float
    greedy: bool
    ids: tuple[int, ...]
    values: tuple[float, ...]


def read(ids: Sequence[int], start: int, top: int, choice: Mapping[str, Any]) -> list[Place]:
    """Read the places of a prompt's ids from `start` on, with up to `top` alternatives each.

    Raises:
        ValueError: the answer is about other ids, or leaves out what was asked.
    """
    came, places = choice.get("prompt_token_ids"), choice.get("prompt_logprobs")
    if not isinstance(came, list) or not isinstance(places, list):
        raise ValueError("no prompt_token_ids with prompt_logprobs came")
    if list(ids) != came:
        raise ValueError(f"it scored other token ids than the {len(ids)} that were sent")
    if len(places) != len(ids):
        raise ValueError(f"{len(ids)} prompt tokens were sent, prompt_logprobs came for {len(places)}")
    return [_place(at, ids[at], top, places[at]) for at in range(start, len(ids))]


def _place(at: int, token: int, top: int, told: object) -> Place:
    if not isinstance(told, Mapping) or not told:
        raise ValueError(f"prompt_logprobs are missing at token {at}")
    try:
        found = {int(name): float(one["logprob"]) for name, one in told.items()}
        own = found[token]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"prompt_logprobs at token {at} do not have the token itself by its id") from None
    if not math.isfinite(own):
        raise ValueError(f"the log-probability of token {at} is {own}")
    best = sorted(found.items(), key=lambda one: (-one[1], one[0]))[:top]
    return Place(own, own >= best[0][1], tuple(i for i, _ in best), tuple(value for _, value in best))
