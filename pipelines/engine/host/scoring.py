"""Log-probabilities of whole prompts. The prompts of one request are a tree of tokens, and each of its nodes is
computed once; nothing is kept between requests.

Nodes are fed depth first, many to a call, whichever branches they are on: what a node may attend to is told by a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from pipelines.engine.host.decoder import PromptScore, Ranked, Token
from pipelines.engine.host.graph import UNSEEN, Branches
from pipelines.engine.host.sampling import log_normalizers, rank

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipelines.engine.host.graph import Cache, Graph

    Floats = NDArray[np.float32]

CHUNK = 256
ROOT = -1


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@dataclass(slots=True)
class _Tree:
    """Prompts as a tree; a node is a token in its context. Nodes are numbered depth first, so parents come first.

    `asked[n]` are the children of node n whose log-probability is wanted; `feeds[n]`: n must be fed;
    `ends[n]`: the token after n is wanted.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    feeds: list[bool] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    asked: dict[int, set[int]] = field(default_factory=dict)

    def grow(self, ids: Sequence[int], before: Sequence[int], common: int) -> list[int]:
        """Add a prompt that shares `common` tokens with the last one, whose nodes were `before`; give its nodes."""
        path = list(before[:common])
        for depth in range(common, len(ids)):
            parent = path[-1] if path else ROOT
            if parent != ROOT:
                self.feeds[parent] = True
            path.append(len(self.tokens))
            self.tokens.append(ids[depth])
            self.parents.append(parent)
            self.depths.append(depth)
            self.feeds.append(False)
            self.ends.append(False)
        return path

    def ancestors(self, node: int) -> list[int]:
        """From the first token of the prompt down to the node's parent."""
        found = []
        while (node := self.parents[node]) != ROOT:
            found.append(node)
        return found[::-1]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt in the tree. `start` is the first position whose log-probability is wanted."""

    index: int
    ids: tuple[int, ...]
    nodes: list[int]
    start: int


class Scorer:
    """Scores the prompts of one request; each is given once the last node it needs has been fed."""

    def __init__(self, graph: Graph, cache: Cache, ranked: int, follow: bool) -> None:
        self._graph, self._cache = graph, cache
        self._ranked, self._follow = ranked, follow
        self._tree = _Tree()
        self._logprobs: dict[int, float] = {}
        self._tops: dict[int, Ranked] = {}
        self._next: dict[int, Token] = {}

    def run(self, prompts: Sequence[tuple[int, ...]], starts: Sequence[int]) -> Iterator[PromptScore]:
        """Yield each prompt's score, carrying the prompt's index in the request."""
        waiting = self._plant(prompts, starts)[::-1]
        calls = list(self._calls())
        self._cache.fit(max((self._tree.depths[c[0]] + len(c) for c in calls), default=1))
        yield from self._finished(waiting, ROOT)
        held: list[int] = []
        for call in calls:
            held = self._hold(held, self._tree.ancestors(call[0]))
            self._feed(call, len(held))
            held = held + call
            yield from self._finished(waiting, call[-1])

    def _finished(self, waiting: list[_Prompt], fed: int) -> Iterator[PromptScore]:
        """Take out the prompts that need no node after `fed`."""
        while waiting and self._last(waiting[-1]) <= fed:
            yield self._score(waiting.pop())

    def _plant(self, prompts: Sequence[tuple[int, ...]], starts: Sequence[int]) -> list[_Prompt]:
        """Make the tree, and with it the prompts in its order."""
        planted: list[_Prompt] = []
        ids: tuple[int, ...] = ()
        nodes: list[int] = []
        for index in sorted(range(len(prompts)), key=prompts.__getitem__):
            nodes = self._tree.grow(prompts[index], nodes, shared(ids, prompts[index]))
            ids, start = prompts[index], max(starts[index], 1)
            planted.append(_Prompt(index, ids, nodes, start))
            for child in nodes[start:]:
                self._tree.asked.setdefault(self._tree.parents[child], set()).add(child)
            if self._follow:
                self._tree.ends[nodes[-1]] = self._tree.feeds[nodes[-1]] = True
                self._tree.asked.setdefault(nodes[-1], set())
        return planted

    def _last(self, prompt: _Prompt) -> int:
        """The last node that must be fed before a prompt's score is known."""
        return prompt.nodes[-1] if self._follow else self._tree.parents[prompt.nodes[-1]]

    def _calls(self) -> Iterator[list[int]]:
        """Nodes to feed, call by call. Only a call that finds its first tokens in the cache may hold branches:
        attention counts the positions of a text's beginning by itself."""
        tree, call = self._tree, list[int]()
        for node in (n for n, feeds in enumerate(tree.feeds) if feeds):
            straight = not call or tree.parents[node] == call[-1]
            branches = self._graph.branches and call and tree.depths[call[0]] > 0
            if len(call) == CHUNK or not (straight or branches):
                yield call
                call = []
            call.append(node)
        if call:
            yield call

    def _hold(self, held: list[int], wanted: list[int]) -> list[int]:
        """Bring the cache from the nodes that it holds, by slot, to those that are wanted; all of them are there."""
        common = shared(held, wanted)
        if common < len(wanted):
            slot = {node: at for at, node in enumerate(held)}
            self._cache.gather(0, [slot[node] for node in wanted[common:]], common)
        return wanted

    def _feed(self, call: list[int], length: int) -> None:
        """Feed nodes after `length` cached ones, and read what is asked of them."""
        import numpy as np

        tree = self._tree
        read = [at for at, node in enumerate(call) if node in tree.asked]
        straight = all(tree.parents[node] == before for before, node in pairwise(call))
        branches = None if straight else self._branches(call, length)
        ids = np.array([[tree.tokens[node] for node in call]], np.int64)
        logits = self._graph.run(self._cache, 0, ids, [length], read or None, branches)[0]
        if read:
            self._take([call[at] for at in read], logits)

    def _branches(self, call: list[int], length: int) -> Branches:
        """What each node sees: its ancestors in the cache, those in the call, and itself."""
        import numpy as np

        tree, at = self._tree, {node: row for row, node in enumerate(call)}
        bias = np.full((len(call), length + len(call)), UNSEEN, np.float32)
        for row, node in enumerate(call):
            parent = at.get(tree.parents[node])
            if parent is None:
                bias[row, : tree.depths[node]] = 0
            else:
                bias[row] = bias[parent]
            bias[row, length + row] = 0
        return Branches(np.array([tree.depths[node] for node in call], np.int64), bias)

    def _take(self, nodes: list[int], logits: Floats) -> None:
        """Note what rows (R, V) say of the children of their nodes."""
        tree = self._tree
        normalizers = log_normalizers(logits)
        for row, (node, top) in enumerate(zip(nodes, rank(logits, normalizers, self._ranked), strict=True)):
            self._tops[node] = top
            for child in tree.asked[node]:
                self._logprobs[child] = float(logits[row, tree.tokens[child]] - normalizers[row])
            if tree.ends[node]:
                best = rank(logits[row : row + 1], normalizers[row : row + 1], 1)[0][0]
                self._next[node] = Token(-1, best[0], best[1], top)

    def _score(self, prompt: _Prompt) -> PromptScore:
        """Put a prompt's score together; positions before `start` have None."""
        skipped = [None] * min(prompt.start, len(prompt.ids))
        asked = prompt.nodes[prompt.start :]
        logprobs = (*skipped, *(self._logprobs[node] for node in asked))
        tops = (*skipped, *(self._tops[self._tree.parents[node]] for node in asked))
        following = self._next[prompt.nodes[-1]] if self._follow else None
        return PromptScore(prompt.index, prompt.ids, logprobs, tops, following)
