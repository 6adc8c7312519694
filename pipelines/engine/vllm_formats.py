"""Which quantized checkpoints vLLM reads on processors and on GPUs, and which of them it only emulates. Pure.

What is said of processors was found by running the library or stands in its kernels' own conditions (release 0.32);
what is said of GPUs stands there too, and has been run on none here.
"""

from __future__ import annotations

from pipelines.quantize.scheme import Scheme

METHODS = ("", "compressed-tensors", "gptq", "awq", "modelopt")
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8")
TILE = 32
"""Of 4-bit layers on processors: rows and columns are multiples of it."""
BFLOAT16, FP8, FP4 = 80, 89, 100
"""Compute capabilities from which GPUs multiply these formats themselves."""
OLDEST = {"gptq": 60}
SM = 75


def refused(method: str, scheme: Scheme, algorithm: str | None) -> str:
    """Why vLLM reads no such checkpoint anywhere, "" where it does. `algorithm` is ModelOpt's name of it."""
    if method == "modelopt" and algorithm is not None and algorithm not in MODELOPT:
        return f"vLLM reads no {algorithm} of ModelOpt, only {', '.join(MODELOPT)}"
    if scheme.quantized and scheme.weight_type == "int" and scheme.weight_bits not in (4, 8):
        return "vLLM reads integer codes of 4 and 8 bits"
    return ""


def refused_on_cpu(method: str, scheme: Scheme, *, reordered: bool, vectors: str) -> str:
    """Why vLLM has no kernel on processors for it, "" where it has. `vectors`: as `flow.device.vectors` has it."""
    if not scheme.quantized:
        return ""
    if scheme.fp4:
        return "vLLM has no kernels for 4-bit floats on processors"
    if scheme.weight_type == "float":
        return _fp8_on_cpu(method, scheme)
    if scheme.weight_bits == 8 and scheme.activation_bits is None:
        return "vLLM has no kernel on processors for 8-bit weights with 16-bit activations"
    if scheme.weight_bits == 4 and scheme.activation_bits is not None:
        return "vLLM has no kernel on processors for 4-bit weights with 8-bit activations"
    if scheme.weight_bits == 4 and vectors == "avx2":
        return "vLLM's kernel for 4-bit weights takes AVX-512, which this processor lacks: it would fail at work"
    if reordered:
        return "vLLM's kernel on processors does not reorder columns (desc_act)"
    return ""


def _fp8_on_cpu(method: str, scheme: Scheme) -> str:
    if not scheme.dynamic or method == "modelopt":
        return "vLLM has no kernel on processors that rounds activations to FP8 by a fixed scale: it would fail at work"
    if scheme.granularity == "block":
        return "vLLM multiplies FP8 in blocks on processors only with AMX, which has been run on none here"
    return ""


def refused_on_gpu(method: str, sm: int) -> str:
    """Why this GPU is too old for a method, "" where it is not."""
    oldest = OLDEST.get(method, SM) if method else 0
    return f"vLLM reads it from SM {oldest} on" if sm < oldest else ""


def emulated(scheme: Scheme, sm: int | None) -> str:
    """Why the latency of a scheme is no evidence on this device, "" where it is. `sm` is None on processors."""
    if not scheme.quantized or scheme.weight_type != "float":
        return ""
    if sm is None:
        return "vLLM multiplies FP8 on processors by way of float32, slower than what is not quantized"
    if scheme.fp4 and scheme.activation_bits is not None and sm < FP4:
        return f"SM {sm} has no 4-bit floats: vLLM keeps activations in 16 bits"
    if not scheme.fp4 and scheme.activation_bits is not None and sm < FP8:
        return f"SM {sm} has no FP8: vLLM keeps activations in 16 bits"
    return ""
