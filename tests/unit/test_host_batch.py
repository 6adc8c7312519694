"""The bookkeeping of cache rows, without a model: a graph whose logits depend on every token it should have seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.engine.host import batch as batch_module
from pipelines.engine.host import scoring
from pipelines.engine.host.batch import BatchDecoder
from pipelines.engine.host.decoder import DecodeFailed, Sampling, Turn
from pipelines.engine.host.graph import UNSEEN, Branches

VOCAB = 11
GREEDY = Sampling(temperature=0)


def logits_after(prefix: Sequence[int]) -> Any:
    """Logits that no two prefixes share."""
    return np.random.default_rng([len(prefix), *prefix]).normal(size=VOCAB).astype(np.float32)


class RecordingCache:
    """Rows that hold the tokens themselves instead of keys and values."""

    def __init__(self, rows: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.capacity = 0

    def fit(self, tokens: int, held: Sequence[int] = ()) -> None:
        if tokens > self.capacity or tokens * 2 < self.capacity:
            lengths = [*held, *[0] * (len(self.rows) - len(held))]
            self.rows = [row[:n] for row, n in zip(self.rows, lengths, strict=True)]
            self.capacity = tokens

    def gather(self, row: int, slots: Sequence[int], at: int) -> None:
        self.rows[row][at : at + len(slots)] = [self.rows[row][slot] for slot in slots]

    def move(self, source: int, target: int, length: int) -> None:
        self.rows[target] = self.rows[source][:length]


class RecordingGraph:
    """Feeds tokens to rows, counts them, and refuses what the real graph would corrupt memory with."""

    def __init__(self, branches: bool = False) -> None:
        self.fed, self.calls, self.read, self.fails, self.branches = 0, 0, 0, False, branches

    def new_cache(self, rows: int) -> RecordingCache:
        return RecordingCache(rows)

    def run(
        self,
        cache: RecordingCache,
        row: int,
        ids: Any,
        lengths: Sequence[int],
        read: Sequence[int] | None = None,
        branches: Branches | None = None,
    ) -> Any:
        if self.fails:
            raise DecodeFailed((), "no memory")
        assert branches is None or (self.branches and lengths[0] > 0)
        steps = ids.shape[1]
        rows = [steps - 1] if read is None else list(read)
        out = np.empty((len(ids), len(rows), VOCAB), np.float32)
        self.calls, self.read = self.calls + 1, self.read + len(rows)
        for i, length in enumerate(lengths):
            assert len(cache.rows[row + i]) >= length
            assert length + steps <= cache.capacity
            cache.rows[row + i] = [*cache.rows[row + i][:length], *ids[i].tolist()]
            self.fed += steps
            for at, step in enumerate(rows):
                out[i, at] = logits_after(seen(cache.rows[row + i], length + step, branches, step))
        return out


def seen(slots: list[int], last: int, branches: Branches | None, step: int) -> list[int]:
    """The text that ends at slot `last`: all before it, or what the mask leaves of it, which its position counts."""
    if branches is None:
        return slots[: last + 1]
    text = [slot for slot, bias in zip(slots[: last + 1], branches.bias[step], strict=False) if bias == 0]
    assert set(branches.bias[step]) <= {np.float32(0), np.float32(UNSEEN)}
    assert len(text) == branches.positions[step] + 1
    return text


def greedy(ids: Sequence[int], count: int) -> list[int]:
    """What a model without a batch would say."""
    said: list[int] = []
    for _ in range(count):
        said.append(int(logits_after([*ids, *said]).argmax()))
    return said


def decoder(graph: Any, rows: int = 3) -> BatchDecoder:
    return BatchDecoder(graph, rows)


TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9).map(tuple)


@given(st.lists(st.tuples(TOKENS, st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=7))
def test_neighbours_never_change_a_sequence(asked: list[tuple[tuple[int, ...], int, int]]) -> None:
    """Sequences that join, leave and abandon a shared batch at any time each say what they would have said alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "CHUNK", 3)
        running, waiting = decoder(RecordingGraph()), list(enumerate(asked))
        said: dict[int, list[int]] = {}
        active: set[int] = set()
        while waiting or active:
            while waiting and len(active) < 3:
                key, (ids, count, _) = waiting.pop(0)
                running.add(Turn(key, ids, count, GREEDY))
                said[key] = []
                active.add(key)
            for token in running.step():
                said[token.key].append(token.id)
            for key in list(active):
                _, count, abandon = asked[key]
                if len(said[key]) == min(count, abandon or count):
                    running.drop(key)
                    active.remove(key)
    for key, (ids, count, abandon) in enumerate(asked):
        assert greedy(ids, min(count, abandon or count)) == said[key]


def test_a_prompt_may_be_dropped_while_it_enters() -> None:
    """Dropping a sequence before its first token leaves the others as they were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "CHUNK", 2)
        running = decoder(RecordingGraph())
        for key, ids in enumerate([(1,), (2,), (3, 4, 5, 6, 7)]):
            running.add(Turn(key, ids, 9, GREEDY))
        said: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for step in range(6):
            for token in running.step():
                said[token.key].append(token.id)
            if step == 2:
                running.drop(0)
            if step == 3:
                running.drop(2)
    assert greedy((2,), len(said[1])) == said[1]
    assert len(said[1]) == 5


FEW = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)


@given(
    st.lists(st.tuples(TOKENS | FEW, st.integers(0, 9)), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
    st.sampled_from([3, 5, 256]),
)
def test_sharing_prefixes_changes_no_score(
    asked: list[tuple[tuple[int, ...], int]], follow: bool, branches: bool, chunk: int
) -> None:
    """Scores of prompts sent together are the log-softmax of each prompt's own prefixes, under its own index, from its
    own start on; nothing is said of what was not asked."""
    prompts, starts = [ids for ids, _ in asked], [start for _, start in asked]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "CHUNK", chunk)
        given_scores = decoder(RecordingGraph(branches)).score(prompts, starts, 1, follow)
        scores = {score.index: score for score in given_scores}
    assert set(range(len(prompts))) == set(scores)
    for index, (ids, start) in enumerate(asked):
        score, first = scores[index], min(max(start, 1), len(ids))
        assert ((None,) * first, (None,) * first) == (score.logprobs[:first], score.ranked[:first])
        assert ids == score.ids
        rows = [logits_after(ids[:i]).astype(np.float64) for i in range(1, len(ids) + 1)]
        exact = [row - np.log(np.exp(row).sum()) for row in rows]
        wanted = range(first, len(ids))
        assert [exact[i - 1][ids[i]] for i in wanted] == pytest.approx(score.logprobs[first:], abs=1e-5)
        assert [int(rows[i - 1].argmax()) for i in wanted] == [top[0][0] for top in score.ranked[first:] if top]
        assert (int(rows[-1].argmax()) if follow else None) == (score.next.id if score.next else None)


def test_a_shared_context_is_computed_once() -> None:
    """Four single-token answers to one question cost the question, not four of them."""
    graph, question = RecordingGraph(), tuple(range(10)) * 5
    list(decoder(graph).score([(*question, answer) for answer in (1, 2, 3, 4)], [50] * 4, 1, False))
    assert (len(question), 1) == (graph.fed, graph.read)


def test_many_branches_share_a_call() -> None:
    """A context and six questions take two calls where attention takes a mask, and six where it does not; either way
    logits are computed only for the rows that are read."""
    context = tuple(range(10)) * 3
    prompts = [(*context, first, 5, 6, 7) for first in range(6)]
    for branches, calls in ((True, 2), (False, 6)):
        graph = RecordingGraph(branches)
        list(decoder(graph).score(prompts, [len(p) - 1 for p in prompts], 1, False))
        assert (len(context) + 6 * 3, calls, 6) == (graph.fed, graph.calls, graph.read)


def test_a_failure_names_the_lost_sequences_and_leaves_the_decoder_usable() -> None:
    """After memory ran out once, the next sequence works."""
    graph = RecordingGraph()
    running = decoder(graph)
    running.add(Turn(1, (1, 2), 3, GREEDY))
    graph.fails = True
    with pytest.raises(DecodeFailed, match="no memory") as caught:
        running.step()
    assert (1,) == caught.value.keys
    graph.fails = False
    running.add(Turn(2, (1, 2), 3, GREEDY))
    assert greedy((1, 2), 1) == [token.id for token in running.step()]


def test_logprobs_are_of_the_chosen_token() -> None:
    """A turn that asks for log-probabilities gets those of its tokens, with alternatives."""
    running = decoder(RecordingGraph())
    running.add(Turn(1, (1, 2), 3, GREEDY, logprobs=2))
    token = running.step()[0]
    row = logits_after((1, 2)).astype(np.float64)
    exact = row - np.log(np.exp(row).sum())
    assert exact.max() == pytest.approx(token.logprob, abs=1e-5)
    assert list(np.argsort(-exact)[:2]) == [other for other, _ in token.ranked]
