"""What a campaign will ask of engines, measured with the base's own tokenizer before an engine exists."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pipelines.config import CONF_DIR, keyed
from pipelines.engine.pairing import Longest
from pipelines.errors import ConfigError
from pipelines.evaluate import lengths
from pipelines.evaluate.evalset import Evalset, EvalsetConfig, Item, load
from pipelines.intake.digests import DigestCache
from pipelines.probe import sources
from pipelines.probe.config import EvalPrompts, ProbeConfig
from pipelines.workload import foresee, pinned

EVALSETS = CONF_DIR.parent / "evalsets"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint whose tokens are words, with enough of them to open every request."""
    words = {"<unk>": 0, "word": 1} | {f"word{k}": k for k in range(2, 500)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def probe(tmp_path: Path, words: int, *more: dict[str, Any], prompts: object = None) -> ProbeConfig:
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"text": "word " * words}) + "\n")
    profiles = [
        {"name": "calm", "mode": "closed", "requests": 4, "concurrency": 1},
        {"name": "busy", "mode": "closed", "requests": 4, "concurrency": 24},
        {"name": "open", "mode": "open", "requests": 4, "rate": 2.0},
    ]
    return ProbeConfig.model_validate(
        {"profiles": [*profiles, *more], "prompts": prompts or str(file), "max_tokens": 10}
    )


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
    with pytest.raises(ConfigError, match=r"probe\.prompts=.*no such file"):
        foresee([], lost, base, DigestCache(tmp_path / "cache.json"))
    (tmp_path / "requests.jsonl").write_text("{broken\n")
    with pytest.raises(ConfigError, match=r"probe\.prompts=.*line 1"):
        foresee([], given, base, DigestCache(tmp_path / "cache.json"))


def test_profiles_that_cannot_be_filled_are_told_when_planning(base: Path, tmp_path: Path) -> None:
    """A trace that is not there, and a bucket that none of the prompts fall into by the base's own tokenizer."""
    cache = DigestCache(tmp_path / "cache.json")
    replay = {"name": "r", "mode": "replay", "trace": "conf/probe/absent.jsonl"}
    with pytest.raises(ConfigError, match=r"probe\.profiles\.3\.trace='conf/probe/absent\.jsonl': no such file"):
        foresee([], probe(tmp_path, 3, replay), base, cache)
    long = {"name": "l", "mode": "closed", "requests": 4, "concurrency": 1, "bucket": "1024-8192"}
    with pytest.raises(ConfigError, match=r"probe\.profiles\.3\.bucket='1024-8192': .*no prompt.*1 in <=128"):
        foresee([], probe(tmp_path, 3, long), base, cache)


def test_shared_prefixes_and_longer_answers_count(base: Path, tmp_path: Path) -> None:
    """3 words, an opening token and a prefix of 50 are 54 tokens; with an answer of 200 the request takes 254."""
    more = {
        "name": "m",
        "mode": "open",
        "requests": 4,
        "rate": 1,
        "prefix": "shared",
        "shared_tokens": 50,
        "max_tokens": 200,
    }
    found = foresee([], probe(tmp_path, 3, more), base, DigestCache(tmp_path / "cache.json"))
    assert (Longest(54, "the probe"), Longest(254, "the probe")) == (found.prompt, found.request)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"output_type": "generate_until", "doc_to_text": "Q: {{q}}"}, "Q: two words"),
        ({"output_type": "multiple_choice", "doc_to_text": "{{q}}:", "doc_to_choice": ["a", "b"]}, "two words:"),
        ({"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "q"}, "two words"),
        ({"output_type": "generate_until", "doc_to_text": object()}, None),
    ],
)
def test_a_question_is_what_is_asked_before_any_answer(task: dict[str, Any], expected: str | None) -> None:
    """Without the choices that evaluation scores behind it; a text that is only read is itself."""
    assert expected == lengths.question(made(task), json.dumps({"q": "two words"}))


def sets_of(*names: str) -> list[Evalset]:
    return [load(EvalsetConfig(path=str(EVALSETS / name))) for name in names]


def test_eval_sets_give_the_probe_their_prompts(base: Path, tmp_path: Path) -> None:
    """Drawn evenly over the sets and named after their items; what is drawn is fixed, and keyed by what it holds."""
    asked = {"evalsets": ["ticket_json", "passage_qa"], "most": 5}
    sets = sets_of("ticket_json", "passage_qa", "gsm8k_choice")
    given = probe(tmp_path, 3, prompts=asked)
    fixed = pinned(given, sets)
    assert isinstance(fixed.prompts, EvalPrompts)
    assert [item.id.split("/")[0] for item in fixed.prompts.items] == ["ticket_json"] * 3 + ["passage_qa"] * 2
    assert all((item.text or "").startswith(("Ticket:", "Passage:")) for item in fixed.prompts.items)
    assert fixed == pinned(given, sets)
    assert keyed(fixed) != keyed(pinned(probe(tmp_path, 3, prompts=asked | {"most": 4}), sets))
    assert sources.read(fixed).wanted[0].id == fixed.prompts.items[0].id
    found = foresee(sets, given, base, DigestCache(tmp_path / "cache.json"))
    assert found.prompt is not None


def test_a_set_that_is_asked_in_the_chat_template_is_probed_in_it(tmp_path: Path) -> None:
    """Its prompts are messages, which the engine's own template wraps."""
    (one,) = sets_of("ticket_json")
    wrapped = replace(one, config=one.config.model_copy(update={"chat_template": True}))
    fixed = pinned(probe(tmp_path, 3, prompts={"evalsets": ["ticket_json"], "most": 1}), [wrapped])
    assert isinstance(fixed.prompts, EvalPrompts)
    assert fixed.prompts.items[0].text is None
    assert fixed.prompts.items[0].messages[0].role == "user"


def test_eval_sets_without_prompts_to_give_are_told(tmp_path: Path) -> None:
    """A name that is not in the campaign, with the closest; a set whose prompts a function makes."""
    asked = probe(tmp_path, 3, prompts={"evalsets": ["ticket_jsn", "mine"]})
    with pytest.raises(ConfigError) as caught:
        pinned(asked, [*sets_of("ticket_json"), made({"output_type": "generate_until", "doc_to_text": object()}, {})])
    first, second = map(str, caught.value.problems)
    assert "probe.prompts.evalsets='ticket_jsn'" in first
    assert "did you mean 'ticket_json'" in first
    assert "made by a function" in second


def test_planned_prompts_are_those_that_are_sent(tmp_path: Path) -> None:
    """Prompts in the configuration that are not what its hash says are refused, as a changed file is."""
    fixed = pinned(probe(tmp_path, 3, prompts={"evalsets": ["ticket_json"]}), sets_of("ticket_json"))
    with pytest.raises(ConfigError, match="not what was planned with"):
        sources.read(fixed.model_copy(update={"prompts_sha256": "0" * 64}))


def test_what_was_measured_is_not_measured_again(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same set, tokenizer and prompts give the same figures from the cache, without a tokenizer being opened."""
    sets, given = [made({"output_type": "generate_until", "doc_to_text": "q"}, {"q": "word"})], probe(tmp_path, 3)
    first = foresee(sets, given, base, DigestCache(tmp_path / "cache.json"))
    monkeypatch.setattr(Tokenizer, "from_file", None)
    assert first == foresee(sets, given, base, DigestCache(tmp_path / "cache.json"))
