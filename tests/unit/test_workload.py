"""What a campaign will ask of engines, measured with the base's own tokenizer before an engine exists."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pipelines.config import CONF_DIR
from pipelines.engine.pairing import Longest
from pipelines.errors import InputError
from pipelines.evaluate import lengths
from pipelines.evaluate.evalset import Evalset, EvalsetConfig, Item, load
from pipelines.intake.digests import DigestCache
from pipelines.probe.config import ProbeConfig
from pipelines.workload import foresee

EVALSETS = CONF_DIR.parent / "evalsets"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint whose tokens are words."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def probe(tmp_path: Path, words: int) -> ProbeConfig:
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"text": "word " * words}) + "\n")
    profiles = [
        {"name": "calm", "mode": "closed", "requests": 4, "concurrency": 1},
        {"name": "busy", "mode": "closed", "requests": 4, "concurrency": 24},
        {"name": "open", "mode": "open", "requests": 4, "rate": 2.0},
    ]
    return ProbeConfig.model_validate({"profiles": profiles, "prompts": str(file), "max_tokens": 10})


def made(task: dict[str, Any], *docs: dict[str, Any]) -> Evalset:
    """An eval set with a task file of its own, at a digest of its own."""
    shipped = load(EvalsetConfig(path=str(EVALSETS / "ticket_json")))
    items = tuple(Item(k, str(k), "all", None, json.dumps(doc)) for k, doc in enumerate(docs))
    return replace(shipped, name="mine", task=task, items=items, drawn=items, digest=repr([task, docs]))


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"output_type": "generate_until", "doc_to_text": "Q: {{q}}", "generation_kwargs": {"max_gen_toks": 7}},
         [("Q: two words", 7)]),
        ({"output_type": "generate_until", "doc_to_text": "q"}, [("two words", 256)]),
        ({"output_type": "multiple_choice", "doc_to_text": "{{q}}:", "doc_to_choice": ["a", "b c"]},
         [("two words: a", 0), ("two words: b c", 0)]),
        ({"output_type": "multiple_choice", "doc_to_text": "q", "doc_to_choice": "options", "target_delimiter": "-"},
         [("two words-x", 0)]),
        ({"output_type": "loglikelihood", "doc_to_text": "q", "doc_to_target": "{{a}}"}, [("two words yes", 0)]),
        ({"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "q"}, []),
    ],
)  # fmt: skip
def test_prompts_are_those_that_lm_eval_would_send(task: dict[str, Any], expected: list[tuple[str, int]]) -> None:
    """Fields by name, Jinja templates, choices behind a delimiter; windows of whole texts fit any engine."""
    doc = {"q": "two words", "a": "yes", "options": ["x"]}
    assert expected == list(lengths.requests(made(task, doc)))


def test_prompts_that_a_function_makes_are_not_guessed() -> None:
    """!function is run only when the task is."""
    assert [] == list(lengths.requests(made({"output_type": "generate_until", "doc_to_text": object()}, {"q": "x"})))


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"output_type": "generate_until", "doc_to_text": "{{q}}?", "doc_to_target": "a"}, "two words? yes"),
        ({"output_type": "multiple_choice", "doc_to_text": "q", "doc_to_choice": ["no", "yes"], "doc_to_target": "at"},
         "two words yes"),
        ({"output_type": "multiple_choice", "doc_to_text": "q", "doc_to_choice": "options", "doc_to_target": "x",
          "target_delimiter": "-"}, "two words-x"),
        ({"output_type": "multiple_choice", "doc_to_text": "q", "doc_to_choice": "options", "doc_to_target": "at"},
         "two words"),
        ({"output_type": "generate_until", "doc_to_text": "q", "doc_to_target": object()}, "two words"),
        ({"output_type": "generate_until", "doc_to_text": object()}, None),
        ({"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "q"}, None),
    ],
)  # fmt: skip
def test_a_prompt_is_shown_with_its_right_answer(task: dict[str, Any], expected: str | None) -> None:
    """The target itself, or the choice that it names by place or by text; an answer not to be known is left out."""
    doc = {"q": "two words", "a": "yes", "options": ["x"], "at": 1}
    assert expected == lengths.answered(made(task, doc), json.dumps(doc))


@pytest.mark.parametrize(
    ("name", "scored"),
    [("support_intent", True), ("gsm8k_choice", True), ("heldout_text", True), ("ticket_json", False)],
)
def test_shipped_sets_say_whether_prompts_are_scored(name: str, scored: bool) -> None:
    """Choices and whole texts are; generated answers are not."""
    assert scored == lengths.scores_prompts(load(EvalsetConfig(path=str(EVALSETS / name))))


def test_the_longest_request_is_found_with_who_sends_it(base: Path, tmp_path: Path) -> None:
    """20 words of the probe and its opening token are the longest prompt; 5 words and 30 more the longest request."""
    task = {"output_type": "generate_until", "doc_to_text": "q", "generation_kwargs": {"max_gen_toks": 30}}
    sets = [made(task, {"q": "word " * 5}, {"q": "word"})]
    found = foresee(sets, probe(tmp_path, 20), base, DigestCache(tmp_path / "cache.json"))
    assert Longest(21, "the probe") == found.prompt
    assert Longest(35, "eval set mine") == found.request
    assert (24, ()) == (found.in_flight, found.scored)


def test_without_a_tokenizer_lengths_stay_unknown(tmp_path: Path) -> None:
    """A base that has to be converted first has none yet; what is scored is known all the same."""
    support = load(EvalsetConfig(path=str(EVALSETS / "support_intent")))
    for checkpoint in (None, tmp_path):
        found = foresee([support], probe(tmp_path, 3), checkpoint, DigestCache(tmp_path / "cache.json"))
        assert (None, None, ("support_intent",)) == (found.prompt, found.request, found.scored)


def test_prompts_that_are_missing_or_broken_are_told_when_planning(base: Path, tmp_path: Path) -> None:
    """Not after hours, when the probe begins."""
    given = probe(tmp_path, 3)
    lost = given.model_copy(update={"prompts": str(tmp_path / "nowhere.jsonl")})
    with pytest.raises(InputError, match="no such file"):
        foresee([], lost, base, DigestCache(tmp_path / "cache.json"))
    Path(given.prompts).write_text("{broken\n")
    with pytest.raises(InputError, match="line 1"):
        foresee([], given, base, DigestCache(tmp_path / "cache.json"))


def test_what_was_measured_is_not_measured_again(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same set, tokenizer and prompts give the same figures from the cache, without a tokenizer being opened."""
    sets, given = [made({"output_type": "generate_until", "doc_to_text": "q"}, {"q": "word"})], probe(tmp_path, 3)
    first = foresee(sets, given, base, DigestCache(tmp_path / "cache.json"))
    monkeypatch.setattr(Tokenizer, "from_file", None)
    assert first == foresee(sets, given, base, DigestCache(tmp_path / "cache.json"))
