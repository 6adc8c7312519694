"""TensorRT-LLM's PyTorch backend: a serving bundle, which is a checkpoint, LlmArgs settings and an image's digest.

There is nothing ahead of time in it, so it is no engine and never called one. It counts as built when the library's own
loader has recognized the quantization that the variant has, and its server has answered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from pipelines.config import Strict
from pipelines.engine import smoke
from pipelines.engine.memory import Storage
from pipelines.engine.pairing import Pairing
from pipelines.engine.smoke import Checks
from pipelines.engine.trtllm import capacity, checks, flags, provenance, record, split
from pipelines.engine.trtllm.case import Case, Limits, case
from pipelines.engine.trtllm.loader import recognized
from pipelines.engine.trtllm.options import Gpu, KvCache, Scheduler
from pipelines.engine.trtllm.record import Record, capabilities, misplaced, serve
from pipelines.engine.trtllm.text import yaml_of
from pipelines.errors import ConfigError, InputError, Problem
from pipelines.flow.progress import report
from pipelines.flow.store import Fact, facts, sha256_of
from pipelines.quantize.carry import CARRIED
from pipelines.quantize.scheme import Scheme
from pipelines.quantize.transformers4 import as_version_4

__all__ = ["TrtllmPytorchConfig", "build", "capabilities", "misplaced", "preflight", "redundant", "serve"]

STEPS = 3
CONFIG = "config.json"


class TorchKvCache(KvCache):
    """The cache of the PyTorch backend, which also has a format and a block size."""

    dtype: Literal["auto", "fp8", "nvfp4"] = Field(
        default="auto", description="auto: as the checkpoint says; fp8 works for checkpoints that were not calibrated"
    )
    tokens_per_block: PositiveInt = Field(default=32, description="tokens in a block")


class CudaGraphs(Strict):
    """Decoding steps captured once for each batch size."""

    batch_sizes: tuple[PositiveInt, ...] | None = Field(default=None, description="null: up to max_batch_size")
    max_batch_size: int = Field(default=0, ge=0, description="0: 128, or the largest of batch_sizes")
    enable_padding: bool = Field(default=False, description="round batches up to a captured size; usually faster")


class TorchCompile(Strict):
    """torch.compile over the model."""

    enable_fullgraph: bool = Field(default=True, description="as one graph")
    enable_inductor: bool = Field(default=False, description="with inductor's kernels")
    enable_piecewise_cuda_graph: bool = Field(default=False, description="CUDA graphs of its pieces")
    enable_userbuffers: bool = Field(default=True, description="communicate through registered buffers")


class TrtllmPytorchConfig(Strict):
    """Names and defaults are those of `TorchLlmArgs` and `trtllm-serve`."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"flags", "gpu"})

    target: Literal["trtllm_pytorch"] = "trtllm_pytorch"
    release: str = Field(
        default="1.2.1", pattern=r"^\d+\.\d+\.\d+(rc\d+)?$", description="of TensorRT-LLM in the toolchain"
    )
    flags: str | None = Field(default=None, description="flag snapshot of another release; null: the shipped one")
    tp: PositiveInt = Field(default=1, description="tensor-parallel ranks, a GPU each")
    pp: PositiveInt = Field(default=1, description="pipeline-parallel ranks, a GPU each")
    ep: PositiveInt | None = Field(default=None, description="ranks that experts are shared over; null: none")
    gpu: Gpu | None = Field(default=None, description="the GPU it is planned for; null: those of this machine")
    max_batch_size: PositiveInt = Field(default=2048, description="requests at once")
    max_num_tokens: PositiveInt = Field(default=8192, description="tokens of one step over all requests")
    max_seq_len: PositiveInt | None = Field(default=None, description="prompt and answer; null: what the model knows")
    max_beam_width: PositiveInt = Field(default=1, description="beams; 1 is sampling and greedy")
    context_logits: bool = Field(
        default=False, description="score prompts by their logits, which block reuse and chunks must not cut"
    )
    kv_cache: TorchKvCache = TorchKvCache()
    enable_chunked_prefill: bool = Field(default=False, description="long prompts in pieces")
    scheduler: Scheduler = Scheduler()
    cuda_graph: CudaGraphs | None = Field(default=CudaGraphs(), description="null: none")
    torch_compile: TorchCompile | None = Field(default=None, description="null: none")
    attn_backend: Literal["TRTLLM", "FLASHINFER", "VANILLA"] = Field(
        default="TRTLLM", description="kernels of attention; any other name would be taken for TRTLLM without a word"
    )
    sampler_type: Literal["auto", "TRTLLMSampler", "TorchSampler"] = Field(default="auto", description="who samples")
    moe_backend: Literal["CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"] = Field(
        default="CUTLASS", description="kernels of mixtures of experts"
    )
    allreduce_strategy: (
        Literal["AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"]
        | None
    ) = Field(default="AUTO", description="how ranks add up; LOWPRECISION changes results")
    disable_overlap_scheduler: bool = Field(default=False, description="schedule only between steps")
    enable_autotuner: bool = Field(default=True, description="try kernels at start")
    enable_iter_perf_stats: bool = Field(
        default=False, description="let /metrics tell memory and cache use; costs time"
    )
    stream_interval: PositiveInt = Field(
        default=1, description="steps between pieces of a stream; 1 for latency probes"
    )
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = Field(default=None, description="for grammars")
    num_postprocess_workers: int = Field(default=0, ge=0, description="processes that turn tokens into text")
    checks: Checks = Checks()


def preflight(config: TrtllmPytorchConfig, pairing: Pairing) -> list[Problem]:
    """Find everything that would make the bundle or the campaign fail, or the loader take codes for weights."""
    found = _case(config, pairing)
    return [
        *checks.hardware(found),
        *checks.release(found),
        *checks.formats(found),
        *checks.models(found),
        *split.layers(found),
        *capacity.lengths(found),
        *capacity.scoring(found, "context_logits", reuse=config.kv_cache.enable_block_reuse),
        *capacity.cache(found, config.kv_cache.dtype),
        *capacity.memory(found),
        *_flag_problems(config),
    ]


def storage(config: TrtllmPytorchConfig, pairing: Pairing) -> Storage:
    """How weights and cache lie in GPUs."""
    return capacity.storage(_case(config, pairing), config.kv_cache.dtype)


def redundant(config: TrtllmPytorchConfig, scheme: Scheme) -> str | None:
    """Every scheme is a bundle of its own."""
    del config, scheme
    return None


def build(config: TrtllmPytorchConfig, out: Path, *, variant: Path, reference: Path) -> dict[str, Fact]:
    """Put checkpoint and settings together, ask the loader what it sees, and have the server answer.

    Runs in the library's toolchain; the manifest's toolchain names the image. Weights are linked, not copied.

    Raises:
        StageFailed: the loader takes the checkpoint for something else, or the server does not answer as it should.
    """
    provenance.check_release(config.release)
    known, about = facts(variant), json.loads((variant / CONFIG).read_text())
    (out / record.LOGS).mkdir()
    report(0, STEPS, "checkpoint")
    name = record.model_id(str((about.get("architectures") or ["model"])[0]), variant)
    _link_checkpoint(variant, out / name, about)
    served = _describe(config, out, variant, name, about)
    report(1, STEPS, "loader")
    algo = recognized(out / name, known, out / record.LOGS / "loader.log")
    report(2, STEPS, "server")
    port = smoke.free_port()
    argv, env = serve(out, port, 1)
    with smoke.served(argv, env, port, out / record.LOGS / "serve.log", config.checks.startup_timeout_s) as ready_s:
        smoked = smoke.check(name, port, config.checks, reference, _scoring(served))
    report(STEPS, STEPS, "server")
    return {
        "target": config.target,
        "kind": served.kind,
        "release": config.release,
        "native": not provenance.native_note(),
        "native_note": provenance.native_note(),
        "tp": config.tp,
        "pp": config.pp,
        "quant_algo": algo,
        "precision": f"{algo or about.get('dtype') or about.get('torch_dtype')} in PyTorch",
        "settings_sha256": sha256_of(out / record.SETTINGS),
        "ready_s": round(ready_s, 3),
        "size_bytes": sum(p.stat().st_size for p in (out / name).rglob("*") if p.is_file()),
        **smoked,
        **provenance.facts_of(variant, {"serve": record.argv(served, Path(), 8000)}, {}),
    }


def _scoring(served: Record) -> smoke.Asker | None:
    return smoke.BY_LOGITS if served.context_logits else None


def _limits(config: TrtllmPytorchConfig) -> Limits:
    return Limits(
        config.max_batch_size, config.max_num_tokens, config.max_seq_len, chunked=config.enable_chunked_prefill
    )


def _case(config: TrtllmPytorchConfig, pairing: Pairing) -> Case:
    parallel = (config.tp, config.pp)
    return case(
        "pytorch",
        config.release,
        parallel,
        config.gpu,
        _limits(config),
        scores_prompts=config.context_logits,
        pairing=pairing,
    )


def _flag_problems(config: TrtllmPytorchConfig) -> list[Problem]:
    try:
        snapshot = flags.load(config.release, config.flags)
    except InputError as error:
        return [Problem("engine.flags", config.flags, str(error))]
    except ConfigError as error:
        return list(error.problems)
    return flags.settings_problems(snapshot, "TorchLlmArgs", _settings(config))


def _settings(config: TrtllmPytorchConfig) -> dict[str, Any]:
    """LlmArgs, as the library reads them from YAML."""
    given: dict[str, Any] = {
        "tensor_parallel_size": config.tp,
        "pipeline_parallel_size": config.pp,
        "moe_expert_parallel_size": config.ep,
        "kv_cache_config": config.kv_cache.model_dump(mode="json", exclude_none=True),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "scheduler_config": config.scheduler.model_dump(mode="json", exclude_none=True),
        "moe_config": {"backend": config.moe_backend},
        "guided_decoding_backend": config.guided_decoding_backend,
    }
    given |= {name: getattr(config, name) for name in _AS_THEY_ARE}
    told = {name: value for name, value in given.items() if value is not None}
    told["cuda_graph_config"] = None if config.cuda_graph is None else _dumped(config.cuda_graph)
    return told | ({} if config.torch_compile is None else {"torch_compile_config": _dumped(config.torch_compile)})


_AS_THEY_ARE = (
    "attn_backend", "sampler_type", "allreduce_strategy", "disable_overlap_scheduler", "enable_autotuner",
    "enable_iter_perf_stats", "stream_interval", "num_postprocess_workers",
)  # fmt: skip


def _dumped(options: Strict) -> dict[str, Any]:
    return options.model_dump(mode="json", exclude_none=True)


def _link_checkpoint(variant: Path, model: Path, about: Mapping[str, Any]) -> None:
    """The variant's files under the name the server will give it, its config in words both transformers read."""
    model.mkdir()
    for file in sorted(p for p in variant.iterdir() if p.is_file() and p.name not in ("manifest.json", CONFIG)):
        if not CARRIED.fullmatch(file.name):
            (model / file.name).symlink_to(file.resolve())
    record.copy_tokenizer(variant, model)
    (model / CONFIG).write_text(json.dumps(as_version_4(about), indent=2) + "\n")


def _describe(config: TrtllmPytorchConfig, out: Path, variant: Path, name: str, about: Mapping[str, Any]) -> Record:
    longest = config.max_seq_len or int(about.get("max_position_embeddings") or 0)
    if not longest:
        raise InputError(f"{variant}: config.json has no max_position_embeddings; give engine.max_seq_len")
    served = Record(
        kind="bundle",
        release=config.release,
        backend="pytorch",
        model=name,
        tp=config.tp,
        pp=config.pp,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=longest,
        max_beam_width=config.max_beam_width,
        context_logits=config.context_logits and not config.kv_cache.enable_block_reuse,
    )
    record.copy_tokenizer(variant, out)
    comment = f"LlmArgs of TensorRT-LLM {config.release}, PyTorch backend: trtllm-serve --extra_llm_api_options"
    (out / record.SETTINGS).write_text(yaml_of(_settings(config), comment))
    record.write(out, served)
    most, _ = _limits(config).longest_prompt(longest)
    note, timeout_s = provenance.native_note(), config.checks.startup_timeout_s
    record.write_card(out, config.target, variant, served, note, max_prompt=most, startup_timeout_s=timeout_s)
    return served
