"""What a probe is told: load profiles, rounds, prompts. With these, what is sent and when is settled."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from pipelines.config import Strict

ProfileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class LoadProfile(Strict):
    """One pattern of load.

    closed: `concurrency` requests are always in flight, each answer is followed by the next request.
    open: requests are due at times drawn beforehand at `rate` per second, whether or not earlier ones were answered.
    """

    name: ProfileName
    mode: Literal["closed", "open"]
    requests: int = Field(ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    rate: float | None = Field(default=None, gt=0)
    arrivals: Literal["poisson", "constant"] = "poisson"

    @model_validator(mode="after")
    def _mode_has_its_own_setting(self) -> Self:
        if self.mode == "closed" and (self.concurrency is None or self.rate is not None):
            raise ValueError(f"profile {self.name}: mode closed takes concurrency, and no rate")
        if self.mode == "open" and (self.rate is None or self.concurrency is not None):
            raise ValueError(f"profile {self.name}: mode open takes rate (requests per second), and no concurrency")
        return self


class ProbeConfig(Strict):
    """A whole probe of several engines.

    threads: given to every engine's server; null means every CPU this process may run on.
    prompts: a JSONL file of requests; prompts_sha256, when given, must be the file's hash.
    max_tokens: output length of every request (exact where the server can ignore the end-of-sequence token).
    """

    unkeyed: ClassVar[frozenset[str]] = frozenset({"prompts"})

    profiles: tuple[LoadProfile, ...] = Field(min_length=1)
    prompts: str
    prompts_sha256: str = ""
    threads: int | None = Field(default=None, ge=1)
    rounds: int = Field(default=3, ge=1)
    warmup_requests: int = Field(default=4, ge=1)
    max_tokens: int = Field(default=64, ge=2)
    timeout_s: float = Field(default=60.0, gt=0)
    seed: int = 0

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [profile.name for profile in self.profiles]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"profile names must be unique; given twice: {', '.join(twice)}")
        return self
