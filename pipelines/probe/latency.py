"""The latency formulas, in one place and pure. Times are seconds of one monotonic clock; results are milliseconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)

FORMULAS: dict[str, str] = {
    "start": "closed loop: when the request was sent; open loop: when it was due (no coordinated omission)",
    "TTFT": "arrival of the first token - start",
    "E2E": "arrival of the last token - start",
    "TPOT": "(E2E - TTFT) / (n - n1); n = output tokens, n1 = tokens that arrived with the first "
    "(1 unless the server sends several tokens an event); not available for n = n1",
    "ITL": "time between consecutive token events of one request",
    "schedule lag": "time sent - time due (open loop)",
    "percentile": "nearest rank: the smallest value with at least p% of the values at or below it; not available "
    "where no value would lie above it (p99 needs 100 requests), never the maximum",
    "requests/s": "requests answered in full / (last answer - start of the load)",
    "output tokens/s": "output tokens of requests answered in full / (last answer - start of the load)",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """A sample in a few figures. A percentile that the sample cannot support is None."""

    count: int
    mean: float | None
    percentiles: Mapping[float, float | None]


def ttft_ms(start_s: float, token_times_s: Sequence[float]) -> float | None:
    """Time to first token."""
    return (token_times_s[0] - start_s) * 1e3 if token_times_s else None


def e2e_ms(start_s: float, token_times_s: Sequence[float]) -> float | None:
    """Time to last token."""
    return (token_times_s[-1] - start_s) * 1e3 if token_times_s else None


def tpot_ms(e2e: float, ttft: float, tokens: int, first_tokens: int = 1) -> float | None:
    """Time per output token after the first: (E2E - TTFT) / (n - n1), with n1 the tokens the first event carried."""
    return (e2e - ttft) / (tokens - first_tokens) if tokens > first_tokens else None


def itl_ms(token_times_s: Sequence[float]) -> tuple[float, ...]:
    """Gaps between consecutive token events."""
    return tuple((b - a) * 1e3 for a, b in itertools.pairwise(token_times_s))


def percentile(values: Sequence[float], p: float) -> float | None:
    """Return the value of rank ceil(p/100 * n) of the sorted sample, or None where that rank is the last one."""
    n = len(values)
    rank = max(1, math.ceil(n * p / 100 - 1e-9))
    return sorted(values)[rank - 1] if rank < n else None


def requests_needed(p: float) -> int:
    """Return the smallest sample for which `percentile(values, p)` is available."""
    n = 2
    while max(1, math.ceil(n * p / 100 - 1e-9)) >= n:
        n += 1
    return n


def summarize(values: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> Summary:
    """Count, mean and percentiles of a sample."""
    mean = math.fsum(values) / len(values) if values else None
    return Summary(len(values), mean, {p: percentile(values, p) for p in percentiles})


def per_second(count: float, wall_s: float) -> float:
    """A rate over the load's wall time; 0 for a load that took no time, since then nothing was answered."""
    return count / wall_s if wall_s > 0 else 0.0
