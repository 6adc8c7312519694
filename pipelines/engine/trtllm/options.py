"""Options that both TensorRT-LLM targets have, with the library's names and defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from pipelines.config import Strict

Switch = Literal["enable", "disable"]
PluginType = Literal["auto", "float16", "float32", "bfloat16", "int32", "disable"]


class Gpu(Strict):
    """The GPUs an engine is meant for, where they are not those of the machine that plans."""

    sm: int = Field(ge=50, le=200, description="compute capability without the dot: 80, 86, 89, 90, 100, 120")
    count: int = Field(default=1, ge=1, description="how many, all alike")
    memory_gib: float = Field(gt=0, description="memory of each")


class KvCache(Strict):
    """How keys and values are kept while the server runs."""

    enable_block_reuse: bool = Field(
        default=True, description="reuse blocks of equal prefixes; must be false where prompts are scored"
    )
    enable_partial_reuse: bool = Field(default=True, description="reuse blocks that match only in part")
    copy_on_partial_reuse: bool = Field(default=True, description="copy such blocks while others use them")
    free_gpu_memory_fraction: float = Field(
        default=0.9, gt=0, lt=1, description="of the memory that weights and activations leave; equal for all compared"
    )
    max_tokens: PositiveInt | None = Field(default=None, description="tokens kept at most; the smaller limit counts")
    max_attention_window: tuple[PositiveInt, ...] | None = Field(
        default=None, description="tokens each layer attends to, repeated over layers; null: all"
    )
    host_cache_size: PositiveInt | None = Field(default=None, description="bytes of host memory for blocks moved out")


class Scheduler(Strict):
    """Which requests run next."""

    capacity_scheduler_policy: Literal["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"] = Field(
        default="GUARANTEED_NO_EVICT", description="MAX_UTILIZATION packs more and may pause requests"
    )
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = Field(
        default=None, description="with enable_chunked_prefill: whose chunks go first"
    )


class Plugins(Strict):
    """Plugins and features of `trtllm-build`; null leaves each to the tool, whose own default is said."""

    gpt_attention_plugin: PluginType | None = Field(default=None, description="auto")
    gemm_plugin: Literal["auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable"] | None = Field(
        default=None,
        description="usual: auto for float16 and bfloat16, disable for FP8; unset by default",
    )
    gemm_swiglu_plugin: Literal["fp8", "disable"] | None = Field(default=None, description="disable; FP8 on Hopper")
    fp8_rowwise_gemm_plugin: PluginType | None = Field(default=None, description="disable")
    low_latency_gemm_plugin: Literal["fp8", "disable"] | None = Field(
        default=None, description="disable; small batches"
    )
    low_latency_gemm_swiglu_plugin: Literal["fp8", "disable"] | None = Field(default=None, description="disable")
    gemm_allreduce_plugin: Literal["float16", "bfloat16", "disable"] | None = Field(default=None, description="disable")
    nccl_plugin: PluginType | None = Field(default=None, description="auto; off where there is one rank")
    moe_plugin: PluginType | None = Field(default=None, description="auto")
    context_fmha: Switch | None = Field(default=None, description="enable; one kernel for attention over the prompt")
    remove_input_padding: Switch | None = Field(default=None, description="enable")
    use_paged_context_fmha: Switch | None = Field(
        default=None, description="enable; block reuse and chunked prefill need it"
    )
    use_fp8_context_fmha: Switch | None = Field(
        default=None, description="enable, and off by itself where the checkpoint is not FP8"
    )
    fuse_fp4_quant: Switch | None = Field(default=None, description="disable; NVFP4 only")
    multiple_profiles: Switch | None = Field(
        default=None, description="disable; enable is recommended for speed, builds longer, not with opt_num_tokens"
    )
    reduce_fusion: Switch | None = Field(default=None, description="disable; Llama with tp of 2 or more")
    user_buffer: Switch | None = Field(default=None, description="disable; FP8 Llama with reduce_fusion")
    norm_quant_fusion: Switch | None = Field(default=None, description="disable; NVFP4 Llama without reduce_fusion")
    use_fused_mlp: Switch | None = Field(default=None, description="enable, and off by itself for int4 and int8")
    pp_reduce_scatter: Switch | None = Field(default=None, description="disable; Mixtral only")
    tokens_per_block: int | None = Field(default=None, ge=1, description="32; tokens in a block of the paged cache")
