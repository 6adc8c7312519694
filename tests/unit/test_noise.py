"""The A/A run: what is counted between two scorings of one engine, and that another order asks the same."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipelines.engine.capabilities import Capabilities
from pipelines.engine.endpoint import Completion, TokenScore
from pipelines.errors import EvidenceError
from pipelines.evaluate.adapter import USUAL, EndpointLM, Pace
from pipelines.evaluate.noise import IN_FLIGHT, TOGETHER, changes
from tests.byte_model import byte_tokenizer


def row(score: float, prediction: str = "a", prompt: str = "p") -> dict[str, Any]:
    return {"score": score, "prediction": prediction, "prompt_hash": prompt}


def test_changes_are_counted_over_items_scored_twice() -> None:
    """One up, two down, one other answer with the same score; items of one scoring only do not count."""
    first = {"1": row(0), "2": row(1), "3": row(0.5), "4": row(1), "5": row(1), "6": row(1)}
    again = {"1": row(1, "b"), "2": row(0, "b"), "3": row(0.25), "4": row(1, "b"), "5": row(1), "7": row(0)}
    assert {"items": 5, "gains": 1, "losses": 2, "answers_changed": 3, "mean_change": pytest.approx(-0.05)} == changes(
        first, again
    )


def test_other_items_or_prompts_are_no_evidence() -> None:
    """Nothing in common, or an item that was asked differently, is an error with its name."""
    with pytest.raises(EvidenceError, match="no item was scored twice"):
        changes({"1": row(0)}, {"2": row(0)})
    with pytest.raises(EvidenceError, match="item 1: the second scoring sent another prompt"):
        changes({"1": row(0)}, {"1": row(0, prompt="q")})


class Server:
    """Scores a token by its id and answers with the prompt's last token; remembers the calls."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, ...]]] = []

    def score(self, prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> list[TokenScore]:
        self.calls.append([tuple(p) for p in prompts])
        return [
            TokenScore(tuple(p), (None, *(-float(i) for i in p[1:])), (None, *(False for _ in p[1:]))) for p in prompts
        ]

    def generate(self, ids: Sequence[int], **_: object) -> Completion:
        self.calls.append([tuple(ids)])
        return Completion(str(ids[-1]), "stop", len(ids), 1)


def scorer(pace: Pace) -> tuple[EndpointLM, Server]:
    card = SimpleNamespace(max_length=100, max_prompt=None, eos_token_ids=[0], bos_token_id=None)
    server = Server()
    engine = SimpleNamespace(card=card, tokenizer=byte_tokenizer())
    return EndpointLM(cast(Any, server), cast(Any, engine), pace), server


def requests(*pairs: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=args, doc={"id": f"i{n // 2}"}, doc_id=n // 2) for n, args in enumerate(pairs)]


def test_another_order_and_batch_size_give_the_same_answers_and_evidence() -> None:
    """Ten requests, whole and shuffled by threes: other calls, but each request's answer and each item's hash stand."""
    asked = requests(*((f"question {n}", f" {'ab'[n % 2]}{n}") for n in range(10)))
    usual, first = scorer(USUAL)
    shuffled, second = scorer(Pace(together=3, in_flight=2, shuffle=1))
    assert usual.loglikelihood(asked) == shuffled.loglikelihood(asked)
    assert ([10], [3, 3, 3, 1]) == ([len(c) for c in first.calls], [len(c) for c in second.calls])
    assert sorted(first.calls[0]) == sorted(p for c in second.calls for p in c)
    assert first.calls[0] != [p for c in second.calls for p in c]
    assert {k: t.prompt_hash for k, t in usual.traces.items()} == {k: t.prompt_hash for k, t in shuffled.traces.items()}


def test_whole_texts_and_generations_come_back_in_the_order_asked() -> None:
    """Whatever the order they were sent in."""
    texts = requests(*((f"text {n}",) for n in range(7)))
    prompts = requests(*((f"prompt {n}", {"until": ["x"], "max_gen_toks": 8}) for n in range(7)))
    pace = Pace(in_flight=1, shuffle=3)
    (usual, _), (shuffled, sent) = scorer(USUAL), scorer(pace)
    assert usual.loglikelihood_rolling(texts) == shuffled.loglikelihood_rolling(texts)
    ((plain, _), (other, calls)) = scorer(USUAL), scorer(pace)
    assert plain.generate_until(prompts) == other.generate_until(prompts)
    assert len(sent.calls) == len(calls.calls) == 7
    assert [c[0] for c in calls.calls] != [tuple(byte_tokenizer().encode(f"prompt {n}").ids) for n in range(7)]


def test_the_second_scoring_batches_differently() -> None:
    """Neither number may equal, divide or be a multiple of the usual one, or calls would coincide."""
    for again, usual in ((TOGETHER, USUAL.together), (IN_FLIGHT, USUAL.in_flight)):
        assert usual % again
        assert again % usual
