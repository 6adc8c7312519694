"""What the probe shows of one engine, as data: the part of a decision that is about speed.

A figure belongs to a group: a load profile, its phase (a step, a part of a spike, a rate that was searched; else 0) and
a bucket of input lengths ("" only where all buckets are added up).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelines.config import Strict
from pipelines.decide.interval import Interval

MetricName = Literal["ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"]


class Latency(Strict):
    """One percentile of one latency metric in one group, with its distribution-free interval.

    requests: how many of them it is taken over; of ITL the gaps between tokens are counted.
    evidence: false where it had to be taken from blocks that are none.
    """

    profile: str
    metric: MetricName
    percentile: float
    value: float | None
    interval: Interval | None
    requests: int
    phase: int = 0
    bucket: str = ""
    evidence: bool = True


class Throughput(Strict):
    """What an engine delivered in one group.

    requests, failed, errors: of everything that was sent; `errors` counts classes, and what was interrupted is no
    failure. Rates are over the blocks that count. rate: what was offered, in requests/s, of an open load.
    goodput_per_s and within_slo: requests that kept every promise of the profile, a second and of those sent; None
    where nothing is promised.
    """

    profile: str
    requests: int
    failed: int
    requests_per_s: float
    output_tokens_per_s: float
    peak_rss_bytes: int | None
    phase: int = 0
    bucket: str = ""
    rate: float | None = None
    concurrency: int | None = None
    input_tokens_per_s: float = 0.0
    errors: dict[str, int] = Field(default_factory=dict)
    goodput_per_s: float | None = None
    within_slo: float | None = None
    evidence: bool = True

    @property
    def total_tokens_per_s(self) -> float:
        return self.input_tokens_per_s + self.output_tokens_per_s

    @property
    def success(self) -> float | None:
        """The share of requests answered in full, interrupted ones aside."""
        sent = self.requests - self.errors.get("interrupted", 0)
        return (sent - self.failed) / sent if sent > 0 else None


class Speed(Strict):
    """Whether a candidate is faster than the reference, on the gate's own latency metric, paired by round.

    `ratio` is reference latency / candidate latency: 1.5 means one and a half times as fast. Where the profile has
    several groups, it is the one with the least gain.
    """

    metric: str
    profile: str
    ratio: float | None
    interval: Interval | None
    evidence: bool
    note: str
    phase: int = 0
    bucket: str = ""


class Difference(Strict):
    """How much faster than the reference in one group: reference / candidate, interval over rounds.

    by: "request" averages over pairs of the same request in the same round; "p99" compares the percentile of each
    block with that of the same round. difference_ms: candidate - reference, over the same pairs.
    """

    profile: str
    phase: int
    bucket: str
    metric: MetricName
    by: str
    ratio: float
    interval: Interval | None
    difference_ms: float
    difference_interval: Interval | None
    rounds: int
    pairs: int


class Spot(Strict):
    """The median of one block, so many hours after the probe began; `left_out` says why it does not count."""

    hours: float
    value: float
    left_out: str = ""


class Drift(Strict):
    """How a metric moved over the blocks of a profile: the share it grew by from first to last, and its interval."""

    profile: str
    metric: MetricName
    spots: tuple[Spot, ...]
    change: float | None
    interval: Interval | None


class Saturation(Strict):
    """The highest rate searched that still kept the promise, by round (None: not even the lowest did) and over rounds.

    failed_by_round: the lowest that did not keep it, None where all did. at_least: some round kept it at the highest
    rate there was, so that the true rate may be higher.
    """

    profile: str
    by_round: tuple[float | None, ...]
    failed_by_round: tuple[float | None, ...]
    rate: float | None
    interval: Interval | None
    at_least: bool
    promise: str
    evidence: bool = True


class LeftOut(Strict):
    """A block that is no evidence, and why."""

    profile: str
    round: int
    reason: str


class Soundness(Strict):
    """What the client and the server's own counts say about a profile's figures.

    lag_*: how late requests of an open load were sent; None in closed loops, and where the sample is too small.
    lag_limit_ms: what the p99 (the maximum, where there is none) may be. token_mismatches: answers of which the
    server's usage and the ids in its stream disagree. other_lengths: answers not as long as asked for.
    steady_blocks: those whose server was shown to be steady when they began; drifting ones are left out, and of the
    rest the warm-up ended before either was shown.
    prefix_hits: share of input tokens that the server took from a cache; None where it does not tell.
    """

    profile: str
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    lag_max_ms: float | None
    lag_limit_ms: float | None
    answered: int
    token_mismatches: int
    compared_tokens: int
    input_mismatches: int
    other_lengths: int
    blocks: int
    steady_blocks: int
    prefix_hits: float | None
    prefix_source: str

    @property
    def late(self) -> bool:
        """Whether the client was too slow for its latencies to be evidence."""
        lag = self.lag_max_ms if self.lag_p99_ms is None else self.lag_p99_ms
        return lag is not None and self.lag_limit_ms is not None and lag > self.lag_limit_ms


class Resources(Strict):
    """What serving a profile took: memory in bytes, energy in joules. None: not available, the conditions say why."""

    profile: str
    ready_s: float | None
    idle_rss_bytes: int | None
    loaded_rss_bytes: int | None
    peak_rss_bytes: int | None
    gpu_memory_idle_bytes: int | None
    gpu_memory_loaded_bytes: int | None
    gpu_memory_peak_bytes: int | None
    gpu_utilisation_percent: float | None
    gpu_power_w: float | None
    energy_per_output_token_j: float | None
    gpu_temperature_c: float | None
    gpu_clock_mhz: float | None
    cpu_percent: float | None
    kv_usage_peak: float | None
    queue_peak: float | None


class Probed(Strict):
    """Everything beside percentiles and rates that the probe shows of one engine."""

    differences: tuple[Difference, ...] = ()
    drifts: tuple[Drift, ...] = ()
    saturations: tuple[Saturation, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    soundness: tuple[Soundness, ...] = ()
    resources: tuple[Resources, ...] = ()
