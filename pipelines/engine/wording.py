"""Prompts of token ids for servers that take text only: such text as is read back as exactly those ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.errors import EndpointError, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Wording:
    """A tokenizer as the server is taken to have it; `begins` is the token it puts before every text by itself."""

    tokenizer: Tokenizer
    begins: int | None = None

    @classmethod
    def of(cls, directory: Path, begins: int | None = None) -> Wording:
        """Read a directory's tokenizer.

        Raises:
            InputError: it has none.
        """
        from tokenizers import Tokenizer

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise InputError(f"{directory}: no tokenizer.json")
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, begins)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            EndpointError: there is none that is read as these ids.
        """
        rest = list(ids)
        if self.begins is not None:
            if rest[:1] != [self.begins]:
                raise EndpointError(f"this server begins every text with token {self.begins}, and the prompt does not")
            rest = rest[1:]
        text: str = self.tokenizer.decode(rest, skip_special_tokens=False)
        if self.tokenizer.encode(text, add_special_tokens=False).ids != rest:
            raise EndpointError(
                f"this server takes text only, and no text is read as these {len(ids)} token ids: {text[:60]!r}..."
            )
        return text
