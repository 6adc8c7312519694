"""A model's own chat template, rendered as transformers renders it, in a sandbox: the one way from messages to text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import InputError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import SandboxedEnvironment


class Unrenderable(InputError):
    """The template refuses these messages, or is no template."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template's source and the special tokens that it may name (`bos_token`, `eos_token` and the like)."""

    source: str
    special: Mapping[str, str]

    @classmethod
    def of(cls, engine_dir: Path) -> ChatTemplate | None:
        """Read chat_template.jinja, or the template inside tokenizer_config.json; None where there is neither.

        Raises:
            InputError: a file cannot be read.
        """
        config_path, template_path = engine_dir / "tokenizer_config.json", engine_dir / "chat_template.jinja"
        try:
            config: dict[str, Any] = json.loads(config_path.read_text()) if config_path.is_file() else {}
            source = template_path.read_text() if template_path.is_file() else config.get("chat_template")
        except (OSError, ValueError) as error:
            raise InputError(f"{engine_dir}: the chat template cannot be read: {error}") from None
        named = {name: value for name, value in config.items() if name.endswith("_token") and value is not None}
        special = {n: str(v.get("content", "")) if isinstance(v, dict) else str(v) for n, v in named.items()}
        return cls(source, special) if isinstance(source, str) else None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Write a conversation as the model expects it, up to where its answer begins.

        Raises:
            Unrenderable: the template refuses these messages.
        """
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, tools=None, **self.special
            )
        except (TemplateError, TypeError) as error:
            raise Unrenderable(f"the chat template refuses these messages: {error}") from None

    @cached_property
    def _template(self) -> Template:
        return _environment().from_string(self.source)


def _environment() -> SandboxedEnvironment:
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
