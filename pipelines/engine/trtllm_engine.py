"""TensorRT-LLM's ahead-of-time engines: checkpoint, `trtllm-build`, one plan for each rank; up to release 1.2.1.

An engine belongs to the GPUs, TensorRT and split it was built for. It counts as built when what was written is what was
asked, key by key, and its own server has answered.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from pipelines.config import Strict
from pipelines.engine import smoke
from pipelines.engine.memory import Storage
from pipelines.engine.pairing import Pairing
from pipelines.engine.smoke import Checks
from pipelines.engine.trtllm import capacity, checks, commands, cross, flags, provenance, record, rules, split
from pipelines.engine.trtllm.case import Case, Limits, case
from pipelines.engine.trtllm.checkpoint import Made, digest, provide
from pipelines.engine.trtllm.compare import differences
from pipelines.engine.trtllm.options import Gpu, KvCache, Plugins, Scheduler
from pipelines.engine.trtllm.record import Record, capabilities, misplaced, serve
from pipelines.engine.trtllm.running import run
from pipelines.engine.trtllm.text import yaml_of
from pipelines.errors import ConfigError, InputError, Problem, StageFailed
from pipelines.flow.progress import report
from pipelines.flow.store import Fact, canonical, facts, sha256_of
from pipelines.quantize.scheme import Scheme

__all__ = ["TrtllmEngineConfig", "build", "capabilities", "misplaced", "preflight", "redundant", "serve"]

STEPS = 3
TIMING_CACHE = "timing.cache"


class TrtllmEngineConfig(Strict):
    """Names and defaults are those of `trtllm-build` and of the settings of `trtllm-serve`."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"workers", "flags", "gpu"})

    target: Literal["trtllm_engine"] = "trtllm_engine"
    release: str = Field(
        default="1.2.1", description="of TensorRT-LLM in the toolchain; 1.2.1 is the last with a builder"
    )
    flags: str | None = Field(default=None, description="flag snapshot of another release; null: the shipped one")
    tp: PositiveInt = Field(default=1, description="tensor-parallel ranks, a GPU each")
    pp: PositiveInt = Field(default=1, description="pipeline-parallel ranks, a GPU each")
    gpu: Gpu | None = Field(default=None, description="the GPU it is planned for; null: those of this machine")
    examples: str = Field(
        default="/app/tensorrt_llm/examples", description="the library's examples in the toolchain, for the converters"
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = Field(
        default="auto", description="of what is not quantized, where a checkpoint is converted; auto: the base's"
    )
    max_batch_size: PositiveInt = Field(default=2048, description="requests at once")
    max_input_len: PositiveInt = Field(default=1024, description="of a prompt; counts only where padding is kept")
    max_seq_len: PositiveInt | None = Field(default=None, description="prompt and answer; null: what the model knows")
    max_beam_width: PositiveInt = Field(default=1, description="beams; 1 is sampling and greedy")
    max_num_tokens: PositiveInt = Field(default=8192, description="prompt tokens of one step over all requests")
    opt_num_tokens: PositiveInt | None = Field(
        default=None, description="tokens kernels are chosen for; null: the batch"
    )
    kv_cache_type: Literal["continuous", "paged", "disabled"] | None = Field(default=None, description="null: paged")
    logits_dtype: Literal["float16", "float32"] | None = Field(default=None, description="null: the checkpoint's")
    gather_context_logits: bool = Field(
        default=False, description="give logits of prompts, from which they are scored; costs memory, not with drafts"
    )
    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] = Field(
        default="layer_names_only", description="what the engine remembers of its layers"
    )
    weight_sparsity: bool = Field(default=False, description="use 2:4 sparse weights")
    fast_build: bool = Field(default=False, description="build faster, run slower; weights in a file of their own")
    monitor_memory: bool = Field(default=False, description="have the builder log memory")
    speculative_decoding_mode: Literal["draft_tokens_external", "lookahead_decoding"] | None = Field(
        default=None, description="modes that need no heads of their own"
    )
    max_draft_len: int = Field(default=0, ge=0, description="draft tokens a step")
    timing_cache: str | None = Field(
        default=None, description="timing cache to begin with, as the toolchain sees it; the one written is kept here"
    )
    workers: PositiveInt = Field(default=1, description="ranks built at once; each holds all weights in host memory")
    plugins: Plugins = Plugins()
    kv_cache: KvCache = KvCache()
    enable_chunked_prefill: bool = Field(default=False, description="long prompts in pieces")
    scheduler: Scheduler = Scheduler()
    num_postprocess_workers: int = Field(default=0, ge=0, description="processes that turn tokens into text")
    checks: Checks = Checks()

    @field_validator("release")
    @classmethod
    def _has_a_builder(cls, release: str) -> str:
        if release != rules.LAST_WITH_BUILDER:
            raise ValueError(
                f"engines are built with {rules.LAST_WITH_BUILDER}, the last stable release that has trtllm-build; for "
                "later ones use target trtllm_pytorch"
            )
        return release


def preflight(config: TrtllmEngineConfig, pairing: Pairing) -> list[Problem]:
    """Find everything that would make conversion, build or campaign fail."""
    found = _case(config, pairing)
    return [
        *checks.hardware(found),
        *checks.formats(found),
        *checks.models(found),
        *split.layers(found),
        *cross.options(config, found),
        *capacity.lengths(found),
        *capacity.scoring(found, "gather_context_logits", reuse=config.kv_cache.enable_block_reuse),
        *capacity.cache(found, "auto"),
        *capacity.memory(found),
        *_flag_problems(config),
    ]


def storage(config: TrtllmEngineConfig, pairing: Pairing) -> Storage:
    """How weights and cache lie in GPUs."""
    return capacity.storage(_case(config, pairing), "auto")


def redundant(config: TrtllmEngineConfig, scheme: Scheme) -> str | None:
    """Every scheme is an engine of its own."""
    del config, scheme
    return None


def build(config: TrtllmEngineConfig, out: Path, *, variant: Path, reference: Path) -> dict[str, Fact]:
    """Convert where needed, build every rank, and have the engine's server answer. Runs in the library's toolchain.

    Raises:
        StageFailed: a tool failed, or what it wrote, or what its server answers, is not what was asked.
    """
    provenance.check_release(config.release)
    known = facts(variant)
    logs, scratch = out / record.LOGS, out / ".scratch"
    logs.mkdir()
    scratch.mkdir()
    report(0, STEPS, "checkpoint")
    made = provide(config, variant, scratch, logs, known)
    checkpoint_sha256 = digest(made.path)
    report(1, STEPS, "engine")
    name = record.model_id(str(made.config.get("architecture", "model")), variant)
    options = commands.build_argv(config, made.path, out / name, out / TIMING_CACHE)
    argv = ["trtllm-build", *options]
    spent = run(argv, logs / "build.log")
    resolved = _refuse_other_engine(config, out / name, made.config)
    shutil.rmtree(scratch)
    report(2, STEPS, "server")
    served = _describe(config, out, variant, name, resolved)
    ready_s, smoked = _ask(config, out, served, reference)
    report(STEPS, STEPS, "server")
    argvs = {"build": argv, "serve": record.argv(served, Path(), 8000)} | ({"convert": made.argv} if made.argv else {})
    return {
        "target": config.target,
        "kind": served.kind,
        "release": config.release,
        "native": not provenance.native_note(),
        "native_note": provenance.native_note(),
        "tp": config.tp,
        "pp": config.pp,
        "quant_algo": str(made.config.get("quantization", {}).get("quant_algo") or ""),
        "precision": _precision(made),
        "checkpoint_sha256": checkpoint_sha256,
        "timing_cache_sha256": sha256_of(out / TIMING_CACHE) if (out / TIMING_CACHE).is_file() else "",
        "build_config": canonical(resolved["build_config"]),
        "deserialized": True,
        "ready_s": round(ready_s, 3),
        "size_bytes": sum(p.stat().st_size for p in (out / name).rglob("*") if p.is_file()),
        **smoked,
        **provenance.facts_of(variant, argvs, {"convert": made.spent, "build": spent}),
    }


def _scoring(served: Record) -> smoke.Asker | None:
    return smoke.BY_LOGITS if served.context_logits else None


def _limits(config: TrtllmEngineConfig) -> Limits:
    plugins = config.plugins
    return Limits(
        config.max_batch_size,
        config.max_num_tokens,
        config.max_seq_len,
        config.max_input_len,
        config.enable_chunked_prefill,
        packed="disable" not in (plugins.context_fmha, plugins.remove_input_padding),
    )


def _case(config: TrtllmEngineConfig, pairing: Pairing) -> Case:
    return case(
        "tensorrt",
        config.release,
        (config.tp, config.pp),
        config.gpu,
        _limits(config),
        scores_prompts=config.gather_context_logits,
        pairing=pairing,
        workers=config.workers,
    )


def _flag_problems(config: TrtllmEngineConfig) -> list[Problem]:
    """The command line and the settings this configuration makes, held to the release's own."""
    try:
        snapshot = flags.load(config.release, config.flags)
    except InputError as error:
        return [Problem("engine.flags", config.flags, str(error))]
    except ConfigError as error:
        return list(error.problems)
    somewhere = Path("engine")
    options = commands.build_argv(config, somewhere, somewhere, somewhere)
    return [
        *flags.argv_problems(snapshot, "trtllm-build", options),
        *flags.settings_problems(snapshot, "TrtLlmArgs", _settings(config)),
    ]


def _settings(config: TrtllmEngineConfig) -> dict[str, Any]:
    """What the server is told beyond its flags."""
    return {
        "kv_cache_config": config.kv_cache.model_dump(mode="json", exclude_none=True),
        "scheduler_config": config.scheduler.model_dump(mode="json", exclude_none=True),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "num_postprocess_workers": config.num_postprocess_workers,
    }


def _refuse_other_engine(config: TrtllmEngineConfig, engine: Path, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's config.json, after comparing it with what was asked, and its ranks."""
    path = engine / "config.json"
    try:
        written: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StageFailed(f"{path}: trtllm-build wrote no readable config.json ({error})") from None
    found = differences(commands.asked_of_engine(config, checkpoint), written)
    ranks = [f"rank{k}.engine" for k in range(config.tp * config.pp)]
    found += [f"{name}: is missing or empty" for name in ranks if not _filled(engine / name)]
    if found:
        listed = "\n  ".join(found)
        raise StageFailed(f"{engine}: not the engine that was asked for, {len(found)} differences:\n  {listed}")
    return written


def _filled(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


def _describe(config: TrtllmEngineConfig, out: Path, variant: Path, name: str, resolved: Mapping[str, Any]) -> Record:
    """Write what serving needs: tokenizer, settings, record and card."""
    built = resolved["build_config"]
    served = Record(
        kind="engine",
        release=config.release,
        backend="tensorrt",
        model=name,
        tp=config.tp,
        pp=config.pp,
        max_batch_size=built["max_batch_size"],
        max_num_tokens=built["max_num_tokens"],
        max_seq_len=built["max_seq_len"],
        max_beam_width=built["max_beam_width"],
        context_logits=config.gather_context_logits and not config.kv_cache.enable_block_reuse,
    )
    record.copy_tokenizer(variant, out)
    (out / record.SETTINGS).write_text(yaml_of(_settings(config), f"settings of trtllm-serve {config.release}"))
    record.write(out, served)
    most, _ = _limits(config).longest_prompt(served.max_seq_len)
    note, timeout_s = provenance.native_note(), config.checks.startup_timeout_s
    record.write_card(out, config.target, variant, served, note, max_prompt=most, startup_timeout_s=timeout_s)
    return served


def _ask(config: TrtllmEngineConfig, out: Path, served: Record, reference: Path) -> tuple[float, dict[str, Fact]]:
    """Start the server, ask it; give the seconds to its first answer and what it showed."""
    port = smoke.free_port()
    argv, env = serve(out, port, 1)
    log = out / record.LOGS / "serve.log"
    with smoke.served(argv, env, port, log, config.checks.startup_timeout_s) as ready_s:
        return ready_s, smoke.check(served.model, port, config.checks, reference, _scoring(served))


def _precision(made: Made) -> str:
    quantization = made.config.get("quantization", {})
    return f"{quantization.get('quant_algo') or made.config.get('dtype')} in TensorRT"
