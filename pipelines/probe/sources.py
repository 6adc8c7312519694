"""What a probe can send, read from its files before anything is tokenized: prompts, lengths cut from them, traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipelines.config import find
from pipelines.errors import ConfigError, InputError, Problem
from pipelines.flow.store import digest_of
from pipelines.probe import trace
from pipelines.probe.arrivals import TraceLine
from pipelines.probe.config import ProbeConfig
from pipelines.probe.profiles import LoadProfile, Replay
from pipelines.probe.prompts import Item, Wanted, read_items


@dataclass(frozen=True, slots=True)
class Sources:
    """Every prompt that any profile may send, by place; which of them a profile takes in turn; and traces.

    Of those in turn a profile's bucket leaves some. Both mappings are by the profile's name.
    """

    wanted: tuple[Wanted, ...]
    in_turn: Mapping[str, tuple[int, ...]]
    traces: Mapping[str, tuple[TraceLine, ...]]


def read(config: ProbeConfig) -> Sources:
    """Read prompts and traces.

    Raises:
        ConfigError: every problem of every file, with its line.
    """
    problems: list[Problem] = []
    items = _items(config, problems)
    traces = {p.name: _trace(n, p, problems) for n, p in enumerate(config.profiles) if isinstance(p, Replay)}
    if problems:
        raise ConfigError(problems)
    wanted = [Wanted(item.id or str(number), item) for number, item in enumerate(items)]
    plain = tuple(range(len(items)))
    in_turn, lines = {}, {}
    for profile in config.profiles:
        size = profile.input_tokens
        in_turn[profile.name] = plain if size is None else _cut(profile, size, wanted, plain)
        lines[profile.name] = tuple(_lines(profile, traces.get(profile.name, ()), wanted, plain))
    return Sources(tuple(wanted), in_turn, lines)


def digest_of_items(items: Sequence[Item]) -> str:
    """What `prompts_sha256` is for prompts that are in the configuration itself."""
    return digest_of({"prompts": [item.model_dump(mode="json") for item in items]})


def _items(config: ProbeConfig, problems: list[Problem]) -> Sequence[Item]:
    if not isinstance(config.prompts, str):
        items = config.prompts.items
        if digest_of_items(items) != config.prompts_sha256:
            named = ", ".join(config.prompts.evalsets)
            problems.append(Problem("probe.prompts", named, "is not what was planned with"))
        return items
    try:
        return read_items(find(config.prompts), config.prompts_sha256)
    except InputError as error:
        problems.append(Problem("probe.prompts", config.prompts, str(error)))
        return ()


def _trace(number: int, profile: Replay, problems: list[Problem]) -> tuple[trace.Recorded, ...]:
    key = f"probe.profiles.{number}.trace"
    try:
        found = trace.read(find(profile.trace), key, profile.trace_sha256, profile.requests)
    except ConfigError as error:
        problems += error.problems
        return ()
    least = profile.shared_tokens + 2
    problems += [
        Problem(
            key, one.input_length, f"request {n}: input_length is below {least}, which prefix and opening token take"
        )
        for n, one in enumerate(found)
        if one.input_length is not None and one.input_length < least
    ]
    return found


def _cut(profile: LoadProfile, tokens: int, wanted: list[Wanted], plain: Sequence[int]) -> tuple[int, ...]:
    """As many prompts of one length as there are texts, each beginning with another."""
    first = len(wanted)
    wanted += [_piece(f"{profile.name}-{k}", tokens - profile.shared_tokens - 1, plain, k) for k in plain]
    return tuple(range(first, len(wanted)))


def _piece(name: str, tokens: int, plain: Sequence[int], first: int) -> Wanted:
    turned = (*plain[first % len(plain) :], *plain[: first % len(plain)])
    return Wanted(name, None, tokens, turned)


def _lines(
    profile: LoadProfile, recorded: Sequence[trace.Recorded], wanted: list[Wanted], plain: Sequence[int]
) -> Iterator[TraceLine]:
    """Lines with their time counted from the first; a line's own prompt is added to those wanted."""
    for number, one in enumerate(recorded):
        prompt, name = None, f"{profile.name}-{number}"
        if one.item is not None:
            prompt = len(wanted)
            wanted.append(Wanted(name, one.item))
        elif one.input_length is not None:
            prompt = len(wanted)
            wanted.append(_piece(name, one.input_length - profile.shared_tokens - 1, plain, number))
        yield TraceLine(one.timestamp - recorded[0].timestamp, prompt, one.output_length)
