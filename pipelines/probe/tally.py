"""What the client has to say about itself and about the servers' counts: its lag, its share of a CPU, mismatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.probe import latency
from pipelines.probe.rows import RequestRow

Facts = dict[str, str | int | float | bool | None]
LATE_MS = 10.0
LATE_SHARE = 0.01
BUSY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Effort:
    """What one load took of the client: its process's CPU time, over the time that the load took."""

    requests: int
    cpu_s: float
    wall_s: float
    real_time: bool


def lags_ms(requests: Sequence[RequestRow]) -> list[float]:
    """Time sent - time due of every request that was sent to a schedule."""
    sent = (row for row in requests if row.error not in ("not_started", "interrupted"))
    return [(row.sent_s - row.scheduled_s) * 1e3 for row in sent if row.concurrency is None]


def fault(lags: Sequence[float], effort: Effort | None) -> str:
    """Say why a load was measured wrongly for the client's sake, "" where it was not.

    Latency counts from the due time, so a late client makes a server look slower, never faster. In a closed loop
    nothing is due, but a client without CPU to spare reads late all the same.
    """
    late = sum(lag > LATE_MS for lag in lags)
    if late > max(1.0, LATE_SHARE * len(lags)):
        return f"the client sent {late} of {len(lags)} requests more than {LATE_MS:g} ms late"
    if effort is not None and effort.wall_s > 0 and effort.cpu_s > BUSY_SHARE * effort.wall_s:
        return f"the client was busy {effort.cpu_s / effort.wall_s:.0%} of the time; one process cannot take this load"
    return ""


def facts(requests: Sequence[RequestRow], efforts: Sequence[Effort]) -> Facts:
    """Sum up a probe."""
    lags = lags_ms(requests)
    answered = [row for row in requests if row.ok]
    errors = Counter(row.error for row in requests if row.error is not None)
    sent = sum(effort.requests for effort in efforts)
    cpu_s = sum(effort.cpu_s for effort in efforts)
    return {
        "errors": ", ".join(f"{name} {count}" for name, count in sorted(errors.items())),
        "schedule_lag_p50_ms": latency.percentile(lags, 50),
        "schedule_lag_p99_ms": latency.percentile(lags, 99),
        "schedule_lag_max_ms": max(lags, default=None),
        "client_cpu_ms_per_request": cpu_s / sent * 1e3 if sent else None,
        "client_busy_percent": max((e.cpu_s / e.wall_s * 100 for e in efforts if e.wall_s > 0), default=None),
        "client_real_time": bool(efforts) and all(effort.real_time for effort in efforts),
        "other_lengths": sum(row.output_tokens != row.asked_tokens for row in answered),
        "input_count_mismatches": sum(
            row.usage_input_tokens is not None and row.usage_input_tokens != row.input_tokens for row in answered
        ),
        "output_count_mismatches": sum(
            row.usage_output_tokens is not None
            and row.counted_tokens is not None
            and row.usage_output_tokens != row.counted_tokens
            for row in answered
        ),
        "uncounted_by_server": sum(row.usage_output_tokens is None for row in answered),
        "uncounted_by_ids": sum(row.counted_tokens is None for row in answered),
    }
