"""A variant's config in llm-compressor's own terms: modifiers in order, each with its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.quantize.checks import HEAD
from pipelines.quantize.llmcompressor import (
    AwqConfig,
    Fp4Config,
    Fp8Config,
    GptqConfig,
    LlmCompressorConfig,
    SmoothQuantConfig,
)
from pipelines.quantize.llmcompressor_told import Told, awq, gptq
from pipelines.quantize.scheme import Scheme, parse

if TYPE_CHECKING:
    import torch

_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def recipe(config: LlmCompressorConfig, scale_dtype: torch.dtype | None, told: Told) -> list[Any]:
    """What the library is to do, in order."""
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    options, scheme = config.options, parse(config.scheme)
    shared: dict[str, Any] = {
        "config_groups": _groups(config, scale_dtype),
        "ignore": ignored(config),
        "weight_observer": options.weight_observer,
        "kv_cache_scheme": dict(_CACHE) if scheme.kv else None,
    }
    if isinstance(config, GptqConfig):
        return [gptq(told, shared | config.options.model_dump(exclude={"weight_observer", "calibrate"}))]
    if isinstance(config, AwqConfig):
        return [awq(told, _awq(config)), QuantizationModifier(**shared)]
    if isinstance(config, SmoothQuantConfig):
        columns = config.options.gptq
        smooth = SmoothQuantModifier(**_smoothing(config))
        return [
            smooth,
            QuantizationModifier(**shared) if columns is None else gptq(told, shared | columns.model_dump()),
        ]
    if isinstance(config, Fp8Config | Fp4Config) and (not scheme.dynamic or scheme.fp4 == "NVFP4"):
        shared["input_observer"] = config.options.input_observer
    return [QuantizationModifier(**shared)]


def _awq(config: AwqConfig) -> dict[str, Any]:
    import torch
    from llmcompressor.modifiers.transform.awq import AWQMapping

    options = config.options
    chosen: dict[str, Any] = {"n_grid": options.n_grid, "duo_scaling": options.duo_scaling}
    if options.mappings is not None:
        chosen["mappings"] = [
            AWQMapping(m.smooth_layer, list(m.balance_layers), m.activation_hook_target) for m in options.mappings
        ]
    if options.offload_device != "auto":
        chosen["offload_device"] = None if options.offload_device is None else torch.device(options.offload_device)
    return chosen


def _smoothing(config: SmoothQuantConfig) -> dict[str, Any]:
    options = config.options
    chosen: dict[str, Any] = {"smoothing_strength": options.smoothing_strength, "algorithm": options.algorithm}
    if options.mappings is not None:
        chosen["mappings"] = [[list(m.balance_layers), m.smooth_layer] for m in options.mappings]
    return chosen


def _groups(config: LlmCompressorConfig, scale_dtype: torch.dtype | None) -> dict[str, dict[str, Any]]:
    """The library's config groups: the body, and the head where it has a scheme of its own."""
    groups = {"group_0": {"targets": list(config.targets), **_arguments(parse(config.scheme), scale_dtype)}}
    if config.head:
        groups["group_1"] = {"targets": [f"re:.*{HEAD}$"], **_arguments(parse(config.head), scale_dtype)}
    return groups


def ignored(config: LlmCompressorConfig) -> list[str]:
    """The layers to leave alone: a head with a scheme of its own is not among them."""
    return [entry for entry in config.ignore if config.head is None or entry != HEAD]


def _arguments(scheme: Scheme, scale_dtype: torch.dtype | None) -> dict[str, Any]:
    """A scheme in the library's terms."""
    if scheme.fp4:
        return _fp4_arguments(scheme)
    weights: dict[str, Any] = {
        "num_bits": scheme.weight_bits,
        "type": scheme.weight_type,
        "strategy": scheme.granularity,
        "symmetric": scheme.symmetric,
        "dynamic": False,
        "scale_dtype": scale_dtype,
    }
    if scheme.granularity == "group":
        weights["group_size"] = scheme.group_size
    if scheme.granularity == "block":
        weights["block_structure"] = [scheme.group_size, scheme.group_size]
    if scheme.activation_bits is None:
        return {"weights": weights}
    inputs: dict[str, Any] = {
        "num_bits": scheme.activation_bits,
        "type": scheme.activation_type,
        "symmetric": True,
        "dynamic": scheme.dynamic,
        "strategy": "token" if scheme.dynamic else "tensor",
    }
    if scheme.granularity == "block":
        inputs |= {"strategy": "group", "group_size": scheme.group_size}
    return {"weights": weights, "input_activations": inputs}


def _fp4_arguments(scheme: Scheme) -> dict[str, Any]:
    """4-bit floats; their scales are stored as the format has them, whatever the model is computed in."""
    import torch

    nvidia = scheme.fp4 == "NVFP4"
    dtype = torch.float8_e4m3fn if nvidia else torch.uint8
    both: dict[str, Any] = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if nvidia else "group",
        "group_size": scheme.group_size,
        "symmetric": True,
        "scale_dtype": dtype,
        "zp_dtype": dtype,
    }
    weights = {"weights": both | {"dynamic": False}}
    if scheme.activation_bits is None:
        return weights
    return weights | {"input_activations": both | {"dynamic": "local" if nvidia else True}}
