"""Counters of the server, in a registry of their own, as Prometheus text."""

from __future__ import annotations

import time

TIMES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        at = self._registry = CollectorRegistry()
        name = "quantgate_host_{}".format
        self._answers = Counter(name("responses"), "Responses by route and status", ["route", "status"], registry=at)
        self._tokens_in = Counter(name("prompt_tokens"), "Prompt tokens of finished requests", registry=at)
        self._tokens_out = Counter(name("generated_tokens"), "Generated tokens of finished requests", registry=at)
        self._open = Gauge(name("requests_open"), "Requests running or waiting", registry=at)
        self._batch = Gauge(name("sequences_running"), "Sequences in the batch", registry=at)
        first, whole = "From request to first token", "From request to last token"
        self._first = Histogram(name("time_to_first_token_seconds"), first, buckets=TIMES_S, registry=at)
        self._whole = Histogram(name("request_seconds"), whole, buckets=TIMES_S, registry=at)

    def answered(self, route: str, status: int) -> None:
        """Count a response."""
        self._answers.labels(route, str(status)).inc()

    def finished(self, started: float, first: float | None, tokens_in: int, tokens_out: int) -> None:
        """Record a request that ran to its end; times are `time.perf_counter` seconds."""
        self._tokens_in.inc(tokens_in)
        self._tokens_out.inc(tokens_out)
        self._whole.observe(time.perf_counter() - started)
        if first is not None:
            self._first.observe(first - started)

    def page(self, open_tickets: int, running: int) -> tuple[bytes, str]:
        """The metrics as text, and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        self._open.set(open_tickets)
        self._batch.set(running)
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
