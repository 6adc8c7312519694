"""What a campaign will ask of its engines, known before they exist: its requests, how long they are, what is scored."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.config import find
from pipelines.engine.pairing import Longest, Workload
from pipelines.errors import ConfigError, Problem, closest
from pipelines.evaluate import lengths
from pipelines.evaluate.evalset import Evalset
from pipelines.flow.store import digest_of, sha256_of
from pipelines.intake.digests import DigestCache, text_sha256
from pipelines.probe import profiles, prompts, rounds, sources
from pipelines.probe.config import EvalPrompts, ProbeConfig
from pipelines.probe.duration import expected_s
from pipelines.probe.profiles import LoadProfile, Replay
from pipelines.probe.prompts import Item, Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
Sizes = tuple[int, int]
"""Tokens of the longest prompt, and of the longest prompt with its answer."""


def pinned(probe: ProbeConfig, evalsets: Sequence[Evalset]) -> ProbeConfig:
    """Fix what a probe will send: files by path and hash, eval sets by the prompts drawn from them.

    Raises:
        ConfigError: every file that does not exist and every eval set that has no prompts to give.
    """
    problems: list[Problem] = []
    found = tuple(_pinned_profile(n, profile, problems) for n, profile in enumerate(probe.profiles))
    given, sha256 = probe.prompts, ""
    if isinstance(given, EvalPrompts):
        given = given.model_copy(update={"items": tuple(_drawn(given, evalsets, probe.seed, problems))})
        sha256 = sources.digest_of_items(given.items)
    elif (file := find(given)).is_file():
        given, sha256 = str(file), text_sha256(file)
    else:
        problems.append(Problem("probe.prompts", given, "no such file"))
    if problems:
        raise ConfigError(problems)
    return probe.model_copy(update={"profiles": found, "prompts": given, "prompts_sha256": sha256})


def foresee(evalsets: Sequence[Evalset], probe: ProbeConfig, checkpoint: Path | None, cache: DigestCache) -> Workload:
    """Measure the longest requests with the checkpoint's own tokenizer; without one, lengths stay unknown.

    Raises:
        ConfigError: everything about the probe's prompts and profiles that would fail when it starts.
        InputError: the prompts cannot be rendered, or the tokenizer cannot be read.
    """
    given = pinned(probe, evalsets)
    found = sources.read(given)
    sizes = {} if checkpoint is None else _sizes(evalsets, given, found, checkpoint, cache)
    return Workload(
        prompt=_longest((prompt, whose) for whose, (prompt, _) in sizes.items()),
        request=_longest((request, whose) for whose, (_, request) in sizes.items()),
        in_flight=max(map(profiles.widest, probe.profiles)),
        scored=tuple(e.name for e in evalsets if lengths.scores_prompts(e)),
    )


def probe_seconds(probe: ProbeConfig, engines: int) -> float:
    """Guess how long a pinned probe of so many engines takes."""
    lines = sources.read(probe).traces
    return engines * expected_s(probe, {name: trace[-1].at_s for name, trace in lines.items() if trace})


def _pinned_profile(number: int, profile: LoadProfile, problems: list[Problem]) -> LoadProfile:
    if not isinstance(profile, Replay):
        return profile
    file = find(profile.trace)
    if not file.is_file():
        problems.append(Problem(f"probe.profiles.{number}.trace", profile.trace, "no such file"))
        return profile
    return profile.model_copy(update={"trace": str(file), "trace_sha256": text_sha256(file)})


def _drawn(given: EvalPrompts, evalsets: Sequence[Evalset], seed: int, problems: list[Problem]) -> Iterator[Item]:
    """Draw prompts evenly over the sets, each as its task file has it, in the chat template where the set says so."""
    known = {e.name: e for e in evalsets}
    for place, name in enumerate(given.evalsets):
        if name not in known:
            what = "no such eval set in this campaign"
            problems.append(Problem("probe.prompts.evalsets", name, what, closest(name, known)))
            continue
        evalset = known[name]
        asked = [(item.id, text) for item in evalset.drawn if (text := lengths.question(evalset, item.line))]
        if not asked:
            what = "its prompts are made by a function or by lm-eval, so that they are not known here"
            problems.append(Problem("probe.prompts.evalsets", name, what))
        count = given.most // len(given.evalsets) + (place < given.most % len(given.evalsets))
        for number, text in random.Random(f"{seed} {name}").sample(asked, min(count, len(asked))):
            label, said = f"{name}/{number}", Message(role="user", content=text)
            yield Item(id=label, messages=(said,)) if evalset.config.chat_template else Item(id=label, text=text)


def _longest(found: Iterable[tuple[int, str]]) -> Longest | None:
    tokens, whose = max(found, default=(0, ""))
    return Longest(tokens, whose) if tokens else None


def _sizes(
    evalsets: Sequence[Evalset], probe: ProbeConfig, found: sources.Sources, checkpoint: Path, cache: DigestCache
) -> Mapping[str, Sizes]:
    tokenizer_file = checkpoint / TOKENIZER
    if not tokenizer_file.is_file() or "model" not in json.loads(tokenizer_file.read_bytes()):
        return {}
    mark = sha256_of(tokenizer_file)
    keys = {f"eval set {e.name}": digest_of({"longest in": e.digest, "tokenizer": mark}) for e in evalsets}
    known = {
        whose: cache.found_in(key, lambda e=evalset: _of_evalset(e, tokenizer_file))  # type: ignore[misc]
        for (whose, key), evalset in zip(keys.items(), evalsets, strict=True)
    }
    texts = [sources.digest_of_items([one.item]) if one.item else one.tokens for one in found.wanted]
    key = digest_of({"lengths of": texts, "tokenizer": mark, "template": _template(checkpoint)})
    told = cache.found_in(key, lambda: _of_prompts(found, checkpoint))
    planned = rounds.plan(probe, found, told["lengths"], told["openings"])
    needs = list(rounds.needs(planned, told["lengths"]))
    sizes = {whose: (int(size["prompt"]), int(size["request"])) for whose, size in known.items()}
    return sizes | {"the probe": (max(n.input_tokens for n in needs), max(n.tokens for n in needs))}


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


def _of_prompts(found: sources.Sources, checkpoint: Path) -> dict[str, object]:
    """Tokens of every prompt that the probe may send, and how many ordinary tokens there are to open requests with."""
    loaded = prompts.load(found.wanted, checkpoint, seed=0)
    return {"lengths": [len(prompt.ids) for prompt in loaded.prompts], "openings": len(loaded.opening_ids)}


def _counts(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[int]:
    for start in range(0, len(texts), 1000):
        yield from (len(e.ids) for e in tokenizer.encode_batch(list(texts[start : start + 1000])))


def _open(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
