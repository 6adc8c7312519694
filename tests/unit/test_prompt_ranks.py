"""Log-probabilities of prompts by token id: exactly about the ids sent, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.engine.prompt_ranks import Place, read


def told(**changes: Any) -> dict[str, Any]:
    """A choice about tokens 7, 8, 9: 8 is the best of its place, 9 is third, and two alternatives share a text."""
    places = [
        None,
        {"8": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}, "5": {"logprob": -1.5, "rank": 2}},
        {
            "9": {"logprob": -3.0, "rank": 3, "decoded_token": "x"},
            "4": {"logprob": -0.25, "rank": 1, "decoded_token": "\ufffd"},
            "3": {"logprob": -2.0, "rank": 2, "decoded_token": "\ufffd"},
        },
    ]
    return {"prompt_token_ids": [7, 8, 9], "prompt_logprobs": places} | changes


def test_each_place_has_its_token_and_the_best_ones() -> None:
    """The prompt's own token is scored wherever it ranks; alternatives come best first."""
    assert [
        Place(-0.5, True, (8, 5), (-0.5, -1.5)),
        Place(-3.0, False, (4, 3), (-0.25, -2.0)),
    ] == read([7, 8, 9], 1, 2, told())


def test_earlier_places_are_not_looked_at() -> None:
    """From the wanted start on; what comes before may hold anything."""
    places = told()["prompt_logprobs"]
    assert [Place(-3.0, False, (4,), (-0.25,))] == read([7, 8, 9], 2, 1, told(prompt_logprobs=[None, None, places[2]]))


def test_a_token_that_none_exceeds_was_the_most_probable() -> None:
    """Ties, which products in bfloat16 make, count as most probable whichever the server names first."""
    tied = {"4": {"logprob": -0.5, "rank": 1}, "8": {"logprob": -0.5, "rank": 2}}
    assert read([7, 8], 1, 1, {"prompt_token_ids": [7, 8], "prompt_logprobs": [None, tied]})[0].greedy


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({}, "no prompt_token_ids"),
        (told(prompt_logprobs=None), "no prompt_token_ids with prompt_logprobs"),
        (told(prompt_token_ids=[7, 8, 1]), "other token ids"),
        (told(prompt_logprobs=[None, {}]), "3 prompt tokens were sent, prompt_logprobs came for 2"),
        (told(prompt_logprobs=[None, None, None]), "missing at token 1"),
        (told(prompt_logprobs=[None, {"5": {"logprob": -1.0}}, None]), "do not have the token itself"),
        (told(prompt_logprobs=[None, {"8": {"rank": 1}}, None]), "do not have the token itself"),
        (told(prompt_logprobs=[None, {"8": {"logprob": float("nan")}}, None]), "is nan"),
    ],
)
def test_an_answer_about_anything_else_is_refused(choice: dict[str, Any], said: str) -> None:
    """Other ids, missing places and tokens without a number are no scores."""
    with pytest.raises(ValueError, match=said):
        read([7, 8, 9], 1, 2, choice)
