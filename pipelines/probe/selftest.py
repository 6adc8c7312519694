"""The client's own error: what it measures of a server whose timing is known, against what that server really did.

Server and client share this machine, so what is found holds for it as busy as it is now.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pipelines.errors import EnvironmentProblem
from pipelines.probe import known, latency, sse
from pipelines.probe.client import Address, Client, Exchange, Request, completion_body
from pipelines.probe.known import Timing

TOKENS = 16
PROMPT_TOKENS = 100
WARMUP = 64
STOP_S = 10.0
TTFT_LIMIT = 0.03
TPOT_LIMIT = 0.02


@dataclass(frozen=True, slots=True)
class Truth:
    """What a server did for one request, in seconds of the monotonic clock."""

    first_id: int | None
    received_s: float
    written_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Measured against true at one rate. Errors are measured - true of each request, or of each gap between tokens.

    delivered: requests a second as the server saw them arrive. `off` says what is not within the limits.
    """

    rate: float
    requests: int
    failed: int
    delivered: float
    ttft_ms: tuple[float, float]
    true_ttft_ms: tuple[float, float]
    ttft_error_ms: tuple[float, float]
    itl_error_ms: tuple[float, float]
    tpot_ms: float
    true_tpot_ms: float
    lag_p99_ms: float
    cpu_ms: float
    events_per_s: float
    real_time: bool

    @property
    def ttft_ratio(self) -> float:
        """P99 of TTFT, measured over true."""
        return self.ttft_ms[1] / self.true_ttft_ms[1]

    @property
    def tpot_ratio(self) -> float:
        """Mean TPOT, measured over true."""
        return self.tpot_ms / self.true_tpot_ms

    @property
    def off(self) -> str:
        """What is not as it should be, "" where all is."""
        found = [
            (self.failed > 0, f"{self.failed} requests failed"),
            (self.delivered < 0.99 * self.rate, f"{self.delivered:.4g} of {self.rate:g} requests/s delivered"),
            (abs(self.ttft_ratio - 1) > TTFT_LIMIT, f"P99 of TTFT off by more than {TTFT_LIMIT:.0%}"),
            (abs(self.tpot_ratio - 1) > TPOT_LIMIT, f"TPOT off by more than {TPOT_LIMIT:.0%}"),
        ]
        return "; ".join(what for wrong, what in found if wrong)

    def document(self) -> dict[str, object]:
        """The figures as JSON has them; pairs are p50 and p99."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        pairs = {f"{name}_{p}": value for name, two in fields.items() if isinstance(two, tuple)
                 for p, value in zip(("p50", "p99"), two, strict=True)}  # fmt: skip
        single = {name: value for name, value in fields.items() if not isinstance(value, tuple)}
        return {**single, **pairs, "ttft_ratio": self.ttft_ratio, "tpot_ratio": self.tpot_ratio, "off": self.off}


class KnownServer:
    """The known server, running in a process of its own."""

    def __init__(self, port: int) -> None:
        self.root = f"http://127.0.0.1:{port}"
        self.address = Address(f"{self.root}/v1", known.MODEL, ignore_eos=True, token_ids=True)

    def truth(self) -> tuple[Truth, ...]:
        """What it did since it was last asked."""
        with urllib.request.urlopen(f"{self.root}/truth", timeout=60) as answer:
            return tuple(Truth(t["first_id"], t["received_s"], tuple(t["written_s"])) for t in json.load(answer))


@contextmanager
def known_server(timing: Timing | None = None) -> Iterator[KnownServer]:
    """Run the known server while the block lasts."""
    timing = timing or Timing()
    arguments = [f"--{name.replace('_', '-')}={getattr(timing, name)}" for name in Timing.__slots__ if name != "role"]
    command = [sys.executable, "-m", "pipelines.probe.known", *arguments, *(["--role"] if timing.role else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line.strip().isdigit():
                raise EnvironmentProblem("the known server did not start; its words are above")
            yield KnownServer(int(line))
        finally:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def measure(rates: Sequence[float], seconds: float, *, real_time: bool = True) -> Iterator[Fidelity]:
    """Measure at each rate in turn, with constant arrivals; without `real_time` as an ordinary process."""
    with known_server() as server, Client(server.address.base_url, timeout_s=60.0, real_time=real_time) as client:
        client.run(_requests(server.address, [0.0] * WARMUP))
        server.truth()
        for rate in rates:
            due = [k / rate for k in range(max(2, math.ceil(rate * seconds)))]
            sent = client.run(_requests(server.address, due))
            yield compare(rate, sent.exchanges, sent.cpu_s, sent.real_time, server.truth())


def _requests(address: Address, due: Sequence[float]) -> list[Request]:
    prompt = list(range(1, PROMPT_TOKENS))
    return [Request(completion_body(address, [k, *prompt], TOKENS), at_s) for k, at_s in enumerate(due)]


def compare(
    rate: float, exchanges: Sequence[Exchange], cpu_s: float, real_time: bool, truth: Sequence[Truth]
) -> Fidelity:
    """Hold exchanges against what the server did for each; latency counts from when a request was due."""
    by_id = {one.first_id: one for one in truth}
    answers = [sse.read(exchange.chunks) for exchange in exchanges]
    good = [
        (exchange, answer.token_times_s, by_id[k])
        for k, (exchange, answer) in enumerate(zip(exchanges, answers, strict=True))
        if exchange.failure is None and answer.error is None and len(answer.token_times_s) == TOKENS
    ]
    if not good:
        raise EnvironmentProblem(f"the client got no answer at {rate:g} requests a second: {exchanges[0].failure}")
    ttft = [(times[0] - exchange.scheduled_s) * 1e3 for exchange, times, _ in good]
    true_ttft = [(one.written_s[0] - one.received_s) * 1e3 for _, _, one in good]
    gaps = [gap for _, times, _ in good for gap in latency.itl_ms(times)]
    true_gaps = [gap for *_, one in good for gap in latency.itl_ms(one.written_s)]
    arrived = sorted(one.received_s for one in truth)
    ended = max(exchange.ended_s for exchange in exchanges)
    return Fidelity(
        rate=rate,
        requests=len(exchanges),
        failed=len(exchanges) - len(good),
        delivered=(len(arrived) - 1) / (arrived[-1] - arrived[0]),
        ttft_ms=middle_and_tail(ttft),
        true_ttft_ms=middle_and_tail(true_ttft),
        ttft_error_ms=middle_and_tail([a - b for a, b in zip(ttft, true_ttft, strict=True)]),
        itl_error_ms=middle_and_tail([abs(a - b) for a, b in zip(gaps, true_gaps, strict=True)]),
        tpot_ms=math.fsum(gaps) / len(gaps),
        true_tpot_ms=math.fsum(true_gaps) / len(true_gaps),
        lag_p99_ms=middle_and_tail([(e.sent_s - e.scheduled_s) * 1e3 for e in exchanges])[1],
        cpu_ms=cpu_s / len(exchanges) * 1e3,
        events_per_s=len(good) * (TOKENS + 2) / ended,
        real_time=real_time,
    )


def middle_and_tail(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p99; with under a hundred values the tail is the largest, since an error must not be hidden."""
    p50, p99 = (latency.percentile(values, p) for p in (50, 99))
    return min(values) if p50 is None else p50, max(values) if p99 is None else p99


def conditions(found: Sequence[Fidelity]) -> Mapping[str, object]:
    """What the figures depend on, besides the machine."""
    return {
        "ttft_ms": Timing().ttft_ms, "itl_ms": Timing().itl_ms, "tokens": TOKENS, "arrivals": "constant",
        "load_average": round(os.getloadavg()[0], 2), "real_time": all(one.real_time for one in found),
    }  # fmt: skip
