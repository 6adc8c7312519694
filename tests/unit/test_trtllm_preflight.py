"""What is said against TensorRT-LLM engines and bundles before they are built: a table of cases that really failed."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.engine.pairing import Longest, Pairing, Workload
from pipelines.engine.trtllm.case import Case, Limits, algorithm, case
from pipelines.engine.trtllm.options import Gpu, KvCache, Plugins
from pipelines.engine.trtllm_engine import TrtllmEngineConfig, preflight
from pipelines.engine.trtllm_pytorch import TorchKvCache, TrtllmPytorchConfig
from pipelines.engine.trtllm_pytorch import preflight as bundle_preflight
from pipelines.errors import Problem
from pipelines.quantize.scheme import parse

H100, A100, L40S, B200, RTX5090 = (
    Gpu(sm=sm, count=8, memory_gib=gib) for sm, gib in ((90, 80), (80, 80), (89, 48), (100, 180), (120, 32))
)


def layers(hidden: int, inter: int, kv: int, count: int = 1) -> dict[str, tuple[int, int]]:
    """The linear layers of a Llama: (out, in), kv is the width of keys and values."""
    found: dict[str, tuple[int, int]] = {}
    for k in range(count):
        at = f"model.layers.{k}"
        found |= {f"{at}.self_attn.{name}": (out, hidden) for name, out in
                  (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv), ("o_proj", hidden))}  # fmt: skip
        found |= {f"{at}.mlp.gate_proj": (inter, hidden), f"{at}.mlp.up_proj": (inter, hidden)}
        found |= {f"{at}.mlp.down_proj": (hidden, inter)}
    return found


LLAMA_8B: dict[str, Any] = {
    "architecture": "LlamaForCausalLM", "parameters": 8_030_000_000, "heads": 32, "kv_heads": 8, "layers": 32,
    "vocab_size": 128256, "max_positions": 131072, "quant_method": "", "scheme": "BF16",
}  # fmt: skip
FP8 = {"scheme": "W8A8_FP8_STATIC_TENSOR", "quant_method": "modelopt", "quant_algo": "FP8",
       "trtllm_checkpoint": "trtllm/tp1", "trtllm_tp": 1, "trtllm_pp": 1}  # fmt: skip
GPTQ = {"scheme": "W4A16_G128", "quant_method": "gptq", "desc_act": False}
HOST = {"memory_gib": "256", "gpu": "none"}


def pairing(facts: dict[str, Any], shapes: dict[str, tuple[int, int]] | None = None, **more: Any) -> Pairing:
    return Pairing(LLAMA_8B | facts, layers(4096, 14336, 1024) if shapes is None else shapes, HOST, **more)


def engine(facts: dict[str, Any], options: dict[str, Any], **more: Any) -> list[Problem]:
    config = TrtllmEngineConfig.model_validate({"gpu": H100, "max_seq_len": 8192, **options})
    return preflight(config, pairing(facts, **more))


def bundle(facts: dict[str, Any], options: dict[str, Any], **more: Any) -> list[Problem]:
    config = TrtllmPytorchConfig.model_validate({"gpu": H100, "max_seq_len": 8192, **options})
    return bundle_preflight(config, pairing(facts, **more))


def told(problems: list[Problem]) -> str:
    return "\n".join(map(str, problems))


def named(width: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return layers(**width)


@pytest.mark.parametrize("facts", [{}, FP8, GPTQ])
def test_what_works_raises_no_problem(facts: dict[str, Any]) -> None:
    """Llama 3.1 8B on an H100: the base, ModelOpt's FP8, GPTQ with groups of 128."""
    assert [] == engine(facts, {})


@pytest.mark.parametrize("facts", [{}, FP8, {"scheme": "W8A8_FP8_DYNAMIC", "quant_method": "compressed-tensors"}])
def test_what_works_as_a_bundle_raises_no_problem(facts: dict[str, Any]) -> None:
    """The same base, ModelOpt's FP8, and llm-compressor's FP8 with dynamic activations."""
    assert [] == bundle(facts, {})


@pytest.mark.parametrize(
    ("facts", "width", "options", "said"),
    [
        # Qwen-14B: 13696 / 2 = 6848 columns are 53.5 groups of 128 on each rank
        ({**GPTQ, "architecture": "Qwen2ForCausalLM"}, {"hidden": 5120, "inter": 13696, "kv": 5120}, {"tp": 2},
         "groups of 128 do not divide the width after the split over tp 2 of 1 layers: model.layers.{0}.mlp.down_proj "
         "(6848)"),
        # Qwen2-1.5B has 2 key-value heads (#2310)
        ({"architecture": "Qwen2ForCausalLM", "heads": 12, "kv_heads": 2}, {"hidden": 1536, "inter": 8960, "kv": 256},
         {"tp": 4}, "engine.tp=4: does not divide 2 key-value heads"),
        ({"heads": 14}, {"hidden": 896, "inter": 4864, "kv": 128}, {"tp": 4}, "does not divide 14 attention heads"),
        # group sizes: 64 and 128 have kernels (#988), 256 has no tactic (#1547), W4A8 takes 128 only (#1770)
        ({**GPTQ, "scheme": "W4A16_G32"}, None, {}, "allowed: G64, G128"),
        ({**GPTQ, "scheme": "W4A16_G256"}, None, {}, "allowed: G64, G128"),
        ({**FP8, "scheme": "W4A16_G64", "quant_algo": "W4A8_AWQ"}, None, {}, "allowed: G128"),
        # rows and columns of packed words in multiples of 32 bytes (#894): 4 bits of 96 outputs are 48
        ({**GPTQ, "scheme": "W4A16_G64"}, {"hidden": 128, "inter": 256, "kv": 96}, {},
         "packed rows and columns are multiples of 32 bytes (#894), but not in 2 layers: model.layers.{0}.self_attn.k"),
        ({}, {"hidden": 4096, "inter": 14336, "kv": 1024}, {"tp": 3}, "tp 3 does not divide the width of"),
        # converters: desc_act, asymmetric GPTQ, formats nobody reads (#2458)
        ({**GPTQ, "desc_act": True}, None, {}, "columns reordered at run time (desc_act) are not implemented"),
        ({**GPTQ, "scheme": "W4A16_G128_ASYM"}, None, {}, "drops the zero points of asymmetric GPTQ"),
        ({"scheme": "W4A16_G128", "quant_method": "compressed-tensors"}, None, {}, "no converter reads compressed-ten"),
        ({"scheme": "W4A16_G128", "quant_method": "awq", "architecture": "MixtralForCausalLM"}, None, {},
         "AutoAWQ of MixtralForCausalLM is not converted"),
        ({"architecture": "OPTForCausalLM"}, None, {}, "no convert_checkpoint.py is known for it"),
        ({"architecture": "Qwen3NextForCausalLM"}, None, {}, "the tensorrt backend does not list this model"),
        ({**FP8, "trtllm_checkpoint": ""}, None, {}, "writes no TensorRT-LLM checkpoint for engines ({tp: 1, pp: 1})"),
        ({**FP8, "trtllm_tp": 2}, None, {}, "the variant's TensorRT-LLM checkpoint is split for tp 2"),
        ({**FP8, "scheme": "W4A16_NVFP4", "quant_algo": "W4A16_NVFP4"}, None, {}, "the library has no such quantizat"),
        # GPUs
        (FP8, None, {"gpu": A100}, "FP8 has no kernels for SM 80"),
        (GPTQ, None, {"gpu": B200}, "W4A16_GPTQ has no kernels for SM 100"),
        (GPTQ, None, {"gpu": RTX5090}, "W4A16_GPTQ has no kernels for SM 120"),
        ({**FP8, "scheme": "W4A4_NVFP4", "quant_algo": "NVFP4"}, None, {}, "NVFP4 has no kernels for SM 90"),
        ({}, None, {"gpu": Gpu(sm=75, count=1, memory_gib=80)}, "engine.gpu.sm=75: the library does not support it"),
        ({}, None, {"tp": 4, "pp": 4}, "tp x pp is 16 ranks, a GPU each, and there are 8"),
        ({"layers": 2}, None, {"pp": 4}, "is more than the model's 2 layers"),
        ({"parameters": 70_600_000_000}, None, {}, "of weights on each of 1 ranks leave no room on a GPU of 80 GiB"),
    ],
)  # fmt: skip
def test_what_fails_to_build_is_told(
    facts: dict[str, Any], width: dict[str, Any] | None, options: dict[str, Any], said: str
) -> None:
    """Each case is one that users reported, or that the sources refuse."""
    assert said in told(engine(facts, options, shapes=None if width is None else named(width)))


@pytest.mark.parametrize(
    ("facts", "options", "said"),
    [
        # what a loader of 1.2 ignores without a word, or misreads
        ({"quant_method": "awq", "scheme": "W4A16_G128"}, {}, "1.2 ignores their codes without a word"),
        ({"quant_method": "gptq", "scheme": "W4A16_G128"}, {}, "no method for GPTQ checkpoints"),
        ({"quant_method": "compressed-tensors", "scheme": "W4A16_G128"}, {}, "does not read that scheme from"),
        ({"quant_method": "compressed-tensors", "scheme": "W8A8_FP8_STATIC_TENSOR"}, {}, "does not read that scheme"),
        ({"quant_method": "compressed-tensors", "scheme": "W8A8_INT8"}, {}, "takes INT8 W8A8 of compressed-tenso"),
        ({**FP8, "scheme": "W8A8_INT8_STATIC", "quant_algo": "W8A8_SQ_PER_CHANNEL"}, {}, "by the tensorrt backend"),
        (FP8, {"release": "1.1.0"}, "ModelOpt's checkpoints are read from 1.2.0 on"),
        (FP8, {"release": "1.3.0rc5"}, "no flag snapshot of TensorRT-LLM 1.3.0rc5 is shipped"),
        ({"architecture": "OPTForCausalLM"}, {}, "the pytorch backend does not list this model"),
        ({}, {"kv_cache": TorchKvCache(dtype="nvfp4")}, "engine.kv_cache.dtype='nvfp4': has no kernels for SM 90"),
        ({**FP8, "scheme": "W8A8_FP8_DYNAMIC", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, {"gpu": L40S},
         "has no kernels for SM 89"),
    ],
)  # fmt: skip
def test_what_a_bundle_would_not_load_is_told(facts: dict[str, Any], options: dict[str, Any], said: str) -> None:
    """Formats that the PyTorch backend refuses, ignores, or takes for others."""
    assert said in told(bundle(facts, options))


def test_key_value_heads_are_doubled_by_one_backend_only() -> None:
    """Two heads over four ranks: the PyTorch backend copies them, the engine's models do not."""
    facts = {"architecture": "Qwen2ForCausalLM", "heads": 12, "kv_heads": 2}
    shapes = layers(1536, 8960, 256)
    assert "key-value heads" not in told(bundle(facts, {"tp": 4}, shapes=shapes))
    assert "key-value heads" in told(engine(facts, {"tp": 4}, shapes=shapes))


@pytest.mark.parametrize(
    ("options", "facts", "said"),
    [
        ({"gather_context_logits": True, "speculative_decoding_mode": "lookahead_decoding", "max_draft_len": 3}, {},
         "context logits are not gathered with draft tokens"),
        ({"max_draft_len": 3}, {}, "speculative decoding takes a mode and a length"),
        ({"plugins": Plugins(multiple_profiles="enable"), "opt_num_tokens": 64}, {}, "not taken together with"),
        ({"kv_cache_type": "disabled"}, {}, "only reads prompts; it cannot be served"),
        ({"kv_cache_type": "continuous"}, {}, "kv_cache.enable_block_reuse=True: needs a paged cache"),
        ({"plugins": Plugins(use_paged_context_fmha="disable"), "enable_chunked_prefill": True}, {},
         "enable_chunked_prefill=True: needs a paged cache and plugins.use_paged_context_fmha"),
        ({"plugins": Plugins(use_fused_mlp="enable")}, GPTQ, "the builder would switch it off for W4A16_GPTQ"),
        ({"plugins": Plugins(use_fp8_context_fmha="enable")}, {}, "is off for an unquantized checkpoint"),
        ({"plugins": Plugins(use_fp8_context_fmha="enable", use_paged_context_fmha="disable")}, FP8,
         "use_fp8_context_fmha='enable': needs use_paged_context_fmha"),
        ({"plugins": Plugins(reduce_fusion="enable")}, {}, "reduce_fusion='enable': the builder would switch it off"),
        ({"plugins": Plugins(user_buffer="enable")}, {}, "is for FP8 Llama with reduce_fusion"),
        ({"plugins": Plugins(gemm_swiglu_plugin="fp8")}, {}, "is for FP8 checkpoints with use_fused_mlp"),
        ({"plugins": Plugins(gemm_swiglu_plugin="fp8"), "gpu": B200}, FP8, "is not supported on SM 100"),
        ({"plugins": Plugins(pp_reduce_scatter="enable")}, {}, "is not for LlamaForCausalLM"),
        ({"plugins": Plugins(norm_quant_fusion="enable")}, FP8, "norm_quant_fusion='enable': the builder would"),
        ({"fast_build": True}, GPTQ, "does not work with the weights of W4A16_GPTQ"),
        ({"dtype": "float16"}, FP8, "nothing is converted: the variant's own TensorRT-LLM checkpoint has a dtype"),
        ({"max_input_len": 9000}, {}, "is more than max_seq_len 8192, so the builder would cut it"),
        ({"max_seq_len": 200_000}, {}, "the model knows 131072 positions"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_told(options: dict[str, Any], facts: dict[str, Any], said: str) -> None:
    """What the builder refuses, or overrides with a warning."""
    assert said in told(engine(facts, options))


ASKED = Workload(Longest(9000, "eval set passages"), Longest(9300, "eval set passages"), 64, ("support_intent",))


@pytest.mark.parametrize(
    ("options", "said", "silent"),
    [
        # 8192 tokens a step are the default, so longer prompts are refused (#2702)
        (
            {"max_seq_len": 16384},
            "engine.max_num_tokens=8192: the longest prompt, of eval set passages, takes 9000",
            (),
        ),
        ({"max_seq_len": 16384, "enable_chunked_prefill": True}, "support_intent ask for", ("the longest prompt",)),
        (
            {"max_seq_len": 9100, "max_num_tokens": 16384},
            "engine.max_seq_len=9100: the longest request",
            ("prompt, of",),
        ),
        ({"max_seq_len": 9000, "max_num_tokens": 16384}, "takes 9000 tokens; it admits 8999", ()),
        ({"max_seq_len": 16384, "max_num_tokens": 16384, "max_batch_size": 32}, "64 requests in flight", ("longest",)),
        ({"max_seq_len": 16384, "plugins": Plugins(context_fmha="disable")}, "engine.max_input_len=1024: the long", ()),
    ],
)
def test_lengths_of_the_campaign_meet_the_limits(options: dict[str, Any], said: str, silent: tuple[str, ...]) -> None:
    """Which limit counts for a prompt depends on chunks and padding, as the runtime has it."""
    found = told(engine({}, options, workload=ASKED))
    assert said in found
    assert not any(other in found for other in silent)


def test_prompts_are_scored_whole_or_not_at_all() -> None:
    """Without context logits, with block reuse, or in chunks: each is told with the setting to change."""
    asked = {"workload": Workload(scored=("support_intent", "heldout_text"))}
    reused, alone = KvCache(), KvCache(enable_block_reuse=False)
    assert "support_intent, heldout_text ask for log-probabilities" in told(engine({}, {}, **asked))
    given = {"gather_context_logits": True, "kv_cache": reused}
    assert "context logits of reused blocks are left out without a word" in told(engine({}, given, **asked))
    given |= {"kv_cache": alone}
    assert [] == engine({}, given, **asked)
    assert "in chunks are not known to be whole" in told(engine({}, given | {"enable_chunked_prefill": True}, **asked))
    whole = {"context_logits": True, "kv_cache": TorchKvCache(enable_block_reuse=False)}
    assert [] == bundle({}, whole, **asked)
    assert "engine.context_logits=False: support_intent" in told(bundle({}, {}, **asked))


def test_all_problems_come_at_once() -> None:
    """One look tells everything: format, GPU, split, lengths, disk."""
    facts = {**GPTQ, "desc_act": True, "architecture": "Qwen2ForCausalLM"}
    shapes = layers(5120, 13696, 5120)
    options = {"gpu": B200, "tp": 2, "plugins": Plugins(use_fused_mlp="enable")}
    found = engine(facts, options, shapes=shapes, workload=ASKED, free_bytes=10)
    keys = {p.key for p in found}
    assert {
        "variant.options.desc_act", "variant.scheme", "engine.plugins.use_fused_mlp", "engine.max_seq_len",
        "engine.gather_context_logits", "paths.store",
    } <= keys  # fmt: skip


def test_without_a_gpu_one_must_be_named() -> None:
    """An engine needs a GPU also to build; a plan for another machine names it."""
    alone = TrtllmEngineConfig(max_seq_len=8192)
    assert "engine.gpu='none': TensorRT-LLM needs an NVIDIA GPU" in told(preflight(alone, pairing({})))
    here = HOST | {"gpu_sm": "90", "gpu_count": "1", "gpu_memory_gib": "80", "gpu": "NVIDIA H100"}
    assert [] == preflight(alone, Pairing(LLAMA_8B, layers(4096, 14336, 1024), here))
    unlike = here | {"gpu_sm": "80,90", "gpu_count": "2"}
    two = TrtllmEngineConfig(max_seq_len=8192, tp=2)
    found = told(preflight(two, Pairing(LLAMA_8B, layers(4096, 14336, 1024), unlike)))
    assert "ranks need equal GPUs, and those here differ: SM 80,90" in found


def test_building_on_this_machine_takes_host_memory_for_each_worker() -> None:
    """Each worker holds all weights, and TensorRT's builder 3.2 GiB more (#102, #743)."""
    here = {"memory_gib": "40", "gpu_sm": "90", "gpu_count": "4", "gpu_memory_gib": "80", "gpu": "NVIDIA H100"}
    shapes = layers(4096, 14336, 1024)
    one, four = (TrtllmEngineConfig(max_seq_len=8192, tp=4, workers=n) for n in (1, 4))
    assert [] == preflight(one, Pairing(LLAMA_8B, shapes, here))
    assert "engine.workers=4: building takes about 63.0 GiB" in told(preflight(four, Pairing(LLAMA_8B, shapes, here)))


def test_layers_that_stay_as_they_are_need_no_groups() -> None:
    """An ignored layer may have any width."""
    shapes = layers(4096, 14336, 1024) | {"model.layers.0.mlp.odd": (100, 100)}
    assert "groups of 128" in told(engine(GPTQ, {}, shapes=shapes))
    assert [] == engine(GPTQ, {}, shapes=shapes, ignored=("re:.*odd$",))


@pytest.mark.parametrize(
    ("scheme", "method", "algo"),
    [
        ("BF16", "", ""),
        ("W4A16_G128", "gptq", "W4A16_GPTQ"),
        ("W4A16_G128_ASYM", "awq", "W4A16_GPTQ"),
        ("W4A16_G128", "modelopt", "W4A16_AWQ"),
        ("W8A16", "gptq", "W8A16_GPTQ"),
        ("W8A8_FP8_STATIC_TENSOR", "modelopt", "FP8"),
        ("W8A8_FP8_DYNAMIC", "compressed-tensors", "FP8_PER_CHANNEL_PER_TOKEN"),
        ("W8A8_FP8_DYNAMIC_BLOCK128", "compressed-tensors", "FP8_BLOCK_SCALES"),
        ("W8A8_FP8_STATIC", "compressed-tensors", None),
        ("W8A8_INT8", "modelopt", "W8A8_SQ_PER_CHANNEL"),
        ("W4A4_NVFP4", "modelopt", "NVFP4"),
        ("W4A16_MXFP4", "compressed-tensors", "W4A16_MXFP4"),
        ("W3A16_G128", "gptq", None),
    ],
)
def test_schemes_have_the_library_s_names(scheme: str, method: str, algo: str | None) -> None:
    """QuantAlgo as mode.py has it."""
    assert algo == algorithm(parse(scheme), method)


def test_what_is_unknown_raises_nothing() -> None:
    """A base whose facts are not known before it is imported is not refused for that."""
    empty: Case = case("tensorrt", "1.2.1", (2, 1), H100, Limits(1, 1, None), scores_prompts=False, pairing=Pairing())
    assert (None, None) == (empty.algo, empty.architecture)
    assert [] == preflight(TrtllmEngineConfig(gpu=H100), Pairing())


@pytest.mark.parametrize("release", ["1.3.0rc15", "1.0.0", "1.2"])
def test_engines_are_of_the_last_release_with_a_builder(release: str) -> None:
    """trtllm-build was removed in July 2026; later releases have bundles."""
    with pytest.raises(ValueError, match="trtllm_pytorch"):
        TrtllmEngineConfig(release=release)
