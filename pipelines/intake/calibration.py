"""The calibration set: texts rendered with the model's own chat template, tokenized, sampled by seed, frozen.

It must not share text with an eval set: quantizers fit what they are shown, and the score would flatter them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from pipelines.config import Strict, find
from pipelines.errors import ConfigError, InputError, Problem, closest
from pipelines.flow import progress
from pipelines.flow.store import digest_of
from pipelines.intake.digests import text_sha256
from pipelines.intake.heldout import Shared, listed, shared
from pipelines.intake.lean import without_unused
from pipelines.intake.shards import read_headers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES = "samples.jsonl"


class CalibrationConfig(Strict):
    """What quantizers are shown."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"source", "held_out", "leaks", "similarity", "excluded"})

    source: str = Field(description="a JSONL file whose rows have `messages` or `text`, or the name of a hub data set")
    subset: str | None = Field(default=None, description="of a hub data set: its configuration")
    split: str = Field(default="train", description="of a hub data set: its split")
    revision: str | None = Field(default=None, description="of a hub data set: the commit it is pinned to")
    samples: int = Field(
        default=256, ge=1, description="sequences shown; 128 to 512 is usual, more adds time and little else"
    )
    max_tokens: int = Field(default=512, ge=8, description="longest sequence; with `pack`, the length of each one")
    min_tokens: int = Field(default=16, ge=1, description="without `pack`, shorter texts are left out")
    pack: bool = Field(default=True, description="join texts and cut them to equal lengths; nothing is padding then")
    seed: int = Field(default=0, ge=0, description="which texts, and in which order")
    apply_chat_template: bool = Field(default=True, description="render `messages` as the model sees them in use")
    chat_template: str | None = Field(
        default=None, description="of a tokenizer with several templates: the name of one; null: its default"
    )
    held_out: tuple[str, ...] = Field(
        default=(), description="items.jsonl of the eval sets that must share no text with it"
    )
    ngram: int = Field(default=13, ge=3, description="words in a row that count as shared")
    leaks: Literal["refuse", "exclude"] = Field(
        default="refuse", description="rows that share text with a held-out set: an error, or left out and listed"
    )
    similarity: float = Field(
        default=0.8, ge=0.5, le=1, description="share of runs of three words from which on two texts are the same"
    )
    digest: str = Field(default="", description="filled in when planning: what the source contains")
    excluded: tuple[int, ...] = Field(default=(), description="filled in when planning: rows left out, from 0")


def pinned(config: CalibrationConfig) -> CalibrationConfig:
    """Resolve paths, and fix the content the source has now, so that the key follows the text and not its place.

    Eval sets are looked through here, each time anew, and do not enter the key: one more item in one of them must
    not make every variant again.

    Raises:
        ConfigError: a file that is not there.
        InputError: the source cannot be read, or shares text with an eval set.
    """
    given = {"calibration.source": config.source} if _is_file(config.source) else {}
    given |= {f"calibration.held_out[{k}]": path for k, path in enumerate(config.held_out)}
    missing = [
        Problem(key, path, "no such file", "a JSONL file, or for a hub data set its name (owner/name)")
        for key, path in given.items()
        if not find(path).is_file()
    ]
    if missing:
        raise ConfigError(missing)
    held_out = tuple(str(find(path)) for path in config.held_out)
    if not _is_file(config.source):
        return config.model_copy(update={"held_out": held_out, "digest": config.source})
    source = find(config.source)
    fixed = config.model_copy(update={"source": str(source), "held_out": held_out, "digest": text_sha256(source)})
    found = leaking(fixed)
    if config.leaks == "exclude":
        return without(fixed, (one.row for one in found))
    _refuse(fixed, found)
    return fixed


def run(config: CalibrationConfig, out: Path, *, checkpoint: Path) -> dict[str, str | int]:
    """Freeze the token ids that every quantizer of a campaign is shown.

    Raises:
        InputError: a row that is no text or that the chat template refuses, too little text, no such template, text
            shared with an eval set, or token ids that the model has no embedding for.
    """
    rows = _read(config)
    found = shared([_contents(row) for row in rows], config.held_out, config.ngram, config.similarity)
    _refuse(config, [one for one in found if one.row not in config.excluded])
    rows = [row for number, row in enumerate(rows) if number not in config.excluded]
    with without_unused():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    known = _embeddings(checkpoint)
    order = random.Random(config.seed).sample(range(len(rows)), len(rows))
    hashed = hashlib.sha256()
    samples: list[list[int]] = []
    for ids in _sequences(config, tokenizer, (rows[k] for k in order), hashed):
        if known is not None and max(ids) >= known:
            raise InputError(
                f"{checkpoint}: its tokenizer gives token id {max(ids)}, but it has embeddings for {known} tokens "
                f"(0 to {known - 1}); the tokenizer is another model's, or tokens were added without resizing it"
            )
        samples.append(ids)
        progress.report(len(samples), config.samples, "samples")
        if len(samples) == config.samples:
            break
    if len(samples) < config.samples:
        raise InputError(
            f"calibration.samples={config.samples}: {config.source} gives {len(samples)} sequences of "
            f"{_length(config)} tokens; ask for fewer or shorter ones (calibration.max_tokens), or add text"
        )
    (out / SAMPLES).write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in samples))
    return {
        "samples": len(samples),
        "tokens": sum(map(len, samples)),
        "max_tokens": config.max_tokens,
        "seed": config.seed,
        "excluded_rows": len(config.excluded),
        "source": Path(config.source).name if _is_file(config.source) else config.source,
        "text_sha256": hashed.hexdigest(),
    }


def load(directory: Path) -> list[list[int]]:
    """Read a frozen calibration set.

    Raises:
        InputError: it is not one, or holds anything but token ids.
    """
    path = directory / SAMPLES
    try:
        rows = [json.loads(line)["ids"] for line in path.read_text().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a calibration set ({error})") from None
    for number, ids in enumerate(rows, 1):
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise InputError(f"{path}: line {number} holds something that is not a token id")
    return rows


def _is_file(source: str) -> bool:
    """A hub data set is `owner/name` with no ending; everything else is a path."""
    return source.endswith((".jsonl", ".json")) or source.startswith((".", "/", "~")) or find(source).is_file()


def _length(config: CalibrationConfig) -> str:
    return str(config.max_tokens) if config.pack else f"{config.min_tokens} to {config.max_tokens}"


def _read(config: CalibrationConfig) -> list[Mapping[str, Any]]:
    rows = list(_read_file(Path(config.source))) if _is_file(config.source) else _read_hub(config)
    if not rows:
        raise InputError(f"calibration.source={config.source!r}: holds no rows")
    return rows


def _read_file(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"calibration.source={str(path)!r}: cannot be read as text ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}: line {number} is not JSON ({error})") from None
        if not _is_row(row):
            raise InputError(f"{path}: line {number} has neither `messages` (role, content) nor `text`")
        yield row


def _is_row(row: object) -> bool:
    if not isinstance(row, Mapping):
        return False
    messages = row.get("messages")
    if messages is None:
        return isinstance(row.get("text"), str)
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, Mapping) and isinstance(m.get("content"), str) and "role" in m for m in messages)
    )


def _read_hub(config: CalibrationConfig) -> list[Mapping[str, Any]]:
    from datasets import load_dataset

    try:
        found = load_dataset(config.source, config.subset, split=config.split, revision=config.revision)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"calibration.source={config.source!r}: no such file, and no such hub data set ({reason})"
        ) from None
    rows: list[Mapping[str, Any]] = [row for row in found if _is_row(row)]
    return rows


def leaking(config: CalibrationConfig) -> list[Shared]:
    """Every eval item that shares text with the source, with the row of the source that holds it."""
    return shared([_contents(row) for row in _read(config)], config.held_out, config.ngram, config.similarity)


def without(config: CalibrationConfig, rows: Iterable[int]) -> CalibrationConfig:
    """The same set with rows left out, which is another set: its key follows."""
    excluded = tuple(sorted(set(rows)))
    if not excluded:
        return config
    digest = digest_of({"text": config.digest, "without": list(excluded)})
    return config.model_copy(update={"excluded": excluded, "digest": digest})


def _refuse(config: CalibrationConfig, found: Sequence[Shared]) -> None:
    """Raise over leaks that nobody asked to be left out, naming the items."""
    if found:
        items = len({(one.set, one.item) for one in found})
        raise InputError(
            f"calibration.source={config.source!r} shares text with {items} eval items; a quantizer fitted to what it "
            "is scored on flatters itself (calibration.leaks=exclude leaves the rows out):\n" + listed(found)
        )


def _contents(row: Mapping[str, Any]) -> list[str]:
    return [m["content"] for m in row["messages"]] if row.get("messages") else [row["text"]]


def _sequences(
    config: CalibrationConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterator[Mapping[str, Any]],
    hashed: hashlib._Hash,
) -> Iterator[list[int]]:
    """Token ids of equal length (packed, texts set apart by the end token), or one sequence per text."""
    pending: list[int] = []
    end = tokenizer.eos_token_id
    for row in rows:
        text, templated = _render(config, tokenizer, row)
        hashed.update(text.encode() + b"\0")
        ids = tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"]
        if not config.pack:
            if len(ids) >= config.min_tokens:
                yield ids[: config.max_tokens]
            continue
        pending += ids + ([end] if not templated and end is not None else [])
        while len(pending) >= config.max_tokens:
            yield pending[: config.max_tokens]
            pending = pending[config.max_tokens :]


def _render(config: CalibrationConfig, tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any]) -> tuple[str, bool]:
    """The text of a row, and whether the template has put its special tokens in already."""
    from jinja2 import TemplateError

    if not row.get("messages"):
        return str(row["text"]), False
    if not config.apply_chat_template:
        return "\n".join(_contents(row)), False
    template = _template(config, tokenizer)
    try:
        text = tokenizer.apply_chat_template(row["messages"], chat_template=template, tokenize=False)
    except (TemplateError, TypeError, KeyError) as error:
        roles = ", ".join(str(m["role"]) for m in row["messages"])
        raise InputError(
            f"calibration.source={config.source!r}: the checkpoint's chat template refuses a conversation of {roles} "
            f"({error}), beginning {_contents(row)[0][:60]!r}; take that row out, or set "
            "calibration.apply_chat_template=false"
        ) from None
    return str(text), True


def _template(config: CalibrationConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The name to ask the tokenizer for, None for its default.

    Raises:
        InputError: it has no template at all, none of that name, or several and no default.
    """
    held = tokenizer.chat_template
    if not held:
        raise InputError(
            "the checkpoint has no chat template to render `messages` with; "
            "set calibration.apply_chat_template=false or give rows of `text`"
        )
    names = list(held) if isinstance(held, Mapping) else []
    asked = config.chat_template
    if asked is not None and asked not in names:
        few = closest(asked, names) if names else "it has one, without a name: leave calibration.chat_template null"
        raise InputError(
            f"calibration.chat_template={asked!r}: the checkpoint's tokenizer has no such template ({few})"
        )
    if asked is None and names and "default" not in names:
        raise InputError(f"calibration.chat_template=None: the tokenizer has several templates ({closest('', names)})")
    return asked


def _embeddings(checkpoint: Path) -> int | None:
    """How many tokens the model has embeddings for, by its headers; None where none is named as usual."""
    ends = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
    headers = read_headers(checkpoint)
    return next((header.shape[0] for name, header in headers.items() if name.endswith(ends)), None)
