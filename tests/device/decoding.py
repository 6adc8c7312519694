"""A random-weight decoder, and how fast it decodes: eager, compiled, or as a quantized checkpoint is loaded.

Weights are random, so what is decoded says nothing; time and memory are those of any weights of these shapes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.byte_model import byte_tokenizer

PROMPT = 64


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes; heads are of 64."""

    hidden: int = 2048
    layers: int = 16
    intermediate: int = 8192
    vocabulary: int = 32000

    @property
    def config(self) -> dict[str, Any]:
        """As transformers names them."""
        heads = self.hidden // 64
        return {
            "vocab_size": self.vocabulary, "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4),
            "head_dim": 64, "max_position_embeddings": 4096, "eos_token_id": 0, "bos_token_id": 0,
            "tie_word_embeddings": False,
        }  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """What decoding one sequence took: the median of several turns, and the most memory that tensors took."""

    tokens_per_s: float
    slowest_tokens_per_s: float
    peak_gpu_bytes: int | None
    weight_bytes: int


def write_model(out: Path, shape: Shape, device: str) -> Path:
    """Write a random model in bfloat16 with a tokenizer of bytes, as a base checkpoint."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape.config, dtype="bfloat16")
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<end>")
    wrapped.save_pretrained(out)
    return out


def speed(checkpoint: Path, device: str, tokens: int, turns: int, backend: str | None = None) -> Speed:
    """Decode greedily with a static cache. `backend` is torch.compile's; None runs eagerly."""
    import transformers

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, device_map=device
    ).eval()
    weights = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
    rates = decode_rates(model, device, tokens, turns, compiled(model, backend))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return Speed(statistics.median(rates), min(rates), peak, weights)


def compiled(model: Any, backend: str | None) -> Callable[..., Any]:
    """The model, compiled where a backend is named; CUDA graphs take the launches off the CPU."""
    if backend is None:
        return model  # type: ignore[no-any-return]
    mode = "reduce-overhead" if backend == "inductor" else None
    return torch.compile(model, backend=backend, mode=mode, fullgraph=True)  # type: ignore[no-any-return]


def decode_rates(model: Any, device: str, tokens: int, turns: int, forward: Callable[..., Any]) -> list[float]:
    """Tokens per second of each turn; the first turn, which compiles and warms up, is left out."""
    found = []
    for _ in range(turns + 1):
        _, seconds = decode(model, device, tokens, forward)
        found.append(tokens / seconds)
    return found[1:]


def decode(
    model: Any, device: str, tokens: int, forward: Callable[..., Any], clock: Callable[[], float] = time.perf_counter
) -> tuple[list[int], float]:
    """Continue a fixed prompt; the ids and the seconds they took after the prompt."""
    import transformers

    # The model itself is called, never its forward: what a quantized checkpoint hooks in would be passed by.
    ids = torch.arange(1, PROMPT + 1, device=device)[None]
    cache = transformers.StaticCache(config=model.config, max_cache_len=PROMPT + tokens)
    found: list[int] = []
    with torch.inference_mode():
        at = torch.arange(PROMPT, device=device)[None]
        token = model(input_ids=ids, past_key_values=cache, position_ids=at).logits[:, -1:].argmax(-1)
        wait(device)
        began = clock()
        for step in range(tokens):
            at = torch.full((1, 1), PROMPT + step, device=device)
            # A compiled step may reuse the memory of its output, so what is kept is a copy.
            token = forward(input_ids=token, past_key_values=cache, position_ids=at).logits[:, -1:].argmax(-1).clone()
            found.append(int(token))
        wait(device)
        return found, clock() - began


def wait(device: str) -> None:
    """Wait for what the device still has to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def figures(found: Speed) -> dict[str, Any]:
    """As the script reports them."""
    return asdict(found)
