"""Does the paired comparison see a server that is 3% slower, none where there is none, and with how many requests?

Three servers of known timing take turns under one schedule: two alike, one 3% slower in TTFT and in ITL. Prompts differ
(standard deviation of the log of their latency: 0.3), and so does the same request from time to time (0.03), as with
real servers. The unpaired comparison is of the same requests, taken as two independent samples.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from outcome import conclude, conditions

from pipelines.decide import stats
from pipelines.decide.measured import CONFIDENCE, Group, Request
from pipelines.decide.speed import by_request
from pipelines.probe import latency, sse
from pipelines.probe.arrivals import turn_order
from pipelines.probe.client import Client, Exchange, completion_body
from pipelines.probe.client import Request as Sent
from pipelines.probe.known import Timing
from pipelines.probe.selftest import KnownServer, known_server

SLOWER, SPREAD, NOISE = 1.03, 0.3, 0.03
TOKENS, POWER, PROFILE = 16, 0.8, "open"
NAMES = ("first", "alike", "slower")


def main() -> None:
    """Run the rounds, print both comparisons and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 rounds of 60 requests instead of 8 of 120")
    given = parser.parse_args()
    rounds, requests = (4, 60) if given.quick else (8, 120)
    rows = measure(rounds, requests, rate=40.0)
    first, figures = rows["first"], {}
    print(f"{'E2E against the first server':<30} {'ratio':>7} {'paired 95% interval':>22} {'unpaired':>20}")
    for name in NAMES[1:]:
        paired = by_request(Group(PROFILE), first, rows[name], "e2e_ms")
        if paired is None or paired.interval is None:
            raise SystemExit(f"{name}: too few requests were answered")
        low, high = unpaired(first, rows[name])
        print(f"{name:<30} {paired.ratio:>7.4f} {paired.interval.lower:>11.4f}..{paired.interval.upper:.4f}"
              f" {low:>11.4f}..{high:.4f}")  # fmt: skip
        figures[name] = {"ratio": paired.ratio, "paired": [paired.interval.lower, paired.interval.upper],
                         "unpaired": [low, high]}  # fmt: skip
    needed = needed_paired(first, rows["slower"]), needed_unpaired(first, rows["slower"])
    print(f"requests a server until 3% is seen with {POWER:.0%} power: paired {needed[0]}, unpaired {needed[1]}")
    sooner = seen_from(first, rows["slower"], requests)
    print(f"here the paired interval excluded no difference from {sooner} requests a server on")
    alike, slower = (figures[name]["paired"] for name in NAMES[1:])
    conclude(
        "ab_sensitivity",
        conditions(
            ("uvloop",), rounds=rounds, requests_a_round=requests, rate=40.0, slower=SLOWER, spread=SPREAD, noise=NOISE,
            quick=given.quick,
        ),
        {**figures, "requests_paired": needed[0], "requests_unpaired": needed[1], "seen_from": sooner},
        {
            "alike: lower end of the interval": (alike[0], "<=", 1.0),
            "alike: upper end of the interval": (alike[1], ">=", 1.0),
            "slower: upper end of the interval": (slower[1], "<=", 1.0 - 1e-9),
            "requests needed, paired over unpaired": (needed[0] / needed[1], "<=", 1.0 - 1e-9),
        },
    )  # fmt: skip


def measure(rounds: int, requests: int, rate: float) -> dict[str, list[Request]]:
    """Give every server the same requests at the same times, round after round in alternating order."""
    plain = Timing(spread=SPREAD, noise=NOISE)
    timings = [
        replace(plain, seed=1),
        replace(plain, seed=2),
        replace(plain, seed=3, ttft_ms=plain.ttft_ms * SLOWER, itl_ms=plain.itl_ms * SLOWER),
    ]
    rows: dict[str, list[Request]] = {name: [] for name in NAMES}
    with ExitStack() as stack:
        servers = [stack.enter_context(known_server(timing)) for timing in timings]
        clients = [stack.enter_context(Client(s.address.base_url, timeout_s=60.0)) for s in servers]
        for number in range(-1, rounds):  # the first warms up
            for place in turn_order(len(servers), number):
                exchanges = clients[place].run(load(servers[place], number, requests, rate)).exchanges
                if number >= 0:
                    rows[NAMES[place]] += [row(NAMES[place], number, k, one) for k, one in enumerate(exchanges)]
    return rows


def load(server: KnownServer, number: int, requests: int, rate: float) -> list[Sent]:
    """One round's requests; the ids after the first are the prompt, another one for every request of a round."""
    bodies = (completion_body(server.address, [k, number, k, 1, 2], TOKENS) for k in range(requests))
    return [Sent(body, k / rate) for k, body in enumerate(bodies)]


def row(engine: str, number: int, k: int, exchange: Exchange) -> Request:
    """A request as the comparison reads it."""
    answer = sse.read(exchange.chunks)
    e2e = latency.e2e_ms(exchange.scheduled_s, answer.token_times_s)
    ok = exchange.failure is None and answer.error is None
    return Request(engine=engine, profile=PROFILE, round=number, ok=ok, e2e_ms=e2e, mode="open", request=k,
                   prompt_id=f"{number}/{k}", output_tokens=answer.tokens)  # fmt: skip


def unpaired(ours: Sequence[Request], theirs: Sequence[Request]) -> tuple[float, float]:
    """Welch's interval of the ratio of geometric means, as of two independent samples."""
    a, b = logs(ours), logs(theirs)
    one, other = stats.paired_t(a), stats.paired_t(b)
    se = math.hypot(one.se, other.se)
    df = se**4 / (one.se**4 / one.df + other.se**4 / other.df)
    half = stats.critical(CONFIDENCE, df) * se
    return math.exp(one.mean - other.mean - half), math.exp(one.mean - other.mean + half)


def needed_paired(ours: Sequence[Request], theirs: Sequence[Request]) -> int:
    """Pairs until the true difference is seen: of the variance of single pairs, or that of rounds if it is larger."""
    by_round: dict[int, list[float]] = {}
    for a, b in zip(ours, theirs, strict=True):
        if a.e2e_ms and b.e2e_ms:
            by_round.setdefault(a.round, []).append(math.log(a.e2e_ms / b.e2e_ms))
    single = [d for pairs in by_round.values() for d in pairs]
    size = len(single) / len(by_round)
    means = [math.fsum(pairs) / len(pairs) for pairs in by_round.values()]
    worst = max(variance(single), variance(means) * size)
    return stats.required_items(worst, math.log(SLOWER), (1 - CONFIDENCE) / 2, POWER)


def needed_unpaired(ours: Sequence[Request], theirs: Sequence[Request]) -> int:
    """Requests of each server until the true difference is seen between independent samples."""
    both = variance(logs(ours)) + variance(logs(theirs))
    return stats.required_items(both, math.log(SLOWER), (1 - CONFIDENCE) / 2, POWER)


def seen_from(ours: Sequence[Request], theirs: Sequence[Request], requests: int) -> int | None:
    """Requests of each server, in whole rounds, from which on the paired interval excluded no difference."""
    found = None
    for rounds in range(2, ours[-1].round + 2):
        sides = ([r for r in side if r.round < rounds] for side in (ours, theirs))
        paired = by_request(Group(PROFILE), *sides, "e2e_ms")
        seen = paired is not None and paired.interval is not None and paired.interval.upper < 1.0
        found = (found or rounds * requests) if seen else None
    return found


def logs(rows: Sequence[Request]) -> list[float]:
    return [math.log(r.e2e_ms) for r in rows if r.ok and r.e2e_ms]


def variance(values: Sequence[float]) -> float:
    estimate = stats.paired_t(values)
    return estimate.se**2 * len(values)


if __name__ == "__main__":
    main()
