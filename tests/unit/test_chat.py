"""One chat template for server, scoring and probe; expected texts are the template's own by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.engine.chat import ChatTemplate, Unrenderable
from pipelines.errors import InputError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def written(where: Path, source: str) -> ChatTemplate:
    (where / "chat_template.jinja").write_text(source)
    made = ChatTemplate.of(where)
    assert made is not None
    return made


def test_messages_become_what_the_model_was_trained_on(tmp_path: Path) -> None:
    """Up to where its answer begins."""
    assert written(tmp_path, TEMPLATE).render(HELLO) == "<user>hello<assistant>"


def test_a_template_inside_the_tokenizer_config(tmp_path: Path) -> None:
    """Older checkpoints keep the template, and special tokens as objects, in tokenizer_config.json."""
    config = {"chat_template": "{{ bos_token }}" + TEMPLATE, "bos_token": {"content": "<s>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    made = ChatTemplate.of(tmp_path)
    assert made is not None
    assert made.render(HELLO) == "<s><user>hello<assistant>"


def test_nothing_to_render_with(tmp_path: Path) -> None:
    """A base model may have no template; a broken file is not the same."""
    assert ChatTemplate.of(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        ChatTemplate.of(tmp_path)


def test_what_model_authors_count_on(tmp_path: Path) -> None:
    """transformers' additions: loop controls, JSON that keeps letters as they are, today's date."""
    source = (
        "{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}{{ {'a': 'é<'}|tojson }}{{ strftime_now('%Y')|length }}"
    )
    assert written(tmp_path, source).render(HELLO) == '1{"a": "é<"}4'


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for %}", "refuses these messages"),
        ("{{ messages.clear() }}", "refuses these messages"),
    ],
)
def test_a_refusal_is_one_clear_error(source: str, said: str, tmp_path: Path) -> None:
    """A template's own complaint, a broken template, and one that reaches out of the sandbox."""
    with pytest.raises(Unrenderable, match=said):
        written(tmp_path, source).render(HELLO)
