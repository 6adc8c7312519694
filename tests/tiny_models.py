"""Tiny random models with checkpoints written by hand in the layouts of the libraries, so that each kind of quantized
layer is met without the library that makes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WIDE, GROUP, LINEAR = 128, 32, 14
SHAPE = {
    "hidden_size": WIDE, "intermediate_size": 2 * WIDE, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "max_position_embeddings": 128, "eos_token_id": 2,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """How a library stores a linear layer: the tensors by their last name, and what config.json declares."""

    store: Callable[[str, torch.Tensor], Tensors]
    declared: Mapping[str, Any] = field(default_factory=dict)


def write(out: Path, architecture: str = "LlamaForCausalLM", layout: Layout | None = None, **shape: Any) -> Path:
    """Write a random model; with a layout, its linear layers are stored so, and `shape` changes its configuration."""
    import transformers

    kind = architecture.removesuffix("ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(**(SHAPE | shape))
    torch.manual_seed(1)
    model = getattr(transformers, architecture)(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(out)
    if layout is not None:
        save_file(dict(_stored(model, layout)), out / "model.safetensors", metadata={"format": "pt"})
        about = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(about | {"quantization_config": dict(layout.declared)}))
    return out


def _stored(model: torch.nn.Module, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if ".layers." in name and tensor.ndim == 2:
            yield from (
                (f"{module}.{part}", t.contiguous()) for part, t in layout.store(module, tensor.float()).items()
            )
        elif name != "lm_head.weight" or not torch.equal(tensor, tensors["model.embed_tokens.weight"]):
            yield name, tensor.contiguous()


def _gptq(module: str, weight: torch.Tensor) -> Tensors:
    """GPTQ version 2 with columns in the order of another quantizer: groups lie scattered."""
    out, width = weight.shape
    generator = torch.Generator().manual_seed(len(module))
    index = (torch.randperm(width, generator=generator) % (width // GROUP)).to(torch.int32)
    scales = torch.stack([weight[:, index == g].abs().amax(1) / 7 for g in range(width // GROUP)]).half()
    codes = torch.clamp(torch.round(weight.T / scales[index.long()].float()) + 8, 0, 15).to(torch.int64)
    packed = sum(codes[i::8] << (4 * i) for i in range(8))
    zeros = torch.full((width // GROUP, out // 8), 0x88888888 - (1 << 32), dtype=torch.int64)
    words = [(t & 0xFFFFFFFF).where(t < 1 << 31, t - (1 << 32)).to(torch.int32) for t in (packed, zeros)]
    return {"qweight": words[0], "qzeros": words[1], "scales": scales, "g_idx": index}


def _awq(module: str, weight: torch.Tensor) -> Tensors:
    """ModelOpt's INT4 with a factor that each layer multiplies its inputs by."""
    out, width = weight.shape
    factor = torch.exp2(torch.randint(-1, 2, (width,), generator=torch.Generator().manual_seed(len(module))).float())
    scaled = weight / factor
    scales = scaled.reshape(out, -1, GROUP).abs().amax(2) / 7
    codes = torch.clamp(torch.round(scaled.reshape(out, -1, GROUP) / scales[..., None]), -8, 7).reshape(out, width)
    low, high = (codes[i::2].to(torch.int32) & 15 for i in (0, 1))
    return {"weight": (low | high << 4).to(torch.uint8), "weight_scale": scales, "pre_quant_scale": factor}


def _fp8(module: str, weight: torch.Tensor) -> Tensors:
    """ModelOpt's FP8 with the scale of inputs that calibration found."""
    scale = weight.abs().amax() / 448
    held = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": held, "weight_scale": scale, "input_scale": torch.tensor(0.01 + len(module) * 1e-4)}


GPTQ_SCATTERED = Layout(
    _gptq,
    {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": True,
     "checkpoint_format": "gptq_v2"},
)  # fmt: skip
AWQ = Layout(_awq, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": GROUP})
FP8 = Layout(_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"})
