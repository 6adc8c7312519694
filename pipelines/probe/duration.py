"""How long a probe may take, guessed before anything was measured on this machine. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipelines.probe.config import ProbeConfig
from pipelines.probe.profiles import Closed, LoadProfile, Open, Replay, Search, Spike, Steps
from pipelines.probe.search import most_visits

START_S = 5.0  # start, warm-up and stop of a server
TOKEN_S = 0.02  # an output token of a small model on a few CPU cores; what a probe really took corrects later guesses


def expected_s(config: ProbeConfig, trace_s: Mapping[str, float]) -> float:
    """Seconds for one engine in all rounds; `trace_s` is the length of each replay's trace by the profile's name."""
    loads = [_load_s(one, one.max_tokens or config.max_tokens, trace_s) for one in config.profiles]
    return config.rounds * (START_S + math.fsum(loads))


def _load_s(profile: LoadProfile, tokens: int, trace_s: Mapping[str, float]) -> float:
    """Schedules as long as they are, provided that the engine keeps up; closed loops by their tokens."""
    match profile:
        case Closed():
            return profile.requests * tokens * TOKEN_S
        case Spike():
            return 3 * profile.requests * tokens * TOKEN_S
        case Open():
            return profile.requests / profile.rate
        case Steps():
            return math.fsum(step.seconds for step in profile.steps)
        case Replay():
            return trace_s[profile.name] / profile.speed
        case Search():
            return most_visits(len(profile.grid)) * profile.requests / math.sqrt(profile.low * profile.high)
