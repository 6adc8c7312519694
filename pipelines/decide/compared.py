"""A comparison as data: the figures of several engines side by side, what differs, and what may not be compared.

Everything is relative to the side that was named first, the base: `difference` is other - base, `ratio` other / base.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelines.config import Strict
from pipelines.decide.interval import Interval

Kind = Literal["score", "latency", "throughput", "memory", "energy", "cost", "size", "perplexity", "divergence"]
NO_MORE = 0.001
"""Of what is exact, a share by which two may differ and be called the same: a file's header, not its weights."""
Reading = Literal["better", "worse", "no difference shown", ""]


class Side(Strict):
    """One thing that is compared. `asked` is how it was named; `name` is unique among those compared with it."""

    name: str
    asked: str
    campaign: str = ""
    decision_key: str = ""
    candidate: str = ""
    outcome: str = ""
    engine_key: str = ""
    scheme: str = ""
    quantizer: str = ""
    target: str = ""
    native: bool = True
    native_note: str = ""
    run_id: str = ""


class Delta(Strict):
    """One figure of one side against the base's.

    name and part: an eval set and its slice, or a load profile and what was measured under it.
    count: what the interval is taken over: items, rounds, windows of text; `clusters` of items, where they form any.
    gains and losses: items on which the other side did better, and worse.
    exact: nothing was sampled, so there is no interval to have.
    marks: why the two may not be compared; a person asked to compare them all the same.
    """

    side: str
    kind: Kind
    name: str
    part: str = ""
    unit: str = ""
    higher_is_better: bool
    base: float | None = None
    other: float | None = None
    difference: float | None = None
    interval: Interval | None = None
    ratio: float | None = None
    ratio_interval: Interval | None = None
    count: int | None = None
    clusters: int | None = None
    gains: int | None = None
    losses: int | None = None
    method: str = ""
    exact: bool = False
    note: str = ""
    marks: tuple[str, ...] = ()

    @property
    def reading(self) -> Reading:
        """What the interval shows; without one nothing, unless the figure is exact."""
        low, high = self._against_none()
        if low is None or high is None:
            return ""
        if low <= 0.0 <= high or (self.exact and self.ratio is not None and abs(self.ratio - 1.0) <= NO_MORE):
            return "no difference shown"
        return "better" if (low > 0.0) == self.higher_is_better else "worse"

    def _against_none(self) -> tuple[float | None, float | None]:
        """The interval of the difference, or of what the ratio is above 1."""
        if self.exact:
            return self.difference, self.difference
        if self.ratio_interval is not None:
            return self.ratio_interval.lower - 1.0, self.ratio_interval.upper - 1.0
        return (None, None) if self.interval is None else (self.interval.lower, self.interval.upper)


class Refusal(Strict):
    """A figure that was not compared, and why. `missing`: there is nothing to compare, whoever asks."""

    side: str
    kind: str
    name: str
    reasons: tuple[str, ...]
    missing: bool = False


class Change(Strict):
    """One thing that is not the same on all sides, in the order of the sides; None where a side has no such thing."""

    section: str
    key: str
    values: tuple[str | None, ...]


class Comparison(Strict):
    """Two sides or more, the base first; `same` counts by section what is equal on all of them."""

    sides: tuple[Side, ...]
    deltas: tuple[Delta, ...]
    refusals: tuple[Refusal, ...]
    changes: tuple[Change, ...]
    same: dict[str, int]
    mlflow: str = ""

    @property
    def base(self) -> Side:
        return self.sides[0]


class Compared(Strict):
    """`compare --json`: one comparison, or one for each label that several decisions have in common.

    unmatched: what could not be paired, with the reason.
    """

    version: Literal[1] = 1
    asked: tuple[str, ...]
    confidence: float
    anyway: bool
    comparisons: tuple[Comparison, ...]
    unmatched: dict[str, str] = Field(default_factory=dict)

    @property
    def refused(self) -> tuple[Refusal, ...]:
        return tuple(r for one in self.comparisons for r in one.refusals)
