"""What was seen of server and machine, sample by sample, and what a stretch of it comes to: pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pipelines.probe.config import Limits

INTERVAL_S = 0.1
Number = TypeVar("Number", int, float)
BUSY_PERCENT = 50.0
"""A GPU less used than this lowers its clock of itself, which is no disturbance."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the machine. CPU times are seconds since some start, so only differences mean something.

    client_cpu_s includes the sampler; busy_cpu_s is the whole machine's, with what a hypervisor stole. Of a server that
    is not ours nothing is known of its process. Fields that begin with gpu are `gpu.GpuLook`'s, those from queue on
    `metrics.Scrape`'s, which is read less often: None in between.
    """

    at_s: float
    rss_bytes: int | None
    server_cpu_s: float | None
    client_cpu_s: float
    busy_cpu_s: float
    load_average: float
    gpu_memory_bytes: int | None = None
    gpu_utilisation_percent: float | None = None
    gpu_power_w: float | None = None
    gpu_energy_j: float | None = None
    gpu_temperature_c: float | None = None
    gpu_clock_mhz: float | None = None
    gpu_throttled: str = ""
    gpu_others: int | None = None
    queue: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    prefix_hits: float | None = None
    prefix_queries: float | None = None
    prefix_hit_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Samples of a stretch of time in a few figures; None where too few samples fell into it, or nobody tells.

    cpu_percent: of one CPU, so 200 is two CPUs in full. foreign_cpu_percent: share of the whole machine that was
    taken by neither server nor client. load_average: the highest one-minute average seen. Loaded memory is the median
    under load, idle memory that before the first request. disturbed: what kept the stretch from being like others.
    """

    idle_rss_bytes: int | None = None
    loaded_rss_bytes: int | None = None
    peak_rss_bytes: int | None = None
    cpu_percent: float | None = None
    foreign_cpu_percent: float | None = None
    load_average: float | None = None
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
    disturbed: str = ""


def usage(
    samples: Sequence[Sample], start_s: float, end_s: float, cpus: int, limits: Limits, idle_until_s: float = 0.0
) -> Usage:
    """Summarize the samples from `start_s` to `end_s` (and one interval around, so that short loads have some).

    The server had been asked nothing until `idle_until_s`.
    """
    inside = [s for s in samples if start_s - INTERVAL_S <= s.at_s <= end_s + INTERVAL_S]
    if not inside:
        return Usage()
    idle = [s for s in samples if s.at_s <= idle_until_s]
    rss, memory = _known(inside, lambda s: s.rss_bytes), _known(inside, lambda s: s.gpu_memory_bytes)
    foreign = _foreign_percent(inside, cpus)
    clocks = _known(inside, lambda s: s.gpu_clock_mhz)
    return Usage(
        idle_rss_bytes=_last(_known(idle, lambda s: s.rss_bytes)),
        loaded_rss_bytes=int(median(rss)) if rss else None,
        peak_rss_bytes=max(rss, default=None),
        cpu_percent=_server_percent(inside),
        foreign_cpu_percent=foreign,
        load_average=max(s.load_average for s in inside),
        gpu_memory_idle_bytes=_last(_known(idle, lambda s: s.gpu_memory_bytes)),
        gpu_memory_loaded_bytes=int(median(memory)) if memory else None,
        gpu_memory_peak_bytes=max(memory, default=None),
        gpu_utilisation_percent=_mean(_known(inside, lambda s: s.gpu_utilisation_percent)),
        gpu_power_w=_mean(_known(inside, lambda s: s.gpu_power_w)),
        energy_j=_energy_j(inside),
        gpu_temperature_c=max(_known(inside, lambda s: s.gpu_temperature_c), default=None),
        gpu_clock_mhz=_mean(clocks),
        kv_usage_peak=max(_known(inside, lambda s: s.kv_usage), default=None),
        queue_peak=max(_known(inside, lambda s: s.queue), default=None),
        prefix_hit_rate=_hit_rate(samples, start_s, end_s),
        disturbed="; ".join(_disturbances(inside, foreign, limits)),
    )


def _disturbances(inside: Sequence[Sample], foreign_percent: float | None, limits: Limits) -> list[str]:
    """What was seen that makes this stretch unlike others, in words."""
    found = []
    if limits.foreign_cpu_percent is not None and (foreign_percent or 0.0) > limits.foreign_cpu_percent:
        found.append(f"others took {foreign_percent:.0f}% of the CPU")
    slowed = sorted({reason for s in inside for reason in s.gpu_throttled.split(", ") if reason})
    if limits.throttling and slowed:
        found.append(f"GPU slowed: {', '.join(slowed)}")
    others = max(_known(inside, lambda s: s.gpu_others), default=0)
    if limits.gpu_processes and others:
        found.append(f"{others} other process{'es' if others > 1 else ''} on the GPU")
    clocks = [s.gpu_clock_mhz for s in inside if (s.gpu_utilisation_percent or 0.0) >= BUSY_PERCENT and s.gpu_clock_mhz]
    if limits.gpu_clock_percent is not None and clocks:
        low, high = min(clocks), max(clocks)
        if low < high * (1 - limits.gpu_clock_percent / 100):
            found.append(f"SM clock between {low:.0f} and {high:.0f} MHz")
    return found


def _server_percent(inside: Sequence[Sample]) -> float | None:
    first, last = inside[0], inside[-1]
    seconds = last.at_s - first.at_s
    if seconds <= 0 or first.server_cpu_s is None or last.server_cpu_s is None:
        return None
    return max(0.0, last.server_cpu_s - first.server_cpu_s) / seconds * 100


def _foreign_percent(inside: Sequence[Sample], cpus: int) -> float | None:
    """Unknown where the server's own share is: a server that is not ours may still run here."""
    first, last = inside[0], inside[-1]
    seconds = last.at_s - first.at_s
    if seconds <= 0 or first.server_cpu_s is None or last.server_cpu_s is None:
        return None
    ours = last.server_cpu_s - first.server_cpu_s + last.client_cpu_s - first.client_cpu_s
    return min(100.0, max(0.0, last.busy_cpu_s - first.busy_cpu_s - ours) / (seconds * cpus) * 100)


def _energy_j(inside: Sequence[Sample]) -> float | None:
    """By the GPUs' own counter; by the trapezoid rule over their power where they have none."""
    counted = _known(inside, lambda s: s.gpu_energy_j)
    if len(counted) > 1:
        return counted[-1] - counted[0]
    powered = [(s.at_s, s.gpu_power_w) for s in inside if s.gpu_power_w is not None]
    if len(powered) < 2:
        return None
    return sum((later - at_s) * (power + after) / 2 for (at_s, power), (later, after) in pairwise(powered))


def _hit_rate(samples: Sequence[Sample], start_s: float, end_s: float) -> float | None:
    """Share of the prompt tokens looked for between two scrapes around the load that the prefix cache held."""
    counts = [(s.at_s, s.prefix_hits, s.prefix_queries) for s in samples]
    known = [(at_s, hits, queries) for at_s, hits, queries in counts if hits is not None and queries is not None]
    if known:
        before = [one for one in known if one[0] <= start_s] or known[:1]
        after = [one for one in known if one[0] >= end_s] or known[-1:]
        queries = after[0][2] - before[-1][2]
        return (after[0][1] - before[-1][1]) / queries if queries > 0 else None
    return _last(_known([s for s in samples if start_s <= s.at_s <= end_s + INTERVAL_S], lambda s: s.prefix_hit_rate))


def _known(samples: Sequence[Sample], field: Callable[[Sample], Number | None]) -> list[Number]:
    return [value for sample in samples if (value := field(sample)) is not None]


def _last(values: Sequence[Number]) -> Number | None:
    return values[-1] if values else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
