"""The rows of a probe as they are judged: requests and blocks of one engine, in groups, and which blocks count."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipelines.decide.probed import LeftOut, MetricName

METRICS: tuple[MetricName, ...] = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
OF_A_REQUEST: tuple[MetricName, ...] = ("ttft_ms", "tpot_ms", "e2e_ms")
INTERRUPTED = "interrupted"
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Request:
    """One request that was sent to an engine; times are milliseconds, None where there is none.

    Seconds count from the start of its load. mode: how the profile sends ("closed", "spike": when a slot is free).
    """

    engine: str
    profile: str
    round: int
    ok: bool
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    itl_ms: Sequence[float] = ()
    mode: str = "closed"
    phase: int = 0
    bucket: str = ""
    request: int = 0
    prompt_id: str = ""
    rate: float | None = None
    concurrency: int | None = None
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    usage_input_tokens: int | None = None
    usage_output_tokens: int | None = None
    counted_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None

    def value(self, metric: MetricName) -> float | None:
        """The figure of one metric; None for a failed request, whose time is not a latency, and for ITL."""
        found = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}.get(metric)
        return found if self.ok and found is not None and math.isfinite(found) else None

    @property
    def failed(self) -> bool:
        """Whether it failed by itself, rather than because the probe was stopped."""
        return not self.ok and self.error != INTERRUPTED

    @property
    def scheduled(self) -> bool:
        """Whether it had a time to be sent at, from which its latency counts."""
        return self.mode not in ("closed", "spike")

    @property
    def start_s(self) -> float:
        return self.scheduled_s if self.scheduled else self.sent_s


@dataclass(frozen=True, slots=True)
class Block:
    """One uninterrupted stretch of load on one engine.

    started_s: seconds since some start that all blocks share. excused: disturbed blocks count all the same.
    """

    engine: str
    profile: str
    round: int
    wall_s: float
    requests: int
    failed: int
    output_tokens_per_s: float
    peak_rss_bytes: int | None
    started_s: float = 0.0
    steady: bool | None = None
    warmup_requests: int = 0
    disturbed: str = ""
    partial: bool = False
    excused: bool = False
    ready_s: float | None = None
    cpu_percent: float | None = None
    gpu_memory_idle_bytes: int | None = None
    gpu_memory_loaded_bytes: int | None = None
    gpu_memory_peak_bytes: int | None = None
    gpu_utilisation_percent: float | None = None
    gpu_power_w: float | None = None
    energy_j: float | None = None
    gpu_temperature_c: float | None = None
    gpu_clock_mhz: float | None = None
    kv_usage_peak: float | None = None
    queue_peak: float | None = None
    prefix_hit_rate: float | None = None
    idle_rss_bytes: int | None = None
    loaded_rss_bytes: int | None = None

    @property
    def left_out(self) -> str:
        """Why it is no evidence, "" where it is."""
        found = [f"disturbed: {self.disturbed}"] if self.disturbed and not self.excused else []
        found += [f"not steady after {self.warmup_requests} warm-up requests"] if self.steady is False else []
        return "; ".join([*found, "cut short"] if self.partial else found)


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """Requests that may be summed up together: one profile, one phase of it, one bucket of input lengths."""

    profile: str
    phase: int = 0
    bucket: str = ""

    def holds(self, request: Request) -> bool:
        return (request.profile, request.phase, request.bucket) == (self.profile, self.phase, self.bucket)


def named(profile: str, phase: int, bucket: str) -> str:
    """A group in words."""
    return f"{profile}{f' phase {phase + 1}' if phase else ''}{f', {bucket} tokens in' if bucket else ''}"


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was measured of one engine."""

    requests: Sequence[Request] = ()
    blocks: Sequence[Block] = ()
    profiles: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "profiles", tuple(dict.fromkeys(r.profile for r in self.requests)))

    def of(self, profile: str) -> Measured:
        """The rows of one profile."""
        return Measured(
            [r for r in self.requests if r.profile == profile], [b for b in self.blocks if b.profile == profile]
        )

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """What is no evidence, by profile and round; a search has a block for each rate that it tried."""
        found = {(b.profile, b.round, b.left_out): None for b in self.blocks if b.left_out}
        return tuple(LeftOut(profile=profile, round=number, reason=why) for profile, number, why in found)

    @property
    def sound(self) -> Measured:
        """Only what lies in blocks that are evidence."""
        out = {(one.profile, one.round) for one in self.left_out}
        return Measured(
            [r for r in self.requests if (r.profile, r.round) not in out],
            [b for b in self.blocks if (b.profile, b.round) not in out],
        )

    def shown(self, profile: str) -> tuple[Measured, bool]:
        """What figures of a profile are taken from, and whether they are evidence: all blocks where none counts."""
        mine, sound = self.of(profile), self.of(profile).sound
        return (sound, True) if sound.requests or not mine.requests else (mine, False)


def groups(requests: Sequence[Request]) -> Iterator[tuple[Group, list[Request]]]:
    """Requests by group: profiles in the order they were sent, then phases, then buckets from short to long."""
    found: dict[Group, list[Request]] = {}
    for r in requests:
        found.setdefault(Group(r.profile, r.phase, r.bucket), []).append(r)
    profiles = list(dict.fromkeys(g.profile for g in found))

    def place(group: Group) -> tuple[int, int, int]:
        return profiles.index(group.profile), group.phase, min(r.input_tokens for r in found[group])

    for group in sorted(found, key=place):
        yield group, found[group]
