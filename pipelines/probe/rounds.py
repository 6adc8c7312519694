"""What one round of a probe sends: its warm-up and loads, with the serial number that tells every request apart."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.probe.arrivals import Arrival, schedule
from pipelines.probe.config import LoadProfile, ProbeConfig


@dataclass(frozen=True, slots=True)
class Load:
    """One round of one profile. `serials` number its requests; no two requests of a probe to one engine share one."""

    profile: LoadProfile
    arrivals: tuple[Arrival, ...]
    serials: range


@dataclass(frozen=True, slots=True)
class Round:
    """Everything one engine is sent between start and stop of its server."""

    number: int
    warmup: range
    warmup_concurrency: int
    loads: tuple[Load, ...]


def requests_per_round(config: ProbeConfig) -> int:
    """Requests one engine gets in a round, warm-up included."""
    return config.warmup_requests + sum(profile.requests for profile in config.profiles)


def measured_requests(config: ProbeConfig, engines: int) -> int:
    """Requests that enter the tables, over all rounds and engines."""
    return engines * config.rounds * sum(profile.requests for profile in config.profiles)


def plan(config: ProbeConfig, number: int, prompts: int) -> Round:
    """Plan one round; the same for every engine."""
    serial = number * requests_per_round(config)
    warmup = range(serial, serial + config.warmup_requests)
    serial = warmup.stop
    loads = []
    for profile in config.profiles:
        arrivals = schedule(profile, seed=config.seed, round_number=number, prompts=prompts)
        loads.append(Load(profile, arrivals, range(serial, serial + profile.requests)))
        serial += profile.requests
    widest = max(profile.concurrency or 1 for profile in config.profiles)
    return Round(number, warmup, widest, tuple(loads))
