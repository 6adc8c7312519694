"""What can be said against a llama.cpp engine before a minute is spent on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipelines.engine.memory import WIDTHS, Storage, token_bytes
from pipelines.engine.pairing import Pairing
from pipelines.engine.traffic import too_long
from pipelines.errors import Problem, closest
from pipelines.quantize.gguf import METHOD
from pipelines.quantize.scheme import parse

if TYPE_CHECKING:
    from pipelines.engine.llama_cpp import LlamaCppConfig

ARCHITECTURES = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM",
)  # fmt: skip
"""What llama.cpp's converter writes and transformers reads back."""


def preflight(config: LlamaCppConfig, pairing: Pairing) -> list[Problem]:
    """Find everything that would make a build or a campaign fail."""
    return [*_variant(pairing), *_scoring(pairing), *_lengths(config, pairing), *_room(config, pairing)]


def _variant(pairing: Pairing) -> Iterator[Problem]:
    architecture, method = pairing.text("architecture"), pairing.text("quant_method") or ""
    if architecture is not None and architecture not in ARCHITECTURES:
        allowed = closest(architecture, ARCHITECTURES)
        yield Problem("checkpoint.source", architecture, "llama.cpp files of it are not checked here", allowed)
    if method not in ("", METHOD):
        message = "llama.cpp reads no such codes; its converter would dequantize and quantize them again"
        yield Problem("variant.quantizer", pairing.text("quantizer") or method, message, "baseline or gguf")


def _scoring(pairing: Pairing) -> Iterator[Problem]:
    """llama-server does not echo prompts, so there are no log-probabilities of one to be had."""
    if pairing.workload.scored:
        message = "llama.cpp's server gives no log-probabilities of prompts, by which these eval sets are scored"
        allowed = "sets that generate answers, as evalset=[ticket_json,passage_qa], or another engine"
        yield Problem("evalset", list(pairing.workload.scored), message, allowed)


def _lengths(config: LlamaCppConfig, pairing: Pairing) -> Iterator[Problem]:
    known = pairing.number("max_positions")
    if known is not None and config.max_length > known:
        yield Problem("engine.max_length", config.max_length, f"the model knows {known} positions")
    yield from too_long(pairing.workload, config.max_length, "engine.max_length")


def _room(config: LlamaCppConfig, pairing: Pairing) -> Iterator[Problem]:
    """Weights and the caches of all requests at once, against the machine's memory."""
    count, memory = pairing.number("parameters"), float(pairing.device.get("memory_gib", "inf"))
    if count is None:
        return
    named = pairing.text("scheme")
    scheme = None if named is None else parse(named)
    bits = {"f32": 32}.get(config.base_type, 16) if scheme is None or not scheme.quantized else scheme.weight_bits + 1
    needed = (count * bits / 8 + cache_bytes(config, pairing)) / 2**30
    if needed > memory:
        message = f"weights and the caches of {config.parallel} requests take about {needed:.1f} GiB"
        yield Problem("engine.parallel", config.parallel, message, f"there are {memory:g} GiB")


def cache_bytes(config: LlamaCppConfig, pairing: Pairing) -> float:
    """What the caches of keys and values take, 0 where the model's shape is unknown."""
    return (token_bytes(pairing, WIDTHS[config.cache_type]) or 0) * config.parallel * config.max_length


def storage(config: LlamaCppConfig, pairing: Pairing) -> Storage:
    """Weights as the file has them; every slot's cache is there from the start."""
    return Storage(
        "host", other=4 if config.base_type == "f32" else 2, cache=WIDTHS[config.cache_type], slots=config.parallel,
        reserved=int(cache_bytes(config, pairing)) or None,
    )  # fmt: skip
