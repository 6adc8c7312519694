"""Prompts: what a file may hold, that all engines get the same ids, and that no two requests share a prefix."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import CONF_DIR
from pipelines.errors import InputError
from pipelines.probe import prompts
from pipelines.probe.prompts import Item, Message, Wanted, bucket

from .probe_configs import write_tokenizer


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    made = tmp_path / "engine"
    write_tokenizer(made)
    return made


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def load(engine: Path, *wanted: Wanted, seed: int = 0) -> prompts.PromptSet:
    return prompts.load(wanted, engine, seed=seed)


def text(words: str) -> Wanted:
    return Wanted("p", Item(text=words))


def test_text_is_tokenized_by_the_engines_tokenizer(engine: Path) -> None:
    """`text` is encoded as it is: w0 to w99 are the tokens 2 to 101 of the test vocabulary."""
    assert load(engine, text("w0 w1 w99")).prompts == (prompts.Prompt("p", (2, 3, 101)),)


def test_no_template_joins_the_contents(engine: Path) -> None:
    """A base model without a chat template gets the messages' plain text: here two words, two tokens."""
    said = (Message(role="system", content="w0"), Message(role="user", content="w1"))
    assert load(engine, Wanted("p", Item(messages=said))).prompts == (prompts.Prompt("p", (2, 3)),)


def test_messages_are_rendered_with_the_chat_template(engine: Path) -> None:
    """With a template the same messages become what the template makes of them."""
    (engine / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} w9 {% endfor %}")
    said = Wanted("p", Item(messages=(Message(role="user", content="w0"),)))
    assert load(engine, said).prompts == (prompts.Prompt("p", (2, 11)),)


def test_a_length_is_cut_from_texts_one_after_another(engine: Path) -> None:
    """Seven tokens of two texts of three and two: all of both, then from the first again."""
    cut = Wanted("cut", None, 7, (1, 0))
    loaded = load(engine, text("w0 w1 w2"), text("w10 w11"), cut)
    assert loaded.prompts[2] == prompts.Prompt("cut", (12, 13, 2, 3, 4, 12, 13))


@given(prompt_count=st.integers(1, 4), requests=st.integers(1, 100), seed=st.integers())
def test_no_two_requests_share_a_prefix(
    prompt_count: int, requests: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every request starts with another token, even when the prompt is the same; special tokens are not used for it."""
    where = tmp_path_factory.mktemp("prompts")
    write_tokenizer(where)
    loaded = load(where, *(text(f"w{k} w7 w8") for k in range(prompt_count)), seed=seed)
    sent = [loaded.request_ids(k % prompt_count, k) for k in range(requests)]
    assert len({ids[0] for ids in sent}) == requests
    assert all(ids[1:] == loaded.prompts[k % prompt_count].ids for k, ids in enumerate(sent))
    assert min(ids[0] for ids in sent) >= 2


@given(tokens=st.integers(1, 30))
def test_a_shared_prefix_is_shared_and_nothing_more(tokens: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two requests have exactly its tokens in common, and a prefix of another serial has none in common with it."""
    where = tmp_path_factory.mktemp("prompts")
    write_tokenizer(where)
    loaded = load(where, text("w1 w2 w3"), text("w4"))
    prefix, other = loaded.shared_prefix(50, tokens), loaded.shared_prefix(51, tokens)
    assert len(prefix) == tokens
    assert prefix[0] != other[0]
    first, second = loaded.request_ids(0, 3, prefix), loaded.request_ids(0, 4, prefix)
    assert first[:tokens] == second[:tokens] == prefix
    assert first[tokens] != second[tokens]
    assert first[tokens + 1 :] == loaded.prompts[0].ids


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(1, "<=128"), (128, "<=128"), (129, "128-1024"), (1024, "128-1024"), (1025, "1024-8192"), (8192, "1024-8192"),
     (8193, ">8192"), (10**6, ">8192")],
)  # fmt: skip
def test_buckets_end_where_they_say(tokens: int, name: str) -> None:
    """A bucket includes the length that ends it, and so not the one that begins it."""
    assert bucket(tokens) == name


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{broken", "line 2"),
        ({"question": "x"}, "line 2: no prompt"),
        ({"text": 7}, "line 2: text=7"),
        ("[]", "line 2"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: object, said: str) -> None:
    """Whatever is wrong with a line, the error names the line."""
    with pytest.raises(InputError, match=said):
        prompts.read_items(write(tmp_path / "p.jsonl", {"text": "fine"}, line))


def test_other_keys_are_left_alone(tmp_path: Path) -> None:
    """A log of requests can be used as it is."""
    path = write(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "x", "name": "n"}], "status": 200})
    assert prompts.read_items(path)[0].messages[0].content == "x"


def test_missing_and_empty_files(tmp_path: Path) -> None:
    """A missing file and one without prompts are both named with their key."""
    with pytest.raises(InputError, match=r"probe\.prompts=.*No such file"):
        prompts.read_items(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match=r"probe\.prompts=.*no prompts"):
        prompts.read_items(write(tmp_path / "p.jsonl", ""))


def test_changed_file_is_refused(tmp_path: Path) -> None:
    """A file whose hash is not the one planned with is not used."""
    path = write(tmp_path / "p.jsonl", {"text": "x"})
    assert prompts.read_items(path, hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(InputError, match="the file has changed"):
        prompts.read_items(path, "0" * 64)


def test_engine_without_tokenizer(tmp_path: Path) -> None:
    """An engine directory without tokenizer.json is one clear error."""
    with pytest.raises(InputError, match=r"tokenizer\.json: missing"):
        load(tmp_path, text("x"))


def test_shipped_requests() -> None:
    """The shipped prompt file holds at least 40 requests with ids of their own, short and long ones."""
    items = prompts.read_items(CONF_DIR / "probe" / "requests.jsonl")
    lengths = [sum(len(message.content) for message in item.messages) for item in items]
    assert len({item.id for item in items}) == len(items) >= 40
    assert min(lengths) < 100
    assert max(lengths) > 1500
