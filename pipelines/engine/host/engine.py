"""An engine directory as the server needs it: what it is called, its limits, its tokenizer and its chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engine.card import EngineCard, read_card
from pipelines.engine.host.text import TokenNames
from pipelines.engine.host.wire import Refused
from pipelines.errors import InputError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Engine:
    """A directory's card and files, read once."""

    path: Path
    card: EngineCard
    tokenizer: Tokenizer

    @classmethod
    def read(cls, path: Path) -> Engine:
        """Read an engine directory.

        Raises:
            InputError: a file is missing or cannot be read.
        """
        from tokenizers import Tokenizer

        card = read_card(path)
        tokenizer_file = path / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise InputError(f"{path}: no tokenizer.json")
        tokenizer = Tokenizer.from_str(tokenizer_file.read_text())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(path, card, tokenizer)

    @cached_property
    def names(self) -> TokenNames:
        """The text of single tokens."""
        return TokenNames(self.tokenizer)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of a prompt, special tokens included."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    @cached_property
    def _template(self) -> Template | None:
        file = self.path / "chat_template.jinja"
        return _environment().from_string(file.read_text()) if file.is_file() else None

    @cached_property
    def _special(self) -> dict[str, str]:
        file = self.path / "tokenizer_config.json"
        found = _json(file) if file.is_file() else {}
        named = {name: value for name, value in found.items() if name.endswith("_token")}
        return {n: v["content"] if isinstance(v, dict) else v for n, v in named.items() if v is not None}

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Write a conversation as the model expects it, up to where its answer begins.

        Raises:
            Refused: the model has no chat template, or the template refuses these messages.
        """
        from jinja2 import TemplateError

        if self._template is None:
            raise Refused("this model has no chat template: use /v1/completions")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._special)
        except (TemplateError, TypeError) as error:
            raise Refused(f"messages: the chat template refuses them: {error}", "messages") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (json.JSONDecodeError, OSError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    return data


def _environment() -> Any:
    """A sandbox with the functions that model authors count on in their templates."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
