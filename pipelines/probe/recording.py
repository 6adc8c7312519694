"""From a turn as it went to its rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pipelines.probe import rows, search, tally
from pipelines.probe.blocks import BlockRow, Conditions, ResourceRow, block_row, resource_rows
from pipelines.probe.client import Exchange, Sent
from pipelines.probe.config import Limits
from pipelines.probe.profiles import Search
from pipelines.probe.prompts import PromptSet
from pipelines.probe.rounds import Load
from pipelines.probe.sampler import Notes
from pipelines.probe.samples import Sample, usage
from pipelines.probe.tally import Effort
from pipelines.probe.warmup import Warmth


@dataclass(frozen=True, slots=True)
class Context:
    """What rows need besides what was recorded."""

    place: rows.Place
    prompts: PromptSet
    threads: int
    limits: Limits


@dataclass(frozen=True, slots=True)
class Recorded:
    """One load, or one rate of a search, as it went; bandwidth_gb_s is None where nothing was sent.

    ended_s: by the clock of the client. partial: it was cut short, or its server ended.
    """

    load: Load
    started: str
    sent: Sent
    ended_s: float
    bandwidth_gb_s: float | None
    partial: bool

    @property
    def effort(self) -> Effort:
        return Effort(
            len(self.sent.exchanges), self.sent.cpu_s, self.ended_s - self.sent.started_s, self.sent.real_time
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn gives.

    failure: why the server did not start; then every row has failed. ended: how it ended in the middle, "" where it did
    not; then the rows after that have failed. interrupted: Ctrl-C came; loads after that have no rows.
    """

    requests: tuple[rows.RequestRow, ...] = ()
    blocks: tuple[BlockRow, ...] = ()
    resources: tuple[ResourceRow, ...] = ()
    efforts: tuple[Effort, ...] = ()
    notes: Notes | None = None
    failure: str | None = None
    ended: str = ""
    interrupted: bool = False


def turn(
    context: Context,
    recorded: Sequence[Recorded],
    *,
    samples: Sequence[Sample] = (),
    notes: Notes | None = None,
    failure: str | None = None,
    ended: str = "",
    interrupted: bool = False,
    warmth: Warmth | None = None,
    ready_s: float | None = None,
    idle_until_s: float = 0.0,
) -> Turn:
    """Make the rows."""
    found: list[rows.RequestRow] = []
    summed: list[BlockRow] = []
    for one in recorded:
        mine = requests(context, one)
        seen = usage(samples, one.sent.started_s, one.ended_s, os.cpu_count() or 1, context.limits, idle_until_s)
        ran = one.bandwidth_gb_s is not None
        fault = tally.fault(tally.lags_ms(mine), one.effort) if ran else ""
        conditions = Conditions(
            started=one.started,
            wall_s=max(exchange.ended_s for exchange in one.sent.exchanges) if ran else 0.0,
            usage=replace(seen, disturbed="; ".join(filter(None, (seen.disturbed, fault)))),
            threads=context.threads,
            bandwidth_gb_s=one.bandwidth_gb_s,
            ready_s=ready_s,
            warmth=warmth,
            partial=one.partial,
        )
        found += mine
        summed.append(block_row(context.place, mine, conditions))
    sent = [one for one in recorded if one.bandwidth_gb_s is not None]
    loads = [(one.load.profile.name, one.sent.started_s, one.ended_s) for one in sent]
    return Turn(
        tuple(found), tuple(summed), tuple(resource_rows(context.place, samples, loads)),
        tuple(one.effort for one in sent), notes, failure, ended, interrupted,
    )  # fmt: skip


def requests(context: Context, one: Recorded) -> list[rows.RequestRow]:
    """The rows of one load's requests."""
    return [
        rows.request_row(context.place, one.load.profile, arrival, context.prompts.prompts[arrival.prompt], exchange)
        for arrival, exchange in zip(one.load.arrivals, one.sent.exchanges, strict=True)
    ]


def unsent(load: Load, failure: str, *, partial: bool = False) -> Recorded:
    """A load of which nothing was sent; of a search the rate it would have tried first."""
    if isinstance(load.profile, Search) and len(load.arrivals) > load.profile.requests:
        load = load.part(search.first_phase(load.profile))
    due = [arrival.due_s or 0.0 for arrival in load.arrivals]
    exchanges = tuple(Exchange(at_s, at_s, at_s, (), failure) for at_s in due)
    return Recorded(load, now(), Sent(0.0, exchanges, 0.0, False, False), 0.0, None, partial)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
