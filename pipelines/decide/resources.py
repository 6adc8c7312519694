"""What serving took: memory, power, energy, cache and queue, profile by profile. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pipelines.decide.measured import Measured
from pipelines.decide.probed import Resources

FORMULAS = {
    "energy per output token": "energy of the GPU over the blocks of a profile / output tokens answered in them; not "
    "available without power readings",
    "memory": "of the server's processes, and of the GPU; idle: the server started and asked nothing; loaded: the "
    "median under load; peak: the highest sample under load",
}


def resources(measured: Measured) -> tuple[Resources, ...]:
    """Sum up the blocks of each profile, disturbed ones included: what was taken was taken."""
    return tuple(_of_profile(measured.of(profile), profile) for profile in measured.profiles)


def _of_profile(measured: Measured, profile: str) -> Resources:
    blocks = measured.blocks
    return Resources(
        profile=profile,
        ready_s=_mean(b.ready_s for b in blocks),
        idle_rss_bytes=_largest(b.idle_rss_bytes for b in blocks),
        loaded_rss_bytes=_largest(b.loaded_rss_bytes for b in blocks),
        peak_rss_bytes=_largest(b.peak_rss_bytes for b in blocks),
        gpu_memory_idle_bytes=_largest(b.gpu_memory_idle_bytes for b in blocks),
        gpu_memory_loaded_bytes=_largest(b.gpu_memory_loaded_bytes for b in blocks),
        gpu_memory_peak_bytes=_largest(b.gpu_memory_peak_bytes for b in blocks),
        gpu_utilisation_percent=_mean(b.gpu_utilisation_percent for b in blocks),
        gpu_power_w=_mean(b.gpu_power_w for b in blocks),
        energy_per_output_token_j=_energy(measured),
        gpu_temperature_c=_highest(b.gpu_temperature_c for b in blocks),
        gpu_clock_mhz=_lowest(b.gpu_clock_mhz for b in blocks),
        cpu_percent=_mean(b.cpu_percent for b in blocks),
        kv_usage_peak=_highest(b.kv_usage_peak for b in blocks),
        queue_peak=_highest(b.queue_peak for b in blocks),
    )


def _energy(measured: Measured) -> float | None:
    """Joules an output token; None unless the energy of every block is known."""
    known = [b.energy_j for b in measured.blocks if b.energy_j is not None]
    tokens = sum(r.output_tokens for r in measured.requests if r.ok)
    return math.fsum(known) / tokens if tokens and len(known) == len(measured.blocks) > 0 else None


def _largest(values: Iterable[int | None]) -> int | None:
    return max((v for v in values if v is not None), default=None)


def _highest(values: Iterable[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _lowest(values: Iterable[float | None]) -> float | None:
    return min((v for v in values if v is not None), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return math.fsum(found) / len(found) if found else None


def peak_memory(found: Iterable[Resources], rss: int | None) -> int | None:
    """The memory an engine is judged by: the GPU's where it used one, else the server's own."""
    on_gpu = [one.gpu_memory_peak_bytes for one in found if one.gpu_memory_peak_bytes]
    return max(on_gpu, default=rss)
