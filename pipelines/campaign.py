"""A campaign: what to take through the pipeline, validated as one model, all problems told at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from pipelines import entries, radar
from pipelines.config import Strict, find, parse
from pipelines.decide.gate import EvalCard, GateConfig, Looks
from pipelines.decide.gate import problems as gate_problems
from pipelines.decide.rollout import RolloutConfig
from pipelines.engine.pairing import Workload, told
from pipelines.entries import Engine, Variant
from pipelines.errors import ConfigError, InputError, Problem, closest
from pipelines.evaluate.evalset import Evalset, EvalsetConfig
from pipelines.evaluate.evalset import load as load_evalset
from pipelines.evaluate.prompts import DivergenceConfig, draw
from pipelines.flow.device import describe, free_bytes
from pipelines.flow.placement import Movable, Placement
from pipelines.flow.store import Store, digest_of
from pipelines.flow.toolchain import Toolchain, toolchains
from pipelines.intake.calibration import CalibrationConfig, pinned, without
from pipelines.intake.checkpoint import CheckpointConfig, Inspected, inspect
from pipelines.intake.digests import DigestCache, text_sha256
from pipelines.probe.config import ProbeConfig
from pipelines.quantize.preflight import problems as variant_problems
from pipelines.radar import RadarEntry
from pipelines.release.champion import Champion
from pipelines.release.champion import find as find_champion
from pipelines.track.masking import MASK, exposed
from pipelines.workload import foresee

TRACKING_URI = re.compile(r"(sqlite:///.|(postgresql|mysql|mssql)(\+\w+)?://|https?://).|databricks", re.DOTALL)


class Paths(Strict):
    """Where artifacts go."""

    store: str = Field(
        default="engines_out",
        min_length=1,
        description="artifact store; one directory per artifact, safe to share between runs",
    )
    ledger: str = Field(default="mlruns/ledger.jsonl", description="append-only record of promotions and rollbacks")
    toolchains: str = Field(default="", description="environments of toolchains; empty: `toolchains` beside the store")

    @property
    def toolchains_home(self) -> Path:
        """Where environments are made."""
        return Path(self.toolchains).resolve() if self.toolchains else Path(self.store).resolve().parent / "toolchains"


class HeldOut(Strict):
    """The text every variant and engine is checked on before it is scored, and how far perplexity may rise."""

    text: str
    windows: int = Field(default=4, ge=1)
    length: int = Field(default=512, ge=16)
    max_ratio: float = Field(
        default=3.0, gt=1, description="a variant whose perplexity is above this times the base's is noise"
    )


class NoiseFloor(Strict):
    """The A/A run: the reference engine scored again in another order and batch size."""

    run: bool = True
    items_per_set: PositiveInt = Field(default=48, description="most items of each eval set that are scored again")
    seed: int = Field(default=1, ge=0, description="of the order")


class Tracking(Strict):
    """Where results are shown."""

    uri: str = Field(
        default="sqlite:///mlruns/mlflow.db", description="any MLflow tracking URI; sqlite paths are relative to here"
    )
    artifacts: str = Field(
        default="",
        description="where a new experiment's files go, a path or URI; empty: beside a local database, in "
        "mlruns/artifacts here for another one, and where a server wants them",
    )
    experiment: str = Field(default="", description="MLflow experiment; empty means the campaign's name")
    registered_model: str = Field(
        default="", description="registry name of promoted engines; empty means the campaign's name"
    )

    @field_validator("uri")
    @classmethod
    def _is_a_store_of_mlflow(cls, uri: str) -> str:
        if not TRACKING_URI.match(uri):
            raise ValueError("no MLflow tracking URI: sqlite:///FILE, postgresql://, mysql://, mssql://, http(s)://")
        return uri


class Executor(Strict):
    """How stages run on this machine."""

    threads: int | None = Field(default=None, ge=1, description="threads for stages and servers; null means every core")
    parallel: int | None = Field(
        default=None, ge=1, description="stages at once, of those that may share the machine; null: by cores and memory"
    )
    offline: bool = Field(default=False, description="forbid stages to reach a model hub")
    toolchains: dict[Movable, str] = Field(
        default={}, description="toolchain of all stages of a kind whose own configuration and row name none"
    )


class CampaignConfig(Strict):
    """The whole of conf/config.yaml after composition; variants and engines are checked by their own rows' models."""

    campaign: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    checkpoint: CheckpointConfig
    calibration: CalibrationConfig
    variant: dict[str, dict[str, Any]] = Field(min_length=1)
    engine: dict[str, dict[str, Any]] = Field(min_length=1)
    evalset: dict[str, EvalsetConfig] = Field(min_length=1)
    items_per_set: Literal["quick"] | PositiveInt | None = Field(
        default=None, description="most items of each eval set without a limit of its own; quick: as its card says"
    )
    held_out: HeldOut
    divergence: DivergenceConfig = DivergenceConfig()
    noise_floor: NoiseFloor = NoiseFloor()
    probe: ProbeConfig
    gate: GateConfig
    rollout: RolloutConfig = RolloutConfig()
    reference: str = Field(default="baseline", description="the variant every other one is compared with")
    tracking: Tracking = Tracking()
    paths: Paths = Paths()
    executor: Executor = Executor()
    toolchain: dict[str, dict[str, Any]] = Field(default={}, description="interpreters that stages can run in")


@dataclass(frozen=True, slots=True)
class Campaign:
    """Everything the user asked for, checked, before any step is made of it.

    `workload` is what every engine will be asked. `prompts` are predicted token by token; `again` are the eval sets as
    the reference engine is scored on them twice. `champion` is the one of now, which every candidate is compared with
    too. `radar` are the entries of what it uses.
    """

    config: CampaignConfig
    base: Inspected
    calibration: CalibrationConfig
    variants: tuple[Variant, ...]
    engines: tuple[Engine, ...]
    workload: Workload
    evalsets: tuple[Evalset, ...]
    cards: Mapping[str, EvalCard]
    prompts: tuple[str, ...]
    again: tuple[Evalset, ...]
    stages: Mapping[Movable, Toolchain]
    champion: Champion
    radar: tuple[RadarEntry, ...]

    @property
    def threads(self) -> int:
        return self.config.executor.threads or int(describe()["cores"])


def open_campaign(data: Mapping[str, Any], config_dir: Path | None = None) -> Campaign:
    """Validate composed configuration and everything it points to; `config_dir` is where it was composed from.

    Raises:
        ConfigError: every problem that can be found without running a stage, each with the key to change.
    """
    config = parse(CampaignConfig, data)
    problems = list(_written_secrets(config))
    known = toolchains(config.toolchain, config.paths.toolchains_home, problems)
    placement = Placement(known, config.executor.toolchains)
    engines = entries.engines(config.engine, config.variant, placement, problems)
    variants = entries.variants(config.variant, engines, config.engine, placement, problems)
    alone: tuple[Movable, ...] = ("checkpoint", "calibration", "reference")
    stages = {kind: placement.stage(kind, problems) for kind in alone}
    evalsets = _evalsets(config, problems)
    cache = DigestCache(Path(config.paths.store).resolve() / ".digests.json")
    base = _base(config, cache, problems)
    calibration = _calibration(config, evalsets, cache, problems)
    if config.reference not in config.variant:
        problems.append(
            Problem(
                "reference", config.reference, "is not among the variants", closest(config.reference, config.variant)
            )
        )
    slices: dict[str, set[str]] = {e.name: {item.slice for item in e.items} for e in evalsets}
    if len(evalsets) < len(config.evalset):  # one could not be read, so what it is called is not known
        slices = {name: set() for name in config.evalset} | slices
    problems += gate_problems(config.gate, slices, [p.name for p in config.probe.profiles])
    problems += _unplanned_looks(config.gate.looks, evalsets)
    workload = Workload()
    if base is not None:
        problems += variant_problems(variants, base)
        workload = _workload(config, evalsets, base, cache, problems)
        free = free_bytes(Path(config.paths.store).resolve())
        problems += told(
            f for v in variants for f in entries.preflight(v, engines, entries.pairing(v, base, workload, free))
        )
    if problems or base is None or calibration is None:
        raise ConfigError(problems)
    known_tools, today = radar.of_campaigns(config_dir), datetime.now(UTC).date()
    cards = {e.name: EvalCard.model_validate(e.gate_card()) for e in evalsets}
    return Campaign(
        config=config,
        base=base,
        calibration=calibration,
        variants=tuple(variants),
        engines=tuple(engines),
        workload=workload,
        evalsets=tuple(evalsets),
        cards=cards,
        prompts=draw(evalsets, config.divergence),
        again=tuple(_again(evalsets, config.noise_floor)),
        stages=stages,
        champion=_champion(config),
        radar=radar.used(known_tools, entries.tools(variants, engines), today),
    )


def _written_secrets(config: CampaignConfig) -> Iterator[Problem]:
    """Settings that would carry a secret into manifests and requests; of the tracking URI it is kept out of them."""
    for key in exposed(config.model_dump(mode="json")):
        if key != "tracking.uri":
            yield Problem(
                key, MASK, "holds a secret, which would be written into manifests",
                "keep it in the environment: a process of this machine has it, a container where pass_env names it",
            )  # fmt: skip


def _champion(config: CampaignConfig) -> Champion:
    model = config.tracking.registered_model or config.campaign
    return find_champion(
        config.tracking.uri, Path(config.paths.ledger).resolve(), model, Store(Path(config.paths.store).resolve())
    )


def _base(config: CampaignConfig, cache: DigestCache, problems: list[Problem]) -> Inspected | None:
    try:
        return inspect(config.checkpoint, cache)
    except InputError as error:
        problems.append(_said("checkpoint.source", config.checkpoint.source, error))
    return None


def _calibration(
    config: CampaignConfig, evalsets: list[Evalset], cache: DigestCache, problems: list[Problem]
) -> CalibrationConfig | None:
    """The calibration set with its content fixed, after looking once for text that it shares with an eval set."""
    scored = tuple(str(e.items_path) for e in evalsets if e.items_path is not None)
    held_out = (*config.calibration.held_out, *scored, config.held_out.text)
    watched = config.calibration.model_copy(update={"held_out": held_out})
    try:
        alone = pinned(config.calibration.model_copy(update={"held_out": ()}))
        # A file that is not there stands as its path, so that nothing found without it can stand in for it.
        texts = [text_sha256(find(path)) if find(path).is_file() else path for path in held_out]
        how = {"ngram": alone.ngram, "similarity": alone.similarity, "leaks": alone.leaks}
        proof = digest_of({"shown": alone.digest, "asked": texts, "what": "shared text", **how})
        found = cache.found_in(proof, lambda: {"excluded": list(pinned(watched).excluded)})  # raises where refused
        given = alone.model_copy(update={"held_out": tuple(str(find(path)) for path in held_out)})
        return without(given, found["excluded"])
    except ConfigError as error:
        problems += error.problems
    except InputError as error:
        problems.append(_said("calibration.source", config.calibration.source, error))
    return None


def _said(key: str, value: object, error: Exception) -> Problem:
    return Problem(key, value, str(error).removeprefix(f"{key}={value!r}: "))


def _evalsets(config: CampaignConfig, problems: list[Problem]) -> list[Evalset]:
    found = []
    for name, given in config.evalset.items():
        try:
            found.append(_drawn(load_evalset(given), config))
        except InputError as error:
            problems.append(_said(f"evalset.{name}", given.path or given.task, error))
    names = [e.name for e in found]
    for twice in sorted({n for n in names if names.count(n) > 1}):
        problems.append(Problem("evalset", twice, "two eval sets have this name in their cards"))
    if not find(config.held_out.text).is_file():
        problems.append(Problem("held_out.text", config.held_out.text, "no such file"))
    return found


def _drawn(evalset: Evalset, config: CampaignConfig) -> Evalset:
    """The eval set, with fewer items where the campaign asks for fewer and the set's own configuration does not say."""
    most = evalset.card.quick if config.items_per_set == "quick" else config.items_per_set
    if most is None or evalset.config.limit is not None:
        return evalset
    return load_evalset(evalset.config.model_copy(update={"limit": most}))


def _unplanned_looks(looks: Looks, evalsets: list[Evalset]) -> Iterator[Problem]:
    """Eval sets whose draw is not the share of items at which this look was planned, give or take one in twenty."""
    planned = looks.at[looks.number - 1]
    for evalset in evalsets if len(looks.at) > 1 else ():
        every, wanted = len(evalset.items), round(planned * len(evalset.items))
        if every and abs(evalset.size - wanted) > max(1.0, every / 20):
            yield Problem(
                f"evalset.{evalset.name}.limit", evalset.config.limit,
                f"look {looks.number} of {len(looks.at)} is planned at {wanted} of {every} items, not {evalset.size}",
            )  # fmt: skip


def _again(evalsets: list[Evalset], noise: NoiseFloor) -> Iterator[Evalset]:
    """The eval sets with fewer items: what a smaller limit draws is part of what was drawn."""
    for evalset in evalsets if noise.run else ():
        limit = min(evalset.size or noise.items_per_set, noise.items_per_set)
        yield load_evalset(evalset.config.model_copy(update={"limit": limit}))


def _workload(
    config: CampaignConfig, evalsets: list[Evalset], base: Inspected, cache: DigestCache, problems: list[Problem]
) -> Workload:
    """What engines will be asked; a base that has to be converted first has no tokenizer to measure lengths with."""
    checkpoint = None if base.config.kind == "gguf" else Path(base.config.source)
    try:
        return foresee(evalsets, config.probe, checkpoint, cache)
    except ConfigError as error:
        problems += error.problems
    except InputError as error:
        problems.append(_said("probe.prompts", config.probe.prompts, error))
    return Workload()
