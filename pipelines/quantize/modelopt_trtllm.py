"""The TensorRT-LLM checkpoint that ModelOpt writes beside a variant, and what is checked of it.

The exporter leaves out in silence what it does not find, and an engine without its rotary_base talks noise. So its
config.json is held against the base's, and its weights, multiplied out, against the base's weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import StageFailed
from pipelines.flow.store import Fact
from pipelines.quantize.codes import Codes, Quantized, Scaled, dequantize
from pipelines.quantize.layouts import read_float4, signed_nibbles
from pipelines.quantize.modelopt import TrtllmCheckpoint
from pipelines.quantize.shards import Shards

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

PADDED_TO = 64
"""The library pads the vocabulary of 4-bit integer checkpoints to a multiple of this."""
FARTHEST = 0.5
"""Noise is farther from a weight than the weight is long; four bits are a tenth of that from it."""
BY_OUTPUTS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
}
BY_INPUTS = {"attention.dense": "self_attn.o_proj", "mlp.proj": "mlp.down_proj"}
"""Modules of a layer, as TensorRT-LLM and the base name them: split over GPUs by their outputs, and by their inputs."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One GPU's part: tensor-parallel and pipeline-parallel place, and its layers of the base."""

    file: Path
    tp: int
    tp_size: int
    layers: range

    def rows(self, weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
        """This rank's outputs of a whole weight. Fewer heads than GPUs are repeated over them; 0: no heads."""
        if 0 < heads < self.tp_size:
            size, head = len(weight) // heads, self.tp * heads // self.tp_size
            return weight[head * size : (head + 1) * size]
        size = len(weight) // self.tp_size
        return weight[self.tp * size : (self.tp + 1) * size]

    def columns(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """This rank's inputs of a whole weight."""
        size = weight.shape[1] // self.tp_size
        return weight[:, self.tp * size : (self.tp + 1) * size]


def export(asked: TrtllmCheckpoint, model: PreTrainedModel, dtype: torch.dtype, variant: Path) -> None:
    """Write the checkpoint from a calibrated model, which is used up: layers that are fused now share their scales."""
    from modelopt.torch.export import export_tensorrt_llm_checkpoint
    from modelopt.torch.export.model_utils import get_model_type

    told = vars(model.config)
    rotary = dict(told.get("rope_parameters") or {})
    if "rope_theta" in rotary:  # the exporter looks for the names that transformers had before its version 5
        told["rope_theta"] = rotary.pop("rope_theta")
    if rotary.get("rope_type", "default") != "default":
        told["rope_scaling"] = rotary
    out = variant / asked.directory
    export_tensorrt_llm_checkpoint(model, get_model_type(model), dtype, out, asked.tp, asked.pp)


def check_written(asked: TrtllmCheckpoint, variant: Path, checkpoint: Path) -> dict[str, Fact]:
    """Hold the written checkpoint against the base and what was asked; give its facts.

    Raises:
        StageFailed: config.json says something else, a rank's file is missing or incomplete, a number is not finite, or
            a weight is far from the base's.
    """
    out = variant / asked.directory
    base = json.loads((checkpoint / "config.json").read_text())
    written = json.loads((out / "config.json").read_text())
    said = json.loads((variant / "hf_quant_config.json").read_text())["quantization"]
    wrong = [*_differing(written, base, asked), *_differing_quantization(written, said)]
    if wrong:
        raise StageFailed(f"{out}/config.json: {'; '.join(wrong)}; an engine would compute another model")
    far = 0.0
    for rank in _ranks(asked, out, int(base["num_hidden_layers"])):
        far = max(far, *_distances(rank, Shards(checkpoint), base, _bits(written)))
    files = [p for p in out.iterdir() if p.is_file()]
    return {
        "trtllm_dtype": str(written["dtype"]),
        "trtllm_size_bytes": sum(p.stat().st_size for p in files),
        "trtllm_farthest_weight": round(far, 4),
    }


def _differing(written: Mapping[str, Any], base: Mapping[str, Any], asked: TrtllmCheckpoint) -> Iterator[str]:
    """What config.json says of the model that its base does not."""
    heads = base["num_attention_heads"]
    rotary = base.get("rope_parameters") or {"rope_theta": base.get("rope_theta", 10000.0)} | (
        base.get("rope_scaling") or {}
    )
    scaled = rotary.get("rope_type", rotary.get("type", "default")) != "default"
    wanted = {
        "architecture": base["architectures"][0],
        "num_hidden_layers": base["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": base.get("num_key_value_heads") or heads,
        "hidden_size": base["hidden_size"],
        "intermediate_size": base["intermediate_size"],
        "head_size": base.get("head_dim") or base["hidden_size"] // heads,
        "max_position_embeddings": base["max_position_embeddings"],
        "norm_epsilon": base.get("rms_norm_eps"),
        "hidden_act": base.get("hidden_act"),
        "rotary_base": rotary["rope_theta"],
        "rotary_scaling": {k: v for k, v in rotary.items() if k != "rope_theta"} if scaled else None,
        "mapping": {"world_size": asked.tp * asked.pp, "tp_size": asked.tp, "pp_size": asked.pp},
    }
    for key, value in wanted.items():
        if written.get(key) != value:
            yield f"{key} {written.get(key)!r}, where the base has {value!r}"
    vocabulary = base["vocab_size"]
    if written.get("vocab_size") not in (vocabulary, -(-vocabulary // PADDED_TO) * PADDED_TO):
        yield f"vocab_size {written.get('vocab_size')!r}, where the base has {vocabulary}"


def _differing_quantization(written: Mapping[str, Any], said: Mapping[str, Any]) -> Iterator[str]:
    """What config.json says of the quantization that hf_quant_config.json of the same run does not."""
    found = written.get("quantization") or {}
    for key in ("quant_algo", "kv_cache_quant_algo", "group_size", "pre_quant_scale"):
        if found.get(key) != said.get(key):
            yield f"quantization.{key} {found.get(key)!r}, not {said.get(key)!r}"


def _bits(written: Mapping[str, Any]) -> int:
    return 4 if "W4" in written["quantization"]["quant_algo"] else 8


def _ranks(asked: TrtllmCheckpoint, out: Path, layers: int) -> Iterator[Rank]:
    each = layers // asked.pp
    for number in range(asked.tp * asked.pp):
        file, stage = out / f"rank{number}.safetensors", number // asked.tp
        if not file.is_file():
            raise StageFailed(f"{file}: was not written")
        yield Rank(file, number % asked.tp, asked.tp, range(stage * each, (stage + 1) * each))


def _distances(rank: Rank, base: Shards, config: Mapping[str, Any], bits: int) -> Iterator[float]:
    """How far each of a rank's weights is from the base's, over how long it is.

    Raises:
        StageFailed: one is not there, not finite, or too far.
    """
    import numpy as np

    held = Shards.of_file(rank.file)
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    for place, layer in enumerate(rank.layers):
        for module, wanted in _wanted(rank, base, f"model.layers.{layer}.", heads):
            name = f"transformer.layers.{place}.{module}"
            if f"{name}.weight" not in held:
                raise StageFailed(f"{rank.file}: {name}.weight is missing")
            weight = _weight(held, name, bits)
            far = (
                float(np.linalg.norm(weight - wanted) / np.linalg.norm(wanted)) if weight.shape == wanted.shape else 9.0
            )
            if not far <= FARTHEST:
                raise StageFailed(
                    f"{rank.file}: {name} of shape {weight.shape} is {far:.3g} of its length away from the base's "
                    f"weight of shape {wanted.shape}; an engine would compute noise (bound: {FARTHEST})"
                )
            yield far


def _wanted(rank: Rank, base: Shards, prefix: str, heads: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """A layer's weights as they are in the base, cut and joined as this rank has them."""
    import numpy as np

    for module, parts in BY_OUTPUTS.items():
        of = {part: heads if part.endswith((".k_proj", ".v_proj")) else 0 for part in parts}
        yield module, np.concatenate([rank.rows(base[f"{prefix}{part}.weight"], n) for part, n in of.items()])
    for module, part in BY_INPUTS.items():
        yield module, rank.columns(base[f"{prefix}{part}.weight"])


def _weight(held: Shards, name: str, bits: int) -> NDArray[np.float32]:
    """A module's weight multiplied out, whatever it is stored in."""
    import numpy as np

    stored = held[f"{name}.weight"]
    if held.dtype(f"{name}.weight") in ("BF16", "F16", "F32"):
        return np.asarray(stored, dtype=np.float32)
    scale = held.get(f"{name}.weights_scaling_factor", held.get(f"{name}.per_channel_scale"))
    if scale is None:
        raise StageFailed(f"{held.directory}: {name} has no scale")
    scales = np.asarray(scale, dtype=np.float32).reshape(len(scale) if scale.size > 1 else 1, -1)
    weight = dequantize(_layer(held, name, scales, bits))
    factor = held.get(f"{name}.prequant_scaling_factor")
    return weight if factor is None else weight * np.asarray(factor, dtype=np.float32)


def _layer(held: Shards, name: str, scales: NDArray[np.float32], bits: int) -> Quantized:
    import numpy as np

    stored, dtype = held[f"{name}.weight"], held.dtype(f"{name}.weight")
    if dtype == "U8":
        return read_float4(stored, scales * np.float32(held[f"{name}.weights_scaling_factor_2"]))
    if dtype != "I8":
        return Scaled(stored, scales)
    codes = signed_nibbles(stored.view(np.uint8)) if bits == 4 else (stored.astype(np.int16) + 128).astype(np.uint8)
    return Codes(codes, scales, None, bits, codes.shape[1] // scales.shape[1])
