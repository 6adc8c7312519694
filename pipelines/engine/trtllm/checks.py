"""Whether GPU, backend and model go together. Pure; what is unknown raises no problem, and all there are are told.

Keys are those of the engine's configuration; `campaign` says which variant and engine they are about.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.engine.trtllm import rules
from pipelines.engine.trtllm.case import Case
from pipelines.errors import Problem, closest


def hardware(case: Case) -> Iterator[Problem]:
    """There are GPUs, enough of them and all alike, and they have kernels for the format."""
    gpu, sms = case.gpu, case.pairing.device.get("gpu_sm", "")
    if gpu is None:
        message = "TensorRT-LLM needs an NVIDIA GPU, also to build; run where one is, or say with engine.gpu what for"
        yield Problem("engine.gpu", case.pairing.device.get("gpu", "none"), message)
        return
    if case.ranks > gpu.count:
        yield Problem("engine.tp", case.tp, f"tp x pp is {case.ranks} ranks, a GPU each, and there are {gpu.count}")
    if case.ranks > 1 and not case.claimed and "," in sms:
        yield Problem("engine.tp", case.tp, f"ranks need equal GPUs, and those here differ: SM {sms}")
    if gpu.sm not in rules.EVERY:
        allowed = closest(str(gpu.sm), map(str, rules.EVERY))
        yield Problem("engine.gpu.sm", gpu.sm, "the library does not support it", allowed)
        return
    form = rules.FORMATS.get(case.algo or rules.PLAIN)
    if form is not None and gpu.sm not in form.sms:
        message = f"{case.algo} has no kernels for SM {gpu.sm} ({form.source})"
        yield Problem("variant.scheme", case.named, message, f"SM {', '.join(map(str, sorted(form.sms)))}")


def release(case: Case) -> Iterator[Problem]:
    """Unified checkpoints of ModelOpt are read from some release on."""
    if case.method == "modelopt" and rules.order(case.release) < rules.order(rules.FIRST_UNIFIED):
        message = f"ModelOpt's checkpoints are read from {rules.FIRST_UNIFIED} on"
        yield Problem("engine.release", case.release, message)


def formats(case: Case) -> Iterator[Problem]:
    """The backend loads what the variant is stored as."""
    refused = rules.NOT_LOADED.get((case.backend, case.method or ""))
    if refused is not None:
        yield Problem("variant.quantizer", case.method, refused)
    elif case.backend == "pytorch" and case.method == "compressed-tensors":
        yield from _compressed_tensors(case)
    elif case.scheme is not None:
        yield from _algorithm(case)
    if case.backend == "tensorrt":
        yield from _convertible(case)


def _algorithm(case: Case) -> Iterator[Problem]:
    form = rules.FORMATS.get(case.algo) if case.algo is not None else None
    if form is None:
        known = ", ".join(sorted(filter(None, rules.FORMATS)))
        yield Problem("variant.scheme", case.named, "the library has no such quantization", f"it has {known}")
    elif case.backend not in form.backends:
        message = f"{case.algo} is read by the {' and '.join(form.backends)} backend only ({form.source})"
        yield Problem("variant.scheme", case.named, message)


def _compressed_tensors(case: Case) -> Iterator[Problem]:
    named = case.named.removesuffix("_KVFP8")
    if named.startswith(rules.MISREAD_COMPRESSED_TENSORS):
        message = "this backend takes INT8 W8A8 of compressed-tensors for FP8: noise, and no error"
        yield Problem("variant.scheme", case.named, message)
    elif case.scheme is not None and case.scheme.quantized and named not in rules.COMPRESSED_TENSORS:
        message = "this backend does not read that scheme from compressed-tensors"
        allowed = f"it reads {', '.join(sorted(rules.COMPRESSED_TENSORS))}; or use a ModelOpt variant"
        yield Problem("variant.scheme", case.named, message, allowed)


def _convertible(case: Case) -> Iterator[Problem]:
    """What the checkpoint converters cannot turn into a TensorRT-LLM checkpoint."""
    if case.pairing.facts.get("desc_act") is True:
        message = "columns reordered at run time (desc_act) are not implemented, and the converter only warns"
        yield Problem("variant.options.desc_act", True, message, "false")
    if case.method == "gptq" and case.scheme is not None and not case.scheme.symmetric:
        message = "the converter drops the zero points of asymmetric GPTQ (it reads has_zero_point from sym)"
        yield Problem("variant.scheme", case.named, message, "a symmetric scheme")
    if case.method == "awq" and case.architecture is not None and case.architecture not in rules.AWQ_CONVERTED:
        allowed = closest(case.architecture, rules.AWQ_CONVERTED)
        yield Problem("variant.quantizer", "awq", f"AutoAWQ of {case.architecture} is not converted", allowed)
    if case.method in rules.CONVERTED:
        if case.architecture is not None and case.architecture not in rules.CONVERTERS:
            message = "no convert_checkpoint.py is known for it; a ModelOpt variant needs none"
            allowed = closest(case.architecture, rules.CONVERTERS)
            yield Problem("checkpoint.source", case.architecture, message, allowed)
    elif case.method == "modelopt":
        yield from _exported(case)


def _exported(case: Case) -> Iterator[Problem]:
    """A ModelOpt variant brings its TensorRT-LLM checkpoint along, split for as many ranks as it was told."""
    facts = case.pairing.facts
    if not facts.get("trtllm_checkpoint"):
        message = "the variant writes no TensorRT-LLM checkpoint for engines"
        yield Problem("variant.trtllm", None, message, f"{{tp: {case.tp}, pp: {case.pp}}}")
        return
    for name, asked in (("tp", case.tp), ("pp", case.pp)):
        made = facts.get(f"trtllm_{name}")
        if made is not None and made != asked:
            yield Problem(f"engine.{name}", asked, f"the variant's TensorRT-LLM checkpoint is split for {name} {made}")


def models(case: Case) -> Iterator[Problem]:
    """The backend knows the model, and its heads can be shared out."""
    known = rules.ENGINE_MODELS if case.backend == "tensorrt" else rules.TORCH_MODELS
    if case.architecture is not None and case.architecture not in known:
        message = f"the {case.backend} backend does not list this model"
        yield Problem("checkpoint.source", case.architecture, message, closest(case.architecture, known))
    heads, kv_heads, layers = (case.pairing.number(name) for name in ("heads", "kv_heads", "layers"))
    if heads is not None and heads % case.tp:
        yield Problem("engine.tp", case.tp, f"does not divide {heads} attention heads")
    shared = kv_heads is not None and case.backend == "pytorch" and case.tp % kv_heads == 0
    if kv_heads is not None and kv_heads % case.tp and not shared:
        yield Problem("engine.tp", case.tp, f"does not divide {kv_heads} key-value heads (#2310)")
    if layers is not None and case.pp > layers:
        yield Problem("engine.pp", case.pp, f"is more than the model's {layers} layers")
