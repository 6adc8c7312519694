"""What TensorRT-LLM can build and load, as tables, each with where it comes from.

Sources are public: documentation and sources of TensorRT-LLM around 1.2 (`docs`, a file's name), its issues (#n), and
ModelOpt's documentation. What they do not list is refused before a GPU is tried; who knows better edits a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Backend = Literal["tensorrt", "pytorch"]

# --- releases ----------------------------------------------------------------------------------------------------

LAST_WITH_BUILDER = "1.2.1"
"""The engine builder was removed in July 2026 (#15763, #15907, #15918, #16369). 1.2.1 is the last stable release with
`trtllm-build`, 1.3.0rc15 the last candidate whose metadata still asks for tensorrt; candidates are not offered here."""

FIRST_UNIFIED = "1.2.0"
"""Oldest release that reads ModelOpt's unified checkpoints, by ModelOpt's documentation."""


def order(release: str) -> tuple[int, ...]:
    """A key that sorts releases: 1.3.0rc5 comes before 1.3.0, and 1.10 after 1.9."""
    numbers, _, candidate = release.partition("rc")
    return (*map(int, numbers.split(".")), int(candidate) if candidate else 10**6)


# --- formats by GPU ----------------------------------------------------------------------------------------------

AMPERE, ADA, HOPPER = frozenset({80, 86}), frozenset({89}), frozenset({90})
BLACKWELL, BLACKWELL_CONSUMER = frozenset({100, 103}), frozenset({120, 121})
EVERY = AMPERE | ADA | HOPPER | BLACKWELL | BLACKWELL_CONSUMER
"""Volta went in 0.15; Turing is not listed. 121 counts as 120: the library's own checks name them together."""

PLAIN = ""
"""The algorithm of a checkpoint that is not quantized."""


@dataclass(frozen=True, slots=True)
class Format:
    """Where a quantization algorithm has kernels, and for which backend."""

    sms: frozenset[int]
    backends: frozenset[Backend]
    source: str


_MATRIX = "docs, features/quantization.md, hardware support matrix"
_BOTH: frozenset[Backend] = frozenset({"tensorrt", "pytorch"})
_ENGINE: frozenset[Backend] = frozenset({"tensorrt"})
_TORCH: frozenset[Backend] = frozenset({"pytorch"})

FORMATS: Mapping[str, Format] = {
    PLAIN: Format(EVERY, _BOTH, _MATRIX),
    "FP8": Format(ADA | HOPPER | BLACKWELL | BLACKWELL_CONSUMER, _BOTH, _MATRIX),
    "FP8_BLOCK_SCALES": Format(HOPPER | BLACKWELL, _TORCH, _MATRIX),
    "FP8_PER_CHANNEL_PER_TOKEN": Format(HOPPER, _BOTH, _MATRIX + ", rowwise"),
    "NVFP4": Format(BLACKWELL | BLACKWELL_CONSUMER, _BOTH, _MATRIX),
    "W4A16_MXFP4": Format(BLACKWELL | BLACKWELL_CONSUMER, _TORCH, _MATRIX),
    "W4A16_AWQ": Format(AMPERE | ADA | HOPPER, _BOTH, _MATRIX),
    "W4A16_GPTQ": Format(AMPERE | ADA | HOPPER, _ENGINE, _MATRIX + "; no linear method in the PyTorch backend"),
    "W4A8_AWQ": Format(ADA | HOPPER, _BOTH, _MATRIX),
    "W8A16": Format(AMPERE | ADA | HOPPER, _ENGINE, "convert_checkpoint.py, weight only"),
    "W8A16_GPTQ": Format(AMPERE | ADA | HOPPER, _ENGINE, "convert_checkpoint.py, int8_gptq"),
    "W8A8_SQ_PER_CHANNEL": Format(AMPERE | ADA | HOPPER, _ENGINE, "ModelOpt, 1_tensorrt_llm.rst; engines only"),
}

FP8_CACHE = EVERY  # _MATRIX lists it for Ampere too
NVFP4_CACHE = BLACKWELL | BLACKWELL_CONSUMER
FP8_CONTEXT_FMHA_SMS = frozenset({89, 90, 100, 120, 121})  # the library's own message names these
FP8_CONTEXT_FMHA_ALGOS = frozenset({"FP8", "W4A8_AWQ", "NVFP4"})  # builder.py, optimize_model_with_config

# --- checkpoints by backend --------------------------------------------------------------------------------------

NOT_LOADED: Mapping[tuple[Backend, str], str] = {
    ("tensorrt", "compressed-tensors"): "no converter reads compressed-tensors (#2458); ModelOpt or GPTQ variants do",
    ("tensorrt", "bitsandbytes"): "no converter reads bitsandbytes (#2458)",
    ("pytorch", "awq"): "its loader has no method for AutoAWQ checkpoints, and 1.2 ignores their codes without a word; "
    "use a ModelOpt INT4 AWQ variant, or trtllm_engine",
    ("pytorch", "gptq"): "its loader has no method for GPTQ checkpoints, and 1.2 ignores their codes without a word; "
    "use trtllm_engine",
}
"""quant_method that a backend does not load, and what to do instead (llm_utils.py, model_config.py)."""

COMPRESSED_TENSORS: frozenset[str] = frozenset(
    {"W8A8_FP8_DYNAMIC", "W8A8_FP8_DYNAMIC_BLOCK128", "W4A4_NVFP4", "W4A16_MXFP4"}
)
"""Schemes whose compressed-tensors form the PyTorch backend reads since #10796 (January 2026). Whether 1.2.1 has that
change is not known, so a bundle's build asks the loader in the image what it recognized."""

MISREAD_COMPRESSED_TENSORS = "W8A8_INT8"
"""8 bits per channel and token are taken for FP8 without a look at the number type: wrong answers, no error."""

CONVERTED = frozenset({"", "gptq", "awq"})
"""quant_method that convert_checkpoint.py turns into a TensorRT-LLM checkpoint; ModelOpt writes one itself."""

AWQ_CONVERTED = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})
"""Models whose AutoAWQ and AutoGPTQ checkpoints the converters read (release notes of 0.16: LLaMA and Qwen)."""

# --- kernels of grouped weights ----------------------------------------------------------------------------------

ENGINE_GROUPS = (64, 128)  # #988; 256 has no tactic (#1547)
W4A8_GROUPS = (128,)  # #1770: 64 fails
ROW_BYTES = 32
"""Rows and columns of a packed weight, after the split, are multiples of this many bytes (#894)."""
PACKED_BITS: Mapping[str, int] = {
    "W4A16_AWQ": 4, "W4A16_GPTQ": 4, "W4A8_AWQ": 4, "W8A16": 8, "W8A16_GPTQ": 8,
}  # fmt: skip
NVFP4_GROUP, FP8_BLOCK = 16, 128

COLUMN_PARALLEL = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "fc1", "w1", "w3"}
)
"""Layers whose outputs are split over tensor-parallel ranks."""
ROW_PARALLEL = frozenset({"o_proj", "out_proj", "dense", "down_proj", "fc2", "w2"})
"""Layers whose inputs are."""

# --- models ------------------------------------------------------------------------------------------------------

CONVERTERS: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen2MoeForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
}
"""examples/models/core/<folder>/convert_checkpoint.py, as far as its options are in the flag snapshot."""

ENGINE_MODELS = frozenset(
    {
        *CONVERTERS, "ExaoneForCausalLM", "FalconForCausalLM", "GPTJForCausalLM", "GPTNeoXForCausalLM",
        "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM", "InternLM2ForCausalLM",
        "NemotronForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "Starcoder2ForCausalLM",
    }
)  # fmt: skip
"""Decoders of text in MODEL_MAP (models/__init__.py); those without a converter here need a ModelOpt variant."""

TORCH_MODELS = frozenset(
    {
        "DeepseekV3ForCausalLM", "Exaone4ForCausalLM", "Gemma3ForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM",
        "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "NemotronForCausalLM",
        "NemotronNASForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    }
)  # fmt: skip
"""Decoders of text that the PyTorch backend lists (docs, models/supported-models.md)."""

REDUCE_FUSION_MODELS = frozenset({"LlamaForCausalLM", "Gemma2ForCausalLM"})  # builder.py overrides it for others
PP_REDUCE_SCATTER_MODELS = frozenset({"MixtralForCausalLM"})  # build.py asserts it

# --- options of the builder --------------------------------------------------------------------------------------

NO_PLUGINS_ON: Mapping[int, tuple[str, ...]] = {
    100: ("gemm_swiglu_plugin", "fp8_rowwise_gemm_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin")
}
"""plugin.py, PluginConfig.validate."""
FUSED_MLP_ALGOS = frozenset({PLAIN, "FP8", "MIXED_PRECISION"})  # build.py switches it off for others
UNMANAGED_ALGOS = frozenset({"W4A16_AWQ", "W4A16_GPTQ", "W4A8_AWQ", "W8A16", "W8A16_GPTQ", "W8A8_SQ_PER_CHANNEL"})
"""fast_build manages weights itself, which int8 and int4 weights cannot be."""

# --- memory ------------------------------------------------------------------------------------------------------

BUILDER_HOST_BYTES = int(3.2 * 2**30)  # what TensorRT's builder takes in host memory before any weight (its log)
GPU_SHARE = 0.9
"""Weights beyond this share of a GPU leave no room for the cache and activations."""
LOGITS_BYTES = 4  # context logits are float32: one per prompt token and word of the vocabulary
