"""What each engine of a campaign will take in memory when it is served under the probe's load, as `plan` shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pipelines import entries, terminal
from pipelines.campaign import Campaign
from pipelines.engine.memory import Footprint
from pipelines.stages import Assembled

Found = Mapping[str, Footprint]
"""By the candidate's label; those are left out whose memory is not ours to know."""
FEW = 20
"""Lines that stand for more than anybody reads."""


def footprints(campaign: Campaign, assembled: Assembled) -> dict[str, Footprint]:
    """Estimate every candidate that is served on a device of ours."""
    found = {}
    for one in assembled.candidates:
        known = entries.footprint(one.variant, one.engine, campaign.base, campaign.workload)
        if known is not None:
            found[one.label] = known
    return found


def document(found: Found) -> list[dict[str, Any]]:
    """The same for machines: bytes, null where something is unknown."""
    return [{"candidate": label, **asdict(one), "each": one.each, "fits": one.fits} for label, one in found.items()]


def show(found: Found, *, every: bool = True) -> None:
    """A table, and a warning for each that may not fit; of so many that nobody would read them those that take most."""
    if not found:
        return
    told = found
    if not every and len(found) > terminal.MOST_LINES:
        told = dict(sorted(found.items(), key=lambda pair: -pair[1].each)[:FEW])
    columns = ("candidate", "weights", "cache per token", "requests x tokens", "cache", "on each device", "of")
    terminal.table("Memory when every request under way is at its longest", columns, map(_row, told, told.values()))
    say = terminal.console()
    if len(told) < len(found):
        say.print(f"and {len(found) - len(told)} that take no more (--all lists each)", markup=False)
    for text in _warnings(found):
        say.print(text, markup=False)


def _row(label: str, one: Footprint) -> tuple[object, ...]:
    ranks = f" x {one.ranks}" if one.ranks > 1 else ""
    return (
        label,
        _size(one.weights),
        "unknown" if one.token is None else f"{one.token:,} B",
        f"{one.requests} x {'unknown' if one.tokens is None else one.tokens}",
        _size(one.cache),
        _size(one.each),
        f"{_size(one.device)} {'GPU' if one.place == 'gpu' else 'host'}{ranks}",
    )


def _size(count: int | None) -> str:
    return "unknown" if count is None else terminal.size(count)


def _warnings(found: Found) -> Iterator[str]:
    for label, one in found.items():
        if one.fits is False:
            yield (
                f"warning: {label} may take {_size(one.each)} of the {_size(one.device)} there are, with "
                f"{one.requests} requests of {one.tokens} tokens under way; fewer at once, shorter ones or fewer bits "
                "take less"
            )
