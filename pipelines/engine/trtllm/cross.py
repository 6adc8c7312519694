"""Options of the builder that do not go together, or that it would override with no more than a warning. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipelines.engine.trtllm import rules
from pipelines.engine.trtllm.case import Case
from pipelines.errors import Problem

if TYPE_CHECKING:
    from pipelines.engine.trtllm_engine import TrtllmEngineConfig

FP8_SWIGLU = ("gemm_swiglu_plugin", "low_latency_gemm_swiglu_plugin")


def options(config: TrtllmEngineConfig, case: Case) -> Iterator[Problem]:
    """Everything that is wrong with a set of build options, whatever the checkpoint, then with this one."""
    if config.dtype != "auto" and case.method not in (None, *rules.CONVERTED):
        message = "nothing is converted: the variant's own TensorRT-LLM checkpoint has a dtype"
        yield Problem("engine.dtype", config.dtype, message, "auto")
    yield from _logits(config)
    yield from _cache(config)
    yield from _profiles(config)
    yield from _parallel(config, case)
    if case.algo is not None:
        yield from _by_algorithm(config, case)
    if case.gpu is not None:
        yield from _by_gpu(config, case.gpu.sm)


def _logits(config: TrtllmEngineConfig) -> Iterator[Problem]:
    if config.gather_context_logits and config.max_draft_len:
        message = "context logits are not gathered with draft tokens (trtllm-build refuses)"
        yield Problem("engine.gather_context_logits", True, message, "max_draft_len=0")
    if bool(config.max_draft_len) != (config.speculative_decoding_mode is not None):
        message = "speculative decoding takes a mode and a length"
        yield Problem("engine.max_draft_len", config.max_draft_len, message, "both or neither")


def _cache(config: TrtllmEngineConfig) -> Iterator[Problem]:
    paged, context = config.kv_cache_type in (None, "paged"), config.plugins.use_paged_context_fmha
    if config.kv_cache_type == "disabled":
        message = "without a cache an engine only reads prompts; it cannot be served"
        yield Problem("engine.kv_cache_type", "disabled", message, "paged or continuous")
    if not paged and context == "enable":
        yield Problem("engine.plugins.use_paged_context_fmha", context, "needs a paged cache", "kv_cache_type=paged")
    for key, asked in (
        ("kv_cache.enable_block_reuse", config.kv_cache.enable_block_reuse),
        ("enable_chunked_prefill", config.enable_chunked_prefill),
    ):
        if asked and (not paged or context == "disable"):
            message = "needs a paged cache and plugins.use_paged_context_fmha"
            yield Problem(f"engine.{key}", True, message, "false")


def _profiles(config: TrtllmEngineConfig) -> Iterator[Problem]:
    if config.plugins.multiple_profiles == "enable" and config.opt_num_tokens is not None:
        message = "is not taken together with multiple_profiles (trtllm-build refuses)"
        yield Problem("engine.opt_num_tokens", config.opt_num_tokens, message, "null")


def _parallel(config: TrtllmEngineConfig, case: Case) -> Iterator[Problem]:
    plugins, model = config.plugins, case.architecture
    fusible = model is None or model in rules.REDUCE_FUSION_MODELS
    if plugins.reduce_fusion == "enable" and (config.tp == 1 or not fusible):
        allowed = f"tp of 2 or more, and {' or '.join(sorted(rules.REDUCE_FUSION_MODELS))}"
        yield Problem("engine.plugins.reduce_fusion", "enable", "the builder would switch it off", allowed)
    if plugins.user_buffer == "enable" and (
        plugins.reduce_fusion != "enable" or case.algo not in ("FP8", None) or model not in ("LlamaForCausalLM", None)
    ):
        message = "is for FP8 Llama with reduce_fusion"
        yield Problem("engine.plugins.user_buffer", "enable", message, "disable")
    if plugins.pp_reduce_scatter == "enable" and model is not None and model not in rules.PP_REDUCE_SCATTER_MODELS:
        allowed = ", ".join(sorted(rules.PP_REDUCE_SCATTER_MODELS))
        yield Problem("engine.plugins.pp_reduce_scatter", "enable", f"is not for {model}", f"models: {allowed}")


def _by_algorithm(config: TrtllmEngineConfig, case: Case) -> Iterator[Problem]:
    plugins, algo = config.plugins, case.algo
    named = algo or "an unquantized checkpoint"
    if plugins.use_fused_mlp == "enable" and algo not in rules.FUSED_MLP_ALGOS:
        yield Problem("engine.plugins.use_fused_mlp", "enable", f"the builder would switch it off for {named}", "null")
    if plugins.use_fp8_context_fmha == "enable" and algo not in rules.FP8_CONTEXT_FMHA_ALGOS:
        allowed = f"with {', '.join(sorted(rules.FP8_CONTEXT_FMHA_ALGOS))}"
        yield Problem("engine.plugins.use_fp8_context_fmha", "enable", f"is off for {named}", allowed)
    if plugins.use_fp8_context_fmha == "enable" and plugins.use_paged_context_fmha == "disable":
        message = "needs use_paged_context_fmha"
        yield Problem("engine.plugins.use_fp8_context_fmha", "enable", message, "use_paged_context_fmha=enable")
    for name in FP8_SWIGLU:
        if getattr(plugins, name) == "fp8" and (algo != "FP8" or plugins.use_fused_mlp == "disable"):
            yield Problem(f"engine.plugins.{name}", "fp8", "is for FP8 checkpoints with use_fused_mlp", "disable")
    if config.fast_build and algo in rules.UNMANAGED_ALGOS:
        yield Problem("engine.fast_build", True, f"does not work with the weights of {named}", "false")
    if plugins.norm_quant_fusion == "enable" and (algo != "NVFP4" or plugins.reduce_fusion == "enable"):
        message = "the builder would switch it off"
        yield Problem("engine.plugins.norm_quant_fusion", "enable", message, "NVFP4 Llama without reduce_fusion")


def _by_gpu(config: TrtllmEngineConfig, sm: int) -> Iterator[Problem]:
    for name in rules.NO_PLUGINS_ON.get(sm, ()):
        if getattr(config.plugins, name) not in (None, "disable"):
            chosen = getattr(config.plugins, name)
            yield Problem(f"engine.plugins.{name}", chosen, f"is not supported on SM {sm}", "disable")
    if config.plugins.use_fp8_context_fmha == "enable" and sm not in rules.FP8_CONTEXT_FMHA_SMS:
        allowed = f"SM {', '.join(map(str, sorted(rules.FP8_CONTEXT_FMHA_SMS)))}"
        yield Problem("engine.plugins.use_fp8_context_fmha", "enable", f"has no kernel for SM {sm}", allowed)
