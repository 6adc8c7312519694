"""Text that two sets share, as words in a row: what calibration and eval sets must not have in common. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SHORTEST = 6
"""Fewer words than this are a label or a phrase anyone may use."""


@dataclass(frozen=True, slots=True)
class Leak:
    """An eval text, by position, and the words it shares with a calibration text."""

    eval_text: int
    calibration_text: int
    text: str


def leaks(calibration_texts: Sequence[str], eval_texts: Sequence[str], n: int = 13) -> list[Leak]:
    """Find eval texts that share n words in a row with a calibration text, or, if shorter, are one of them whole.

    Case and punctuation do not count. 13 is the length used for contamination checks since GPT-3 (arXiv 2005.14165).
    """
    shown = [words(text) for text in calibration_texts]
    grams = {gram: k for k, found in enumerate(shown) for gram in _ngrams(found, n)}
    whole = {tuple(found): k for k, found in enumerate(shown) if SHORTEST <= len(found) < n}
    result = []
    for position, text in enumerate(eval_texts):
        found = words(text)
        if len(found) < n:
            at = whole.get(tuple(found))
            if at is not None:
                result.append(Leak(position, at, " ".join(found)))
            continue
        hit = next((gram for gram in _ngrams(found, n) if gram in grams), None)
        if hit is not None:
            result.append(Leak(position, grams[hit], " ".join(hit)))
    return result


def words(text: str) -> list[str]:
    """The words and numbers of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def texts_of(item: object) -> Iterator[str]:
    """Every string in an eval item, at any depth."""
    if isinstance(item, str):
        yield item
    elif isinstance(item, dict):
        for value in item.values():
            yield from texts_of(value)
    elif isinstance(item, list):
        for value in item:
            yield from texts_of(value)


def _ngrams(found: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    return (tuple(found[k : k + n]) for k in range(len(found) - n + 1))
