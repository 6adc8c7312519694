"""ModelOpt for real: its checkpoints are read as it means them, and carried into an engine and an export.

Most runs take the first layers of the small real model, so that each ends in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from pipelines.errors import InputError, StageFailed
from pipelines.quantize.codes import Codes, dequantize
from pipelines.quantize.coverage import read
from pipelines.quantize.packing import open_quantized
from pipelines.quantize.reload import load, load_dense, logits
from pipelines.quantize.rounding import Rounding, rounded
from tests.e2e.test_quantizers import LAYERS, divergence, quantize, short, shown, undone, words  # noqa: F401 - fixtures

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]  # the library's own warnings

Make = Callable[..., tuple[Path, dict[str, Any]]]
QUICK = {"alpha_step": 0.5, "calibrate": {"batch_size": 4}}


@pytest.fixture(scope="module")
def make(short: Path, shown: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:  # noqa: F811
    """Run a method on the short model, once for equal settings."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def run(quantizer: str, **settings: Any) -> tuple[Path, dict[str, Any]]:
        key = json.dumps([quantizer, settings], sort_keys=True)
        if key not in made:
            out = tmp_path_factory.mktemp(quantizer)
            made[key] = out, quantize(out, short, shown, quantizer, **settings)
        return made[key]

    return run


def awq(make: Make) -> tuple[Path, dict[str, Any]]:
    return make("modelopt_awq", scheme="W4A16_G64", trtllm={"tp": 3}, options=QUICK)


def fp8(make: Make) -> tuple[Path, dict[str, Any]]:
    return make("modelopt_fp8", scheme="W8A8_FP8_STATIC_TENSOR_KVFP8", trtllm={"tp": 1, "pp": LAYERS})


def test_awq_codes_are_the_model(make: Make, undone: NDArray[np.float32], words: NDArray[np.int64]) -> None:  # noqa: F811
    """Every layer has codes, an error and, where it could not be folded away, a factor on its input."""
    variant, facts = awq(make)
    assert (7 * LAYERS, "lm_head", "W4A16_AWQ") == (
        facts["quantized_modules"], facts["skipped_modules"], facts["quant_algo"],
    )  # fmt: skip
    assert divergence(undone, logits(load(variant), words)) < 0.3
    rows = {row.module: row for row in read(variant) if row.module != "lm_head"}
    assert {("W4A16_G64", 4, 64)} == {(row.scheme, row.bits, row.group_size) for row in rows.values()}
    assert all(row.error is not None and row.error > 0 for row in rows.values())
    factors = {name for name, layer in open_quantized(variant).items() if layer.pre_scale is not None}
    assert {name for name in rows if name.endswith(("o_proj", "down_proj"))} == factors


def test_float8_is_the_model_and_scales_the_cache(
    make: Make, undone: NDArray[np.float32], words: NDArray[np.int64]  # noqa: F811
) -> None:  # fmt: skip
    """Inputs are rounded on reload, as they will be; keys and values have a scale in every layer."""
    variant, facts = fp8(make)
    assert ("FP8", "FP8", "FP8") == (facts["format"], facts["quant_algo"], facts["kv_cache_quant_algo"])
    loaded = load(variant)
    assert "inputs rounded to float8; keys and values as computed" in loaded.implementation
    assert divergence(undone, logits(loaded, words)) < 0.1
    with safe_open(variant / "model.safetensors", framework="np") as f:
        names = [name for name in f.keys() if name.endswith(("k_scale", "v_scale"))]  # noqa: SIM118
    assert 2 * LAYERS == len(names)


@pytest.mark.parametrize(("kind", "directory", "ranks"), [("awq", "trtllm/tp3", 3), ("fp8", "trtllm/tp1_pp3", LAYERS)])
def test_an_export_for_engines_lies_beside(make: Make, short: Path, kind: str, directory: str, ranks: int) -> None:  # noqa: F811
    """It keeps the base's rotations, which transformers 5 would have lost it, and its weights are near the base's."""
    variant, facts = awq(make) if kind == "awq" else fp8(make)
    written = json.loads((variant / directory / "config.json").read_text())
    base = json.loads((short / "config.json").read_text())
    assert base["rope_parameters"]["rope_theta"] == written["rotary_base"]
    assert facts["quant_algo"] == written["quantization"]["quant_algo"]
    files = sorted(p.name for p in (variant / directory).glob("*.safetensors"))
    assert [f"rank{k}.safetensors" for k in range(ranks)] == files
    assert (directory, True) == (facts["trtllm_checkpoint"], 0 < facts["trtllm_farthest_weight"] < 0.4)
    assert facts["size_bytes"] == sum(p.stat().st_size for p in variant.iterdir() if p.is_file())


def test_files_beside_the_weights_are_the_bases(make: Make, short: Path) -> None:  # noqa: F811
    """Config but for the quantization, tokenizer, template, settings, licence; and the dtype of what is kept."""
    variant, _ = awq(make)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE"):
        assert (short / name).read_bytes() == (variant / name).read_bytes()
    config = json.loads((variant / "config.json").read_text())
    assert "modelopt" == config.pop("quantization_config")["quant_method"]
    assert json.loads((short / "config.json").read_text()) == config
    with safe_open(variant / "model.safetensors", framework="pt") as f:
        kept = {str(f.get_tensor(n).dtype) for n in f.keys() if n.endswith(("norm.weight", "embed_tokens.weight"))}  # noqa: SIM118
    assert {"torch.bfloat16"} == kept


def test_an_engine_multiplies_inputs_as_the_checkpoint_says(
    make: Make, words: NDArray[np.int64], tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """ONNX Runtime's graph has the codes, the factors before them, and the checkpoint's logits to 1e-3."""
    from pipelines.engine.ort_builder import build_graph
    from pipelines.engine.ort_check import differing_weights, engine_logits, open_engine
    from pipelines.engine.ort_graph import EngineWeights

    variant, _ = awq(make)
    quantized, loaded = open_quantized(variant), load_dense(variant, lazily=True)
    nodes = build_graph(variant, tmp_path, loaded.model, quantized, 1)
    weights = EngineWeights(tmp_path / "model.onnx")
    assert [] == list(differing_weights(weights, nodes, quantized))
    assert "/model/layers.0/mlp/down_proj/MatMul/PreScale" in weights.nodes
    row = words[0, :64].astype(np.int32)
    np.testing.assert_allclose(logits(loaded, row)[0], engine_logits(open_engine(tmp_path, 2), row), rtol=0, atol=1e-3)


def test_our_rounding_is_the_librarys() -> None:
    """The same numbers, given the scales the library exports; its FP4 by the tensor it would store."""
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from modelopt.torch.quantization.tensor_quant import fake_tensor_quant, fp8_eager

    x = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32) * 3)
    most = torch.tensor(4.0)
    torch.testing.assert_close(fp8_eager(x, most), rounded(x, Rounding("float8", 4 / 448)), rtol=1e-6, atol=0)
    wanted = fake_tensor_quant(x, most, None, 8, False, False)
    torch.testing.assert_close(wanted, rounded(x, Rounding("int8", 4 / 127)), rtol=1e-6, atol=0)
    scale = x.abs().max() / (6 * 448)
    stored, of_blocks, of_all = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=scale)
    wanted = stored.dequantize(torch.float32, scale=of_blocks, double_scale=of_all, block_sizes={-1: 16})
    torch.testing.assert_close(wanted, rounded(x, Rounding("float4", float(scale), 16)), rtol=1e-6, atol=0)


def test_our_reading_of_int4_is_the_librarys() -> None:
    """What its packing function makes of a weight reads as the numbers it was made from."""
    import torch
    from modelopt.torch.export.quant_utils import pack_int4_in_uint8

    from pipelines.quantize.layouts import signed_nibbles

    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (16, 64))
    scales = rng.uniform(0.01, 1, (16, 2)).astype(np.float32)
    weight = torch.from_numpy(codes.astype(np.float32)) * torch.from_numpy(scales).repeat_interleave(32, dim=1)
    packed = pack_int4_in_uint8(weight, torch.from_numpy(scales), 32).numpy()
    np.testing.assert_array_equal(codes + 8, signed_nibbles(packed))
    layer = Codes(signed_nibbles(packed), scales, None, 4, 32)
    np.testing.assert_allclose(weight.numpy(), dequantize(layer), rtol=1e-6)


def test_a_group_that_does_not_divide_is_told_before_calibration(short: Path, shown: Path, tmp_path: Path) -> None:  # noqa: F811
    """The library would have found out when it saves, after all of the work."""
    with pytest.raises(InputError, match=r"128 does not divide the width of .*self_attn\.q_proj \(576\).*G32, G64"):
        quantize(tmp_path, short, shown, "modelopt_awq", scheme="W4A16_G128")
    assert [] == list(tmp_path.iterdir())


def test_a_rotation_that_was_lost_fails_the_variant(
    short: Path, shown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Without the old names for it, the library leaves rotary_base out and says nothing; the check says it."""
    from modelopt.torch.export import export_tensorrt_llm_checkpoint
    from modelopt.torch.export.model_utils import get_model_type

    from pipelines.quantize import modelopt_run

    def as_the_library_comes(asked: Any, model: Any, dtype: Any, out: Path) -> None:
        export_tensorrt_llm_checkpoint(model, get_model_type(model), dtype, out / asked.directory, asked.tp, asked.pp)

    monkeypatch.setattr(modelopt_run, "export", as_the_library_comes)
    with pytest.raises(StageFailed, match=r"rotary_base None, where the base has 100000\.0"):
        quantize(tmp_path, short, shown, "modelopt_fp8", scheme="W8A8_FP8_DYNAMIC", trtllm={"tp": 1})


LONG = [
    ("modelopt_nvfp4", "W4A4_NVFP4", {}, "NVFP4", 0.2),
    ("modelopt_nvfp4", "W4A16_NVFP4", {}, "W4A16_NVFP4", 0.1),
    ("modelopt_awq", "W4A8_FP8_STATIC_G64", QUICK, "W4A8_AWQ", 0.3),
    ("modelopt_smoothquant", "W8A8_INT8_STATIC", {"alpha": 0.5}, "W8A8_SQ_PER_CHANNEL", 0.3),
    ("modelopt_fp8", "W8A8_FP8_DYNAMIC", {"algorithm": "mse"}, "FP8_PER_CHANNEL_PER_TOKEN", 0.05),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("quantizer", "scheme", "options", "name", "bound"), LONG, ids=lambda v: v if isinstance(v, str) else ""
)
def test_other_formats_are_the_model(
    make: Make, undone: NDArray[np.float32], words: NDArray[np.int64], quantizer: str, scheme: str,  # noqa: F811
    options: dict[str, Any], name: str, bound: float,
) -> None:  # fmt: skip
    """Saved, reloaded with their inputs rounded, and still the model."""
    variant, facts = make(quantizer, scheme=scheme, options=options)
    assert (name, 7 * LAYERS, f"{scheme} x {7 * LAYERS}") == (
        facts["quant_algo"], facts["quantized_modules"], facts["layer_schemes"],
    )  # fmt: skip
    assert divergence(undone, logits(load(variant), words)) < bound
