"""Metrics of generated answers, against values worked out by hand from their definitions."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.evaluate import metrics


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("  an  apple, a day ", "apple day"),
        ("another theory", "another theory"),
        ("U.S.A.", "usa"),
        ("the", ""),
    ],
)
def test_normalizing_drops_case_punctuation_and_articles(text: str, expected: str) -> None:
    """Articles go only as whole words, and punctuation goes without leaving a space."""
    assert expected == metrics.normalize_answer(text)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        # said {eiffel, tower, in, paris}, wanted {eiffel, tower}: P = 2/4, R = 2/2, F1 = 2/3
        ("the Eiffel Tower in Paris", ["Eiffel Tower"], 2 / 3),
        # P = 1/1, R = 1/3, F1 = 1/2
        ("Denver", ["Denver Broncos team"], 1 / 2),
        # a word said twice counts once: P = 1/2, R = 1/1, F1 = 2/3
        ("paris paris", ["Paris"], 2 / 3),
        # the best of several answers
        ("30 days", ["a month", "30 days"], 1.0),
        ("Rome", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
        ("the", ["a"], 1.0),
    ],
)
def test_f1_is_squads(prediction: str, answers: list[str], expected: float) -> None:
    """Token F1 has the value of 2PR/(P+R) by hand; empty sides are equal only to each other."""
    assert expected == pytest.approx(metrics.squad_f1(prediction, answers))


def test_exact_match_is_squads() -> None:
    """Case, articles and punctuation don't count; every other word does."""
    assert metrics.squad_exact("The 30 days.", ["30 days"]) == 1.0
    assert metrics.squad_exact("within 30 days", ["30 days"]) == 0.0


@given(st.text(), st.text())
def test_f1_is_symmetric_and_bounded(one: str, other: str) -> None:
    """Swapping prediction and answer changes nothing; an exact match has F1 1."""
    f1 = metrics.squad_f1(one, [other])
    assert 0.0 <= f1 <= 1.0
    assert f1 == pytest.approx(metrics.squad_f1(other, [one]))
    assert metrics.squad_exact(one, [other]) <= f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (' {"a": 1} and more', {"a": 1}),
        ('```json\n{"a": "x"}\n```', {"a": "x"}),
        ("[1]", None),
        ("Sure: {}", None),
        ('{"a": ', None),
        ("", None),
    ],
)
def test_an_object_is_read_only_from_the_beginning(text: str, expected: dict[str, object] | None) -> None:
    """Spaces and a code fence may come first, talk may not; a list or half an object is none."""
    assert expected == metrics.first_object(text)


REFERENCE = {"order": "20417", "item": "desk fan", "problem": "late"}


@pytest.mark.parametrize(
    ("answer", "exact", "share"),
    [
        ('{"order": "20417", "item": "desk fan", "problem": "late"}', 1.0, 1.0),
        ('{"problem": "LATE", "item": " Desk  fan", "order": 20417} thanks', 1.0, 1.0),
        ('{"order": "20417", "item": "fan", "problem": "late"}', 0.0, 2 / 3),
        ('{"order": "20417", "item": "desk fan", "problem": "late", "city": "Graz"}', 0.0, 1.0),
        ('{"order": null, "item": "desk fan"}', 0.0, 1 / 3),
        ("order 20417, desk fan, late", 0.0, 0.0),
    ],
)
def test_fields_must_all_be_right_and_no_more(answer: str, exact: float, share: float) -> None:
    """A field too many or too few is no exact match; numbers and case are forgiven."""
    scores = metrics.json_fields({"answer": json.dumps(REFERENCE)}, [answer])
    assert {"fields_exact": exact, "fields_share": pytest.approx(share)} == scores


def test_true_and_null_are_not_words() -> None:
    """A JSON true is not the text "true", and null matches nothing but null."""
    assert metrics.matching_fields({"a": True, "b": None}, {"a": "true", "b": "null"}) == 0
    assert metrics.matching_fields({"b": None}, {"b": None}) == 1


def test_likelihood_counts_words_and_marks() -> None:
    """A text of four words and two marks at probability 1/e each has a loss of 1 nat per word."""
    text = "Well, that is all."
    assert metrics.count_words(text) == 6
    loss = metrics.text_likelihood({"text": text}, [6 * math.log(1 / math.e)])
    assert {"nll_per_word": pytest.approx(1.0)} == loss


def test_short_answers_score_both_ways() -> None:
    """F1 and exact match come from one answer."""
    scores = metrics.short_answer({"answers": ["oak"]}, ["oak wood"])
    assert {"f1": pytest.approx(2 / 3), "exact": 0.0} == scores
