"""Continuous batching over one graph: sequences join and leave between steps, prompts enter in chunks.

No prefix is ever reused between turns: a probe of this server measures prefill, not a cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.engine.host.decoder import DecodeFailed, PromptScore, Token, Turn
from pipelines.engine.host.sampling import choose, log_normalizers, rank
from pipelines.engine.host.scoring import CHUNK, Scorer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipelines.engine.host.graph import Graph

    Floats = NDArray[np.float32]


@dataclass(slots=True)
class _Row:
    """A sequence in the cache: `held` tokens are in it; `last` is the token to feed next, once the prompt is in."""

    turn: Turn
    random: np.random.Generator
    held: int = 0
    last: int = -1

    @property
    def room(self) -> int:
        """Tokens that the cache must hold in the end; the last token is never fed."""
        return len(self.turn.ids) + self.turn.max_tokens


class BatchDecoder:
    """A `Decoder` whose rows 0..n-1 are the sequences that decode together; the row after them takes in a prompt."""

    def __init__(self, graph: Graph, max_batch: int) -> None:
        self._graph = graph
        self._cache = graph.new_cache(max_batch)
        self._score_cache = graph.new_cache(1)
        self._pending: deque[Turn] = deque()
        self._ready: list[_Row] = []
        self._entering: _Row | None = None

    def warm_up(self) -> None:
        """Run one token through the graph, so that one that cannot run says so at start."""
        for _ in self.score([(0,)], [0], ranked=1, follow=True):
            pass

    def add(self, turn: Turn) -> None:
        """Take a sequence in; its first token comes from a later `step`."""
        self._pending.append(turn)

    def drop(self, key: int) -> None:
        """Forget a sequence; the last of the batch takes its row, so that rows stay together."""
        self._pending = deque(t for t in self._pending if t.key != key)
        if self._entering is not None and self._entering.turn.key == key:
            self._entering = None
        gone = next((i for i, row in enumerate(self._ready) if row.turn.key == key), None)
        if gone is None:
            return
        last = len(self._ready) - 1
        if gone < last:
            self._cache.move(last, gone, self._ready[last].held)
            self._ready[gone] = self._ready[last]
        self._ready.pop()
        if self._entering is not None:
            self._cache.move(last + 1, last, self._entering.held)

    def step(self) -> list[Token]:
        """Give every sequence in the batch its next token, then take in one chunk of one prompt."""
        tokens = self._decode() if self._ready else []
        if self._entering is None and self._pending:
            self._enter(self._pending.popleft())
        if self._entering is not None:
            tokens += self._prefill(self._entering)
        return tokens

    def score(
        self, prompts: Sequence[tuple[int, ...]], starts: Sequence[int], ranked: int, follow: bool
    ) -> Iterator[PromptScore]:
        """Score prompts; see `Scorer`."""
        return Scorer(self._graph, self._score_cache, ranked, follow).run(prompts, starts)

    def _enter(self, turn: Turn) -> None:
        import numpy as np

        row = _Row(turn, np.random.default_rng(turn.sampling.seed))
        self._cache.fit(max(r.room for r in [*self._ready, row]), [r.held for r in self._ready])
        self._entering = row

    def _prefill(self, row: _Row) -> list[Token]:
        import numpy as np

        chunk = row.turn.ids[row.held : row.held + CHUNK]
        logits = self._run([row], np.array([chunk], np.int64), at=len(self._ready))
        if row.held < len(row.turn.ids):
            return []
        self._entering = None
        self._ready.append(row)
        return [_next(row, logits[0, -1])]

    def _decode(self) -> list[Token]:
        import numpy as np

        rows = list(self._ready)
        logits = self._run(rows, np.array([[row.last] for row in rows], np.int64), at=0)
        return [_next(row, logits[i, -1]) for i, row in enumerate(rows)]

    def _run(self, rows: list[_Row], ids: NDArray[np.int64], at: int) -> Floats:
        try:
            logits = self._graph.run(self._cache, at, ids, [row.held for row in rows])
        except DecodeFailed as error:
            keys = [row.turn.key for row in rows]
            for key in keys:
                self.drop(key)
            raise DecodeFailed(keys, str(error)) from error
        for row in rows:
            row.held += ids.shape[1]
        return logits


def _next(row: _Row, logits: Floats) -> Token:
    """Choose a row's next token from its logits (V,)."""
    row.last = choose(logits, row.turn.sampling, row.random)
    if row.turn.logprobs is None:
        return Token(row.turn.key, row.last)
    normalizers = log_normalizers(logits[None])
    ranked = rank(logits[None], normalizers, row.turn.logprobs)[0]
    return Token(row.turn.key, row.last, float(logits[row.last] - normalizers[0]), ranked)
