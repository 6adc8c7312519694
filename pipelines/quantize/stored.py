"""The scheme of a quantized layer as its files have it: tensor headers, and what config.json says of activations.

Where the two disagree a reader would load noise, so that is a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pipelines.errors import StageFailed, closest
from pipelines.quantize.layouts import code_bits, shape_of
from pipelines.quantize.scheme import Scheme, matches
from pipelines.quantize.shards import FLOAT8, Shards

MODELOPT: Mapping[str, Mapping[str, Any]] = {
    "FP8": {"weights": (8, "float"), "inputs": (8, "float"), "dynamic": False},
    "FP8_PER_CHANNEL_PER_TOKEN": {"weights": (8, "float"), "inputs": (8, "float"), "dynamic": True},
    "NVFP4": {"weights": (4, "float"), "inputs": (4, "float"), "dynamic": True},
    "W4A16_NVFP4": {"weights": (4, "float")},
    "W4A16_AWQ": {"weights": (4, "int")},
    "W4A8_AWQ": {"weights": (4, "int"), "inputs": (8, "float"), "dynamic": False},
    "W8A8_SQ_PER_CHANNEL": {"weights": (8, "int"), "inputs": (8, "int"), "dynamic": False},
}
"""What ModelOpt's names of algorithms say of weights and of layers' inputs."""
CLASSES = ("Linear", "Embedding")
"""Targets that name every layer of a class; the layers counted here are all linear, but for the head's table."""


def scheme_of(shards: Shards, module: str, config: Mapping[str, Any]) -> Scheme:
    """Read a layer's scheme. `config` is the checkpoint's quantization_config.

    Raises:
        StageFailed: the tensors are packed otherwise than config.json says.
    """
    held = _weights(shards, module, config)
    if config.get("quant_method") == "compressed-tensors":
        group = group_of(config, module)
        _compare(module, held, (group.get("weights") or {}))
        held = _with_activations(held, group.get("input_activations"))
    elif config.get("quant_method") == "modelopt":
        held = _by_algorithm(shards, module, held, config)
    elif not config.get("dynamic"):
        _compare(module, held, {"num_bits": config.get("bits"), "group_size": config.get("group_size")})
    return replace(held, kv="FP8" if config.get("kv_cache_scheme") else None)


def rounds_inputs(config: Mapping[str, Any]) -> bool:
    """Whether a quantization_config asks any layer to round its inputs while running."""
    groups = (config.get("config_groups") or {}).values()
    return any((group or {}).get("input_activations") for group in groups) or "inputs" in MODELOPT.get(
        str(config.get("quant_algo")), {}
    )


def group_of(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The config group of compressed-tensors that a layer is in: one that names it, else the one of its class."""
    groups = [g for g in (config.get("config_groups") or {}).values() if isinstance(g, Mapping)]
    named = [g for g in groups if matches(module, [t for t in g.get("targets") or () if t not in CLASSES])]
    classed = [g for g in groups if any(t in CLASSES for t in g.get("targets") or ())]
    return next(iter([*named, *classed]), {})


def _weights(shards: Shards, module: str, config: Mapping[str, Any]) -> Scheme:
    out, columns = shape_of(shards, module)
    if f"{module}.qweight" in shards:
        scales = shards.shape(f"{module}.scales")
        # GPTQ and AWQ both keep a row of scales for each group
        bits = code_bits(shards.shape(f"{module}.qzeros")[1], out, f"{module}.qzeros")
        symmetric = bool(config.get("sym", True)) if "zero_point" not in config else not config["zero_point"]
        return _grouped(bits, "int", columns, scales[0], symmetric=symmetric)
    scales = shards.shape(f"{module}.weight_scale")
    symmetric = f"{module}.weight_zero_point" not in shards
    if f"{module}.weight_packed" in shards:
        if shards.dtype(f"{module}.weight_packed") == "U8":
            return _grouped(4, "float", columns, scales[1], symmetric=symmetric)
        bits = code_bits(shards.shape(f"{module}.weight_packed")[1], columns, f"{module}.weight_packed")
        return _grouped(bits, "int", columns, scales[1], symmetric=symmetric)
    if shards.dtype(f"{module}.weight") == "U8":
        of_floats = shards.dtype(f"{module}.weight_scale") in FLOAT8
        return _grouped(4, "float" if of_floats else "int", columns, scales[1], symmetric=symmetric)
    kind: Literal["int", "float"] = "float" if shards.dtype(f"{module}.weight") in FLOAT8 else "int"
    if not scales or scales == (1,):
        return Scheme(8, kind, "tensor", symmetric=symmetric)
    if len(scales) == 2 and scales[1] > 1:
        if scales[0] == out:
            return _grouped(8, kind, columns, scales[1], symmetric=symmetric)
        declared = (group_of(config, module).get("weights") or {}).get("block_structure") or (0, 0)
        return Scheme(8, kind, "block", int(declared[1]) or -(-columns // scales[1]), symmetric=symmetric)
    return Scheme(8, kind, symmetric=symmetric)


def _grouped(bits: int, kind: Literal["int", "float"], columns: int, groups: int, *, symmetric: bool) -> Scheme:
    if groups == 1:
        return Scheme(bits, kind, symmetric=symmetric)
    return Scheme(bits, kind, "group", -(-columns // groups), symmetric=symmetric)


def _with_activations(held: Scheme, inputs: Mapping[str, Any] | None) -> Scheme:
    if not inputs:
        return held
    kind: Literal["int", "float"] = "int" if inputs.get("type") == "int" else "float"
    dynamic = bool(inputs.get("dynamic"))  # "local" (NVFP4) is dynamic within a static range
    return replace(held, activation_bits=int(inputs["num_bits"]), activation_type=kind, dynamic=dynamic)


def _by_algorithm(shards: Shards, module: str, held: Scheme, config: Mapping[str, Any]) -> Scheme:
    """What ModelOpt's quant_algo says of a layer, held against its tensors."""
    name = str(config.get("quant_algo"))
    if name not in MODELOPT:
        raise StageFailed(f"{module}: quant_algo {name!r} cannot be read ({closest(name, MODELOPT)})")
    said = MODELOPT[name]
    bits, kind = said["weights"]
    _compare(module, held, {"num_bits": bits, "type": kind, "group_size": config.get("group_size")})
    if "inputs" not in said:
        return held
    if f"{module}.input_scale" not in shards and not (said["dynamic"] and bits == 8):
        raise StageFailed(f"{module}: {name} has its inputs rounded, but there is no {module}.input_scale")
    input_bits, input_kind = said["inputs"]
    return replace(held, activation_bits=input_bits, activation_type=input_kind, dynamic=said["dynamic"])


def _compare(module: str, held: Scheme, said: Mapping[str, Any]) -> None:
    """Compare bits, kind and group size with what config.json declares, as far as it does."""
    found = {"num_bits": held.weight_bits, "type": held.weight_type, "group_size": held.group_size}
    wrong = [
        f"{name} {said[name]}, where its tensors have {value}"
        for name, value in found.items()
        if said.get(name) not in (None, -1, value) and not (name == "group_size" and value is None)
    ]
    if wrong:
        raise StageFailed(f"{module}: config.json says {'; '.join(wrong)}; a reader would load noise")
