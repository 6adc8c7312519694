"""What a server tells of itself in Prometheus text: a few figures by meaning, whatever it calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# By meaning, the names that servers have for it; several series of one name are its engines or models.
NAMES: Mapping[str, tuple[str, ...]] = {
    "waiting": (
        "vllm:num_requests_waiting",
        "llamacpp:requests_deferred",
        "trtllm_num_requests_waiting",
        "sglang:num_queue_reqs",
    ),
    "running": (
        "vllm:num_requests_running",
        "llamacpp:requests_processing",
        "trtllm_num_requests_running",
        "sglang:num_running_reqs",
        "quantgate_host_sequences_running",
    ),
    "open": ("quantgate_host_requests_open",),  # running or waiting
    "kv_usage": (
        "vllm:kv_cache_usage_perc",  # a share, whatever it is called
        "vllm:gpu_cache_usage_perc",
        "llamacpp:kv_cache_usage_ratio",
        "trtllm_kv_cache_utilization",
        "sglang:token_usage",
    ),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hit_rate": ("trtllm_kv_cache_hit_rate", "sglang:cache_hit_rate"),
}
_MEANING = {name: meaning for meaning, names in NAMES.items() for name in names}


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading; None where the server does not tell.

    queue: requests waiting. kv_usage: share of the KV cache in use, of the fullest engine. prefix_hits and
    prefix_queries: tokens found in, and looked for in, the prefix cache since the server started; prefix_hit_rate: what
    a server that keeps no such counts says itself.
    """

    queue: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    prefix_hits: float | None = None
    prefix_queries: float | None = None
    prefix_hit_rate: float | None = None


def read(text: str) -> Scrape:
    """Read a page of metrics; lines that are none of ours, or no number, are passed over."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name = line[: brace if (brace := line.find("{")) >= 0 else line.find(" ")]
        meaning = _MEANING.get(name)
        if meaning is not None and (value := _value(line)) is not None:
            found.setdefault(meaning, []).append(value)
    totals = {meaning: sum(values) for meaning, values in found.items()}
    rates = found.get("prefix_hit_rate")
    waiting, running = totals.get("waiting"), totals.get("running")
    if waiting is None and running is not None and "open" in totals:
        waiting = max(0.0, totals["open"] - running)
    return Scrape(
        queue=waiting,
        running=running,
        kv_usage=max(found["kv_usage"]) if "kv_usage" in found else None,
        prefix_hits=totals.get("prefix_hits"),
        prefix_queries=totals.get("prefix_queries"),
        prefix_hit_rate=sum(rates) / len(rates) if rates else None,
    )


def _value(line: str) -> float | None:
    """The number behind the labels, which may themselves hold spaces and braces; NaN is none."""
    rest = line[line.rfind("}") + 1 :] if "}" in line else line.partition(" ")[2]
    try:
        value = float(rest.split()[0])
    except (ValueError, IndexError):
        return None
    return value if value == value else None
