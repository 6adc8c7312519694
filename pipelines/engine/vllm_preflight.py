"""What can be said against a vLLM bundle before a minute is spent on it. Pure; what is unknown raises no problem."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipelines.engine import memory, vllm_formats
from pipelines.engine.pairing import Pairing
from pipelines.engine.traffic import prompt_too_long, queued, too_long
from pipelines.errors import Problem, closest
from pipelines.quantize.scheme import Misfit, Scheme, folded, matches, parse

if TYPE_CHECKING:
    from pipelines.engine.vllm import VllmConfig

GIB = memory.GIB
SHOWN = 6
HEAD = "lm_head"
BLOCK = 128
"""Tokens in a block of the cache on processors; a request takes whole ones."""


def preflight(config: VllmConfig, pairing: Pairing) -> list[Problem]:
    """Find everything that would make the bundle or the campaign fail."""
    named = pairing.text("scheme")
    scheme = None if named is None else parse(named.partition(",")[0])
    return [
        *_device(config, pairing),
        *([] if scheme is None else _format(config, pairing, scheme)),
        *_lengths(config, pairing),
        *_cache(config, pairing),
        *_memory(config, pairing),
    ]


def _device(config: VllmConfig, pairing: Pairing) -> Iterator[Problem]:
    if config.device == "cpu":
        if config.tp > 1:
            yield Problem("engine.tp", config.tp, "on processors one rank is served", "1")
        if config.kv_cache_gib is None:
            message = "on processors vLLM would keep nine tenths of the machine's memory for keys and values"
            yield Problem("engine.kv_cache_gib", None, message, "a number of GiB")
        return
    sm, count = _sm(pairing), int(pairing.device.get("gpu_count", "1"))
    if sm is None and pairing.device:
        message = "there is no GPU here; on processors: engine.device=cpu and toolchain vllm_cpu"
        yield Problem("engine.device", config.device, message)
    elif config.tp > count:
        yield Problem("engine.tp", config.tp, f"takes a GPU for each rank, and there are {count}")
    if sm is not None and config.dtype == "bfloat16" and sm < vllm_formats.BFLOAT16:
        yield Problem("engine.dtype", config.dtype, f"SM {sm} has no bfloat16", "float16")


def _sm(pairing: Pairing) -> int | None:
    """The lowest compute capability of this machine's GPUs, None where there are none."""
    told = pairing.device.get("gpu_sm", "")
    return min(map(int, told.split(","))) if told else None


def _format(config: VllmConfig, pairing: Pairing, scheme: Scheme) -> Iterator[Problem]:
    """The library reads what the variant is stored as, on this device."""
    method, sm = pairing.text("quant_method") or "", _sm(pairing)
    if method not in vllm_formats.METHODS:
        allowed = closest(method, [m for m in vllm_formats.METHODS if m])
        yield Problem("variant.quantizer", method, "vLLM reads no codes of this method here", allowed)
        return
    why = vllm_formats.refused(method, scheme, pairing.text("quant_algo"))
    if not why and config.device == "cpu":
        reordered, vectors = pairing.facts.get("desc_act") is True, pairing.device.get("vectors", "")
        why = vllm_formats.refused_on_cpu(method, scheme, reordered=reordered, vectors=vectors)
    elif not why and sm is not None:
        why = vllm_formats.refused_on_gpu(method, sm)
    if why:
        yield Problem("variant.scheme", str(scheme), why)
    elif config.device == "cpu" and scheme.quantized and scheme.weight_bits == 4:
        yield from _tiles(pairing, scheme)


def _tiles(pairing: Pairing, scheme: Scheme) -> Iterator[Problem]:
    quantized = {n: s for n, s in pairing.linear_shapes.items() if n.rpartition(".")[2] != HEAD}
    found = [
        Misfit(name, side, vllm_formats.TILE)
        for name, shape in quantized.items()
        for side in shape
        if side % vllm_formats.TILE and not matches(name, pairing.ignored)
    ]
    if found:
        lines = folded(found)
        shown = ", ".join(f"{name} ({side})" for name, side in lines[:SHOWN])
        more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        message = f"on processors sides of 4-bit layers are multiples of {vllm_formats.TILE}, but not in {shown}{more}"
        yield Problem("variant.scheme", str(scheme), message, "leave those layers out (variant.ignore)")


def _lengths(config: VllmConfig, pairing: Pairing) -> Iterator[Problem]:
    known, asked = pairing.number("max_positions"), pairing.workload
    if known is not None and config.max_model_len is not None and config.max_model_len > known:
        yield Problem("engine.max_model_len", config.max_model_len, f"the model knows {known} positions")
    longest = config.max_model_len or known
    if longest is not None:
        yield from too_long(asked, longest, "engine.max_model_len")
        yield from prompt_too_long(asked, longest - 1, "engine.max_model_len")
    yield from queued(asked, config.max_num_seqs, "engine.max_num_seqs")


def token_bytes(config: VllmConfig, pairing: Pairing) -> int:
    """What one token takes in the cache, 0 where the model's shape is unknown."""
    return memory.token_bytes(pairing, _cache_number(config, pairing)) or 0


def _cache_number(config: VllmConfig, pairing: Pairing) -> float:
    """Bytes of a number in the cache: as the setting says, else as the checkpoint does, else as activations are."""
    named = pairing.text("scheme")
    stored = None if named is None else parse(named.partition(",")[0]).kv
    told = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else (stored or config.dtype).lower()
    return memory.WIDTHS.get(told, 2)


def storage(config: VllmConfig, pairing: Pairing) -> memory.Storage:
    """How weights and cache lie in the device; a cache of a given size is there from the start."""
    return memory.Storage(
        "gpu" if config.device == "cuda" else "host", other=4 if config.dtype == "float32" else 2,
        cache=_cache_number(config, pairing), slots=config.max_num_seqs, ranks=config.tp,
        reserved=None if config.kv_cache_gib is None else int(config.kv_cache_gib * GIB / config.tp),
    )  # fmt: skip


def _cache(config: VllmConfig, pairing: Pairing) -> Iterator[Problem]:
    """Room for one request of the greatest length, without which the server does not start, and for the probe's."""
    each, asked = token_bytes(config, pairing), pairing.workload
    longest = config.max_model_len or pairing.number("max_positions")
    if not each or config.kv_cache_gib is None:
        return
    room = int(config.kv_cache_gib * GIB) // (each * BLOCK) * BLOCK
    if longest is not None and longest > room:
        message = f"holds keys and values of {room} tokens, fewer than one request may have ({longest})"
        allowed = "more, or a smaller max_model_len"
        yield Problem("engine.kv_cache_gib", config.kv_cache_gib, message, allowed)
    needed = 0 if asked.request is None else asked.in_flight * (-(-asked.request.tokens // BLOCK) * BLOCK)
    if asked.request is not None and needed > room:
        message = (
            f"holds keys and values of {room} tokens; {asked.in_flight} requests in flight of {asked.request.tokens} "
            f"({asked.request.whose}) take up to {needed}, so some would wait"
        )
        yield Problem("engine.kv_cache_gib", config.kv_cache_gib, message, f"{needed * each / GIB:.2g}")


def _memory(config: VllmConfig, pairing: Pairing) -> Iterator[Problem]:
    """Weights and cache against the device; activations are left out."""
    gpu = config.device == "cuda"
    told = pairing.device.get("gpu_memory_gib" if gpu else "memory_gib")
    weights = memory.weights_of(pairing, storage(config, pairing)) / GIB / config.tp
    if told is None or not weights:
        return
    usable = float(told) * (config.gpu_memory_utilization if gpu else 1)
    needed = weights + (config.kv_cache_gib or 0) / config.tp
    if needed > usable:
        message = f"weights of {weights:.1f} GiB and the cache take {needed:.1f}, and there are {usable:.1f}"
        yield Problem("engine.kv_cache_gib", config.kv_cache_gib, message, "a smaller cache, fewer bits, or more ranks")
