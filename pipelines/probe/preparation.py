"""From a probe's configuration to what is sent: prompts tokenized for all engines, rounds planned, lengths checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.errors import InputError
from pipelines.probe import prompts, rounds, sources
from pipelines.probe.config import ProbeConfig


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prompts and rounds, the same for every engine."""

    prompts: prompts.PromptSet
    rounds: tuple[rounds.Round, ...]


def prepare(config: ProbeConfig, engines: Sequence[Path]) -> Prepared:
    """Read, tokenize and plan everything, and see that every engine takes it whole.

    Raises:
        ConfigError: files that cannot be used, or profiles that cannot be filled from them.
        InputError: engines that tokenize the prompts differently, or one that would cut or refuse a request.
    """
    found = sources.read(config)
    prompt_set = _tokenized_alike(config, found, engines)
    lengths = [len(prompt.ids) for prompt in prompt_set.prompts]
    planned = rounds.plan(config, found, lengths, len(prompt_set.opening_ids))
    for engine in engines:
        _check_lengths(engine, prompt_set, planned, lengths)
    return Prepared(prompt_set, planned)


def _tokenized_alike(config: ProbeConfig, found: sources.Sources, engines: Sequence[Path]) -> prompts.PromptSet:
    """Check that every engine's own tokenizer gives the same ids."""
    sets = {engine.name: prompts.load(found.wanted, engine, seed=config.seed) for engine in engines}
    first, *others = sets
    different = [name for name in others if sets[name].prompts != sets[first].prompts]
    if different:
        raise InputError(
            f"engines {first} and {', '.join(different)} tokenize the prompts differently, so their latencies "
            "cannot be compared; probe engines of one base checkpoint together"
        )
    return sets[first]


def _check_lengths(
    engine: Path, prompt_set: prompts.PromptSet, planned: Sequence[rounds.Round], lengths: Sequence[int]
) -> None:
    """Refuse requests that an engine would cut or refuse."""
    card = json.loads((engine / "engine.json").read_text())
    limit, most = card.get("max_length"), card.get("max_prompt")
    wide = max(rounds.needs(planned, lengths), key=lambda need: need.input_tokens)
    if most is not None and wide.input_tokens > most:
        raise InputError(
            f"prompt {prompt_set.prompts[wide.prompt].id!r} takes {wide.input_tokens} tokens; engine {engine.name} "
            f"admits prompts of {most}"
        )
    long = max(rounds.needs(planned, lengths), key=lambda need: need.tokens)
    if limit is not None and long.tokens > limit:
        raise InputError(
            f"prompt {prompt_set.prompts[long.prompt].id!r} takes {long.input_tokens} tokens and its answer "
            f"{long.max_tokens} more (probe.max_tokens, or the profile's), but engine {engine.name} holds {limit}; "
            "shorten the prompt or the answer"
        )
