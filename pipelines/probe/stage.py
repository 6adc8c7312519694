"""The probe stage: every engine in turn, round after round in alternating order, under one schedule."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipelines.errors import StageFailed
from pipelines.flow import device, progress
from pipelines.probe import rounds, rows, tables, tally, turn
from pipelines.probe.arrivals import turn_order
from pipelines.probe.bandwidth import ARRAY_BYTES, BandwidthProbe
from pipelines.probe.config import ProbeConfig
from pipelines.probe.pace import Pace
from pipelines.probe.preparation import prepare
from pipelines.probe.recording import Turn

Facts = dict[str, str | int | float | bool | None]


def run(config: ProbeConfig, out: Path, *, engines: list[Path]) -> Facts:
    """Probe engines against each other; write requests.parquet, blocks.parquet, resources.parquet, the servers' logs.

    Ctrl-C ends it early with what was measured; the facts then say `partial`, as where a server ended by itself.

    Raises:
        ConfigError, InputError: prompts or traces that cannot be read, do not fit an engine, or that the engines
            tokenize differently.
        StageFailed: no engine answered anything.
    """
    from pipelines.engine.serving import serve

    return measure(config, out, engines, serve)


def measure(
    config: ProbeConfig, out: Path, engines: Sequence[Path], serve: turn.Serve, array_bytes: int = ARRAY_BYTES
) -> Facts:
    """Do what `run` does, with whatever starts servers; bandwidth is read over `array_bytes`."""
    threads = config.threads or len(os.sched_getaffinity(0))
    prepared = prepare(config, engines)
    logs = out / "logs"
    logs.mkdir()
    with _stopped_as_by_hand():
        with BandwidthProbe(threads, array_bytes) as bandwidth:
            pace = Pace(prepared.rounds, len(engines), progress.report)
            setup = turn.Setup(config, prepared.prompts, threads, bandwidth, serve, logs, pace)
            turns = _all_turns(setup, engines, prepared.rounds)
        return _kept(setup, out, turns)


def _kept(setup: turn.Setup, out: Path, turns: dict[rows.Place, Turn]) -> Facts:
    """Write the tables and sum them up.

    Raises:
        KeyboardInterrupt: Ctrl-C came before there was anything to keep.
        StageFailed: no engine answered anything.
    """
    requests = [row for taken in turns.values() for row in taken.requests]
    blocks = [row for taken in turns.values() for row in taken.blocks]
    if not any(row.ok for row in requests):
        if any(taken.interrupted for taken in turns.values()):
            raise KeyboardInterrupt
        raise StageFailed(_nothing_answered(requests, turns))
    tables.write(out, requests, blocks, [row for taken in turns.values() for row in taken.resources])
    config = setup.config
    return {
        "rounds": config.rounds,
        "profiles": ",".join(profile.name for profile in config.profiles),
        "requests": len(requests),
        "failed_requests": sum(not row.ok for row in requests),
        "failed_engines": ",".join(sorted({row.engine for row in requests if not row.ok})),
        "prompts": len(setup.prompts.prompts),
        "max_tokens": config.max_tokens,
        **tally.facts(requests, [effort for taken in turns.values() for effort in taken.efforts]),
        "threads": setup.threads,
        "device": "; ".join(f"{name} {value}" for name, value in device.describe().items()),
        "started": blocks[0].started,
        "disturbed": config.disturbed,
        "disturbed_blocks": sum(bool(row.disturbed) for row in blocks),
        "unsteady_blocks": sum(row.steady is False for row in blocks),
        **_lost(turns),
    }


def _all_turns(setup: turn.Setup, engines: Sequence[Path], planned: Sequence[rounds.Round]) -> dict[rows.Place, Turn]:
    """Take every turn. A server that did not start is not tried again; its later rows are recorded as failed."""
    turns: dict[rows.Place, Turn] = {}
    unstarted: dict[str, str] = {}
    for plan in planned:
        for position, index in enumerate(turn_order(len(engines), plan.number)):
            engine = engines[index]
            place = rows.Place(engine.name, plan.number, len(turns), position)
            known = unstarted.get(engine.name)
            taken = turn.take(setup, engine, place, plan) if known is None else turn.missed(setup, place, plan, known)
            turns[place] = taken
            if taken.interrupted:
                return turns
            if taken.failure is not None:
                unstarted[engine.name] = taken.failure
    return turns


def _lost(turns: dict[rows.Place, Turn]) -> Facts:
    """What was not measured, and why."""
    ended = [f"{place.engine}, round {place.round}: {taken.ended}" for place, taken in turns.items() if taken.ended]
    failures = {place.engine: taken.failure for place, taken in turns.items() if taken.failure is not None}
    ended += [f"{engine}: did not start: {failure.splitlines()[0]}" for engine, failure in failures.items()]
    interrupted = any(taken.interrupted for taken in turns.values())
    notes = [taken.notes for taken in turns.values() if taken.notes is not None]
    return {
        "partial": bool(ended) or interrupted,
        "interrupted": interrupted,
        "ended": "; ".join(ended),
        "gpu_note": "; ".join(dict.fromkeys(note.gpu for note in notes if note.gpu)),
        "metrics_note": "; ".join(
            dict.fromkeys(
                f"{place.engine}: {taken.notes.metrics}"
                for place, taken in turns.items()
                if taken.notes is not None and taken.notes.metrics
            )
        ),
    }


def _nothing_answered(requests: Sequence[rows.RequestRow], turns: dict[rows.Place, Turn]) -> str:
    errors = sorted({row.error for row in requests if row.error})
    reasons = dict.fromkeys(
        f"{place.engine}: {taken.failure or taken.ended}"
        for place, taken in turns.items()
        if taken.failure or taken.ended
    )
    return f"no engine answered a request ({', '.join(errors)})" + (f": {'; '.join(reasons)}" if reasons else "")


@contextmanager
def _stopped_as_by_hand() -> Iterator[None]:
    """Let SIGTERM, which ends a stage, mean Ctrl-C, which the client lets go of its load at.

    It counts once: what was measured is being written, and whoever is impatient has SIGKILL.
    """

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.raise_signal(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    by_hand = signal.signal(signal.SIGINT, signal.default_int_handler)
    ending = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ending)
        signal.signal(signal.SIGINT, by_hand)
