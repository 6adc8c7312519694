"""What serving took in memory, split as far as the figures allow: files, runtime, what grew under load. No MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipelines.config import Strict
from pipelines.decide.model import Candidate
from pipelines.decide.probed import Resources
from pipelines.engine.memory import Footprint
from pipelines.track.barcharts import Bar, Part, stacked

MIB = 2**20
KINDS = ("weights: the engine's files", "runtime and others", "grown under load", "held when ready, not split")
WEIGHTS, RUNTIME, GROWN, WHOLE = range(4)
ESTIMATE = "keys and values at most (estimate)"


class Cache(Strict):
    """An estimate of an engine's keys and values, in bytes: of one token, and with so many requests at once, all at
    their longest; what is unknown is None."""

    token: int | None
    size: int | None
    requests: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Split:
    """One engine's memory in one place, in bytes. `idle` and `peak` are measured, `files` is what lies on disk.

    weights is None where files and what is held do not fit together, so that the two cannot be told apart.
    """

    label: str
    place: str
    idle: int
    peak: int
    profile: str
    weights: int | None
    cache: Cache | None
    note: str = ""

    @property
    def runtime(self) -> int | None:
        """What is held before any request and is no file of the engine's: a difference."""
        return None if self.weights is None else self.idle - self.weights

    @property
    def grown(self) -> int:
        """What serving added at its peak: a difference."""
        return max(0, self.peak - self.idle)


def splits(drawn: Sequence[Candidate], caches: Mapping[str, Cache]) -> tuple[Split, ...]:
    """The memory of every engine of which it was measured: its process, and a GPU's memory where it has one."""
    return tuple(split for one in drawn for split in _of(one, caches.get(one.label)))


def _of(one: Candidate, cache: Cache | None) -> Iterator[Split]:
    on_gpu = _measured(one.probed.resources, "gpu_memory_idle_bytes", "gpu_memory_peak_bytes")
    in_host = _measured(one.probed.resources, "idle_rss_bytes", "peak_rss_bytes")
    if on_gpu is not None:
        yield _split(one, "GPU", on_gpu, one.engine_bytes, cache)
    if in_host is not None:
        given = (one.engine_bytes, cache) if on_gpu is None else (None, None)
        yield _split(one, "process", in_host, *given)


def _measured(found: Sequence[Resources], idle: str, peak: str) -> tuple[int, int, str] | None:
    """What was held when ready, the most under any load, and which load that was."""
    known = [
        (before, most, one.profile)
        for one in found
        if (before := getattr(one, idle)) is not None and (most := getattr(one, peak)) is not None
    ]
    return max(known, key=lambda one: one[1], default=None)


def _split(one: Candidate, place: str, held: tuple[int, int, str], files: int | None, cache: Cache | None) -> Split:
    idle, peak, profile = held
    fits = files is not None and files <= idle
    note = "" if fits or files is None else "its files are larger than what it holds, so weights are not set apart"
    return Split(one.label, place, idle, peak, profile, files if fits else None, cache, note)


def draw(found: Sequence[Split], width: float) -> str:
    """A bar for each, in MiB."""
    title = f"Memory of {', '.join(f'{split.label} ({split.place})' for split in found)}"
    return stacked([_bar(split) for split in found], KINDS, estimate=ESTIMATE, unit="MiB", title=title, width=width)


def _bar(split: Split) -> Bar:
    held = (
        (Part(WHOLE, split.idle / MIB),)
        if split.weights is None or split.runtime is None
        else (Part(WEIGHTS, split.weights / MIB), Part(RUNTIME, split.runtime / MIB))
    )
    label = split.label if split.place == "process" else f"{split.label}, {split.place}"
    grown = Part(GROWN, split.grown / MIB)
    most = None if split.cache is None else split.cache.size
    at_most = None if most is None else (split.idle / MIB, (split.idle + most) / MIB)
    return Bar(label, (*held, grown), at_most)


def caches(found: Mapping[str, Footprint | None]) -> dict[str, Cache]:
    """The estimates of keys and values by candidate, where the model's shape is known or the engine reserves them."""
    return {
        label: Cache(token=one.token, size=one.cache, requests=one.requests, tokens=one.tokens)
        for label, one in found.items()
        if one is not None and (one.token is not None or one.cache is not None)
    }
