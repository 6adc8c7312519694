"""What a campaign will ask of its engines, known before they exist: how long its requests are, and what is scored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.config import find
from pipelines.engine.pairing import Longest, Workload
from pipelines.errors import InputError
from pipelines.evaluate import lengths
from pipelines.evaluate.evalset import Evalset
from pipelines.flow.store import digest_of, sha256_of
from pipelines.intake.digests import DigestCache, text_sha256
from pipelines.probe import prompts
from pipelines.probe.config import ProbeConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
Sizes = tuple[int, int]
"""Tokens of the longest prompt, and of the longest prompt with its answer."""


def foresee(evalsets: Sequence[Evalset], probe: ProbeConfig, checkpoint: Path | None, cache: DigestCache) -> Workload:
    """Measure the longest requests with the checkpoint's own tokenizer; without one, lengths stay unknown.

    Raises:
        InputError: the probe's prompts cannot be read or rendered, or the tokenizer cannot be.
    """
    sizes = {} if checkpoint is None else _sizes(evalsets, probe, checkpoint, cache)
    return Workload(
        prompt=_longest((prompt, whose) for whose, (prompt, _) in sizes.items()),
        request=_longest((request, whose) for whose, (_, request) in sizes.items()),
        in_flight=max((profile.concurrency or 1 for profile in probe.profiles), default=1),
        scored=tuple(e.name for e in evalsets if lengths.scores_prompts(e)),
    )


def _longest(found: Iterable[tuple[int, str]]) -> Longest | None:
    tokens, whose = max(found, default=(0, ""))
    return Longest(tokens, whose) if tokens else None


def _sizes(
    evalsets: Sequence[Evalset], probe: ProbeConfig, checkpoint: Path, cache: DigestCache
) -> Mapping[str, Sizes]:
    tokenizer_file = checkpoint / TOKENIZER
    if not tokenizer_file.is_file() or "model" not in json.loads(tokenizer_file.read_bytes()):
        return {}
    mark, asked = sha256_of(tokenizer_file), find(probe.prompts)
    if not asked.is_file():
        raise InputError(f"probe.prompts={probe.prompts!r}: no such file")
    keys = {f"eval set {e.name}": digest_of({"longest in": e.digest, "tokenizer": mark}) for e in evalsets}
    found = {
        whose: cache.found_in(key, lambda e=evalset: _of_evalset(e, tokenizer_file))  # type: ignore[misc]
        for (whose, key), evalset in zip(keys.items(), evalsets, strict=True)
    }
    key = digest_of({"longest prompt": text_sha256(asked), "tokenizer": mark, "template": _template(checkpoint)})
    longest = int(cache.found_in(key, lambda: {"prompt": _of_prompts(asked, checkpoint)})["prompt"])
    sizes = {whose: (int(size["prompt"]), int(size["request"])) for whose, size in found.items()}
    return sizes | {"the probe": (longest, longest + probe.max_tokens)}


def _template(checkpoint: Path) -> list[str]:
    files = (checkpoint / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    return [text_sha256(file) for file in files if file.is_file()]


def _of_evalset(evalset: Evalset, tokenizer_file: Path) -> dict[str, int]:
    asked = list(lengths.requests(evalset))
    counts = list(_counts(_open(tokenizer_file), [text for text, _ in asked])) if asked else []
    return {
        "prompt": max(counts, default=0),
        "request": max((n + more for n, (_, more) in zip(counts, asked, strict=True)), default=0),
    }


def _of_prompts(path: Path, checkpoint: Path) -> int:
    """Tokens of the longest prompt of the probe, with the token that opens each request."""
    loaded = prompts.load(path, checkpoint, requests=1, seed=0)
    return max(len(prompt.ids) for prompt in loaded.prompts) + 1


def _counts(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[int]:
    for start in range(0, len(texts), 1000):
        yield from (len(e.ids) for e in tokenizer.encode_batch(list(texts[start : start + 1000])))


def _open(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
