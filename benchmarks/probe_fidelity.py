"""How far off is the probe's client, against a server that streams 16 tokens with known TTFT (50 ms) and ITL (10 ms)?

Client and server share this machine's cores. Truth is the server's own log. Beside it: the same client without
real-time priority, and the load generators of vLLM, AIPerf and GuideLLM where they are installed (see peers.py).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Mapping, Sequence

import peers
from outcome import conclude, conditions

from pipelines.probe.selftest import Fidelity, Truth, known_server, measure, middle_and_tail

RATES = (20.0, 100.0, 300.0)
TTFT_LIMIT, TPOT_LIMIT, CPU_LIMIT_MS = 0.03, 0.02, 1.2
HEADER = (
    f"{'client':<22} {'asked/s':>7} {'served':>7} {'TTFT p50':>9} {'true':>6} {'p99':>7} {'true':>6} {'ratio':>6} "
    f"{'error p50':>9} {'p99':>6} {'TPOT':>7} {'true':>6} {'ITL err p99':>11} {'lag p99':>8} {'CPU ms':>7}"
)
Row = dict[str, float | None]


def main() -> None:
    """Measure all clients, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 seconds a rate, once, not 10 s three times")
    parser.add_argument("--tokenizer", default=os.environ.get("QUANTGATE_TEST_BASE", ""), help="for the peers' prompts")
    given = parser.parse_args()
    seconds, repeats = (4.0, 1) if given.quick else (10.0, 3)
    if given.quick:
        print("quick: a smaller sample")
    ours = [list(measure(RATES, seconds)) for _ in range(repeats)]
    plain = [list(measure(RATES, seconds, real_time=False)) for _ in range(repeats)]
    found = {"quantgate": middles(ours), "quantgate, no real time": middles(plain)}
    print(HEADER)
    for name, rows in found.items():
        show(name, rows)
    for peer in peers.PEERS:
        theirs = "left out of a quick run" if given.quick else beside(peer, seconds, given.tokenizer)
        if isinstance(theirs, str):
            print(f"{peer.name:<22} {theirs}")
            continue
        found[peer.name] = theirs
        show(peer.name, theirs)
    best = found["quantgate"]
    real_time = all(one.real_time for run in ours for one in run)
    print(
        f"medians of {repeats}, peers once; CPU of peers: what one more request costs, from the two highest rates; "
        f"of this client: {one_more(best, seconds):.2f}"
    )
    conclude(
        "probe_fidelity",
        conditions(("uvloop",), seconds=seconds, repeats=repeats, real_time=real_time, quick=given.quick),
        {
            "cpu_ms_of_one_more": one_more(best, seconds),
            **{name: {f"{rate:g}": row for rate, row in rows.items()} for name, rows in found.items()},
        },
        {
            "rate served over asked, worst": (min(_of(best, r, "served") / r for r in RATES), ">=", 0.99),
            "P99 of TTFT measured over true, furthest from 1": (_worst(best, "ttft_ratio"), "<=", TTFT_LIMIT),
            "TPOT measured over true, furthest from 1": (_worst(best, "tpot_ratio"), "<=", TPOT_LIMIT),
            "CPU ms of one more request": (one_more(best, seconds), "<=", CPU_LIMIT_MS),
        },
    )


def one_more(rows: Mapping[float, Row], seconds: float) -> float:
    """CPU of one more request, from the two highest rates: what is compared with peers, free of their start-up."""
    low, high = RATES[-2:]
    spent = {rate: _of(rows, rate, "cpu_ms") * rate * seconds for rate in (low, high)}
    return (spent[high] - spent[low]) / ((high - low) * seconds)


def middles(runs: Sequence[Sequence[Fidelity]]) -> dict[float, Row]:
    """The median of each figure over repeats, by rate."""
    rows: dict[float, Row] = {}
    for same in zip(*runs, strict=True):
        rows[same[0].rate] = {**_medians([_row(one) for one in same])}
    return rows


def _row(one: Fidelity) -> dict[str, float]:
    return {
        "served": one.delivered, "ttft_p50": one.ttft_ms[0], "true_p50": one.true_ttft_ms[0],
        "ttft_p99": one.ttft_ms[1], "true_p99": one.true_ttft_ms[1], "ttft_ratio": one.ttft_ratio,
        "error_p50": one.ttft_error_ms[0], "error_p99": one.ttft_error_ms[1], "tpot": one.tpot_ms,
        "true_tpot": one.true_tpot_ms, "tpot_ratio": one.tpot_ratio, "itl_error_p99": one.itl_error_ms[1],
        "lag_p99": one.lag_p99_ms, "cpu_ms": one.cpu_ms,
    }  # fmt: skip


def beside(peer: peers.Peer, seconds: float, tokenizer: str) -> dict[float, Row] | str:
    """A peer's figures at each rate against the server's log of the same run; or why there are none. One run each, for
    some take a minute to start."""
    program = peer.found()
    if program is None:
        return f"not installed ({peer.variable} names no environment with it)"
    if not tokenizer:
        return "not run (no tokenizer; set QUANTGATE_TEST_BASE)"
    rows: dict[float, Row] = {}
    spent_s: dict[float, float] = {}
    for rate in RATES:
        requests = math.ceil(rate * seconds)
        with known_server() as server:
            run = peers.run(peer, program, server.root, rate, requests, tokenizer)
            truth = sorted(server.truth(), key=lambda one: one.received_s)[-requests:]
        if isinstance(run, str):
            return f"{rate:g}/s: {run}"
        rows[rate] = {**_peer_row(run.figures, truth)}
        spent_s[rate] = run.cpu_s
    low, high = RATES[-2:]
    more = (spent_s[high] - spent_s[low]) / ((high - low) * seconds) * 1e3
    nothing: Row = {"error_p50": None, "error_p99": None, "itl_error_p99": None, "lag_p99": None}
    return {rate: {**row, **nothing, "cpu_ms": more} for rate, row in rows.items()}


def _medians(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in each) for name in each[0]}


def _peer_row(figures: Mapping[str, float], truth: Sequence[Truth]) -> dict[str, float]:
    written = [one.written_s for one in truth]
    received = [one.received_s for one in truth]
    true_p50, true_p99 = middle_and_tail([(w[0] - r) * 1e3 for w, r in zip(written, received, strict=True)])
    tpot = statistics.mean((w[-1] - w[0]) * 1e3 / (len(w) - 1) for w in written)
    return {
        "served": (len(received) - 1) / (received[-1] - received[0]), "ttft_p50": figures["ttft_p50"],
        "true_p50": true_p50, "ttft_p99": figures["ttft_p99"], "true_p99": true_p99,
        "ttft_ratio": figures["ttft_p99"] / true_p99, "tpot": figures["tpot"], "true_tpot": tpot,
        "tpot_ratio": figures["tpot"] / tpot,
    }  # fmt: skip


def show(name: str, rows: Mapping[float, Row]) -> None:
    """Print one client's lines."""
    for rate, row in rows.items():
        cells = (("served", 7, 1), ("ttft_p50", 9, 2), ("true_p50", 6, 2), ("ttft_p99", 7, 2), ("true_p99", 6, 2),
                 ("ttft_ratio", 6, 3), ("error_p50", 9, 2), ("error_p99", 6, 2), ("tpot", 7, 3), ("true_tpot", 6, 2),
                 ("itl_error_p99", 11, 2), ("lag_p99", 8, 2), ("cpu_ms", 7, 2))  # fmt: skip
        print(f"{name:<22} {rate:>7g} " + " ".join(_cell(row[key], width, digits) for key, width, digits in cells))


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def _of(rows: Mapping[float, Row], rate: float, name: str) -> float:
    return _number(rows[rate][name])


def _number(value: float | None) -> float:
    if value is None:
        raise ValueError("not measured")
    return value


def _worst(rows: Mapping[float, Row], ratio: str) -> float:
    return max(abs(_of(rows, rate, ratio) - 1.0) for rate in rows)


if __name__ == "__main__":
    main()
