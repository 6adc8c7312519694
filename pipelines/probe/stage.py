"""The probe stage: every engine in turn, round after round in alternating order, under one schedule."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.errors import InputError, StageFailed
from pipelines.flow import device, progress
from pipelines.probe import latency, prompts, rounds, rows, turn
from pipelines.probe.arrivals import turn_order
from pipelines.probe.bandwidth import ARRAY_BYTES, BandwidthProbe
from pipelines.probe.config import ProbeConfig

Facts = dict[str, str | int | float | bool | None]


def run(config: ProbeConfig, out: Path, *, engines: list[Path]) -> Facts:
    """Probe engines against each other; write requests.parquet, blocks.parquet and the servers' logs.

    Raises:
        InputError: prompts that cannot be read, do not fit an engine, or that the engines tokenize differently.
        StageFailed: no engine answered anything.
    """
    from pipelines.engine.serving import serve

    return measure(config, out, engines, serve)


def measure(
    config: ProbeConfig, out: Path, engines: Sequence[Path], serve: turn.Serve, array_bytes: int = ARRAY_BYTES
) -> Facts:
    """Do what `run` does, with whatever starts servers; bandwidth is read over `array_bytes`."""
    threads = config.threads or len(os.sched_getaffinity(0))
    prompt_set = _shared_prompts(config, engines)
    for engine in engines:
        _check_lengths(config, engine, prompt_set)
    logs = out / "logs"
    logs.mkdir()
    with BandwidthProbe(threads, array_bytes) as bandwidth:
        finished = _counter(rounds.measured_requests(config, len(engines)))
        setup = turn.Setup(config, prompt_set, threads, bandwidth, serve, logs, finished)
        requests, blocks, unstarted = _all_rounds(setup, engines)
    rows.write(out, requests, blocks)
    if not any(row.ok for row in requests):
        raise StageFailed(_nothing_answered(requests, unstarted))
    return _facts(setup, requests, blocks)


def _all_rounds(
    setup: turn.Setup, engines: Sequence[Path]
) -> tuple[list[rows.RequestRow], list[rows.BlockRow], dict[str, str]]:
    """Take every turn. A server that did not start is not tried again; its later rows are recorded as failed."""
    requests: list[rows.RequestRow] = []
    blocks: list[rows.BlockRow] = []
    unstarted: dict[str, str] = {}
    block = 0
    for number in range(setup.config.rounds):
        plan = rounds.plan(setup.config, number, len(setup.prompts.prompts))
        for position, index in enumerate(turn_order(len(engines), number)):
            engine = engines[index]
            place = rows.Place(engine.name, number, block, position)
            known = unstarted.get(engine.name)
            taken = turn.take(setup, engine, place, plan) if known is None else turn.missed(setup, place, plan, known)
            if taken.failure is not None:
                unstarted[engine.name] = taken.failure
            requests += taken.requests
            blocks += taken.blocks
            block += 1
    return requests, blocks, unstarted


def _counter(total: int) -> Callable[[int], None]:
    """Report progress as loads end."""
    done = 0

    def finished(requests: int) -> None:
        nonlocal done
        done += requests
        progress.report(done, total, "requests")

    return finished


def _shared_prompts(config: ProbeConfig, engines: Sequence[Path]) -> prompts.PromptSet:
    """Tokenize once, and check that every engine's own tokenizer would have given the same ids."""
    needed = config.rounds * rounds.requests_per_round(config)
    sets = {
        engine.name: prompts.load(
            Path(config.prompts), engine, requests=needed, seed=config.seed, sha256=config.prompts_sha256
        )
        for engine in engines
    }
    first, *others = sets
    different = [name for name in others if sets[name].prompts != sets[first].prompts]
    if different:
        raise InputError(
            f"engines {first} and {', '.join(different)} tokenize the prompts differently, so their latencies "
            "cannot be compared; probe engines of one base checkpoint together"
        )
    return sets[first]


def _check_lengths(config: ProbeConfig, engine: Path, prompt_set: prompts.PromptSet) -> None:
    """Refuse prompts that an engine would cut or refuse."""
    card = json.loads((engine / "engine.json").read_text())
    limit, most = card.get("max_length"), card.get("max_prompt")
    longest = max(prompt_set.prompts, key=lambda prompt: len(prompt.ids))
    needed = len(longest.ids) + 1 + config.max_tokens
    if most is not None and len(longest.ids) + 1 > most:
        raise InputError(
            f"prompt {longest.id!r} takes {len(longest.ids) + 1} tokens; engine {engine.name} admits prompts of {most}"
        )
    if limit is not None and needed > limit:
        raise InputError(
            f"prompt {longest.id!r} takes {len(longest.ids) + 1} tokens and probe.max_tokens={config.max_tokens} more, "
            f"but engine {engine.name} holds {limit}; shorten the prompt or lower probe.max_tokens"
        )


def _nothing_answered(requests: Sequence[rows.RequestRow], unstarted: dict[str, str]) -> str:
    errors = sorted({row.error for row in requests if row.error})
    reasons = "; ".join(f"{engine}: {reason}" for engine, reason in unstarted.items())
    return f"no engine answered a request ({', '.join(errors)})" + (f": {reasons}" if reasons else "")


def _facts(setup: turn.Setup, requests: Sequence[rows.RequestRow], blocks: Sequence[rows.BlockRow]) -> Facts:
    lags = [(row.sent_s - row.scheduled_s) * 1e3 for row in requests if row.mode == "open" and row.error is None]
    failed = [row for row in requests if not row.ok]
    answered = [row for row in requests if row.ok]
    return {
        "rounds": setup.config.rounds,
        "profiles": ",".join(profile.name for profile in setup.config.profiles),
        "requests": len(requests),
        "failed_requests": len(failed),
        "failed_engines": ",".join(sorted({row.engine for row in failed})),
        "prompts": len(setup.prompts.prompts),
        "max_tokens": setup.config.max_tokens,
        "other_lengths": sum(row.output_tokens != setup.config.max_tokens for row in answered),
        "schedule_lag_p50_ms": latency.percentile(lags, 50),
        "schedule_lag_p99_ms": latency.percentile(lags, 99),
        "schedule_lag_max_ms": max(lags, default=None),
        "threads": setup.threads,
        "device": "; ".join(f"{name} {value}" for name, value in device.describe().items()),
        "started": blocks[0].started,
    }
