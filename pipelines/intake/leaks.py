"""Text that two sets share, word for word or nearly: what calibration and eval sets must not have in common. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasketch import MinHash

SHORTEST = 6
"""Fewer words than this are a label or a phrase anyone may use."""
PERMUTATIONS = 128
GENEROUS = 0.15  # by so much less alike pairs are proposed, so that few are missed that count
WORDS_SHOWN = 13


@dataclass(frozen=True, slots=True)
class Leak:
    """An eval text, by position, and the words it shares with a calibration text; of a near-duplicate, its own."""

    eval_text: int
    calibration_text: int
    text: str
    near: bool = False


def leaks(calibration_texts: Sequence[str], eval_texts: Sequence[str], n: int = 13) -> list[Leak]:
    """Find eval texts that share n words in a row with a calibration text, or, if shorter, are one of them whole.

    One leak for each pair of texts. Case and punctuation do not count. 13 is the length used for contamination checks
    since GPT-3 (arXiv 2005.14165).
    """
    shown = [words(text) for text in calibration_texts]
    grams: dict[tuple[str, ...], set[int]] = {}
    whole: dict[tuple[str, ...], set[int]] = {}
    for k, found in enumerate(shown):
        for gram in _ngrams(found, n):
            grams.setdefault(gram, set()).add(k)
        if SHORTEST <= len(found) < n:
            whole.setdefault(tuple(found), set()).add(k)
    result = []
    for position, text in enumerate(eval_texts):
        found = words(text)
        pieces = [tuple(found)] if len(found) < n else list(_ngrams(found, n))
        hits: dict[int, tuple[str, ...]] = {}
        for piece in pieces:
            for k in (whole if len(found) < n else grams).get(piece, ()):
                hits.setdefault(k, piece)
        result += [Leak(position, k, " ".join(hits[k])) for k in sorted(hits)]
    return result


def near_duplicates(calibration_texts: Sequence[str], eval_texts: Sequence[str], similarity: float = 0.8) -> list[Leak]:
    """Find eval texts whose runs of three words are, to that share (Jaccard), those of a calibration text.

    MinHash proposes pairs (Broder 1997); each is then counted exactly, so that none is found by chance.
    """
    if not calibration_texts or not eval_texts:
        return []  # the library takes seconds to import
    from datasketch import MinHash, MinHashLSH

    shown = [_shingles(text) for text in calibration_texts]
    asked = [_shingles(text) for text in eval_texts]
    index = MinHashLSH(threshold=similarity - GENEROUS, num_perm=PERMUTATIONS)
    prints = dict[frozenset[str], MinHash]()
    for number, shingles in enumerate(shown):
        if shingles:
            index.insert(number, _print(shingles, prints))
    result = []
    for position, shingles in enumerate(asked):
        near = sorted(index.query(_print(shingles, prints))) if shingles else ()
        close = [k for k in near if _jaccard(shown[k], shingles) >= similarity]
        result += [Leak(position, k, " ".join(words(eval_texts[position])[:WORDS_SHOWN]), near=True) for k in close]
    return result


def _shingles(text: str) -> frozenset[str]:
    """Runs of three words; of a text too short to be anybody's own, none."""
    found = words(text)
    return frozenset(" ".join(gram) for gram in _ngrams(found, 3)) if len(found) >= 2 * SHORTEST else frozenset()


def _print(shingles: frozenset[str], known: dict[frozenset[str], MinHash]) -> MinHash:
    """The MinHash of a text, made once for texts that are asked again and again."""
    from datasketch import MinHash

    if shingles not in known:
        made = MinHash(num_perm=PERMUTATIONS, seed=1)
        made.update_batch([shingle.encode() for shingle in sorted(shingles)])
        known[shingles] = made
    return known[shingles]


def _jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)


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
