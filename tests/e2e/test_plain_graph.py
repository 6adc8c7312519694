"""Plain ONNX graphs of tiny models: what transformers computes, in standard operators, with and without cache.

Checkpoints are written here by hand, in the layouts of the libraries, so that each way of carrying a layer is met.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipelines.engine.plain_graph import MODEL, PlainGraphConfig, run
from pipelines.engine.plain_nodes import ARCHITECTURES
from pipelines.errors import StageFailed
from pipelines.flow.store import Fact

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]  # the libraries' own

WIDE, GROUP = 128, 32
SHAPE = {
    "hidden_size": WIDE, "intermediate_size": 2 * WIDE, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "max_position_embeddings": 128, "eos_token_id": 2,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """Write a random model; `change` turns each linear weight of a layer into the tensors that are stored for it."""

    def make(
        architecture: str = "LlamaForCausalLM",
        change: Callable[[str, torch.Tensor], Tensors] | None = None,
        declared: Mapping[str, Any] | None = None,
        **shape: Any,
    ) -> Path:
        import transformers

        kind = architecture.removesuffix("ForCausalLM")
        config = getattr(transformers, f"{kind}Config")(**(SHAPE | shape))
        torch.manual_seed(1)
        model = getattr(transformers, architecture)(config).to(torch.bfloat16)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
        out = tmp_path / f"{architecture}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(out)
        if change is not None:
            save_file(dict(_changed(model, change)), out / "model.safetensors", metadata={"format": "pt"})
            about = json.loads((out / "config.json").read_text())
            (out / "config.json").write_text(json.dumps(about | {"quantization_config": dict(declared or {})}))
        return out

    return make


def _changed(
    model: torch.nn.Module, change: Callable[[str, torch.Tensor], Tensors]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.state_dict().items():
        linear = ".layers." in name and tensor.ndim == 2
        if linear:
            module = name.removesuffix(".weight")
            yield from (
                (f"{module}.{part}", value.contiguous()) for part, value in change(module, tensor.float()).items()
            )
        elif name != "lm_head.weight" or not torch.equal(tensor, model.state_dict()["model.embed_tokens.weight"]):
            yield name, tensor.contiguous()


@pytest.fixture
def graph(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, Fact]]]:
    """Make the graph of a variant, held to it on 40 random tokens."""
    reference = tmp_path / "reference"
    reference.mkdir()
    ids = np.random.default_rng(3).integers(0, 96, (1, 40), dtype=np.int32)
    np.savez(reference / "tokens.npz", ids=ids, logprobs=np.zeros((1, 39), np.float32))

    def make(variant: Path, **config: Any) -> tuple[Path, dict[str, Fact]]:
        out = tmp_path / f"graph-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        return out, run(PlainGraphConfig.model_validate(config), out, variant=variant, reference=reference)

    return make


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_computes_what_transformers_does(
    architecture: str, tiny: Callable[..., Path], graph: Callable[..., tuple[Path, dict[str, Fact]]]
) -> None:
    """Logits within 1e-4 in one call and in three, from operators of ONNX alone."""
    import onnx

    out, facts = graph(tiny(architecture), dtype="float16")
    assert float(facts["max_abs_dlogit"] or 1) < 1e-4
    nodes = onnx.load(str(out / MODEL), load_external_data=False).graph.node
    assert {""} == {node.domain for node in nodes}
    assert {1} == {len(node.output) for node in nodes if node.op_type == "Attention"}
    assert 2 == sum(node.op_type == "Attention" for node in nodes)


def test_a_table_that_is_input_and_head_is_stored_once(
    tiny: Callable[..., Path], graph: Callable[..., tuple[Path, dict[str, Fact]]]
) -> None:
    """A tied head is the same constant, turned when it is used."""
    _, facts = graph(tiny(tie_word_embeddings=True, vocab_size=4096))
    _, apart = graph(tiny(tie_word_embeddings=False, vocab_size=4096))
    assert float(facts["max_abs_dlogit"] or 1) < 1e-4
    saved = int(apart["size_bytes"] or 0) - int(facts["size_bytes"] or 0)
    assert saved == pytest.approx(4096 * WIDE * 2, rel=0.02)


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


def test_columns_out_of_order_are_gathered(
    tiny: Callable[..., Path], graph: Callable[..., tuple[Path, dict[str, Fact]]]
) -> None:
    """GPTQ with activation order: float16 scales in a bfloat16 graph are kept as they are, and cast afterwards."""
    declared = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": True,
                "checkpoint_format": "gptq_v2"}  # fmt: skip
    out, facts = graph(tiny(change=_gptq, declared=declared), dtype="bfloat16")
    assert (14, "int4 x bfloat16", True) == (facts["quantized_modules"], facts["precision"], facts["weights_equal"])
    assert float(facts["max_abs_dlogit"] or 1) < 1e-4
    assert {"INT4": 14, "FLOAT16": 14} == constants_of(out, "codes", "scales")


def constants_of(out: Path, *parts: str) -> dict[str, int]:
    """Count the constants with these last names by their type."""
    import onnx_ir as ir

    held = ir.load(str(out / MODEL)).graph.initializers
    kinds = [str(v.dtype) for name, v in held.items() if name.rpartition("/")[2] in parts]
    return {kind: kinds.count(kind) for kind in kinds}


def _awq(module: str, weight: torch.Tensor) -> Tensors:
    """ModelOpt's INT4 with a factor that each layer multiplies its inputs by."""
    out, width = weight.shape
    factor = torch.exp2(torch.randint(-1, 2, (width,), generator=torch.Generator().manual_seed(len(module))).float())
    scaled = weight / factor
    scales = scaled.reshape(out, -1, GROUP).abs().amax(2) / 7
    codes = torch.clamp(torch.round(scaled.reshape(out, -1, GROUP) / scales[..., None]), -8, 7).reshape(out, width)
    low, high = (codes[i::2].to(torch.int32) & 15 for i in (0, 1))
    return {"weight": (low | high << 4).to(torch.uint8), "weight_scale": scales, "pre_quant_scale": factor}


def test_a_factor_of_the_inputs_is_multiplied_first(
    tiny: Callable[..., Path], graph: Callable[..., tuple[Path, dict[str, Fact]]]
) -> None:
    """AWQ as ModelOpt stores it: codes of the scaled weight, and the factor in front of the product."""
    declared = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": GROUP}
    _, facts = graph(tiny(change=_awq, declared=declared))
    assert (14, True) == (facts["quantized_modules"], facts["weights_equal"])
    assert float(facts["max_abs_dlogit"] or 1) < 1e-4


def _fp8(module: str, weight: torch.Tensor) -> Tensors:
    """ModelOpt's FP8 with the scale of inputs that calibration found."""
    scale = weight.abs().amax() / 448
    held = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": held, "weight_scale": scale, "input_scale": torch.tensor(0.01 + len(module) * 1e-4)}


def test_inputs_are_rounded_where_the_checkpoint_says_so(
    tiny: Callable[..., Path], graph: Callable[..., tuple[Path, dict[str, Fact]]]
) -> None:
    """FP8 with fixed scales: QuantizeLinear before each product; it predicts what the checkpoint rounded does."""
    declared = {"quant_method": "modelopt", "quant_algo": "FP8"}
    out, facts = graph(tiny(change=_fp8, declared=declared))
    assert (14, "float8 x float8", "") == (facts["rounded_modules"], facts["precision"], facts["native_note"])
    assert float(facts["kl_mean"] or 1) < 1e-3
    assert {"FLOAT8E4M3FN": 28} == constants_of(out, "codes", "input_zero")


def test_a_changed_code_fails_the_graph(
    tiny: Callable[..., Path], graph: Callable[..., tuple[Path, dict[str, Fact]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is read back and compared with the variant, bit by bit."""
    from pipelines.engine import plain_codes

    real = plain_codes._integers

    def wrong(layer: Any) -> Any:
        held = real(layer)
        held.codes[0, 0] = 1 if held.codes[0, 0] != 1 else 2
        return held

    monkeypatch.setattr(plain_codes, "_integers", wrong)
    declared = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": GROUP}
    with pytest.raises(StageFailed, match="14 tensors differ from the variant's"):
        graph(tiny(change=_awq, declared=declared))
