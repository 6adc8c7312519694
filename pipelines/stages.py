"""The stages of a campaign, and the steps that a candidate and a whole campaign are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipelines.entries import Engine, Variant
from pipelines.flow.stage import Stage, Step
from pipelines.quantize.table import Quantizer

_TORCH = ("torch", "transformers", "tokenizers")
_READERS = (*_TORCH, "compressed-tensors", "gptqmodel")

CHECKPOINT = Stage(
    "checkpoint",
    "checkpoint",
    1,
    "pipelines.intake.imported:run",
    "pipelines.intake.checkpoint:ImportConfig",
    (*_TORCH, "gguf"),
)
CALIBRATION = Stage(
    "calibration",
    "calibration",
    1,
    "pipelines.intake.calibration:run",
    "pipelines.intake.calibration:CalibrationConfig",
    _TORCH,
    shares_machine=True,
)
REFERENCE = Stage(
    "reference", "reference", 2, "pipelines.quantize.reference:run_reference",
    "pipelines.quantize.reference:ReferenceConfig", _READERS,
)  # fmt: skip
ASKED = Stage(
    "reference", "reference.prompts", 1, "pipelines.quantize.asked:run_asked", "pipelines.quantize.asked:AskedConfig",
    _READERS,
)  # fmt: skip
SCORES = Stage(
    "scores",
    "scores",
    2,
    "pipelines.evaluate.harness:run",
    "pipelines.evaluate.harness:ScoresConfig",
    ("lm-eval", "tokenizers"),
)
NOISE = Stage(
    "noise", "noise", 1, "pipelines.evaluate.noise:run", "pipelines.evaluate.noise:NoiseConfig",
    ("lm-eval", "tokenizers"),
)  # fmt: skip
DIVERGENCE = Stage(
    "divergence", "divergence", 1, "pipelines.evaluate.divergence:run", "pipelines.evaluate.divergence:ReadingConfig"
)
LATENCY = Stage(
    "latency", "latency", 2, "pipelines.probe.stage:run", "pipelines.probe.config:ProbeConfig", ("uvloop",),
    device_bound=True, may_be_partial=True,
)  # fmt: skip
DECISION = Stage(
    "decision", "decision", 4, "pipelines.decide.stage:run", "pipelines.decide.stage:DecisionConfig", ("scipy",)
)
REASSESSMENT = Stage(
    "reassessment", "reassessment", 1,
    "pipelines.decide.reassessing:run", "pipelines.decide.reassessing:ReassessConfig", ("scipy",),
)  # fmt: skip
REPORT = Stage("report", "report", 2, "pipelines.track.report:run", "pipelines.track.report:ReportConfig")
TRACK = Stage("track", "track", 2, "pipelines.track.runs:run", "pipelines.track.config:TrackingConfig", ("mlflow",))

# Seconds on a machine that has not run a stage yet; afterwards its own last run is the estimate.
FIRST_GUESS = {
    "checkpoint": 15.0,
    "calibration": 8.0,
    "variant": 45.0,
    "reference": 20.0,
    "graph": 60.0,
    "engine": 35.0,
    "scores": 12.0,
}


def quantizer_stage(row: Quantizer) -> Stage:
    packages = (*_TORCH, *row.packages)
    return Stage(
        "variant", f"variant.{row.name}", row.version, row.function, row.config_type, packages, shares_machine=True
    )


@dataclass(frozen=True, slots=True)
class Reloaded:
    """A variant and what its checkpoint predicts: held-out text, and eval prompts where any are drawn."""

    quantized: Step
    checked: Step
    asked: Step | None


@dataclass(frozen=True)
class CandidateSteps:
    """A variant in an engine: the steps that make and measure it. `read` is its divergence."""

    label: str
    variant: Variant
    engine: Engine
    quantized: Step
    checked: Step
    graph: Step | None
    built: Step
    scores: Mapping[str, Step]
    asked: Step | None = None
    read: Step | None = None

    @property
    def steps(self) -> Iterator[Step]:
        found = (self.quantized, self.checked, self.asked, self.graph, self.built, *self.scores.values(), self.read)
        yield from (step for step in found if step is not None)

    @property
    def unjudged(self) -> str:
        """Why this candidate is built and no more, "" where it is scored and probed."""
        return self.engine.row.unserved

    def failure(self, failures: Mapping[str, str]) -> str | None:
        """Why this candidate cannot be judged: its first failed step, or None."""
        return next((f"{s.label}: {failures[s.key]}" for s in self.steps if s.key in failures), None)


@dataclass(frozen=True, slots=True)
class Assembled:
    """All steps of a campaign."""

    base: Step
    candidates: tuple[CandidateSteps, ...]
    noise: tuple[Step, ...]
    champion: Mapping[str, Step]
    latency: Step | None
    decision: Step
    report: Step
    track: Step

    @property
    def measured(self) -> Iterator[Step]:
        """What is made and measured before the probe: variants, then engines, then scores, so that steps that may
        share a process come together."""
        yield from (c.quantized for c in self.candidates)
        for one in self.candidates:  # prompts are asked of the model that was just reloaded
            yield from (s for s in (one.checked, one.asked, one.built) if s is not None)
        for one in self.candidates:  # what reads one engine comes together, so that its server starts once
            yield from one.scores.values()
            yield from (s for s in self.noise if s.inputs["engine"] == one.built)
            yield from (s for s in (one.read,) if s is not None)
        yield from self.champion.values()
