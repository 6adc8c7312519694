"""When each request is due and what it asks: a pure function of (profile, seed, round), equal for every engine."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from pipelines.probe.config import LoadProfile


@dataclass(frozen=True, slots=True)
class Arrival:
    """One planned request: `due_s` after the start of the load; None in a closed loop (due when a slot is free)."""

    request: int
    prompt: int
    due_s: float | None


def schedule(profile: LoadProfile, *, seed: int, round_number: int, prompts: int) -> tuple[Arrival, ...]:
    """Plan one round of a profile over `prompts` prompts."""
    due = due_times(profile, seed=seed, round_number=round_number)
    order = prompt_order(profile, seed=seed, round_number=round_number, prompts=prompts)
    return tuple(
        Arrival(request, prompt, None if due is None else due[request]) for request, prompt in enumerate(order)
    )


def due_times(profile: LoadProfile, *, seed: int, round_number: int) -> tuple[float, ...] | None:
    """Absolute due times in seconds, or None for a closed loop.

    Poisson: sums of independent exponential gaps with mean 1/rate, by inversion; not rescaled to a fixed duration,
    which would bend the distribution. Constant: k/rate.
    """
    if profile.rate is None:
        return None
    if profile.arrivals == "constant":
        return tuple(k / profile.rate for k in range(profile.requests))
    source = random.Random(f"arrivals/{seed}/{profile.name}/{round_number}")
    times = []
    now = 0.0
    for _ in range(profile.requests):
        now -= math.log(1.0 - source.random()) / profile.rate
        times.append(now)
    return tuple(times)


def prompt_order(profile: LoadProfile, *, seed: int, round_number: int, prompts: int) -> tuple[int, ...]:
    """Prompt indices of one round.

    Rounds take consecutive slices of one seeded permutation, so that prompts are used equally often.
    """
    order = list(range(prompts))
    random.Random(f"prompts/{seed}/{profile.name}").shuffle(order)
    first = round_number * profile.requests
    return tuple(order[k % prompts] for k in range(first, first + profile.requests))


def turn_order(engines: int, round_number: int) -> tuple[int, ...]:
    """Order of the engines in a round: A B C, then C B A, ... so that a linear drift over time falls on all alike."""
    order = range(engines)
    return tuple(order if round_number % 2 == 0 else reversed(order))
