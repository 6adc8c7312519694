"""Scoring prompts by their context logits: exact, or an error; and engines that cannot be scored at all."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from pipelines.engine import context_logits
from pipelines.engine.capabilities import Capabilities
from pipelines.engine.endpoint import Endpoint
from pipelines.errors import EndpointError, EvidenceError

LOGITS = [[0.0, math.log(3.0)], [math.log(3.0), 0.0], [5.0, 5.0]]  # (1/4, 3/4), (3/4, 1/4), evens
BY_LOGITS = Capabilities(prompt_logprobs=False, context_logits=True)


def answer(rows: list[list[float]] | None, **more: Any) -> bytes:
    choice = {"index": 0, "text": "a", "finish_reason": "length", "context_logits": rows}
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    return json.dumps({"choices": [choice], "usage": usage} | more).encode()


def endpoint(body: bytes, sent: list[dict[str, Any]] | None = None) -> Endpoint:
    def reply(request: httpx.Request) -> httpx.Response:
        if sent is not None:
            sent.append(json.loads(request.content))
        return httpx.Response(200, content=body)

    return Endpoint("http://test/v1", "m", BY_LOGITS, transport=httpx.MockTransport(reply))


def test_row_i_predicts_token_i_plus_one() -> None:
    """The second token has 3/4 after the first, the third 1/4 after the second; the first has no context."""
    sent: list[dict[str, Any]] = []
    (score,) = endpoint(answer(LOGITS), sent).score([[1, 1, 1]])
    assert score.logprobs[0] is None and score.greedy[0] is None
    assert score.logprobs[1:] == pytest.approx((math.log(3 / 4), math.log(1 / 4)))
    assert (True, False) == score.greedy[1:]
    assert [1, 1, 1] == sent[0]["prompt"]
    assert (True, 1) == (sent[0]["return_context_logits"], sent[0]["max_tokens"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (answer(LOGITS[:1]), "3 prompt tokens were sent, context logits came for 1: blocks of the cache were reused"),
        (answer([*LOGITS, LOGITS[0]]), "came for 4"),
        (answer(None), "no context logits came"),
        (answer([[1.0], [1.0], [1.0]]), "token 1 lies outside the 1 words"),
        (answer([[0.0, 1.0], [1.0], [0.0, 1.0]]), "rows of unequal length"),
        (b'{"choices": [{"context_logits": [1.0, 2.0]}]}', "no table of numbers"),
        (b"not json", "Expecting value"),
    ],
)
def test_logits_that_are_not_whole_are_an_error(body: bytes, said: str) -> None:
    """Nothing is filled in: a reused prefix gives fewer rows, and scores made of the rest would be wrong."""
    with pytest.raises(EndpointError, match=said):
        endpoint(body).score([[1, 1, 1]])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(value: float) -> None:
    """An engine that overflows is not scored."""
    with pytest.raises(ValueError, match="not all finite"):
        context_logits.score([0, 1, 1], np.array([[value, 0.0], *LOGITS[1:]]))


def test_numbers_are_read_as_json_reads_them() -> None:
    """Exponents, signs, spaces and line ends."""
    table = [[-1e-05, 2.5e3], [0.1, -7.0]]
    for text in (json.dumps(table), json.dumps(table, separators=(",", ":")), json.dumps(table, indent=1)):
        rest, logits = context_logits.read(b'{"a": 1, "context_logits": ' + text.encode() + b', "b": [[2]]}')
        assert {"a": 1, "context_logits": None, "b": [[2]]} == rest
        assert logits is not None
        assert table == logits.tolist()


def test_an_answer_without_the_field_is_read_too() -> None:
    """Other servers leave it out."""
    assert ({"choices": []}, None) == context_logits.read(b'{"choices": []}')


@pytest.mark.parametrize("method", ["loglikelihood", "loglikelihood_rolling"])
def test_an_eval_set_of_log_likelihoods_says_what_its_engine_lacks(method: str) -> None:
    """An engine without them is evidence that is missing, told before a request is sent."""
    from pipelines.evaluate.adapter import EndpointLM

    card = SimpleNamespace(
        max_length=64, max_prompt=None, eos_token_ids=[2], bos_token_id=1, model_id="llama-x", target="trtllm_engine"
    )
    unable = SimpleNamespace(capabilities=Capabilities(prompt_logprobs=False))
    lm = EndpointLM(unable, SimpleNamespace(card=card, tokenizer=None))  # type: ignore[arg-type]
    with pytest.raises(EvidenceError, match=r"llama-x \(trtllm_engine\) gives no log-probabilities of prompts"):
        getattr(lm, method)([])


def test_prompts_are_cut_to_what_the_engine_admits() -> None:
    """A prompt limit below the total leaves room neither more nor less."""
    from pipelines.evaluate.adapter import EndpointLM

    card = SimpleNamespace(
        max_length=64, max_prompt=10, eos_token_ids=[2], bos_token_id=1, model_id="m", target="trtllm_engine"
    )
    asked: list[int] = []

    def generate(ids: list[int], **_: object) -> SimpleNamespace:
        asked.append(len(ids))
        return SimpleNamespace(text="x", tokens_out=1, finish_reason="length")

    able = SimpleNamespace(capabilities=BY_LOGITS, generate=generate)
    tokenizer = SimpleNamespace(encode=lambda text, **_: SimpleNamespace(ids=list(range(len(text)))))
    lm = EndpointLM(able, SimpleNamespace(card=card, tokenizer=tokenizer))  # type: ignore[arg-type]
    request = SimpleNamespace(doc={"id": "i"}, args=("y" * 30, {"max_gen_toks": 8}))
    lm.generate_until([request])  # type: ignore[list-item]
    assert [10] == asked
    assert lm.traces["i"].truncated
