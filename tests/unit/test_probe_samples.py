"""What samples of server, machine and GPUs come to over a load, and what they say disturbed it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipelines.probe.config import Limits
from pipelines.probe.samples import Sample, Usage, usage

LIMITS = Limits()
QUIET = Sample(at_s=0.0, rss_bytes=0, server_cpu_s=0.0, client_cpu_s=0.0, busy_cpu_s=0.0, load_average=0.0)


def sample(at_s: float, **fields: Any) -> Sample:
    return replace(QUIET, at_s=at_s, load_average=at_s, **fields)


def over(samples: list[Sample], *, limits: Limits = LIMITS, idle_until_s: float = 0.0, cpus: int = 4) -> Usage:
    """Usage of a load from 10 to 12 s."""
    return usage(samples, 10.0, 12.0, cpus, limits, idle_until_s)


def test_memory_and_cpu_by_hand() -> None:
    """Two seconds on four CPUs: 3 s of server are 150% of one CPU, 7 - 3 - 1 = 3 s of others 37.5% of all four."""
    found = over(
        [
            sample(10, rss_bytes=100),
            sample(11, rss_bytes=300, server_cpu_s=1.0, client_cpu_s=0.5, busy_cpu_s=3.0),
            sample(12, rss_bytes=200, server_cpu_s=3.0, client_cpu_s=1.0, busy_cpu_s=7.0),
        ]
    )
    assert (300, 200, None) == (found.peak_rss_bytes, found.loaded_rss_bytes, found.idle_rss_bytes)
    assert (150, 37.5, 12) == (found.cpu_percent, found.foreign_cpu_percent, found.load_average)
    assert "" == found.disturbed


def test_only_the_loads_own_time_counts() -> None:
    """Samples well before and after a load do not enter its figures, but for idle memory, before the first request."""
    found = over(
        [sample(1, rss_bytes=50), sample(2, rss_bytes=60), sample(5, rss_bytes=999), sample(10, rss_bytes=100),
         sample(12, rss_bytes=200, server_cpu_s=2.0), sample(20, rss_bytes=999, server_cpu_s=50.0)],
        idle_until_s=2.5,
    )  # fmt: skip
    assert (60, 200, 100.0) == (found.idle_rss_bytes, found.peak_rss_bytes, found.cpu_percent)


def test_too_few_samples_are_not_zero() -> None:
    """Without samples nothing is known; with one, memory but no CPU share; of a server elsewhere, neither."""
    assert Usage() == over([])
    one = over([sample(11, rss_bytes=7)])
    assert (7, None, None) == (one.peak_rss_bytes, one.cpu_percent, one.foreign_cpu_percent)
    elsewhere = over([sample(at_s, rss_bytes=None, server_cpu_s=None, busy_cpu_s=at_s * 4) for at_s in (10, 11, 12)])
    assert (None, None, None, "") == (
        elsewhere.peak_rss_bytes, elsewhere.cpu_percent, elsewhere.foreign_cpu_percent, elsewhere.disturbed
    )  # fmt: skip


def test_foreign_share_is_never_negative() -> None:
    """The kernel's clocks are coarse, so the server may seem to use more than the machine did."""
    assert 0.0 == over([sample(10), sample(12, server_cpu_s=2.0, busy_cpu_s=1.5)], cpus=2).foreign_cpu_percent


def test_gpu_figures_by_hand() -> None:
    """Means of power, utilisation and clock, the highest temperature, three memories, energy by the GPU's counter."""
    found = over(
        [
            sample(8, gpu_memory_bytes=10),
            sample(10, gpu_memory_bytes=20, gpu_power_w=100.0, gpu_energy_j=1000.0, gpu_temperature_c=50.0,
                   gpu_utilisation_percent=90.0, gpu_clock_mhz=1900.0),
            sample(11, gpu_memory_bytes=40, gpu_power_w=300.0, gpu_energy_j=1150.0, gpu_temperature_c=61.0,
                   gpu_utilisation_percent=70.0, gpu_clock_mhz=1800.0),
            sample(12, gpu_memory_bytes=30, gpu_power_w=200.0, gpu_energy_j=1420.0, gpu_temperature_c=60.0,
                   gpu_utilisation_percent=80.0, gpu_clock_mhz=1850.0),
        ],
        idle_until_s=9.0,
    )  # fmt: skip
    assert (10, 30, 40) == (found.gpu_memory_idle_bytes, found.gpu_memory_loaded_bytes, found.gpu_memory_peak_bytes)
    assert (80.0, 200.0, 61.0, 1850.0) == (
        found.gpu_utilisation_percent, found.gpu_power_w, found.gpu_temperature_c, found.gpu_clock_mhz
    )  # fmt: skip
    assert (420.0, "") == (found.energy_j, found.disturbed)


def test_energy_from_power_where_there_is_no_counter() -> None:
    """The trapezoid rule: 100 to 300 W over one second, 300 to 200 W over the next, are 450 J."""
    powers = [(10, 100.0), (11, 300.0), (12, 200.0)]
    assert 450.0 == over([sample(at_s, gpu_power_w=power) for at_s, power in powers]).energy_j
    assert None is over([sample(11, gpu_power_w=100.0)]).energy_j


def test_a_servers_own_words() -> None:
    """Peaks of queue and cache under load; hits between the last scrape before it and the first after it."""
    found = over(
        [
            sample(9.5, prefix_hits=100.0, prefix_queries=400.0, queue=99.0, kv_usage=0.9),
            sample(10.5, prefix_hits=130.0, prefix_queries=500.0, queue=3.0, kv_usage=0.25),
            sample(11.5, queue=8.0, kv_usage=0.5),
            sample(12.5, prefix_hits=160.0, prefix_queries=600.0, queue=0.0, kv_usage=0.0),
            sample(13.5, prefix_hits=999.0, prefix_queries=999.0),
        ]
    )
    assert (8.0, 0.5, 0.3) == (found.queue_peak, found.kv_usage_peak, found.prefix_hit_rate)


def test_a_hit_rate_that_a_server_tells_itself_is_taken_as_told() -> None:
    """Without counts, the last rate under load; no prompt looked for is no rate."""
    assert 0.75 == over([sample(10.5, prefix_hit_rate=0.5), sample(11.5, prefix_hit_rate=0.75)]).prefix_hit_rate
    idle = [sample(at_s, prefix_hits=5.0, prefix_queries=9.0) for at_s in (9.5, 10.5, 12.5)]
    assert None is over(idle).prefix_hit_rate


def clocked(*clocks: float, busy: float = 90.0) -> list[Sample]:
    return [sample(10 + k / 10, gpu_clock_mhz=mhz, gpu_utilisation_percent=busy) for k, mhz in enumerate(clocks)]


DISTURBED = [
    ([sample(10), sample(12, server_cpu_s=1.0, busy_cpu_s=5.0)], "others took 50% of the CPU"),
    ([sample(10, gpu_throttled="power brake, thermal slowdown"), sample(11, gpu_throttled="thermal slowdown")],
     "GPU slowed: power brake, thermal slowdown"),
    ([sample(10, gpu_others=0), sample(11, gpu_others=1)], "1 other process on the GPU"),
    ([sample(10, gpu_others=3), sample(11, gpu_others=None)], "3 other processes on the GPU"),
    (clocked(1980.0, 1200.0), "SM clock between 1200 and 1980 MHz"),
    ([sample(10, gpu_others=1, gpu_throttled="power brake")], "GPU slowed: power brake; 1 other process on the GPU"),
]  # fmt: skip


@pytest.mark.parametrize(("samples", "words"), DISTURBED)
def test_what_disturbs_a_block_is_said(samples: list[Sample], words: str) -> None:
    """Each kind has its words, and several stand beside each other."""
    assert words == over(samples).disturbed


@pytest.mark.parametrize("samples", [samples for samples, _ in DISTURBED])
def test_what_no_limit_names_disturbs_nothing(samples: list[Sample]) -> None:
    """Each limit can be taken away."""
    none = Limits(foreign_cpu_percent=None, gpu_clock_percent=None, gpu_processes=False, throttling=False)
    assert "" == over(samples, limits=none).disturbed


def test_the_clock_of_an_idle_gpu_may_fall() -> None:
    """A GPU that waits lowers its clock; and clocks within the limit are no change."""
    assert "" == over([*clocked(1980.0), *clocked(300.0, busy=3.0)]).disturbed
    assert "" == over(clocked(1980.0, 1700.0)).disturbed
