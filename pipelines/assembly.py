"""From a campaign to its steps: checkpoint -> variant -> engine -> {scores, latency} -> decision -> report, MLflow.

Pure: nothing is read here but what `Campaign` already holds and the digests of small text files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel

from pipelines.campaign import Campaign, Engine, Variant
from pipelines.config import find
from pipelines.decide.stage import CandidateInput, DecisionConfig
from pipelines.evaluate.harness import ScoresConfig
from pipelines.flow.device import describe
from pipelines.flow.stage import Stage, Step
from pipelines.flow.toolchain import CURRENT, Toolchain
from pipelines.intake.digests import text_sha256
from pipelines.quantize.reference import ReferenceConfig
from pipelines.quantize.table import Quantizer
from pipelines.track.report import ReportConfig
from pipelines.track.runs import TrackingConfig

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
)
REFERENCE = Stage(
    "reference", "reference", 2, "pipelines.quantize.reference:run_reference",
    "pipelines.quantize.reference:ReferenceConfig", _READERS,
)  # fmt: skip
SCORES = Stage(
    "scores",
    "scores",
    2,
    "pipelines.evaluate.harness:run",
    "pipelines.evaluate.harness:ScoresConfig",
    ("lm-eval", "tokenizers"),
)
LATENCY = Stage(
    "latency", "latency", 1, "pipelines.probe.stage:run", "pipelines.probe.config:ProbeConfig", ("aiohttp", "uvloop"),
    device_bound=True,
)  # fmt: skip
DECISION = Stage(
    "decision", "decision", 2, "pipelines.decide.stage:run", "pipelines.decide.stage:DecisionConfig", ("scipy",)
)
REPORT = Stage("report", "report", 1, "pipelines.track.report:run", "pipelines.track.report:ReportConfig")
TRACK = Stage("track", "track", 1, "pipelines.track.runs:run", "pipelines.track.runs:TrackingConfig", ("mlflow",))

SMALL_BASE = 2**30
Inputs = Mapping[str, Step | tuple[Step, ...]]

# Seconds on a machine that has not run a stage yet; afterwards its own last run is the estimate.
_FIRST_GUESS = {
    "checkpoint": 15.0,
    "calibration": 8.0,
    "variant": 45.0,
    "reference": 20.0,
    "graph": 60.0,
    "engine": 35.0,
    "scores": 12.0,
}


@dataclass(frozen=True)
class CandidateSteps:
    """A variant in an engine: the steps that make and measure it."""

    label: str
    variant: Variant
    engine: Engine
    quantized: Step
    checked: Step
    graph: Step | None
    built: Step
    scores: Mapping[str, Step]

    @property
    def steps(self) -> Iterator[Step]:
        yield from (self.quantized, self.checked, *([] if self.graph is None else [self.graph]), self.built)
        yield from self.scores.values()

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
    latency: Step | None
    decision: Step
    report: Step
    track: Step


@dataclass(frozen=True)
class _Assembly:
    """What the steps of one campaign share."""

    campaign: Campaign
    failures: Mapping[str, str]
    timings: Mapping[str, float]

    def step(
        self,
        stage: Stage,
        label: str,
        config: BaseModel,
        inputs: Inputs,
        *,
        size: float = 0,
        batch: str | None = None,
        runs_in: Toolchain = CURRENT,
    ) -> Step:
        device = describe() if stage.device_bound else None
        seconds = self.timings.get(stage.name, _FIRST_GUESS.get(stage.kind, 5.0))
        versions = runs_in.versions(stage.packages)
        return Step(stage, label, config, inputs, versions, device, batch, seconds, int(size), runs_in)

    @cached_property
    def base(self) -> Step:
        inspected = self.campaign.base
        copied = inspected.parameters * 2 if inspected.config.kind == "gguf" else 0
        placed = self.campaign.stages["checkpoint"]
        return self.step(CHECKPOINT, "checkpoint", inspected.config, {}, size=copied, runs_in=placed)

    @cached_property
    def calibration(self) -> Step:
        inputs, placed = {"checkpoint": self.base}, self.campaign.stages["calibration"]
        return self.step(CALIBRATION, "calibration", self.campaign.calibration, inputs, runs_in=placed)

    def quantized(self, variant: Variant) -> Step:
        row = variant.row
        inputs: dict[str, Step] = {"checkpoint": self.base}
        if row.needs_calibration(variant.config):
            inputs["calibration"] = self.calibration
        size = self.weight_bytes(variant, other=2) if variant.scheme.quantized else 0
        label, placed = f"variant {variant.name}", variant.toolchain
        return self.step(_quantizer_stage(row), label, variant.config, inputs, size=size, runs_in=placed)

    def checked(self, variant: Variant, quantized: Step, baseline: Step | None) -> Step:
        held_out = self.campaign.config.held_out
        text = find(held_out.text)
        config = ReferenceConfig(
            text_path=str(text),
            text_sha256=text_sha256(text),
            windows=held_out.windows,
            length=held_out.length,
            max_ratio=held_out.max_ratio,
            prompts=self.campaign.prompts,
            tail=self.campaign.config.divergence.tail,
        )
        inputs = {"variant": quantized} | ({} if baseline is None else {"base": baseline})
        tokens = held_out.windows * held_out.length + len(config.prompts) * config.tail
        size = 0 if baseline is not None else tokens * self.campaign.base.vocab_size * 4
        label, placed, batch = f"reload {variant.name}", self.campaign.stages["reference"], self.building(quantized)
        return self.step(REFERENCE, label, config, inputs, size=size, batch=batch, runs_in=placed)

    def graph(self, label: str, engine: Engine, variant: Variant, quantized: Step, checked: Step) -> Step | None:
        """What the engine is compiled from, where its target has a stage for it; it reads what reloading reads."""
        row = engine.row.graph
        if row is None:
            return None
        config: BaseModel = getattr(engine.config, "graph")  # noqa: B009 - a row with a graph has its config
        stage = Stage("graph", f"graph.{engine.row.name}", row.version, row.function, row.config_type, row.packages)
        inputs = {"variant": quantized, "reference": checked}
        size, batch = self.weight_bytes(variant, other=2), self.building(quantized)
        return self.step(stage, f"graph {label}", config, inputs, size=size, batch=batch)

    def built(
        self, label: str, engine: Engine, variant: Variant, quantized: Step, checked: Step, graph: Step | None
    ) -> Step:
        row = engine.row
        name = f"engine.{row.name}"
        stage = Stage("engine", name, row.version, row.build, row.config_type, row.packages, row.device_bound)
        inputs = {"variant": quantized, "reference": checked} | ({} if graph is None else {"graph": graph})
        size = self.weight_bytes(variant, other=4)
        batch, placed = self.building(quantized), engine.toolchain
        return self.step(stage, f"engine {label}", engine.config, inputs, size=size, batch=batch, runs_in=placed)

    def building(self, quantized: Step) -> str:
        """Reloading and building import the same libraries, so they share a process: each variant's own, or, where a
        base is so small that imports cost more than its memory, one for all."""
        return "build" if self.campaign.base.size_bytes < SMALL_BASE else f"build {quantized.key}"

    def weight_bytes(self, variant: Variant, other: int) -> float:
        """Estimate what a variant's weights take: linear layers by their scheme, the rest at `other` bytes each."""
        base, scheme = self.campaign.base, variant.scheme
        linear = sum(out * into for out, into in base.linear_shapes.values())
        carried = scheme.quantized and (scheme.weight_type == "int" or other == 2)
        each = scheme.weight_bits / 8 + (4 / scheme.group_size if scheme.group_size else 0) if carried else other
        return linear * each + (base.parameters - linear) * other

    def scored(self, label: str, built: Step) -> dict[str, Step]:
        """Scores share a process, and with it imports and, as long as the engine is the same, its server."""
        return {
            e.name: self.step(
                SCORES,
                f"score {label} on {e.name}",
                ScoresConfig(evalset=e.config, digest=e.digest),
                {"engine": built},
                batch="score",
            )
            for e in self.campaign.evalsets
        }


def assemble(campaign: Campaign, failures: Mapping[str, str], timings: Mapping[str, float]) -> Assembled:
    """Make the steps. `failures` maps keys of failed steps to why: their candidates are decided on as failed.

    `timings` maps stage names to the seconds they took here last, for the estimates.
    """
    this = _Assembly(campaign, failures, timings)
    candidates = tuple(_candidates(this))
    alive = tuple(c for c in candidates if c.failure(failures) is None)
    latency = _latency(this, tuple(c for c in alive if not c.unjudged))
    decision = _decision(this, candidates, alive, latency)
    evidence: dict[str, Step] = {"decision": decision} | ({} if latency is None else {"latency": latency})
    report = this.step(REPORT, "report", ReportConfig(title=campaign.config.campaign), evidence)
    scores = tuple(s for c in alive for s in c.scores.values())
    engines = tuple(c.built for c in alive)
    variants = tuple({c.quantized.key: c.quantized for c in alive}.values())
    shown: Inputs = {**evidence, "report": report, "engines": engines, "variants": variants, "scores": scores}
    track = this.step(TRACK, "track in MLflow", _track_config(campaign), shown)
    return Assembled(this.base, candidates, latency, decision, report, track)


def _candidates(this: _Assembly) -> Iterator[CandidateSteps]:
    campaign = this.campaign
    reference = next(v for v in campaign.variants if v.name == campaign.config.reference)
    baseline = this.checked(reference, this.quantized(reference), None)
    for variant in campaign.variants:
        quantized = this.quantized(variant)
        checked = baseline if variant is reference else this.checked(variant, quantized, baseline)
        for engine in campaign.engines:
            if engine.name in variant.engines and engine.row.redundant(engine.config, variant.scheme) is None:
                label = variant.name if len(campaign.engines) == 1 else f"{variant.name}@{engine.name}"
                graph = this.graph(label, engine, variant, quantized, checked)
                built = this.built(label, engine, variant, quantized, checked, graph)
                scores = {} if engine.row.unserved else this.scored(label, built)
                yield CandidateSteps(label, variant, engine, quantized, checked, graph, built, scores)


def _quantizer_stage(row: Quantizer) -> Stage:
    return Stage("variant", f"variant.{row.name}", row.version, row.function, row.config_type, (*_TORCH, *row.packages))


def _latency(this: _Assembly, alive: tuple[CandidateSteps, ...]) -> Step | None:
    """One probe of all engines, so that their blocks are interleaved in time."""
    if not alive:
        return None
    given = this.campaign.config.probe
    prompts = find(given.prompts)
    config = given.model_copy(
        update={
            "prompts": str(prompts),
            "prompts_sha256": text_sha256(prompts),
            "threads": given.threads or this.campaign.threads,
        }
    )
    step = this.step(LATENCY, "latency of all engines", config, {"engines": tuple(c.built for c in alive)})
    return None if step.key in this.failures else step


def reference_label(campaign: Campaign, candidates: tuple[CandidateSteps, ...]) -> str:
    """The candidate others are compared with: the reference variant in the campaign's first engine that is judged."""
    name = campaign.config.reference
    found = sorted((c for c in candidates if c.variant.name == name), key=lambda c: bool(c.unjudged))
    return found[0].label if found else name


def _decision(
    this: _Assembly, candidates: tuple[CandidateSteps, ...], alive: tuple[CandidateSteps, ...], latency: Step | None
) -> Step:
    campaign = this.campaign
    config = DecisionConfig(
        campaign=campaign.config.campaign,
        reference=reference_label(campaign, candidates),
        candidates=tuple(_candidate_input(c, this.failures) for c in candidates),
        gate=campaign.config.gate,
        eval_sets=dict(campaign.cards),
        base=_base_facts(campaign),
    )
    inputs: dict[str, Step | tuple[Step, ...]] = {
        "scores": tuple(s for c in alive for s in c.scores.values()),
        "engines": tuple(c.built for c in alive),
        "variants": tuple({c.quantized.key: c.quantized for c in alive}.values()),
    }
    if latency is not None:
        inputs["latency"] = latency
    return this.step(DECISION, "decision", config, inputs)


def _candidate_input(c: CandidateSteps, failures: Mapping[str, str]) -> CandidateInput:
    failure = c.failure(failures)
    alive = failure is None
    return CandidateInput(
        label=c.label,
        variant=c.variant.name,
        engine=c.engine.name,
        quantizer=c.variant.row.name,
        scheme=str(c.variant.scheme),
        variant_key=c.quantized.key if alive else None,
        engine_key=c.built.key if alive else None,
        scores=tuple(s.key for s in c.scores.values()) if alive else (),
        status="ok" if alive else "failed",
        failure=failure,
        unjudged=c.unjudged,
        labels=dict(c.engine.labels),
    )


def _base_facts(campaign: Campaign) -> dict[str, str]:
    base, given = campaign.base, campaign.config.checkpoint
    return {
        "source": given.source,
        "revision": given.revision or "",
        "digest": base.config.digest,
        "architecture": base.architecture,
        "parameters": f"{base.parameters:,}",
        "licence": base.config.licence or "not stated",
        "prior quantization": base.config.prior_quantization or "none",
        "note": given.note,
    }


def _track_config(campaign: Campaign) -> TrackingConfig:
    tracking, name = campaign.config.tracking, campaign.config.campaign
    return TrackingConfig(
        tracking_uri=absolute_uri(tracking.uri),
        experiment=tracking.experiment or name,
        registered_model=tracking.registered_model or name,
        campaign_config=campaign.config.model_dump(mode="json"),
    )


def absolute_uri(uri: str) -> str:
    """Make a sqlite URI's relative path absolute, so that every process means the same database."""
    prefix = "sqlite:///"
    if uri.startswith(prefix) and not uri.startswith(prefix + "/"):
        return prefix + str(Path(uri.removeprefix(prefix)).resolve())
    return uri
