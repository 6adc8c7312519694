"""When each request is due and what it asks: a pure function of (profile, seed, round), equal for every engine."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.probe.profiles import Closed, LoadProfile, Open, Replay, Search, Spike, Steps


@dataclass(frozen=True, slots=True)
class Arrival:
    """One planned request: `due_s` after the start of the load; None in a closed loop (due when a slot is free).

    phase: number of the step, of the part of a spike, or of the rate in a search's grid; else 0. A search's due times
    count from the start of its phase. max_tokens: output tokens asked for.
    """

    request: int
    prompt: int
    due_s: float | None
    phase: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace: seconds after its first; what is None there is taken from the profile."""

    at_s: float
    prompt: int | None
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a profile's requests can ask: prompts taken in turn, the default output length, and its trace if any."""

    prompts: tuple[int, ...]
    max_tokens: int
    trace: tuple[TraceLine, ...] = ()


def schedule(profile: LoadProfile, asked: Asked, *, seed: int, round_number: int) -> tuple[Arrival, ...]:
    """Plan one round of a profile. A search gets the requests of every rate that it may try."""
    due = due_times(profile, asked.trace, seed=seed, round_number=round_number)
    order = prompt_order(profile, asked, seed=seed, round_number=round_number)
    arrivals = []
    for request, ((phase, due_s), prompt) in enumerate(zip(due, order, strict=True)):
        line = asked.trace[request] if asked.trace else None
        own = None if line is None else line.prompt
        most = None if line is None else line.max_tokens
        arrivals.append(Arrival(request, prompt if own is None else own, due_s, phase, most or asked.max_tokens))
    return tuple(arrivals)


def due_times(
    profile: LoadProfile, trace: Sequence[TraceLine] = (), *, seed: int, round_number: int
) -> tuple[tuple[int, float | None], ...]:
    """Phase and absolute due time in seconds of each request; None for a closed loop.

    Gaps are independent draws, not rescaled to a fixed duration, which would bend their distribution. A search has the
    same gaps at all of its rates, times their length, so that rates differ by nothing else.
    """
    match profile:
        case Closed():
            return ((0, None),) * profile.requests
        case Spike():
            return tuple((phase, None) for phase in range(3) for _ in range(profile.requests))
        case Open():
            return tuple((0, at_s) for at_s in _open_times(profile, _source(profile, seed, round_number)))
        case Replay():
            return tuple((0, line.at_s / profile.speed) for line in trace)
        case Steps():
            return tuple(_step_times(profile, _source(profile, seed, round_number)))
        case Search():
            gaps = list(itertools.islice(_exponential_gaps(_source(profile, seed, round_number)), profile.requests))
            unit = list(itertools.accumulate(gaps))
            return tuple((place, at / rate) for place, rate in enumerate(profile.grid) for at in unit)


def prompt_order(profile: LoadProfile, asked: Asked, *, seed: int, round_number: int) -> tuple[int, ...]:
    """Prompts of one round, one for each request.

    Rounds take consecutive slices of one seeded permutation, so that prompts are used equally often; all rates of a
    search get the same ones.
    """
    order = list(asked.prompts)
    random.Random(f"prompts/{seed}/{profile.name}").shuffle(order)
    taken = [len(due_times(profile, asked.trace, seed=seed, round_number=n)) for n in range(round_number + 1)]
    first, count, times = sum(taken[:-1]), taken[-1], 1
    if isinstance(profile, Search):
        first, count, times = round_number * profile.requests, profile.requests, len(profile.grid)
    return tuple(order[k % len(order)] for k in range(first, first + count)) * times


def turn_order(engines: int, round_number: int) -> tuple[int, ...]:
    """Order of the engines in a round: A B C, then C B A, ... so that a linear drift over time falls on all alike."""
    order = range(engines)
    return tuple(order if round_number % 2 == 0 else reversed(order))


def _source(profile: LoadProfile, seed: int, round_number: int) -> random.Random:
    return random.Random(f"arrivals/{seed}/{profile.name}/{round_number}")


def _open_times(profile: Open, source: random.Random) -> Iterator[float]:
    """Constant: k/rate. Poisson: sums of exponential gaps, by inversion. Gamma: sums of gamma gaps of the same mean."""
    if profile.arrivals == "constant":
        yield from (k / profile.rate for k in range(profile.requests))
        return
    gaps = _exponential_gaps(source)
    if profile.burstiness is not None:
        gaps = _gamma_gaps(source, profile.burstiness)
    now = 0.0
    for gap in itertools.islice(gaps, profile.requests):
        now += gap / profile.rate
        yield now


def _exponential_gaps(source: random.Random) -> Iterator[float]:
    while True:
        yield -math.log(1.0 - source.random())


def _gamma_gaps(source: random.Random, shape: float) -> Iterator[float]:
    while True:
        yield source.gammavariate(shape, 1.0 / shape)


def _step_times(profile: Steps, source: random.Random) -> Iterator[tuple[int, float | None]]:
    """A Poisson process by pieces: each begins anew, which an exponential gap allows, and is cut where it ends."""
    begins_s = 0.0
    for phase, step in enumerate(profile.steps):
        ends_s, now = begins_s + step.seconds, begins_s
        for gap in _exponential_gaps(source):
            now += gap / step.rate
            if now >= ends_s:
                break
            yield phase, now
        begins_s = ends_s
