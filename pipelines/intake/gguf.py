"""GGUF files: the header for planning, and the way to a Hugging Face checkpoint by transformers' own dequantization."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.config import Strict
from pipelines.errors import InputError

# What GGUF calls an architecture, and the class transformers dequantizes it into.
TRANSFORMERS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADER_VERSION = 3  # raised when more is read from a header than caches hold


class GgufHeader(Strict):
    """What a GGUF file says of itself."""

    architecture: str
    licence: str
    licence_name: str
    licence_link: str
    linear_shapes: dict[str, tuple[int, int]]
    parameters: int
    hidden_size: int
    layers: int
    vocab_size: int
    max_positions: int
    heads: int
    kv_heads: int
    quantization: str


def read_header(path: Path) -> GgufHeader:
    """Read a GGUF file's metadata and tensor table; weights are not touched.

    Raises:
        InputError: not a GGUF file, or cut short.
    """
    from gguf import GGUFReader

    with path.open("rb") as f:
        if f.read(4) != b"GGUF":
            raise InputError(f"{path}: not a readable GGUF file (it does not begin with GGUF)")
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise InputError(f"{path}: not a readable GGUF file ({error})") from None
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    arch = str(fields.get("general.architecture", "?"))
    shapes: dict[str, tuple[int, int]] = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if len(parts) == 4 and parts[2] in _LINEAR:
            shapes[f"model.layers.{parts[1]}.{_LINEAR[parts[2]]}"] = (int(tensor.shape[1]), int(tensor.shape[0]))
    types = Counter(
        t.tensor_type.name for t in reader.tensors if t.name.startswith("blk.") and len(t.shape) > 1 and t.shape[-1] > 1
    )
    return GgufHeader(
        architecture=arch,
        licence=str(fields.get("general.license", "")),
        licence_name=str(fields.get("general.license.name", "")),
        licence_link=str(fields.get("general.license.link", "")),
        linear_shapes=shapes,
        parameters=sum(int(t.n_elements) for t in reader.tensors),
        hidden_size=int(fields.get(f"{arch}.embedding_length", 0)),
        layers=int(fields.get(f"{arch}.block_count", 0)),
        vocab_size=len(fields.get("tokenizer.ggml.tokens", ())),
        max_positions=int(fields.get(f"{arch}.context_length", 0)),
        heads=_one(fields.get(f"{arch}.attention.head_count", 0)),
        kv_heads=_one(fields.get(f"{arch}.attention.head_count_kv", fields.get(f"{arch}.attention.head_count", 0))),
        quantization=types.most_common(1)[0][0] if types else "",
    )


def _one(count: int | list[int]) -> int:
    """A number of heads; where layers differ it is unknown, 0."""
    return count if isinstance(count, int) else 0


def to_checkpoint(path: Path, out: Path) -> None:
    """Dequantize a GGUF file to a bfloat16 Hugging Face directory with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"gguf_file": path.name}
    with read_once():
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **where
        ).to(torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    if hasattr(model.config, "quantization_config"):  # what is saved is no longer quantized
        del model.config.quantization_config
    eos = model.config.eos_token_id
    if isinstance(eos, int) and tokenizer.eos_token_id != eos:  # converters have been seen to mix up bos and eos
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


@contextmanager
def read_once() -> Iterator[None]:
    """Let transformers parse the file and its names once, not for config, weights and tokenizer each."""
    import gguf

    plain = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = map(functools.cache, plain)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = plain
