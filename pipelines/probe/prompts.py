"""Prompts as token ids: tokenized once, the same ids for every engine.

Each request has an opening token of its own before its prompt, so that no two share a prefix and no prefix cache helps
any of them, but for the prefix that a profile shares on purpose.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict

from pipelines.config import Strict, parse
from pipelines.engine.chat import ChatTemplate
from pipelines.engine.host.text import BROKEN
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


Bucket = Literal["<=128", "128-1024", "1024-8192", ">8192"]
_ENDS: tuple[tuple[Bucket, float], ...] = (("<=128", 128), ("128-1024", 1024), ("1024-8192", 8192), (">8192", math.inf))


def bucket(tokens: int) -> Bucket:
    """Name the bucket of an input length; each ends with the length that it is named for."""
    return next(name for name, most in _ENDS if tokens <= most)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt before it is tokenized: an item, or without one `tokens` tokens cut from texts of others.

    texts: which of the prompts wanted, one after another and again from the first, until there are enough.
    """

    id: str
    item: Item | None = None
    tokens: int = 0
    texts: tuple[int, ...] = ()


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

    def request_ids(self, prompt: int, serial: int, prefix: Sequence[int] = ()) -> tuple[int, ...]:
        """Return prompt ids behind the opening token number `serial`; different serials never share a first token.

        A prefix that is shared stands before both.
        """
        return (*prefix, self.opening_ids[serial], *self.prompts[prompt].ids)

    def shared_prefix(self, serial: int, tokens: int) -> tuple[int, ...]:
        """Return `tokens` ids to be shared: the opening token number `serial`, then the texts of the prompts."""
        return (self.opening_ids[serial], *itertools.islice(_joined([p.ids for p in self.prompts]), tokens - 1))


def load(wanted: Sequence[Wanted], engine_dir: Path, *, seed: int) -> PromptSet:
    """Render and tokenize prompts for one engine.

    Raises:
        InputError: no tokenizer, or a chat template that cannot be read or refuses the messages.
    """
    from tokenizers import Tokenizer

    tokenizer_file = engine_dir / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise InputError(
            f"{tokenizer_file}: missing; the probe sends token ids, which only an engine's tokenizer can make"
        )
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    template = ChatTemplate.of(engine_dir)
    whole = {place: _encode(tokenizer, template, one.item) for place, one in enumerate(wanted) if one.item is not None}
    prompts = (Prompt(one.id, whole[place] if place in whole else _cut(one, whole)) for place, one in enumerate(wanted))
    return PromptSet(tuple(prompts), _opening_ids(tokenizer, seed))


def _encode(tokenizer: Tokenizer, template: ChatTemplate | None, item: Item) -> tuple[int, ...]:
    text = item.text if item.text is not None else _render(template, item.messages)
    return tuple(tokenizer.encode(text, add_special_tokens=item.text is not None).ids)


def _cut(wanted: Wanted, whole: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(itertools.islice(_joined([whole[place] for place in wanted.texts]), wanted.tokens))


def _joined(texts: Sequence[Sequence[int]]) -> Iterator[int]:
    """All ids of all texts, again and again."""
    return itertools.chain.from_iterable(itertools.cycle(texts))


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


def _opening_ids(tokenizer: Tokenizer, seed: int) -> tuple[int, ...]:
    """Ordinary token ids in a random order: the vocabulary, less special and added tokens and pieces of characters,
    which a server that takes text only could not be sent."""
    added = tokenizer.get_added_tokens_decoder()
    ordinary = sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - added.keys())
    texts = tokenizer.decode_batch([[one] for one in ordinary], skip_special_tokens=False)
    found = [one for one, text in zip(ordinary, texts, strict=True) if text and BROKEN not in text]
    random.Random(f"openings/{seed}").shuffle(found)
    return tuple(found)
