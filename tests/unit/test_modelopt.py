"""ModelOpt's options, what a plan says against them, and its TensorRT-LLM checkpoint held to the base."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save_file

from pipelines.errors import StageFailed
from pipelines.quantize import modelopt
from pipelines.quantize.modelopt import TrtllmCheckpoint
from pipelines.quantize.modelopt_trtllm import check_written
from tests.unit.test_scheme import SMOLLM2

AWQ, FP8 = modelopt.ModelOptAwqConfig, modelopt.ModelOptFp8Config
NVFP4, SMOOTH = modelopt.ModelOptNvfp4Config, modelopt.ModelOptSmoothQuantConfig
BASE: Any = SimpleNamespace(linear_shapes=SMOLLM2, model_type="llama", heads=9, kv_heads=3, layers=30)


def with_base(**changes: Any) -> Any:
    return SimpleNamespace(**(vars(BASE) | changes))


@pytest.mark.parametrize(
    ("kind", "scheme", "name"),
    [
        (AWQ, "W4A16_G64", "W4A16_AWQ"),
        (AWQ, "W4A8_FP8_STATIC_G128", "W4A8_AWQ"),
        (FP8, "W8A8_FP8_STATIC_TENSOR_KVFP8", "FP8"),
        (FP8, "W8A8_FP8_DYNAMIC", "FP8_PER_CHANNEL_PER_TOKEN"),
        (NVFP4, "W4A4_NVFP4", "NVFP4"),
        (NVFP4, "W4A16_NVFP4", "W4A16_NVFP4"),
        (SMOOTH, "W8A8_INT8_STATIC", "W8A8_SQ_PER_CHANNEL"),
    ],
)
def test_each_scheme_has_the_name_that_tensorrt_llm_gives_it(kind: Any, scheme: str, name: str) -> None:
    """Targets are told the algorithm, and the cache's format, before the variant exists."""
    found = modelopt.promises(kind(scheme=scheme))
    assert ("modelopt", name) == (found["quant_method"], found["quant_algo"])
    assert ("FP8" if scheme.endswith("KVFP8") else "") == found["kv_cache_quant_algo"]
    assert "trtllm_checkpoint" not in found


@pytest.mark.parametrize(("split", "directory"), [({"tp": 2}, "trtllm/tp2"), ({"tp": 3, "pp": 2}, "trtllm/tp3_pp2")])
def test_an_export_is_promised_with_its_split(split: dict[str, int], directory: str) -> None:
    """The builder of engines finds it by these facts."""
    found = modelopt.promises(AWQ(scheme="W4A16_G64", trtllm=split))
    assert directory == found["trtllm_checkpoint"]
    assert (split["tp"], split.get("pp", 1)) == (found["trtllm_tp"], found["trtllm_pp"])


def test_heads_stay_and_half_a_hidden_size_is_not_written() -> None:
    """What the library or its runtimes cannot do is no option."""
    with pytest.raises(ValidationError, match="leaves lm_head alone"):
        FP8(scheme="W8A8_FP8_DYNAMIC", ignore=())
    with pytest.raises(ValidationError, match="half the hidden size"):
        NVFP4(scheme="W4A16_NVFP4", trtllm={"tp": 1})
    assert NVFP4(scheme="W4A4_NVFP4", trtllm={"tp": 1}).trtllm == TrtllmCheckpoint()


def test_a_base_that_fits_has_no_problems() -> None:
    """The demo's base splits over three GPUs: 9 heads, 3 of them for keys, groups of 64 in 576 and 1536 inputs."""
    for tp in (1, 3):
        assert [] == modelopt.preflight(AWQ(scheme="W4A16_G64", trtllm={"tp": tp, "pp": 2}), BASE)


def test_a_split_that_does_not_divide_is_told_with_all_reasons() -> None:
    """Heads, and every layer whose groups would be cut, with the layers folded and the splits that would work."""
    two, nine = (modelopt.preflight(AWQ(scheme="W4A16_G64", trtllm={"tp": tp}), BASE) for tp in (2, 9))
    assert ["trtllm.tp"] == [p.key for p in two]
    assert "9 attention heads do not divide over 2 GPUs; 3 heads of keys and values neither" in two[0].message
    assert "model.layers.{0-29}.self_attn.q_proj (576)" in two[0].message
    assert "would fit: 1, 3" == two[0].allowed == nine[0].allowed
    assert "whole groups of 64 on 9 GPUs: model.layers.{0-29}.mlp.down_proj (1536)" in nine[0].message
    assert "heads" not in nine[0].message  # 3 heads of keys and values are repeated three times


def test_an_uneven_pipeline_and_an_unknown_model_are_told() -> None:
    """30 layers are not dealt out to 4 GPUs, and the exporter has no gemma2; without an export neither matters."""
    foreign = with_base(model_type="gemma2")
    found = modelopt.preflight(FP8(scheme="W8A8_FP8_DYNAMIC", trtllm={"pp": 4}), foreign)
    assert ["trtllm", "trtllm.pp"] == [p.key for p in found]
    assert "no model of type 'gemma2'" in found[0].message
    assert [] == modelopt.preflight(FP8(scheme="W8A8_FP8_DYNAMIC"), foreign)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (r"re:.*\.k_proj", "leaves model.layers.0.self_attn.k_proj, model.layers.1.self_attn.k_proj"),
        ("model.layers.3.mlp.up_proj", "leaves model.layers.3.mlp.up_proj alone"),
    ],
)
def test_layers_that_read_one_input_go_together(entry: str, told: str) -> None:
    """The library saves q, k and v with one scale for their input, so it cannot leave one of them alone."""
    found = modelopt.preflight(AWQ(scheme="W4A16_G64", ignore=("lm_head", entry)), BASE)
    assert ["ignore"] == [p.key for p in found]
    assert told in found[0].message
    assert [] == modelopt.preflight(FP8(scheme="W8A8_FP8_STATIC_TENSOR", ignore=("lm_head", entry)), BASE)
    assert [] == modelopt.preflight(AWQ(scheme="W4A16_G64", ignore=("lm_head", r"re:.*\.[qkv]_proj")), BASE)


def test_outputs_that_do_not_pair_are_told() -> None:
    """Two outputs share a byte."""
    odd = with_base(linear_shapes={"model.layers.0.mlp.up_proj": (33, 64)})
    found = modelopt.preflight(AWQ(scheme="W4A16_G64"), odd)
    assert "odd number of them: model.layers.{0}.mlp.up_proj (33)" in found[0].message


HIDDEN, WIDE, HEAD, HEADS, KV, LAYERS = 8, 16, 2, 4, 2, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "hidden_size": HIDDEN, "intermediate_size": WIDE, "head_dim": HEAD,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "vocab_size": 100,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}  # fmt: skip
ALGORITHM = {"quant_algo": "W8A8_SQ_PER_CHANNEL", "kv_cache_quant_algo": None}
WRITTEN = {
    "architecture": "LlamaForCausalLM", "dtype": "bfloat16", "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "hidden_size": HIDDEN, "intermediate_size": WIDE,
    "head_size": HEAD, "max_position_embeddings": 64, "norm_epsilon": 1e-5, "hidden_act": "silu", "vocab_size": 100,
    "rotary_base": 100000.0, "quantization": ALGORITHM,
}  # fmt: skip
Weights = dict[str, np.ndarray]


def base_weights() -> Weights:
    rng = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV * HEAD, HIDDEN),
        "self_attn.v_proj": (KV * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE),
    }  # fmt: skip
    return {
        f"model.layers.{k}.{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for k in range(LAYERS)
        for name, shape in shapes.items()
    }


def rank(weights: Weights, tp: int, of: int, layers: list[int]) -> Weights:
    """One GPU's file, split here by hand: heads and intermediate width dealt out in order, in signed bytes."""
    found: Weights = {}
    for place, k in enumerate(layers):
        base = {name.split(f"layers.{k}.")[1]: w for name, w in weights.items() if f"layers.{k}." in name}
        q = np.split(base["self_attn.q_proj.weight"], of)[tp]
        keys = [np.split(base[f"self_attn.{n}_proj.weight"], KV) for n in "kv"]
        owned = range(tp * KV // of, max((tp + 1) * KV // of, tp * KV // of + 1))
        kv = [np.concatenate([heads[h] for h in owned]) for heads in keys]
        modules = {
            "attention.qkv": np.concatenate([q, *kv]),
            "attention.dense": np.split(base["self_attn.o_proj.weight"], of, axis=1)[tp],
            "mlp.fc": np.split(base["mlp.gate_proj.weight"], of)[tp],
            "mlp.gate": np.split(base["mlp.up_proj.weight"], of)[tp],
            "mlp.proj": np.split(base["mlp.down_proj.weight"], of, axis=1)[tp],
        }
        for module, weight in modules.items():
            factor = np.linspace(0.5, 2, weight.shape[1]).astype(np.float32)
            smoothed = weight / factor
            scale = np.abs(smoothed).max(axis=1) / 127
            prefix = f"transformer.layers.{place}.{module}"
            found[f"{prefix}.weight"] = np.round(smoothed / scale[:, None]).astype(np.int8)
            found[f"{prefix}.weights_scaling_factor"] = scale.astype(np.float32)
            found[f"{prefix}.prequant_scaling_factor"] = factor
    return found


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[TrtllmCheckpoint, Path, Path]]:
    """Write a base, and a variant with an export of it."""

    def make(tp: int = 1, pp: int = 1, config: dict[str, Any] | None = None, **written: Any) -> Any:
        asked, weights = TrtllmCheckpoint(tp=tp, pp=pp), base_weights()
        base, variant = tmp_path / "base", tmp_path / "variant"
        out = variant / asked.directory
        out.mkdir(parents=True)
        base.mkdir()
        save_file(weights, base / "model.safetensors")
        (base / "config.json").write_text(json.dumps(CONFIG | (config or {})))
        (variant / "hf_quant_config.json").write_text(json.dumps({"quantization": ALGORITHM}))
        mapping = {"world_size": tp * pp, "tp_size": tp, "pp_size": pp}
        (out / "config.json").write_text(json.dumps(WRITTEN | {"mapping": mapping} | written))
        for stage in range(pp):
            layers = list(range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp))
            for k in range(tp):
                save_file(rank(weights, k, tp, layers), out / f"rank{stage * tp + k}.safetensors")
        return asked, variant, base

    return make


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_a_true_export_passes_however_it_is_split(made: Any, tp: int, pp: int) -> None:
    """Bytes are a hundredth from the weights they stand for, on every GPU; four GPUs share two heads of keys."""
    facts = check_written(*made(tp, pp))
    assert 0 < facts["trtllm_farthest_weight"] < 0.02
    assert "bfloat16" == facts["trtllm_dtype"]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({"rotary_base": None}, "rotary_base None, where the base has 100000.0"),
        ({"rotary_base": 10000.0}, "rotary_base 10000.0, where the base has 100000.0"),
        ({"hidden_size": 4}, "hidden_size 4, where the base has 8"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4, where the base has 2"),
        ({"vocab_size": 96}, "vocab_size 96, where the base has 100"),
        ({"quantization": {**ALGORITHM, "quant_algo": "FP8"}}, "quantization.quant_algo 'FP8', not 'W8A8_SQ_PER"),
        ({"mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1}}, "mapping"),
    ],
)
def test_a_config_that_says_something_else_fails(made: Any, written: dict[str, Any], told: str) -> None:
    """The exporter leaves out in silence what it does not find; an engine would compute another model."""
    with pytest.raises(StageFailed, match="an engine would compute another model") as failure:
        check_written(*made(**written))
    assert told in str(failure.value)


def test_a_padded_vocabulary_and_scaled_rotations_are_as_they_should_be(made: Any) -> None:
    """The library pads to a multiple of 64; a base with scaled rotations needs the scaling written, word for word."""
    rope = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
    scaling = {"rope_type": "llama3", "factor": 8.0}
    check_written(*made(config={"rope_parameters": rope}, rotary_base=5e5, rotary_scaling=scaling, vocab_size=128))


def test_a_lost_scaling_of_rotations_fails(made: Any) -> None:
    """Without it the engine goes astray only in long texts."""
    rope = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
    with pytest.raises(StageFailed, match="rotary_scaling None, where the base has"):
        check_written(*made(config={"rope_parameters": rope}, rotary_base=5e5))


@pytest.mark.parametrize("damage", ["swapped", "nan", "lost", "file"])
def test_weights_that_are_not_the_bases_fail(made: Any, damage: str) -> None:
    """Outputs in another order, a scale that is no number, a module or a file that is not there."""
    asked, variant, base = made(2)
    file = variant / asked.directory / "rank1.safetensors"
    tensors = rank(base_weights(), 1, 2, [0, 1])
    name = "transformer.layers.1.mlp.fc"
    if damage == "swapped":
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"][::-1].copy()
    elif damage == "nan":
        tensors[f"{name}.weights_scaling_factor"][0] = np.nan
    elif damage == "lost":
        del tensors[f"{name}.weight"]
    save_file(tensors, file)
    if damage == "file":
        file.unlink()
    with pytest.raises(StageFailed, match=r"compute noise|is missing|was not written"):
        check_written(asked, variant, base)
