"""`quantgate probe`: a campaign as far as scores and latency; with --self-test, the client's own error here."""

from __future__ import annotations

import argparse

from pipelines import terminal
from pipelines.cli import Answer
from pipelines.errors import InputError

RATES = (20.0, 100.0, 300.0)
SECONDS = 10.0
COLUMNS = (
    "asked /s", "delivered /s", "TTFT p50", "true", "TTFT p99", "true", "error p50", "p99", "TPOT", "true",
    "ITL error p99", "lag p99", "CPU a request", "what is off",
)  # fmt: skip


def probe(args: argparse.Namespace) -> Answer:
    """Run a campaign as far as its probes, or measure the client itself."""
    if args.self_test:
        if args.overrides:
            raise InputError(f"--self-test measures the client, not a campaign; leave out {' '.join(args.overrides)}")
        return self_test(args.rates or RATES, args.seconds or SECONDS)
    if args.rates or args.seconds:
        raise InputError("--rates and --seconds belong to --self-test; a campaign's load is under probe.profiles")
    from pipelines.verbs import campaign

    return campaign.probe(args)


def self_test(rates: tuple[float, ...], seconds: float) -> Answer:
    """Measure a server whose timing is known at each rate, and print how far off the client is."""
    from pipelines.probe import selftest

    found = list(selftest.measure(rates, seconds))
    terminal.table(
        "The client against a server of known timing; milliseconds",
        COLUMNS,
        (
            (
                f"{f.rate:g}", f"{f.delivered:.1f}", f"{f.ttft_ms[0]:.2f}", f"{f.true_ttft_ms[0]:.2f}",
                f"{f.ttft_ms[1]:.2f}", f"{f.true_ttft_ms[1]:.2f}", f"{f.ttft_error_ms[0]:.2f}",
                f"{f.ttft_error_ms[1]:.2f}", f"{f.tpot_ms:.3f}", f"{f.true_tpot_ms:.3f}", f"{f.itl_error_ms[1]:.2f}",
                f"{f.lag_p99_ms:.2f}", f"{f.cpu_ms:.2f}", f.off or "nothing",
            )
            for f in found
        ),
    )  # fmt: skip
    if not all(f.real_time for f in found):
        print("The kernel refuses real-time priority here, so whatever else runs delays the client.")
    return Answer(0, {"conditions": dict(selftest.conditions(found)), "rates": [f.document() for f in found]})
