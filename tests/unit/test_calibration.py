"""Calibration sets: what is refused, what is frozen, and that no eval text is in them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError

from pipelines.config import keyed
from pipelines.errors import ConfigError, InputError
from pipelines.intake import calibration
from pipelines.intake.calibration import CalibrationConfig, load, pinned
from pipelines.intake.leaks import Leak, leaks, near_duplicates, texts_of

PROVERB = "a stitch in time saves nine so mend the coat before winter comes to stay for good"  # 17 words


class WordTokenizer:
    """One id per word, by length; 1 starts a text, 2 ends one."""

    eos_token_id = 2
    chat_template: str | dict[str, str] | None = "yes"

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        ids = [10 + len(word) for word in text.split()]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, chat_template: str | None, tokenize: bool
    ) -> str:
        if any(m["role"] == "tool" for m in messages):
            raise TemplateError("Conversation roles must alternate user/assistant")
        return " ".join(f"<{m['role']}> {m['content']} <end>" for m in messages) + (chat_template or "")


def sequences(rows: list[dict[str, Any]], tokenizer: WordTokenizer | None = None, **settings: Any) -> list[list[int]]:
    """What a config makes of rows with a tokenizer that can be followed by hand."""
    config = CalibrationConfig(source="x.jsonl", **settings)
    given = tokenizer or WordTokenizer()
    return list(calibration._sequences(config, given, iter(rows), hashlib.sha256()))  # type: ignore[arg-type]


def write(path: Path, rows: Sequence[object]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_packing_joins_texts_and_cuts_equal_lengths() -> None:
    """Texts are joined with an end token between them; what does not fill a sequence is dropped."""
    rows = [{"text": "aa bbb"}, {"text": "c dd eee ffff g"}, {"text": "h"}]
    assert [[1, 12, 13, 2, 1, 11, 12, 13]] == sequences(rows, max_tokens=8)


def test_truncation_keeps_one_text_per_sequence() -> None:
    """Without packing a text is cut to the longest allowed, and shorter ones than the shortest are left out."""
    rows = [{"text": "a b c d e f g h i j"}, {"text": "a"}]
    assert [[1, *[11] * 7]] == sequences(rows, pack=False, max_tokens=8, min_tokens=3)


def test_messages_are_rendered_with_the_template() -> None:
    """A conversation is tokenized as the template writes it, with no special tokens added twice."""
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]
    assert [[16, 12, 15]] == sequences(rows, pack=False, min_tokens=1)


def test_messages_without_a_template_are_refused() -> None:
    """A model without a chat template cannot be shown conversations as it would see them."""
    tokenizer = WordTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="apply_chat_template=false"):
        sequences([{"messages": [{"role": "user", "content": "hi"}]}], tokenizer)


def test_a_template_that_the_tokenizer_does_not_have_is_refused() -> None:
    """Of several templates one is chosen by name; a name it does not have is answered with those it has."""
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]
    tokenizer = WordTokenizer()
    with pytest.raises(InputError, match=r"chat_template='deutsch': .*has one, without a name"):
        sequences(rows, tokenizer, chat_template="deutsch")
    tokenizer.chat_template = {"default": "", "tool_use": ""}
    with pytest.raises(InputError, match="did you mean 'tool_use'"):
        sequences(rows, tokenizer, chat_template="tool_us")
    assert [[16, 12, 15 + len("tool_use")]] == sequences(
        rows, tokenizer, chat_template="tool_use", pack=False, min_tokens=1
    )
    tokenizer.chat_template = {"rag": "", "tool_use": ""}
    with pytest.raises(InputError, match=r"several templates \(allowed: rag, tool_use\)"):
        sequences(rows, tokenizer)


def test_a_conversation_that_the_template_refuses_is_named() -> None:
    """What a template raises becomes one sentence with the roles and the beginning of the row."""
    rows = [{"messages": [{"role": "tool", "content": "42 degrees"}]}]
    with pytest.raises(InputError, match=r"refuses a conversation of tool \(Conversation roles.*'42 degrees'"):
        sequences(rows)


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An id without an embedding would stop a quantizer in the middle; it is told, and nothing is written."""
    from safetensors.numpy import save_file

    save_file({"model.embed_tokens.weight": np.zeros((13, 4), np.float32)}, tmp_path / "model.safetensors")
    loader = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=lambda _: WordTokenizer()))
    monkeypatch.setitem(sys.modules, "transformers", loader)
    source, out = write(tmp_path / "rows.jsonl", [{"text": "a bb ccc dddd"}]), tmp_path / "out"
    out.mkdir()
    config = pinned(CalibrationConfig(source=source, samples=1, pack=False, min_tokens=1))
    with pytest.raises(InputError, match=r"gives token id 14, but it has embeddings for 13 tokens \(0 to 12\)"):
        calibration.run(config, out, checkpoint=tmp_path)
    assert [] == list(out.iterdir())


def test_the_key_follows_the_text_and_not_its_place(tmp_path: Path) -> None:
    """The same rows under another name give the same key; other rows give another."""
    rows = [{"text": "one"}]
    configs = [
        pinned(CalibrationConfig(source=write(tmp_path / name, content)))
        for name, content in (("a.jsonl", rows), ("b.jsonl", rows), ("c.jsonl", [{"text": "two"}]))
    ]
    first, moved, changed = (json.dumps(keyed(c)) for c in configs)
    assert (True, False) == (first == moved, first == changed)


def test_every_missing_file_is_named_at_once(tmp_path: Path) -> None:
    """A config with two wrong paths gives one error with both keys."""
    config = CalibrationConfig(source=str(tmp_path / "no.jsonl"), held_out=(str(tmp_path / "none.jsonl"),))
    with pytest.raises(ConfigError) as caught:
        pinned(config)
    assert ["calibration.source", "calibration.held_out[0]"] == [p.key for p in caught.value.problems]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
        ('{"prompt": "x"}', "line 2 has neither"),
        ('{"text": NaN}', "line 2 has neither"),
        ('{"messages": []}', "line 2 has neither"),
        ('{"messages": [{"role": "user"}]}', "line 2 has neither"),
    ],
)
def test_a_broken_row_is_named_by_its_line(tmp_path: Path, line: str, said: str) -> None:
    """Whatever is wrong with a row, its line number is said."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(InputError, match=said):
        calibration._read(CalibrationConfig(source=str(path)))


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    """A file without rows is no calibration set."""
    with pytest.raises(InputError, match="no rows"):
        calibration._read(CalibrationConfig(source=write(tmp_path / "rows.jsonl", [])))


@pytest.mark.parametrize("ids", [[], [1.5], [-1], ["a"], None])
def test_a_frozen_set_holds_token_ids_and_nothing_else(tmp_path: Path, ids: object) -> None:
    """A damaged frozen set is refused before a quantizer reads it."""
    write(tmp_path / calibration.SAMPLES, [{"ids": [1, 2]}, {"ids": ids}])
    with pytest.raises(InputError, match="line 2"):
        load(tmp_path)


def test_shared_words_in_a_row_are_a_leak() -> None:
    """Thirteen words in a row are found whatever stands around them, in any case and punctuation."""
    shouted = "Remember: " + PROVERB.upper().replace(" ", ", ") + "!"
    (found,) = leaks([PROVERB], ["something else entirely", shouted])
    assert Leak(1, 0, " ".join(PROVERB.split()[:13])) == found


def test_twelve_words_in_a_row_are_not_a_leak() -> None:
    """Common phrases are shorter than thirteen words."""
    assert [] == leaks([PROVERB], [" ".join(PROVERB.split()[:12]) + " and then something different"])


def test_a_short_text_leaks_if_it_is_there_whole() -> None:
    """A short eval text is found when it is a calibration text, not when it is part of one; labels never are."""
    ticket = "my parcel never arrived please refund me"
    assert [Leak(0, 1, ticket)] == leaks(["billing", ticket, f"hello {ticket}"], [ticket.title(), "billing"])


@given(st.lists(st.text("ab ", min_size=1), max_size=4), st.lists(st.text("ab ", min_size=1), max_size=4))
def test_leaks_agree_with_looking_for_every_run(shown: list[str], asked: list[str]) -> None:
    """The index finds exactly what comparing every run of three words with every text finds."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[k : k + 3]) for k in range(len(words) - 2)}

    expected = [k for k, text in enumerate(asked) if any(runs(text) & runs(other) for other in shown)]
    assert expected == sorted({leak.eval_text for leak in leaks(shown, asked, n=3)})


def test_texts_of_an_item_are_found_at_any_depth() -> None:
    """An eval item's words may be in lists and objects; numbers are no text."""
    assert ["a", "b", "c"] == list(texts_of({"id": 1, "q": "a", "choices": ["b", {"text": "c"}], "score": 0.5}))


def leaky(tmp_path: Path, **changes: object) -> CalibrationConfig:
    """Three rows of which the second holds an eval item's words and the third is nearly another's text."""
    rows = [{"text": "nothing of the kind, only words of its own"}, {"text": f"so {PROVERB}"}, {"text": LETTER}]
    items = [
        {"id": "q1", "question": "unrelated"},
        {"id": "q2", "question": PROVERB},
        {"id": "q3", "text": LETTER_AGAIN},
    ]
    given = {"source": write(tmp_path / "rows.jsonl", rows), "held_out": (write(tmp_path / "mine/items.jsonl", items),)}
    return CalibrationConfig.model_validate(given | changes)


LETTER = (  # 28 words
    "Dear Ada, the parcel with the blue lamp came on Monday. The shade is dented on one side. "
    "Could you send a new one? The rest is fine. Yours, Bo"
)
LETTER_AGAIN = LETTER.replace("Ada", "Eve").replace("Bo", "Jo")


def test_a_leak_into_an_eval_set_names_every_item(tmp_path: Path) -> None:
    """A calibration set that holds eval items, or nearly, is refused: each item with the row that holds it."""
    with pytest.raises(InputError) as caught:
        pinned(leaky(tmp_path))
    told = str(caught.value)
    assert "shares text with 2 eval items" in told
    assert "mine/q2: row 2 of the calibration set, the words" in told
    assert "mine/q3: row 3 of the calibration set" in told


def test_leaks_may_be_left_out_and_change_the_key(tmp_path: Path) -> None:
    """With exclude the rows go, the content is another one, and which rows went is on record."""
    kept = pinned(leaky(tmp_path, leaks="exclude"))
    clean = pinned(leaky(tmp_path, held_out=()))
    assert ((1, 2), ()) == (kept.excluded, clean.excluded)
    assert keyed(kept) != keyed(clean)
    assert keyed(clean) == keyed(pinned(leaky(tmp_path, held_out=(), leaks="exclude", similarity=0.9)))


def test_near_duplicates_are_found_by_library_and_counted_exactly() -> None:
    """Two names changed in a letter of 28 words leave most runs of three alike; a short text is nobody's own."""
    (found,) = near_duplicates([LETTER, PROVERB], [LETTER_AGAIN, "Dear Ada, thanks."], 0.6)
    assert (0, 0, True) == (found.eval_text, found.calibration_text, found.near)
    assert [] == near_duplicates([LETTER], [LETTER_AGAIN], 0.95)
    assert [0] == [leak.eval_text for leak in near_duplicates([LETTER], [LETTER.upper()], 1.0)]


def test_a_set_compared_with_nothing_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose leaks are known fixes the set alone, and would pay seconds for an import that finds nothing."""
    monkeypatch.setitem(sys.modules, "datasketch", None)
    assert () == pinned(leaky(tmp_path, held_out=(), leaks="exclude")).excluded
    with pytest.raises(ImportError):
        near_duplicates([LETTER], [LETTER_AGAIN])
