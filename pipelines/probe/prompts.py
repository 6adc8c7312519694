"""Prompts as token ids: read from the team's own requests, tokenized once, the same ids for every engine.

Each request sent starts with a token of its own, so no two share a prefix and no prefix cache helps any of them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ConfigDict

from pipelines.config import Strict, parse
from pipelines.engine.chat import ChatTemplate
from pipelines.errors import ConfigError, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Message(Strict):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: str
    content: str


class Item(Strict):
    """One line of a prompt file: `text` as it is, or `messages` to be rendered with the model's chat template.

    Other keys are left alone, for the file may be a log of requests.
    """

    model_config = ConfigDict(extra="ignore")

    id: str = ""
    text: str | None = None
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenized."""

    id: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts for one tokenizer, and the ids that open its requests. `opening_ids` are distinct ordinary tokens."""

    prompts: tuple[Prompt, ...]
    opening_ids: tuple[int, ...]

    def request_ids(self, prompt: int, serial: int) -> tuple[int, ...]:
        """Return prompt ids behind the opening token number `serial`; different serials never share a first token."""
        return (self.opening_ids[serial], *self.prompts[prompt].ids)


def load(path: Path, engine_dir: Path, *, requests: int, seed: int, sha256: str = "") -> PromptSet:
    """Read, render and tokenize the prompts for one engine, with opening tokens for `requests` requests.

    Raises:
        InputError: an unreadable file or line, another hash than `sha256`, or more requests than ordinary tokens.
    """
    from tokenizers import Tokenizer

    tokenizer_file = engine_dir / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise InputError(
            f"{tokenizer_file}: missing; the probe sends token ids, which only an engine's tokenizer can make"
        )
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    items = read_items(path, sha256)
    template = ChatTemplate.of(engine_dir)
    prompts = []
    for number, item in enumerate(items):
        text = item.text if item.text is not None else _render(template, item.messages)
        ids = tokenizer.encode(text, add_special_tokens=item.text is not None).ids
        prompts.append(Prompt(item.id or str(number), tuple(ids)))
    return PromptSet(tuple(prompts), _opening_ids(tokenizer, requests, seed))


def read_items(path: Path, sha256: str = "") -> list[Item]:
    """Read a prompt file, naming the line of whatever is wrong."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"probe.prompts={str(path)!r}: cannot be read ({error.strerror})") from None
    found = hashlib.sha256(data).hexdigest()
    if sha256 and found != sha256:
        raise InputError(f"probe.prompts={str(path)!r}: sha256 is {found}, expected {sha256}; the file has changed")
    items = [_item(path, number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not items:
        raise InputError(f"probe.prompts={str(path)!r}: holds no prompts")
    return items


def _item(path: Path, number: int, line: bytes) -> Item:
    try:
        item = parse(Item, json.loads(line))
    except (ValueError, ConfigError) as error:
        raise InputError(f"{path}, line {number}: {error}") from None
    if not item.text and not item.messages:
        raise InputError(f"{path}, line {number}: no prompt (give text or messages)")
    return item


def _render(template: ChatTemplate | None, messages: Sequence[Message]) -> str:
    """Messages as the model expects them; a model without a chat template gets their contents, by blank lines."""
    if template is None:
        return "\n\n".join(message.content for message in messages)
    return template.render([message.model_dump() for message in messages])


def _opening_ids(tokenizer: Tokenizer, requests: int, seed: int) -> tuple[int, ...]:
    """Draw distinct ordinary token ids: of the vocabulary, less special and added tokens."""
    added = tokenizer.get_added_tokens_decoder()
    ordinary = sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - added.keys())
    if requests > len(ordinary):
        raise InputError(
            f"probe.profiles: {requests} requests over all rounds, but the vocabulary has {len(ordinary)} ordinary "
            "tokens to tell them apart by; lower probe.rounds or the profiles' requests"
        )
    random.Random(f"openings/{seed}").shuffle(ordinary)
    return tuple(ordinary[:requests])
