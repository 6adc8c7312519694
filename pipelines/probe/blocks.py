"""Rows of a block, one load on one engine, and of what was sampled while its server ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.probe import latency
from pipelines.probe.rows import Place, RequestRow
from pipelines.probe.samples import Sample, Usage
from pipelines.probe.warmup import Warmth


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One load on one engine, with what the machine did meanwhile. bandwidth_gb_s was read just before it.

    ready_s: from the start of the server to its first answer. steady: whether warm-up showed the server steady, saw it
    drift still, or (None) could not tell, after warmup_requests. disturbed: what makes the block unlike others, "" for
    nothing. partial: it was cut short, or its server ended. Memory, power and metrics are `samples.Usage`'s.
    """

    engine: str
    profile: str
    round: int
    block: int
    position: int
    started: str
    wall_s: float
    requests: int
    failed: int
    requests_per_s: float
    output_tokens_per_s: float
    peak_rss_bytes: int | None
    cpu_percent: float | None
    load_average: float | None
    foreign_cpu_percent: float | None
    threads: int
    bandwidth_gb_s: float | None
    ready_s: float | None
    steady: bool | None
    warmup_requests: int
    disturbed: str
    partial: bool
    idle_rss_bytes: int | None
    loaded_rss_bytes: int | None
    gpu_memory_idle_bytes: int | None
    gpu_memory_loaded_bytes: int | None
    gpu_memory_peak_bytes: int | None
    gpu_utilisation_percent: float | None
    gpu_power_w: float | None
    energy_j: float | None
    gpu_temperature_c: float | None
    gpu_clock_mhz: float | None
    kv_usage_peak: float | None
    queue_peak: float | None
    prefix_hit_rate: float | None


@dataclass(frozen=True, slots=True)
class ResourceRow:
    """One sample. at_s counts from the first of its server; profile is the load that was on, "" in between.

    CPU times are seconds since some start; the rest is `samples.Sample`'s.
    """

    engine: str
    block: int
    profile: str
    at_s: float
    rss_bytes: int | None
    server_cpu_s: float | None
    client_cpu_s: float
    busy_cpu_s: float
    load_average: float
    gpu_memory_bytes: int | None
    gpu_utilisation_percent: float | None
    gpu_power_w: float | None
    gpu_energy_j: float | None
    gpu_temperature_c: float | None
    gpu_clock_mhz: float | None
    gpu_throttled: str
    gpu_others: int | None
    queue: float | None
    running: float | None
    kv_usage: float | None
    prefix_hits: float | None
    prefix_queries: float | None
    prefix_hit_rate: float | None


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a load ran under. ready_s and warmth are of its server, None where that did not start."""

    started: str
    wall_s: float
    usage: Usage
    threads: int
    bandwidth_gb_s: float | None
    ready_s: float | None
    warmth: Warmth | None
    partial: bool


def block_row(place: Place, requests: Sequence[RequestRow], conditions: Conditions) -> BlockRow:
    """Sum up one load."""
    answered = [row for row in requests if row.ok]
    usage, warmth = conditions.usage, conditions.warmth
    return BlockRow(
        engine=place.engine,
        profile=requests[0].profile,
        round=place.round,
        block=place.block,
        position=place.position,
        started=conditions.started,
        wall_s=conditions.wall_s,
        requests=len(requests),
        failed=len(requests) - len(answered),
        requests_per_s=latency.per_second(len(answered), conditions.wall_s),
        output_tokens_per_s=latency.per_second(sum(row.output_tokens for row in answered), conditions.wall_s),
        peak_rss_bytes=usage.peak_rss_bytes,
        cpu_percent=usage.cpu_percent,
        load_average=usage.load_average,
        foreign_cpu_percent=usage.foreign_cpu_percent,
        threads=conditions.threads,
        bandwidth_gb_s=conditions.bandwidth_gb_s,
        ready_s=conditions.ready_s,
        steady=None if warmth is None else warmth.steady,
        warmup_requests=0 if warmth is None else warmth.requests,
        disturbed=usage.disturbed,
        partial=conditions.partial,
        idle_rss_bytes=usage.idle_rss_bytes,
        loaded_rss_bytes=usage.loaded_rss_bytes,
        gpu_memory_idle_bytes=usage.gpu_memory_idle_bytes,
        gpu_memory_loaded_bytes=usage.gpu_memory_loaded_bytes,
        gpu_memory_peak_bytes=usage.gpu_memory_peak_bytes,
        gpu_utilisation_percent=usage.gpu_utilisation_percent,
        gpu_power_w=usage.gpu_power_w,
        energy_j=usage.energy_j,
        gpu_temperature_c=usage.gpu_temperature_c,
        gpu_clock_mhz=usage.gpu_clock_mhz,
        kv_usage_peak=usage.kv_usage_peak,
        queue_peak=usage.queue_peak,
        prefix_hit_rate=usage.prefix_hit_rate,
    )


def resource_rows(
    place: Place, samples: Sequence[Sample], loads: Sequence[tuple[str, float, float]]
) -> Iterator[ResourceRow]:
    """Place samples among the loads, each of a profile's name, start and end by the clock of the samples."""
    for sample in samples:
        on = next((name for name, start_s, end_s in loads if start_s <= sample.at_s <= end_s), "")
        fields = {name: getattr(sample, name) for name in Sample.__slots__ if name != "at_s"}
        at_s = round(sample.at_s - samples[0].at_s, 4)
        yield ResourceRow(engine=place.engine, block=place.block, profile=on, at_s=at_s, **fields)
