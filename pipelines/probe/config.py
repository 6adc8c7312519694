"""What a probe is told: load profiles, rounds, prompts. With these, what is sent and when is settled."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from pipelines.config import Strict
from pipelines.probe.profiles import LoadProfile
from pipelines.probe.prompts import Item

Name = Annotated[str, StringConstraints(min_length=1)]


class EvalPrompts(Strict):
    """Prompts as eval sets of the campaign ask them: without few-shot examples, and without the answers offered.

    most: drawn at random, evenly over the sets. items: filled in when the campaign is planned.
    """

    evalsets: tuple[Name, ...] = Field(min_length=1)
    most: int = Field(default=64, ge=1)
    items: tuple[Item, ...] = ()


class Limits(Strict):
    """From where on what was seen during a block has disturbed it; null: never.

    foreign_cpu_percent: share of the whole machine taken by others. gpu_clock_percent: how far the SM clock of a busy
    GPU fell below its highest. gpu_processes: others computed on the GPU. throttling: a GPU was slowed for its heat, or
    by its board; a power cap is a condition of every block, and no disturbance.
    """

    foreign_cpu_percent: float | None = Field(default=40.0, ge=0, le=100)
    gpu_clock_percent: float | None = Field(default=15.0, gt=0, le=100)
    gpu_processes: bool = True
    throttling: bool = True


class ProbeConfig(Strict):
    """A whole probe of several engines.

    threads: given to every engine's server; null means every CPU this process may run on.
    warmup_requests: sent together, again and again until the server is steady, but no more than warmup_max_requests,
    and none after warmup_max_s.
    prompts: a JSONL file of requests, or eval sets; prompts_sha256, when given, must be the hash of what is in them.
    max_tokens: output length of requests where neither profile nor trace says (exact where the server can ignore the
    end-of-sequence token).
    disturbed: whether blocks that were disturbed are left out of evidence, or count all the same.
    """

    unkeyed: ClassVar[frozenset[str]] = frozenset({"prompts"})

    profiles: tuple[LoadProfile, ...] = Field(min_length=1)
    prompts: Name | EvalPrompts
    prompts_sha256: str = ""
    threads: int | None = Field(default=None, ge=1)
    rounds: int = Field(default=3, ge=1)
    warmup_requests: int = Field(default=4, ge=1)
    warmup_max_requests: int = Field(default=32, ge=1)
    warmup_max_s: float = Field(default=60.0, gt=0)
    max_tokens: int = Field(default=64, ge=2)
    timeout_s: float = Field(default=60.0, gt=0)
    seed: int = 0
    limits: Limits = Limits()
    disturbed: Literal["left_out", "kept"] = "left_out"

    @model_validator(mode="after")
    def _warmup_has_room(self) -> Self:
        if self.warmup_max_requests < self.warmup_requests:
            raise ValueError(
                f"warmup_max_requests ({self.warmup_max_requests}) must be at least warmup_requests "
                f"({self.warmup_requests})"
            )
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [profile.name for profile in self.profiles]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"profile names must be unique; given twice: {', '.join(twice)}")
        return self
