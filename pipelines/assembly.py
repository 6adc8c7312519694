"""From a campaign to its steps: checkpoint -> variant -> engine -> {scores, latency} -> decision -> report, MLflow.

Pure: nothing is read here but what `Campaign` already holds and the digests of small text files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel

from pipelines.campaign import Campaign
from pipelines.config import Strict, find
from pipelines.decide.stage import CandidateInput, ChampionInput, DecisionConfig
from pipelines.engine import memory
from pipelines.entries import Engine, Variant, engines_of, footprint
from pipelines.evaluate.divergence import ReadingConfig
from pipelines.evaluate.harness import ScoresConfig
from pipelines.evaluate.noise import NoiseConfig
from pipelines.flow.device import describe
from pipelines.flow.stage import Stage, Step
from pipelines.flow.toolchain import CURRENT, Toolchain
from pipelines.intake.digests import text_sha256
from pipelines.quantize.asked import AskedConfig
from pipelines.quantize.estimate import START_BYTES, Estimate, Job, estimate
from pipelines.quantize.reference import ReferenceConfig
from pipelines.stages import (
    ASKED,
    CALIBRATION,
    CHECKPOINT,
    DECISION,
    DIVERGENCE,
    FIRST_GUESS,
    LATENCY,
    NOISE,
    REFERENCE,
    REPORT,
    SCORES,
    TRACK,
    Assembled,
    CandidateSteps,
    Reloaded,
    quantizer_stage,
)
from pipelines.track.config import TrackingConfig
from pipelines.track.connection import absolute_uri, artifact_root
from pipelines.track.memorysplit import caches
from pipelines.track.report import ReportConfig
from pipelines.workload import pinned, probe_seconds

SMALL_BASE = 2**30
Inputs = Mapping[str, Step | tuple[Step, ...]]


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
        guessed: Estimate | None = None,
        memory_bytes: int = 0,
    ) -> Step:
        device = describe() if stage.device_bound else None
        if guessed is None:
            guessed = Estimate(0.0, memory_bytes)
            seconds = self.timings.get(stage.name, FIRST_GUESS.get(stage.kind, 5.0))
        else:
            seconds = guessed.seconds * self.timings.get(stage.pace, 1.0)
        return Step(
            stage, label, config, inputs, runs_in.versions(stage.packages), device, batch, seconds, int(size), runs_in,
            guessed.seconds, guessed.memory_bytes,
        )  # fmt: skip

    @cached_property
    def base(self) -> Step:
        inspected = self.campaign.base
        copied = inspected.parameters * 2 if inspected.config.kind == "gguf" else 0
        placed = self.campaign.stages["checkpoint"]
        return self.step(CHECKPOINT, "checkpoint", inspected.config, {}, size=copied, runs_in=placed)

    @cached_property
    def calibration(self) -> Step:
        inputs, placed = {"checkpoint": self.base}, self.campaign.stages["calibration"]
        given = self.campaign.calibration
        return self.step(CALIBRATION, "calibration", given, inputs, runs_in=placed, memory_bytes=START_BYTES)

    def quantized(self, variant: Variant) -> Step:
        row = variant.row
        inputs: dict[str, Step] = {"checkpoint": self.base}
        if row.needs_calibration(variant.config):
            inputs["calibration"] = self.calibration
        size = self.weight_bytes(variant, other=2) if variant.scheme.quantized else 0
        label, placed = f"variant {variant.name}", variant.toolchain
        guessed = self.effort(variant) if variant.scheme.quantized else Estimate(0.5, 0)
        return self.step(
            quantizer_stage(row), label, variant.config, inputs, size=size, runs_in=placed, guessed=guessed
        )

    def effort(self, variant: Variant) -> Estimate:
        """What quantizing may take, from the base, the method and what it is shown."""
        base, shown, device = self.campaign.base, self.campaign.calibration, describe()
        job = Job(
            base.linear_shapes, base.parameters, base.size_bytes, base.hidden_size, base.layers, base.vocab_size,
            shown.samples, shown.max_tokens, self.campaign.threads, gpu=device["gpu"] != "none",
        )  # fmt: skip
        return estimate(job, variant.row.work(variant.config), tuple(getattr(variant.config, "ignore", ())))

    def checked(self, variant: Variant, quantized: Step, baseline: Step | None) -> Step:
        held_out = self.campaign.config.held_out
        text = find(held_out.text)
        config = ReferenceConfig(
            text_path=str(text),
            text_sha256=text_sha256(text),
            windows=held_out.windows,
            length=held_out.length,
            max_ratio=held_out.max_ratio,
        )
        inputs = {"variant": quantized} | ({} if baseline is None else {"base": baseline})
        size = 0 if baseline is not None else self.logits_bytes(held_out.windows * held_out.length)
        label, placed, batch = f"reload {variant.name}", self.campaign.stages["reference"], self.building(quantized)
        return self.step(REFERENCE, label, config, inputs, size=size, batch=batch, runs_in=placed)

    def asked(self, variant: Variant, quantized: Step, baseline: Step | None) -> Step | None:
        """Eval prompts predicted by the checkpoint; None where none are drawn."""
        given, prompts = self.campaign.config.divergence, self.campaign.prompts
        if not prompts:
            return None
        config = AskedConfig(prompts=prompts, tail=given.tail, length=self.campaign.config.held_out.length)
        inputs = {"variant": quantized} | ({} if baseline is None else {"base": baseline})
        size = 0 if baseline is not None else self.logits_bytes(len(prompts) * given.tail)
        label, placed, batch = f"ask {variant.name}", self.campaign.stages["reference"], self.building(quantized)
        return self.step(ASKED, label, config, inputs, size=size, batch=batch, runs_in=placed)

    def logits_bytes(self, tokens: int) -> float:
        """What the base's logits take on disk."""
        return tokens * self.campaign.base.vocab_size * 4

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
        floats = None if other == 2 else other
        return memory.weight_bytes(base.parameters, linear, scheme, other=other, scale=4, floats=floats)

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

    @cached_property
    def champion(self) -> dict[str, Step]:
        """The champion's engine scored on the same items; nothing where it cannot be had."""
        known = self.campaign.champion
        if not known.engine_key:
            return {}
        stage = Stage("engine", "champion", 0, "", "")
        return self.scored("the champion", Step(stage, f"champion {known.version}", Strict(), pinned=known.engine_key))

    def reloaded(self, variant: Variant, base: Reloaded | None) -> Reloaded:
        """Quantize a variant and read what came out; without `base` it is the base."""
        quantized = self.quantized(variant)
        checked = self.checked(variant, quantized, None if base is None else base.checked)
        return Reloaded(quantized, checked, self.asked(variant, quantized, None if base is None else base.asked))

    def candidate(self, variant: Variant, engine: Engine, made: Reloaded, against: Step | None) -> CandidateSteps:
        """A variant in an engine; `against` is the divergence of the engine others are compared with."""
        label = variant.name if len(self.campaign.engines) == 1 else f"{variant.name}@{engine.name}"
        graph = self.graph(label, engine, variant, made.quantized, made.checked)
        built = self.built(label, engine, variant, made.quantized, made.checked, graph)
        one = CandidateSteps(label, variant, engine, made.quantized, made.checked, graph, built, {})
        if engine.row.unserved:
            return one
        given = {"engine": built, "checked": made.checked, "asked": made.asked, "against": against}
        inputs = {name: step for name, step in given.items() if step is not None}
        read = self.step(DIVERGENCE, f"divergence of {label}", ReadingConfig(), inputs, batch="score")
        return replace(one, scores=self.scored(label, built), asked=made.asked, read=read)

    def again(self, one: CandidateSteps) -> tuple[Step, ...]:
        """The A/A run: the reference engine scored again on some of the items."""
        seed = self.campaign.config.noise_floor.seed
        return tuple(
            self.step(
                NOISE,
                f"score {one.label} again on {e.name}",
                NoiseConfig(evalset=e.config, digest=e.digest, seed=seed),
                {"engine": one.built, "scores": one.scores[e.name]},
                batch="score",
            )
            for e in self.campaign.again
            if e.name in one.scores
        )


def assemble(campaign: Campaign, failures: Mapping[str, str], timings: Mapping[str, float]) -> Assembled:
    """Make the steps. `failures` maps keys of failed steps to why: their candidates are decided on as failed.

    `timings` maps stage names to the seconds they took here last, for the estimates.
    """
    this = _Assembly(campaign, failures, timings)
    candidates = tuple(_candidates(this))
    alive = tuple(c for c in candidates if c.failure(failures) is None)
    latency = _latency(this, tuple(c for c in alive if not c.unjudged))
    first = reference_label(campaign, candidates)
    noise = tuple(s for c in alive if c.label == first for s in this.again(c) if s.key not in failures)
    decision = _decision(this, candidates, alive, noise, latency)
    evidence: dict[str, Step] = {"decision": decision} | ({} if latency is None else {"latency": latency})
    variants = tuple({c.quantized.key: c.quantized for c in alive}.values())
    report = this.step(REPORT, "report", _report_config(campaign, alive), {**evidence, "variants": variants})
    scores = tuple(s for c in alive for s in c.scores.values())
    engines = tuple(c.built for c in alive)
    shown: Inputs = {**evidence, "report": report, "engines": engines, "variants": variants, "scores": scores}
    # What fails changes the decision's key; the run opened before any work is known by the one it has otherwise.
    intended = decision if not failures else assemble(campaign, {}, timings).decision
    track = this.step(TRACK, "track in MLflow", _track_config(campaign, intended.key[:16]), shown)
    return Assembled(this.base, candidates, noise, this.champion, latency, decision, report, track)


def _report_config(campaign: Campaign, alive: tuple[CandidateSteps, ...]) -> ReportConfig:
    taken = {c.label: footprint(c.variant, c.engine, campaign.base, campaign.workload) for c in alive}
    return ReportConfig(title=campaign.config.campaign, radar=campaign.radar, caches=caches(taken))


def _candidates(this: _Assembly) -> Iterator[CandidateSteps]:
    campaign = this.campaign
    reference = next(v for v in campaign.variants if v.name == campaign.config.reference)
    base = this.reloaded(reference, None)
    judged = next((e for e in engines_of(reference, campaign.engines) if not e.row.unserved), None)
    first = None if judged is None else this.candidate(reference, judged, base, None)
    against = None if first is None or first.failure(this.failures) else first.read
    for variant in campaign.variants:
        made = base if variant is reference else this.reloaded(variant, base)
        for engine in engines_of(variant, campaign.engines):
            is_first = first is not None and variant is reference and engine is judged
            yield first if first is not None and is_first else this.candidate(variant, engine, made, against)


def _latency(this: _Assembly, alive: tuple[CandidateSteps, ...]) -> Step | None:
    """One probe of all engines, so that their blocks are interleaved in time."""
    if not alive:
        return None
    given = pinned(this.campaign.config.probe, this.campaign.evalsets)
    config = given.model_copy(update={"threads": given.threads or this.campaign.threads})
    guessed, inputs = Estimate(probe_seconds(config, len(alive)), 0), {"engines": tuple(c.built for c in alive)}
    step = this.step(LATENCY, "latency of all engines", config, inputs, guessed=guessed)
    return None if step.key in this.failures else step


def reference_label(campaign: Campaign, candidates: tuple[CandidateSteps, ...]) -> str:
    """The candidate others are compared with: the reference variant in the campaign's first engine that is judged."""
    name = campaign.config.reference
    found = sorted((c for c in candidates if c.variant.name == name), key=lambda c: bool(c.unjudged))
    return found[0].label if found else name


def _decision(
    this: _Assembly,
    candidates: tuple[CandidateSteps, ...],
    alive: tuple[CandidateSteps, ...],
    noise: tuple[Step, ...],
    latency: Step | None,
) -> Step:
    campaign = this.campaign
    config = DecisionConfig(
        campaign=campaign.config.campaign,
        reference=reference_label(campaign, candidates),
        candidates=tuple(_candidate_input(c, this.failures) for c in candidates),
        gate=campaign.config.gate,
        eval_sets=dict(campaign.cards),
        base=_base_facts(campaign),
        champion=_champion_input(this),
    )
    scored = [s for c in alive for s in c.scores.values()]
    scored += [s for s in this.champion.values() if s.key in config.champion.scores]
    inputs: dict[str, Step | tuple[Step, ...]] = {
        "scores": tuple({s.key: s for s in scored}.values()),
        "engines": tuple(c.built for c in alive),
        "variants": tuple({c.quantized.key: c.quantized for c in alive}.values()),
        "divergences": tuple(c.read for c in alive if c.read is not None),
        "noise": noise,
    }
    if latency is not None:
        inputs["latency"] = latency
    return this.step(DECISION, "decision", config, inputs)


def _champion_input(this: _Assembly) -> ChampionInput:
    """The champion as far as it can be compared with: known, in this store, and scored on every eval set."""
    known, steps = this.campaign.champion, this.champion
    lost = next((f"{s.label}: {this.failures[s.key]}" for s in steps.values() if s.key in this.failures), "")
    if not steps or lost:
        return ChampionInput(version=known.version, note=lost or known.note)
    return ChampionInput(
        version=known.version, engine_key=known.engine_key, scores=tuple(s.key for s in steps.values())
    )


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
        divergence_key=c.read.key if alive and c.read is not None else None,
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
        **base.licence.told,
        "prior quantization": base.config.prior_quantization or "none",
        "note": given.note,
        "calibration": _calibration_told(campaign),
    }


def _calibration_told(campaign: Campaign) -> str:
    config = campaign.calibration
    left_out = ", ".join(str(row + 1) for row in config.excluded)
    shared = f"rows {left_out} left out, which share text with eval items" if left_out else "no text of an eval item"
    return f"{Path(config.source).name}: {shared}"


def _track_config(campaign: Campaign, plan_key: str) -> TrackingConfig:
    tracking, name = campaign.config.tracking, campaign.config.campaign
    uri = absolute_uri(tracking.uri)
    return TrackingConfig(
        tracking_uri=uri,
        artifact_root=artifact_root(uri, tracking.artifacts) or "",
        plan_key=plan_key,
        experiment=tracking.experiment or name,
        registered_model=tracking.registered_model or name,
        campaign_config=campaign.config.model_dump(mode="json"),
    )
