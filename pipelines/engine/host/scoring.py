"""Log-probabilities of whole prompts, computing each shared prefix once within a request and never across requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipelines.engine.host.decoder import PromptScore, Ranked, Token
from pipelines.engine.host.sampling import log_normalizers, rank

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipelines.engine.host.graph import Cache, Graph

    Floats = NDArray[np.float32]

CHUNK = 256


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@dataclass(slots=True)
class _Known:
    """What the last prompt left behind: its scores, and the one row of logits that the next prompt starts from."""

    ids: tuple[int, ...] = ()
    logprobs: list[float | None] = field(default_factory=list)
    ranked: list[Ranked | None] = field(default_factory=list)
    row: int = -1
    logits: Floats | None = None


class Scorer:
    """Scores the prompts of one request in sorted order, so that each prompt shares the most with the one before it."""

    def __init__(self, graph: Graph, cache: Cache, ranked: int, follow: bool) -> None:
        self._graph, self._cache = graph, cache
        self._ranked, self._follow = ranked, follow
        self._known = _Known()

    def run(self, prompts: Sequence[tuple[int, ...]]) -> Iterator[PromptScore]:
        """Yield each prompt's score, carrying the prompt's index in the request."""
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        self._cache.fit(max(len(p) for p in prompts))
        for place, index in enumerate(order):
            ahead = prompts[order[place + 1]] if place + 1 < len(order) else ()
            yield self._one(index, prompts[index], shared(prompts[index], ahead) - 1)

    def _one(self, index: int, ids: tuple[int, ...], keep: int) -> PromptScore:
        """Score one prompt and keep row `keep` of its logits for the next one."""
        known = self._known
        common = shared(known.ids, ids)
        start = max(common - 1, 0)
        logprobs, ranked = known.logprobs[: start + 1], known.ranked[: start + 1]
        now = _Known(ids, logprobs or [None], ranked or [None])
        if known.logits is not None and known.row == keep < common:
            now.row, now.logits = known.row, known.logits
        following = None
        if known.logits is not None and known.row == common - 1:
            following = self._take(now, known.logits, start, keep)
            start = common
        fed = ids if self._follow else ids[:-1]
        for at in range(start, len(fed), CHUNK):
            following = self._take(now, self._feed(fed[at : at + CHUNK], at), at, keep)
        self._known = now
        return PromptScore(index, ids, tuple(now.logprobs), tuple(now.ranked), following if self._follow else None)

    def _feed(self, ids: Sequence[int], at: int) -> Floats:
        import numpy as np

        logits: Floats = self._graph.run(self._cache, 0, np.array([ids], np.int64), [at])[0]
        return logits

    def _take(self, now: _Known, logits: Floats, first: int, keep: int) -> Token | None:
        """Read the scores of positions `first + 1`.. out of rows (S, V); give the token past the prompt's end."""
        import numpy as np

        if now.logits is None and first <= keep < first + len(logits):
            now.row, now.logits = keep, logits[keep - first : keep - first + 1].copy()
        del now.logprobs[first + 1 :], now.ranked[first + 1 :]
        normalizers = log_normalizers(logits)
        targets = now.ids[first + 1 : first + 1 + len(logits)]
        rows = np.arange(len(targets))
        now.logprobs += (logits[rows, list(targets)] - normalizers[rows]).tolist() if targets else []
        ranks = rank(logits, normalizers, self._ranked)
        now.ranked += ranks[: len(targets)]
        if len(targets) == len(logits):
            return None
        best = rank(logits[-1:], normalizers[-1:], 1)[0][0]
        return Token(-1, best[0], best[1], ranks[-1])
