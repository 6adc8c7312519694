"""An engine directory as the server needs it: what it is called, its limits, its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engine.card import EngineCard, read_card
from pipelines.engine.chat import ChatTemplate, Unrenderable
from pipelines.engine.host.text import TokenNames
from pipelines.engine.host.wire import Refused
from pipelines.errors import InputError

if TYPE_CHECKING:
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
    def _template(self) -> ChatTemplate | None:
        return ChatTemplate.of(self.path)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Write a conversation as the model expects it, up to where its answer begins.

        Raises:
            Refused: the model has no chat template, or the template refuses these messages.
        """
        if self._template is None:
            raise Refused("this model has no chat template: use /v1/completions")
        try:
            return self._template.render(messages)
        except Unrenderable as error:
            raise Refused(f"messages: {error}", "messages") from None
