"""Metrics of generated answers, pure, and the functions that lm-eval task files name for them.

A task file says `process_results: !function pipelines.evaluate.metrics.<name>`; each returns one value per metric.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)
_WORD = re.compile(r"\w+|[^\w\s]")


def normalize_answer(text: str) -> str:
    """Lower the case, then drop punctuation, English articles and extra spaces, in the order of SQuAD v1.1's script."""
    lowered = "".join(c for c in text.lower() if c not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", lowered).split())


def squad_f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 over shared normalized tokens, best of the accepted answers (Rajpurkar et al. 2016, section 6.1).

    If either side has no token left, it is 1 when both have none and else 0, as in the SQuAD v2.0 script.
    """
    return max(_f1(normalize_answer(prediction).split(), normalize_answer(a).split()) for a in answers)


def squad_exact(prediction: str, answers: Sequence[str]) -> float:
    """1 if the normalized prediction is one of the normalized answers, else 0."""
    said = normalize_answer(prediction)
    return float(any(said == normalize_answer(a) for a in answers))


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    shared = sum((Counter(said) & Counter(wanted)).values())
    # 2PR / (P + R) with P = shared/said and R = shared/wanted, in a form that a hand can check
    return 2 * shared / (len(said) + len(wanted))


def first_object(text: str) -> dict[str, object] | None:
    """Decode the JSON object that the text begins with after spaces or a code fence; what follows it is ignored."""
    start = re.match(r"\s*(?:```(?:json)?\s*)?", text)
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start.end() if start else 0)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def matching_fields(prediction: Mapping[str, object] | None, reference: Mapping[str, object]) -> int:
    """Count reference fields that the prediction holds with the same value; case and outer spaces do not count."""
    if prediction is None:
        return 0
    return sum(key in prediction and _plain(prediction[key]) == _plain(value) for key, value in reference.items())


def _plain(value: object) -> str:
    """A field's value as compared: numbers and strings alike, but true and null are not the words for them."""
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return " ".join(str(value).split()).casefold()
    return "\0" + json.dumps(value, sort_keys=True)


def count_words(text: str) -> int:
    """Words and punctuation marks: the unit of `nll_per_word`, the same for every tokenizer."""
    return len(_WORD.findall(text))


# --- named by task files -----------------------------------------------------------------------------------------


def json_fields(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
    """Score an object against the JSON text in `answer`: every field right and no field more, and the share right."""
    reference = json.loads(doc["answer"])
    prediction = first_object(results[0])
    right = matching_fields(prediction, reference)
    whole = prediction is not None and right == len(reference) == len(prediction)
    return {"fields_exact": float(whole), "fields_share": right / len(reference)}


def short_answer(doc: Mapping[str, Sequence[str]], results: Sequence[str]) -> dict[str, float]:
    """Score a short answer against the accepted ones in `answers`."""
    return {"f1": squad_f1(results[0], doc["answers"]), "exact": squad_exact(results[0], doc["answers"])}


def text_likelihood(doc: Mapping[str, str], results: Sequence[float]) -> dict[str, float]:
    """Negative log-likelihood of `text` in nats for each word or punctuation mark; exp of it is a perplexity."""
    return {"nll_per_word": -results[0] / count_words(doc["text"])}
