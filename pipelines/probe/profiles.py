"""Load profiles: each one pattern of load, by its mode. What they mean in requests is `arrivals.schedule`."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from pipelines.config import Strict
from pipelines.probe.prompts import Bucket

ProfileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class Profile(Strict):
    """What every profile may say of its prompts and answers.

    prefix: unique gives every request a first token of its own, so that no prefix cache helps; shared puts the same
    `shared_tokens` tokens, which nothing else begins with, before every request of the profile.
    bucket: only prompts of this input length are sent. input_tokens: instead, prompts of just this length are cut from
    the prompts' texts one after another. Both count all that is sent.
    max_tokens: output length, where it is not the probe's.
    """

    name: ProfileName
    prefix: Literal["unique", "shared"] = "unique"
    shared_tokens: int = Field(default=0, ge=0)
    bucket: Bucket | None = None
    input_tokens: int | None = Field(default=None, ge=2)
    max_tokens: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _prompts_fit_together(self) -> Self:
        if (self.prefix == "shared") != (self.shared_tokens > 0):
            raise ValueError(f"profile {self.name}: prefix shared takes shared_tokens of 1 or more, unique takes none")
        if self.bucket is not None and self.input_tokens is not None:
            raise ValueError(f"profile {self.name}: give bucket or input_tokens, not both")
        if self.input_tokens is not None and self.input_tokens < self.shared_tokens + 2:
            raise ValueError(
                f"profile {self.name}: input_tokens={self.input_tokens} leaves no room for a prompt behind "
                f"shared_tokens={self.shared_tokens} and the request's own opening token"
            )
        return self


class Closed(Profile):
    """`concurrency` requests are always in flight; each answer is followed by the next request."""

    mode: Literal["closed"]
    concurrency: int = Field(ge=1)
    requests: int = Field(ge=1)


class Open(Profile):
    """Requests are due at times drawn beforehand at `rate` a second, whether or not earlier ones were answered.

    burstiness: shape of the gamma distribution of the gaps; 1 is Poisson, below 1 is burstier, above 1 more even.
    """

    mode: Literal["open"]
    rate: float = Field(gt=0)
    requests: int = Field(ge=1)
    arrivals: Literal["constant", "poisson", "gamma"] = "poisson"
    burstiness: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _burstiness_is_gammas(self) -> Self:
        if (self.arrivals == "gamma") != (self.burstiness is not None):
            raise ValueError(f"profile {self.name}: arrivals gamma takes burstiness, and no other arrivals do")
        return self


class Replay(Profile):
    """A recorded trace, sent again with its own gaps; `speed` 2 sends it in half the time.

    trace: JSONL, see `trace`. requests: only the first so many; null is all of them. trace_sha256: filled in when the
    campaign is planned; when given, the file must have it.
    """

    unkeyed: ClassVar[frozenset[str]] = frozenset({"trace"})

    mode: Literal["replay"]
    trace: str = Field(min_length=1)
    trace_sha256: str = ""
    speed: float = Field(default=1.0, ge=0.5, le=2.0)
    requests: int | None = Field(default=None, ge=1)


class Step(Strict):
    """A stretch of time with Poisson arrivals at one rate."""

    rate: float = Field(gt=0)
    seconds: float = Field(gt=0)


class Steps(Profile):
    """Rates one after another without a pause; each step is a phase of its own in the results."""

    mode: Literal["steps"]
    steps: tuple[Step, ...] = Field(min_length=1)


class Spike(Profile):
    """A closed loop at `base` in flight, then at `peak`, then at `base` again: three phases of `requests` each."""

    mode: Literal["spike"]
    base: int = Field(ge=1)
    peak: int = Field(ge=2)
    requests: int = Field(ge=1)

    @model_validator(mode="after")
    def _peak_is_reached(self) -> Self:
        if self.peak <= self.base:
            raise ValueError(f"profile {self.name}: peak={self.peak} must be above base={self.base}")
        if self.requests < self.peak:
            raise ValueError(
                f"profile {self.name}: requests={self.requests} a phase never reach peak={self.peak} in flight; "
                "give at least as many"
            )
        return self


class Slo(Strict):
    """What a request must keep, all that is given at once, and the share of the requests sent that must keep it."""

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    e2e_ms: float | None = Field(default=None, gt=0)
    share: float = Field(default=0.99, gt=0, le=1)

    @model_validator(mode="after")
    def _something_is_promised(self) -> Self:
        if self.ttft_ms is None and self.tpot_ms is None and self.e2e_ms is None:
            raise ValueError("give at least one of ttft_ms, tpot_ms, e2e_ms")
        return self


class Search(Profile):
    """The highest rate that still meets the SLO, by bisection of the rates from `low` to `high`, Poisson at each.

    requests: at each rate tried. resolution: neighbouring rates are at most this much apart, relatively.
    """

    mode: Literal["search"]
    low: float = Field(gt=0)
    high: float = Field(gt=0)
    requests: int = Field(ge=2)
    resolution: float = Field(default=0.1, ge=0.01, le=1)
    slo: Slo

    @model_validator(mode="after")
    def _there_is_a_range(self) -> Self:
        if self.high <= self.low:
            raise ValueError(f"profile {self.name}: high={self.high:g} must be above low={self.low:g}")
        return self

    @property
    def grid(self) -> tuple[float, ...]:
        """The rates that may be tried: the same ratio apart, from low to high."""
        ratio = self.high / self.low
        gaps = math.ceil(math.log(ratio) / math.log1p(self.resolution) - 1e-9)
        return (*(self.low * ratio ** (k / gaps) for k in range(gaps)), self.high)


LoadProfile = Annotated[Closed | Open | Replay | Steps | Spike | Search, Field(discriminator="mode")]
CLOSED_MODES = frozenset({"closed", "spike"})


def is_open(profile: LoadProfile) -> bool:
    """Whether requests are due at times set beforehand, from which their latency counts."""
    return profile.mode not in CLOSED_MODES


def concurrency_of(profile: LoadProfile, phase: int) -> int | None:
    """Requests in flight during a phase of a closed loop; None in an open one."""
    match profile:
        case Closed():
            return profile.concurrency
        case Spike():
            return profile.peak if phase == 1 else profile.base
        case _:
            return None


def rate_of(profile: LoadProfile, phase: int) -> float | None:
    """Requests a second asked for in a phase; None in a closed loop, and in a trace, which has its own times."""
    match profile:
        case Open():
            return profile.rate
        case Steps():
            return profile.steps[phase].rate
        case Search():
            return profile.grid[phase]
        case _:
            return None


def widest(profile: LoadProfile) -> int:
    """Most requests in flight that a closed loop asks for; 1 for an open one, where nobody knows beforehand."""
    return max((concurrency_of(profile, phase) or 1) for phase in (0, 1))
