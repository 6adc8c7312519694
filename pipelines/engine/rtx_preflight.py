"""What can be said against a TensorRT-RTX engine before a minute is spent on it: formats, GPUs, models, lengths.

The table of formats is what TensorRT-RTX 1.7.1 compiled, and refused to compile, for each compute capability.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipelines.engine.pairing import Pairing
from pipelines.engine.plain_nodes import ARCHITECTURES
from pipelines.errors import Problem, closest
from pipelines.quantize import scheme as schemes

if TYPE_CHECKING:
    from pipelines.engine.tensorrt_rtx import TensorrtRtxConfig

FIRST = {"int4": 80, "float8": 89, "bfloat16": 80, "float16": 75, "int8": 75}
"""The first compute capability that has a format. Attention in float32 is compiled for none."""
READ_METHODS = ("", "compressed-tensors", "gptq", "awq", "modelopt")


def preflight(config: TensorrtRtxConfig, pairing: Pairing) -> list[Problem]:
    """Find everything that would make the graph or its compilation fail."""
    named = pairing.text("scheme")
    scheme = None if named is None else schemes.parse(named)
    return [
        *_model(pairing),
        *(() if scheme is None else _form(scheme)),
        *_gpus(config, scheme),
        *_lengths(config, pairing),
        *_room(pairing),
    ]


def weight_format(scheme: schemes.Scheme) -> str | None:
    """What a scheme's weights are stored as in the graph, None where they are not quantized."""
    if not scheme.quantized:
        return None
    return f"{'int' if scheme.weight_type == 'int' else 'float'}{scheme.weight_bits}"


def _model(pairing: Pairing) -> Iterator[Problem]:
    architecture, method = pairing.text("architecture"), pairing.text("quant_method") or ""
    if architecture is not None and architecture not in ARCHITECTURES:
        allowed = closest(architecture, ARCHITECTURES)
        yield Problem("checkpoint.source", architecture, "there is no plain graph of this architecture", allowed)
    if method not in READ_METHODS:
        allowed = closest(method, [m for m in READ_METHODS if m])
        yield Problem("variant.quantizer", method, "codes of this method are not read", allowed)


def _form(scheme: schemes.Scheme) -> Iterator[Problem]:
    """Whether DequantizeLinear, as the library takes it, can say this scheme."""
    form = weight_format(scheme)
    if form is not None and form not in FIRST:
        yield Problem("variant.scheme", str(scheme), f"{form} weights are not carried", "int4, int8 and 8-bit floats")
    if not scheme.symmetric:
        message = "the library has no zero points of weights"
        yield Problem("variant.scheme", str(scheme), message, "a symmetric scheme, such as W4A16_G64")
    if scheme.granularity == "block":
        yield Problem("variant.scheme", str(scheme), "scales of blocks of rows are not carried", "channels or groups")
    if scheme.kv is not None:
        yield Problem("variant.scheme", str(scheme), "the graph keeps its cache in the type it computes in")


def _gpus(config: TensorrtRtxConfig, scheme: schemes.Scheme | None) -> Iterator[Problem]:
    wanted: dict[str, str] = {"engine.graph.dtype": config.graph.dtype}
    if scheme is not None and (form := weight_format(scheme)) in FIRST:
        wanted["variant.scheme"] = str(form)
    for key, form in wanted.items():
        without = [sm for sm in config.compute_capabilities if sm < FIRST[form]]
        if without:
            sms = ", ".join(f"SM {sm}" for sm in without)
            value = str(scheme) if key == "variant.scheme" else form
            message = f"{form} cannot be compiled for {sms} (engine.compute_capabilities)"
            yield Problem(key, value, message, f"from SM {FIRST[form]} on")


def _lengths(config: TensorrtRtxConfig, pairing: Pairing) -> Iterator[Problem]:
    known = pairing.number("max_positions")
    if known is not None and config.max_length > known:
        yield Problem("engine.max_length", config.max_length, f"the model knows {known} positions")


def _room(pairing: Pairing) -> Iterator[Problem]:
    """The graph is checked in float32; it is written once so and once to stay, and compiled into an engine."""
    count = pairing.number("parameters")
    if count is None:
        return
    memory = float(pairing.device.get("memory_gib", "inf"))
    if 8 * count / 2**30 > memory:
        message = f"checking it in float32 against the checkpoint takes about {8 * count / 2**30:.0f} GiB of memory"
        yield Problem("checkpoint.source", count, message, f"there are {memory:g} GiB")
    if pairing.free_bytes is not None and 8 * count > pairing.free_bytes:
        message = f"graph, its float32 copy and engine take up to {8 * count / 2**30:.0f} GiB of disk"
        yield Problem("paths.store", pairing.free_bytes, message)
