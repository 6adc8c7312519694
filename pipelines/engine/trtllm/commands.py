"""Command lines of the converter and the builder, and what each has to have written afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engine.trtllm import rules
from pipelines.engine.trtllm.compare import Asked, of_switch

if TYPE_CHECKING:
    from pipelines.engine.trtllm_engine import TrtllmEngineConfig

GPTQ_PRECISION: Mapping[str, str] = {"W4A16_GPTQ": "int4_gptq", "W8A16_GPTQ": "int8_gptq"}
TOLD_AS_IT_IS = ("max_batch_size", "max_input_len", "max_beam_width", "max_num_tokens")
OPTIONAL = ("max_seq_len", "opt_num_tokens", "kv_cache_type", "logits_dtype", "speculative_decoding_mode")
FLAGS = ("gather_context_logits", "weight_sparsity", "fast_build", "monitor_memory")


def convert_argv(config: TrtllmEngineConfig, model: Path, out: Path, algo: str, weights: Path | None) -> list[str]:
    """Arguments of convert_checkpoint.py, without the interpreter and the script.

    `weights` is the file of GPTQ codes; AutoAWQ's are found by the checkpoint's own quantization_config.
    """
    argv = ["--model_dir", str(model), "--output_dir", str(out), "--dtype", config.dtype]
    argv += ["--tp_size", str(config.tp), "--pp_size", str(config.pp), "--workers", str(config.workers)]
    if weights is not None:
        argv += ["--use_weight_only", "--weight_only_precision", GPTQ_PRECISION[algo], "--per_group"]
        argv += ["--group_size", str(_group_size(model)), "--quant_ckpt_path", str(weights)]
    return argv


def _group_size(model: Path) -> int:
    from pipelines.quantize.shards import quantization_config

    return int(quantization_config(model).get("group_size", 128))


def asked_of_checkpoint(config: TrtllmEngineConfig, about: Mapping[str, Any], quantization: Asked) -> Asked:
    """What a TensorRT-LLM checkpoint must say, given the config.json of the variant it was made from.

    `quantization` is what of the section of that name is known.
    """
    heads, hidden = int(about["num_attention_heads"]), int(about["hidden_size"])
    words, ranks = int(about["vocab_size"]), config.tp * config.pp
    rope = (about.get("rope_parameters") or {}).get("rope_theta") or about.get("rope_theta")
    asked: dict[str, tuple[object, ...]] = {
        "architecture": _architectures(about),
        "num_hidden_layers": (int(about["num_hidden_layers"]),),
        "num_attention_heads": (heads,),
        "num_key_value_heads": (int(about.get("num_key_value_heads") or heads),),
        "hidden_size": (hidden,),
        "vocab_size": (words, -(-words // config.tp) * config.tp, -(-words // 64) * 64),
        "mapping.world_size": (ranks,),
        "mapping.tp_size": (config.tp,),
        "mapping.pp_size": (config.pp,),
        **{f"quantization.{name}": accepted for name, accepted in quantization.items()},
    }
    if about.get("intermediate_size") is not None:
        asked["intermediate_size"] = (int(about["intermediate_size"]),)
    if rope is not None:  # exporters have been seen to lose it, and engines then use 10000
        asked["rotary_base"] = (float(rope),)
    return asked | ({} if config.dtype == "auto" else {"dtype": (config.dtype,)})


def _architectures(about: Mapping[str, Any]) -> tuple[object, ...]:
    """The model's own name, and that of the class the converters give to its relatives."""
    own = (about.get("architectures") or ["?"])[0]
    relatives = {"MistralForCausalLM": "LlamaForCausalLM", "MixtralForCausalLM": "LlamaForCausalLM"}
    return (own, relatives[own]) if own in relatives else (own,)


def asked_quantization(algo: str, group_size: int | None, kv_cache: str | None) -> Asked:
    """The section `quantization` of a checkpoint: what its variant says of itself."""
    if algo == rules.PLAIN:
        return {"quant_algo": (None, "NO_QUANT")}
    asked: dict[str, tuple[object, ...]] = {"quant_algo": (algo,)}
    if group_size is not None and algo in rules.PACKED_BITS:
        asked["group_size"] = (group_size,)
    if algo in GPTQ_PRECISION:
        asked["has_zero_point"] = (True,)
    return asked | ({} if kv_cache is None else {"kv_cache_quant_algo": (kv_cache,)})


def build_argv(config: TrtllmEngineConfig, checkpoint: Path, out: Path, timing_cache: Path) -> list[str]:
    """Arguments of trtllm-build: what differs from a default, and the limits in any case."""
    argv = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(out), "--workers", str(config.workers)]
    for name in TOLD_AS_IT_IS:
        argv += [f"--{name}", str(getattr(config, name))]
    for name in OPTIONAL:
        if (value := getattr(config, name)) is not None:
            argv += [f"--{name}", str(value)]
    argv += [f"--{name}" for name in FLAGS if getattr(config, name)]
    if config.max_draft_len:
        argv += ["--max_draft_len", str(config.max_draft_len)]
    argv += ["--profiling_verbosity", config.profiling_verbosity, "--output_timing_cache", str(timing_cache)]
    argv += [] if config.timing_cache is None else ["--input_timing_cache", config.timing_cache]
    for name, chosen in config.plugins.model_dump(exclude_none=True).items():
        argv += [f"--{name}", str(chosen)]
    return argv


def asked_of_engine(config: TrtllmEngineConfig, checkpoint: Mapping[str, Any]) -> Asked:
    """What an engine's config.json must say: the options that were given, and its checkpoint's own description."""
    asked: dict[str, tuple[object, ...]] = {f"build_config.{n}": (getattr(config, n),) for n in TOLD_AS_IT_IS}
    for name in ("max_seq_len", "opt_num_tokens"):
        if (value := getattr(config, name)) is not None:
            asked[f"build_config.{name}"] = (value,)
    if config.kv_cache_type is not None:
        asked["build_config.kv_cache_type"] = (config.kv_cache_type.upper(), config.kv_cache_type)
    asked["build_config.gather_context_logits"] = (config.gather_context_logits, int(config.gather_context_logits))
    asked["build_config.max_draft_len"] = (config.max_draft_len,)
    for name, chosen in config.plugins.model_dump(exclude_none=True).items():
        asked[f"build_config.plugin_config.{name}"] = (chosen,) if isinstance(chosen, int) else of_switch(chosen)
    for name in ("architecture", "num_hidden_layers", "num_attention_heads", "hidden_size"):
        asked[f"pretrained_config.{name}"] = (checkpoint.get(name),)
    for name in ("world_size", "tp_size", "pp_size"):
        asked[f"pretrained_config.mapping.{name}"] = (checkpoint.get("mapping", {}).get(name),)
    for name in ("quant_algo", "kv_cache_quant_algo", "group_size"):
        if name in checkpoint.get("quantization", {}):
            asked[f"pretrained_config.quantization.{name}"] = (checkpoint["quantization"][name],)
    return asked | {"version": (config.release,)}
