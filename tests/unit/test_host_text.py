"""Token ids to text: whole characters, whole stop strings, nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipelines.engine.host.text import BROKEN, Detokenizer, StopCutter, TokenNames
from tests.byte_model import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=BROKEN), max_size=30)


@given(prompt=TEXT, text=TEXT)
def test_deltas_join_to_the_text(prompt: str, text: str) -> None:
    """Whatever the prompt, the deltas of a text's tokens are that text, without a broken character on the way."""
    detokenizer = Detokenizer(TOKENIZER, TOKENIZER.encode(prompt).ids)
    deltas = [detokenizer.add(i) for i in TOKENIZER.encode(text).ids]
    assert text == "".join(deltas)
    assert not any(BROKEN in delta for delta in deltas)
    assert "" == detokenizer.flush()


def test_an_unfinished_character_is_flushed_as_a_replacement() -> None:
    """Bytes that never become a character are shown once, at the end."""
    detokenizer = Detokenizer(TOKENIZER)
    first = TOKENIZER.encode("aé").ids[:2]
    assert ["a", ""] == [detokenizer.add(i) for i in first]
    assert BROKEN == detokenizer.flush()


def test_a_prompt_that_ends_inside_a_character_gets_the_whole_character() -> None:
    """The completing token yields the character, although its first byte was in the prompt."""
    head, tail = TOKENIZER.encode("é").ids
    assert "é" == Detokenizer(TOKENIZER, [head]).add(tail)


def test_special_tokens_have_no_text() -> None:
    """An end-of-text token inside a text adds nothing."""
    detokenizer = Detokenizer(TOKENIZER)
    ids = TOKENIZER.encode("ab").ids
    assert ["a", "", "b"] == [detokenizer.add(i) for i in (ids[0], EOS, ids[1])]


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_text_is_cut_at_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    """Sent text never holds a stop string or anything after it, however the text was cut into pieces."""
    text = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    cutter, sent, hit = StopCutter(stops), "", False
    for piece in pieces:
        out, hit = cutter.push(piece)
        sent += out
        if hit:
            break
    sent += "" if hit else cutter.rest()
    assert bool(ends) == hit
    assert text.startswith(sent)
    assert not any(stop in sent for stop in stops)
    if not hit:
        assert text == sent


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    """Text that may become a stop string waits; it is sent as soon as it cannot."""
    cutter = StopCutter(["END"])
    assert [("a", False), ("", False), ("ENx", False), ("b", True)] == [
        cutter.push(piece) for piece in ("aE", "N", "x", "bEND and more")
    ]


def test_tokens_without_text_of_their_own_are_named_by_id() -> None:
    """Half a character is shown as token_id:N, so that alternatives never share a name."""
    names = TokenNames(TOKENIZER)
    half = TOKENIZER.encode("é").ids[0]
    assert [f"token_id:{half}", "x", "<end>"] == [names[half], names[TOKENIZER.encode("x").ids[0]], names[EOS]]
