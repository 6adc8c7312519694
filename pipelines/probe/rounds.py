"""What the rounds of a probe send: warm-up and loads, with the serial number that tells every request apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.errors import ConfigError, Problem
from pipelines.probe import profiles, search
from pipelines.probe.arrivals import Arrival, Asked, schedule
from pipelines.probe.config import ProbeConfig
from pipelines.probe.profiles import LoadProfile, Search, Steps
from pipelines.probe.prompts import PromptSet, bucket
from pipelines.probe.sources import Sources


@dataclass(frozen=True, slots=True)
class Load:
    """One round of one profile. `serials` number its requests; no two requests of a probe to one engine share one.

    prefix_serial opens the prefix that they share, where they do. A search's load holds the requests of every rate that
    may be tried; `part` is what is sent at one.
    """

    profile: LoadProfile
    arrivals: tuple[Arrival, ...]
    serials: range
    prefix_serial: int | None = None

    def concurrency_of(self, phase: int) -> int | None:
        """Requests in flight during a phase; None where they are due by a schedule."""
        return profiles.concurrency_of(self.profile, phase)

    def ids(self, prompts: PromptSet) -> Iterator[tuple[int, ...]]:
        """What is sent for each arrival."""
        shared = self.profile.shared_tokens
        prefix = () if self.prefix_serial is None else prompts.shared_prefix(self.prefix_serial, shared)
        for arrival, serial in zip(self.arrivals, self.serials, strict=True):
            yield prompts.request_ids(arrival.prompt, serial, prefix)

    def part(self, phase: int) -> Load:
        """The load of one phase alone."""
        places = [place for place, arrival in enumerate(self.arrivals) if arrival.phase == phase]
        serials = self.serials[places[0] : places[-1] + 1]
        return Load(self.profile, self.arrivals[places[0] : places[-1] + 1], serials, self.prefix_serial)

    @property
    def most(self) -> int:
        """Requests that are sent, at most."""
        if isinstance(self.profile, Search):
            return search.most_visits(len(self.profile.grid)) * self.profile.requests
        return len(self.arrivals)


@dataclass(frozen=True, slots=True)
class Round:
    """Everything one engine is sent between start and stop of its server; the same for every engine.

    warmup numbers as many requests as a warm-up may take, of the prompts `warmup_prompts` in turn.
    """

    number: int
    warmup: range
    warmup_prompts: tuple[int, ...]
    warmup_concurrency: int
    loads: tuple[Load, ...]


def plan(config: ProbeConfig, sources: Sources, lengths: Sequence[int], openings: int) -> tuple[Round, ...]:
    """Plan all rounds, given the tokens of each prompt and how many ordinary tokens there are to open requests with.

    Raises:
        ConfigError: a bucket without prompts, a step without requests, or more requests than opening tokens.
    """
    problems: list[Problem] = []
    asked = {
        profile.name: _asked(config, number, profile, sources, lengths, problems)
        for number, profile in enumerate(config.profiles)
    }
    if problems:
        raise ConfigError(problems)
    rounds, serial = [], 0
    for number in range(config.rounds):
        rounds.append(_round(config, number, serial, asked))
        last = rounds[-1].loads[-1]
        serial = last.serials.stop
    problems += _empty_steps(config, rounds)
    if serial > openings:
        problems.append(
            Problem(
                "probe.rounds", config.rounds, f"{serial} requests are planned over all rounds (a search plans "
                f"every rate of its grid), but the vocabulary has {openings} ordinary tokens to tell them apart by; "
                "lower probe.rounds or the profiles' requests"
            )
        )  # fmt: skip
    if problems:
        raise ConfigError(problems)
    return tuple(rounds)


@dataclass(frozen=True, slots=True)
class Need:
    """What one request takes of an engine: the prompt's place, and tokens."""

    prompt: int
    input_tokens: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.max_tokens


def needs(rounds: Sequence[Round], lengths: Sequence[int]) -> Iterator[Need]:
    """What each planned request takes, the opening token and a shared prefix counted."""
    for one in rounds:
        for load in one.loads:
            for arrival in load.arrivals:
                taken = input_tokens(load.profile, lengths[arrival.prompt])
                yield Need(arrival.prompt, taken, arrival.max_tokens)


def input_tokens(profile: LoadProfile, prompt_tokens: int) -> int:
    """Tokens that are sent with a prompt: a shared prefix, the request's own opening token, the prompt."""
    return profile.shared_tokens + 1 + prompt_tokens


def _asked(
    config: ProbeConfig, number: int, profile: LoadProfile, sources: Sources, lengths: Sequence[int],
    problems: list[Problem],
) -> Asked:  # fmt: skip
    in_turn = sources.in_turn[profile.name]
    if profile.bucket is not None:
        sizes = {place: bucket(input_tokens(profile, lengths[place])) for place in in_turn}
        in_turn = tuple(place for place in in_turn if sizes[place] == profile.bucket)
        if not in_turn:
            there = ", ".join(f"{count} in {name}" for name, count in Counter(sizes.values()).items())
            key = f"probe.profiles.{number}.bucket"
            problems.append(Problem(key, profile.bucket, f"profile {profile.name}: no prompt has this length", there))
    return Asked(in_turn, profile.max_tokens or config.max_tokens, sources.traces[profile.name])


def _round(config: ProbeConfig, number: int, serial: int, asked: dict[str, Asked]) -> Round:
    warmup = range(serial, serial + config.warmup_max_requests)
    serial = warmup.stop
    loads = []
    for profile in config.profiles:
        arrivals = schedule(profile, asked[profile.name], seed=config.seed, round_number=number)
        shared = serial if profile.shared_tokens else None
        serial += shared is not None
        loads.append(Load(profile, arrivals, range(serial, serial + len(arrivals)), shared))
        serial += len(arrivals)
    used = tuple(dict.fromkeys(arrival.prompt for load in loads for arrival in load.arrivals))
    return Round(number, warmup, used, max(map(profiles.widest, config.profiles)), tuple(loads))


def _empty_steps(config: ProbeConfig, rounds: Sequence[Round]) -> Iterator[Problem]:
    for place, profile in enumerate(config.profiles):
        if not isinstance(profile, Steps):
            continue
        for one in rounds:
            present = {arrival.phase for arrival in one.loads[place].arrivals}
            for step in sorted(set(range(len(profile.steps))) - present):
                what = profile.steps[step]
                yield Problem(
                    f"probe.profiles.{place}.steps.{step}", f"{what.rate:g}/s for {what.seconds:g} s",
                    f"no request falls into this step in round {one.number}", "give it more seconds, or another seed",
                )  # fmt: skip
