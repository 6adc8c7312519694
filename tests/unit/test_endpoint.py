"""The scoring client: exact ids, the server's own words in errors, and patience only with a full queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pipelines.engine.endpoint import Capabilities, Completion, Endpoint, Ranking, TokenScore
from pipelines.errors import EndpointError

Json = dict[str, Any]


def endpoint(answer: Callable[[Json], httpx.Response], **capabilities: Any) -> Endpoint:
    """A client whose server is one function."""
    transport = httpx.MockTransport(lambda request: answer(json.loads(request.content)))
    return Endpoint("http://engine/v1/", "m", Capabilities(**capabilities), transport=transport)


def scored(index: int, ids: list[int], **changes: Any) -> Json:
    """A choice as our own host writes it: every token after the first at -1, token 5 the most probable."""
    fields: Json = {
        "tokens": [str(i) for i in ids],
        "token_logprobs": [None] + [-1.0] * (len(ids) - 1),
        "top_logprobs": [None] + [{"5": -1.0}] * (len(ids) - 1),
        "token_ids": ids,
        "top_token_ids": [None] + [[5]] * (len(ids) - 1),
    }
    return {"index": index, "text": "", "finish_reason": "length", "logprobs": {**fields, **changes}}


def test_prompts_are_scored_in_the_order_sent() -> None:
    """Choices are matched to prompts by index, and greedy flags come from the exact ids."""
    client = endpoint(lambda _: httpx.Response(200, json={"choices": [scored(1, [3, 5]), scored(0, [4, 6, 5])]}))
    assert [
        TokenScore((4, 6, 5), (None, -1.0, -1.0), (None, False, True)),
        TokenScore((3, 5), (None, -1.0), (None, True)),
    ] == client.score([[4, 6, 5], [3, 5]])


def test_scoring_asks_for_the_echo_of_exact_ids() -> None:
    """The request is token ids with echo, logprobs and no generation."""
    seen: list[Json] = []

    def answer(body: Json) -> httpx.Response:
        seen.append(body)
        return httpx.Response(200, json={"choices": [scored(0, [1, 2])]})

    endpoint(answer).score([(1, 2)])
    wanted = {"model": "m", "prompt": [[1, 2]], "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    assert [wanted] == seen


def test_no_prompts_need_no_server() -> None:
    """Scoring nothing sends nothing."""
    assert [] == endpoint(lambda _: httpx.Response(500)).score([])


def test_a_foreign_server_is_understood_by_the_standard_fields() -> None:
    """Without id extensions a token was greedy if no alternative has a higher log-probability."""
    choice = scored(0, [1, 2, 3])
    fields = {k: v for k, v in choice["logprobs"].items() if k not in ("token_ids", "top_token_ids")}
    fields["token_logprobs"] = [None, -1.0, -2.0]
    fields["top_logprobs"] = [None, {"b": -1.0}, {"x": -0.5, "c": -2.0}]
    client = endpoint(lambda _: httpx.Response(200, json={"choices": [{**choice, "logprobs": fields}]}))
    assert [TokenScore((1, 2, 3), (None, -1.0, -2.0), (None, True, False))] == client.score([[1, 2, 3]])


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (scored(0, [1, 2, 4]), "other token ids"),
        (scored(0, [1, 2]), "3 prompt tokens were sent, log-probabilities came for 2"),
        (scored(0, [1, 2, 3], token_logprobs=[None, -1.0, None]), "missing"),
        (scored(0, [1, 2, 3], top_token_ids=[None, [5], []]), "top_token_ids"),
        (scored(1, [1, 2, 3]), "choices came for"),
        ({"index": 0, "text": "", "logprobs": None}, "no logprobs"),
    ],
)
def test_an_answer_about_anything_else_is_an_error(choice: Json, said: str) -> None:
    """Scores that are not about the ids sent, or are incomplete, are never used."""
    with pytest.raises(EndpointError, match=said):
        endpoint(lambda _: httpx.Response(200, json={"choices": [choice]})).score([[1, 2, 3]])


def ranked(**changes: Any) -> Json:
    """A choice about tokens 1, 2, 3 with two alternatives at each place."""
    tops = {"top_token_ids": [None, [5, 2], [5, 6]], "top_token_logprobs": [None, [-0.5, -1.0], [-0.5, -2.0]]}
    return scored(0, [1, 2, 3], **tops | changes)


def test_alternatives_come_by_id_from_the_wanted_start() -> None:
    """The request says how many and from where; the answer is cut to there."""
    seen: list[Json] = []

    def answer(body: Json) -> httpx.Response:
        seen.append(body)
        return httpx.Response(200, json={"choices": [ranked()]})

    found = endpoint(answer, logprob_start=True).rank([[1, 2, 3]], [2], 30)
    assert [Ranking((-1.0,), ((5, 6),), ((-0.5, -2.0),))] == found
    assert (20, [2]) == (seen[0]["logprobs"], seen[0]["logprob_start_len"])


def test_alternatives_that_have_names_only_are_left_out() -> None:
    """Two tokens may share a text, so texts say nothing of a partition; the true tokens' scores stay."""
    choice = ranked()
    del choice["logprobs"]["top_token_logprobs"]
    client = endpoint(lambda _: httpx.Response(200, json={"choices": [choice]}))
    assert [Ranking((-1.0, -1.0), ((), ()), ((), ()))] == client.rank([[1, 2, 3]], [1], 20)


def test_alternatives_of_another_number_are_an_error() -> None:
    """Ids without their log-probabilities are no evidence."""
    choice = ranked(top_token_logprobs=[None, [-0.5], [-0.5, -2.0]])
    with pytest.raises(EndpointError, match="top_token_logprobs"):
        endpoint(lambda _: httpx.Response(200, json={"choices": [choice]})).rank([[1, 2, 3]], [1], 20)


def by_id(ids: list[int]) -> Json:
    """A choice as vLLM writes it: token 5 the best everywhere but at token 6, which it ties with."""
    places = [
        None,
        *({str(i): {"logprob": -2.0, "rank": 2}, "5": {"logprob": -2.0 if i == 6 else -0.5}} for i in ids[1:]),
    ]
    return {"index": 0, "text": "", "prompt_token_ids": ids, "prompt_logprobs": places}


def test_places_by_id_are_scored_and_ranked() -> None:
    """A server of vLLM's kind is asked without echo; scores and alternatives come from the wanted start on."""
    seen: list[Json] = []

    def answer(body: Json) -> httpx.Response:
        seen.append(body)
        return httpx.Response(200, json={"choices": [by_id([1, 2, 6])]})

    client = endpoint(answer, prompt_ranks=True)
    assert [TokenScore((1, 2, 6), (None, -2.0, -2.0), (None, False, True))] == client.score([[1, 2, 6]])
    assert [TokenScore((1, 2, 6), (None, None, -2.0), (None, None, True))] == client.score([[1, 2, 6]], [2])
    assert [Ranking((-2.0,), ((5, 6),), ((-2.0, -2.0),))] == client.rank([[1, 2, 6]], [2], 30)
    assert [1, 1, 20] == [body["prompt_logprobs"] for body in seen]
    assert "echo" not in seen[0]
    assert seen[0]["return_token_ids"]


def test_places_about_other_ids_are_an_error() -> None:
    """What the server says it read is held to what was sent."""
    client = endpoint(lambda _: httpx.Response(200, json={"choices": [by_id([1, 2, 7])]}), prompt_ranks=True)
    with pytest.raises(EndpointError, match="other token ids"):
        client.score([[1, 2, 6]])


def test_alternatives_are_computed_where_all_logits_come() -> None:
    """A server that gives context logits: the softmax of each row, by hand for two tokens."""
    body = {"choices": [{"index": 0, "context_logits": [[0.0, 0.0], [0.0, 1.0986122886681098]]}]}
    client = endpoint(lambda _: httpx.Response(200, json=body), prompt_logprobs=False, context_logits=True)
    ((logprobs, ids, values),) = [(r.logprobs, r.ids, r.values) for r in client.rank([[0, 1]], [1], 1)]
    assert ((pytest.approx(-0.6931471805599453),), ((0,),)) == (logprobs, ids)
    assert values[0] == pytest.approx((-0.6931471805599453,))


def test_a_completion_carries_text_reason_and_counts() -> None:
    """Generation returns what the server counted."""
    body = {
        "choices": [{"index": 0, "text": " Paris", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3},
    }
    client = endpoint(lambda _: httpx.Response(200, json=body))
    assert Completion(" Paris", "stop", 2, 3) == client.generate([1, 2], max_tokens=4)


@pytest.mark.parametrize("missing", ["text", "finish_reason", "usage"])
def test_a_completion_without_evidence_is_an_error(missing: str) -> None:
    """No text, reason or counts: no completion."""
    choice = {"index": 0, "text": "a", "finish_reason": "stop"}
    body: Json = {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    body.pop(missing, None)
    choice.pop(missing, None)
    with pytest.raises(EndpointError, match="missing"):
        endpoint(lambda _: httpx.Response(200, json=body)).generate([1], max_tokens=1)


def test_a_server_that_counts_other_prompt_tokens_is_not_believed() -> None:
    """A server that re-tokenizes or adds tokens is found out by its own count."""
    body = {
        "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
    with pytest.raises(EndpointError, match="2 prompt tokens were sent, it counted 3"):
        endpoint(lambda _: httpx.Response(200, json=body)).generate([1, 2], max_tokens=1)


@pytest.mark.parametrize(
    "body",
    [
        '{"error": {"message": "no room here"}}',
        '{"message": "no room here"}',
        '{"error": "no room here"}',
        "no room here",
    ],
)
def test_errors_carry_status_and_the_servers_words(body: str) -> None:
    """Whatever way the server wraps its message, it is shown with the status."""
    with pytest.raises(EndpointError, match="status 400: no room here"):
        endpoint(lambda _: httpx.Response(400, text=body)).generate([1], max_tokens=1)


def test_only_a_full_queue_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """429 waits as long as the server asks; a server error is final."""
    waits: list[float] = []
    monkeypatch.setattr("pipelines.engine.endpoint.time.sleep", waits.append)
    answers = [
        httpx.Response(429, headers={"Retry-After": "3"}),
        httpx.Response(429, headers={"Retry-After": "soon"}),
        httpx.Response(200, json={"choices": [scored(0, [1])]}),
        httpx.Response(503),
    ]
    client = endpoint(lambda _: answers.pop(0))
    assert [TokenScore((1,), (None,), (None,))] == client.score([[1]])
    assert [3.0, 1.0] == waits
    with pytest.raises(EndpointError, match="status 503"):
        client.score([[1]])


def test_a_queue_that_stays_full_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience is bounded."""
    monkeypatch.setattr("pipelines.engine.endpoint.time.sleep", lambda _: None)
    with pytest.raises(EndpointError, match="status 429"):
        endpoint(lambda _: httpx.Response(429, json={"error": {"message": "full"}})).score([[1]])


def test_a_broken_connection_is_an_endpoint_error() -> None:
    """Transport errors name the address."""

    def refuse(_: Json) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(EndpointError, match="http://engine/v1/completions: ConnectError"):
        endpoint(refuse).score([[1]])


def test_what_a_server_cannot_do_is_refused_before_it_is_asked() -> None:
    """Declared capabilities decide, not a failing request."""
    client = endpoint(lambda _: httpx.Response(500), prompt_logprobs=False, ignore_eos=False)
    with pytest.raises(EndpointError, match="no log-probabilities"):
        client.score([[1]])
    with pytest.raises(EndpointError, match="end-of-text"):
        client.generate([1], max_tokens=1, ignore_eos=True)
