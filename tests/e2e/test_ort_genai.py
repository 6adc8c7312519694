"""Engines of the real small model: the graph, the weights in it, and the bounds a build must stay in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.engine.ort_check import differing_weights, engine_logits, open_engine
from pipelines.engine.ort_genai import OrtGenaiConfig, build
from pipelines.engine.ort_graph import EngineWeights
from pipelines.errors import StageFailed
from pipelines.flow.store import Fact, Manifest
from pipelines.quantize.codes import Codes, dequantize
from pipelines.quantize.packing import open_quantized
from pipelines.quantize.reload import load, load_dense, logits, next_token_logprobs, perplexity

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("default"),  # the libraries' own
]

Variant = Callable[..., Path]


def _weights(bits: int = 4, symmetric: bool = True, group: int | None = 64) -> dict[str, object]:
    return {"num_bits": bits, "symmetric": symmetric, "group_size": group, "strategy": "group" if group else "channel"}


@pytest.fixture(scope="session")
def rtn(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Variant:
    """Make a round-to-nearest variant of the small model with llm-compressor."""

    def make(
        weights: dict[str, object] | None = None, scheme: str = "", ignore: tuple[str, ...] = ("lm_head",)
    ) -> Path:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(base_checkpoint, dtype="bfloat16")
        _round(model, weights, scheme, ignore)
        out = tmp_path_factory.mktemp("variant")
        model.save_pretrained(out, save_compressed=True)
        AutoTokenizer.from_pretrained(base_checkpoint).save_pretrained(out)
        return out

    return make


def _round(
    model: object, weights: dict[str, object] | None, scheme: str = "", ignore: tuple[str, ...] = ("lm_head",)
) -> None:
    """Round a model's linear layers to nearest with llm-compressor, no data needed."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    if weights is None:
        modifier = QuantizationModifier(targets=["Linear"], scheme=scheme, ignore=list(ignore))
    else:
        group = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        modifier = QuantizationModifier(config_groups={"group_0": group}, ignore=list(ignore))
    oneshot(model=model, recipe=modifier)


@pytest.fixture(scope="session")
def w4(rtn: Variant) -> Path:
    """The small model in W4A16_G64, rounded to nearest."""
    return rtn(_weights())


@pytest.fixture(scope="session")
def ids(base_checkpoint: Path) -> NDArray[np.int32]:
    """Two windows of 64 tokens of this project's own text."""
    from transformers import AutoTokenizer

    text = (Path(__file__).parents[2] / "docs" / "decisions" / "0003-carry-codes-into-the-graph.md").read_text()
    return np.array(AutoTokenizer.from_pretrained(base_checkpoint)(text).input_ids[:128], np.int32).reshape(2, 64)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, ids: NDArray[np.int32]) -> Callable[[Path, Path], Path]:
    """Make a reference artifact of a variant on those windows."""

    def make(variant: Path, base: Path) -> Path:
        return reference_of(tmp_path_factory.mktemp("reference"), variant, base, ids)

    return make


def reference_of(out: Path, variant: Path, base: Path, ids: NDArray[np.int32]) -> Path:
    """Write a reference artifact of a variant on some windows."""
    logprobs = np.stack([next_token_logprobs(s, row) for s, row in zip(logits(load(variant), ids), ids, strict=True)])
    of_base = np.stack([next_token_logprobs(s, row) for s, row in zip(logits(load(base), ids), ids, strict=True)])
    np.savez(out / "tokens.npz", ids=ids, logprobs=logprobs)
    found: dict[str, Fact] = {"perplexity": perplexity(logprobs), "base_perplexity": perplexity(of_base)}
    (out / "manifest.json").write_text(_manifest(found).model_dump_json())
    return out


def _manifest(found: dict[str, Fact]) -> Manifest:
    return Manifest(
        kind="reference", stage="reference", version=1, key="0" * 64, config={}, inputs={}, toolchain={}, device=None,
        facts=found, files={}, started="", seconds=0.0, peak_rss=0,
    )  # fmt: skip


def test_the_base_in_an_engine_computes_what_transformers_does(
    base_checkpoint: Path, reference: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """An unquantized engine: float32 throughout, logits within 1e-3, its table tied and on file once."""
    facts = build(
        OrtGenaiConfig(), tmp_path, variant=base_checkpoint, reference=reference(base_checkpoint, base_checkpoint)
    )
    assert (True, True, 0) == (facts["native"], facts["weights_equal"], facts["carried_modules"])
    config = json.loads((base_checkpoint / "config.json").read_text())
    parameters = 4 * sum(np.prod(s) for s in _shapes(base_checkpoint))
    assert facts["bytes_per_token"] == pytest.approx(parameters, rel=0.01)
    engine = json.loads((tmp_path / "engine.json").read_text())
    assert (config["vocab_size"], "ort_genai", [2]) == (engine["vocab_size"], engine["target"], engine["eos_token_ids"])
    assert not (tmp_path / ".build").exists()


def _shapes(checkpoint: Path) -> list[tuple[int, ...]]:
    from pipelines.quantize.shards import Shards

    shards = Shards(checkpoint)
    return [shards.shape(name) for name in shards]


def test_a_variants_codes_are_its_engines_codes(
    w4: Path, base_checkpoint: Path, reference: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """Each code, scale and zero point is in the engine's file; logits are the checkpoint's to 1e-3."""
    facts = build(OrtGenaiConfig(), tmp_path, variant=w4, reference=reference(w4, base_checkpoint))
    assert (210, True, "int4 x float32") == (facts["carried_modules"], facts["native"], facts["precision"])
    assert float(facts["max_abs_dlogit"] or 1) < 1e-3
    assert facts["top1"] == 1.0
    layer = open_quantized(w4)["model.layers.3.mlp.down_proj"]
    assert isinstance(layer, Codes)
    stored = EngineWeights(tmp_path / "model.onnx")
    node = stored.nodes["/model/layers.3/mlp/down_proj/MatMulNBits"]
    packed = stored.tensor(node.input[1]).reshape(layer.codes.shape[0], -1)
    np.testing.assert_array_equal(layer.codes[:, 0::2], packed & 15)
    np.testing.assert_array_equal(layer.codes[:, 1::2], packed >> 4)
    np.testing.assert_array_equal(layer.scales, stored.tensor(node.input[2]))


def test_int8_activations_are_an_engine_of_their_own(
    w4: Path, base_checkpoint: Path, reference: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """accuracy_level 4 keeps the weights, moves the logits, and is held to perplexity."""
    facts = build(OrtGenaiConfig(accuracy_level=4), tmp_path, variant=w4, reference=reference(w4, base_checkpoint))
    assert (True, "int4 x int8") == (facts["weights_equal"], facts["precision"])
    assert float(facts["max_abs_dlogit"] or 0) > 1e-3


def test_zero_points_and_a_quantized_head_are_carried(
    rtn: Variant, base_checkpoint: Path, reference: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """An asymmetric variant with lm_head quantized: 211 layers carried, head included, embedding as it was."""
    variant = rtn(_weights(symmetric=False), ignore=())
    facts = build(OrtGenaiConfig(), tmp_path, variant=variant, reference=reference(variant, base_checkpoint))
    assert (211, True) == (facts["carried_modules"], facts["weights_equal"])
    stored = EngineWeights(tmp_path / "model.onnx")
    np.testing.assert_array_equal(dequantize(open_quantized(variant)["lm_head"]), stored.of("/lm_head/MatMulNBits"))


def test_one_scale_per_channel_is_carried_as_blocks(
    rtn: Variant, base_checkpoint: Path, reference: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """A W8A16 variant without groups: blocks share their channel's scale and nothing is rounded again."""
    variant = rtn(_weights(bits=8, group=None))
    facts = build(OrtGenaiConfig(), tmp_path, variant=variant, reference=reference(variant, base_checkpoint))
    assert ("int8 x float32", True, True) == (facts["precision"], facts["native"], facts["weights_equal"])


def test_8_bit_floats_are_marked_as_emulated(
    rtn: Variant, base_checkpoint: Path, reference: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """FP8 weights run as float32 and activations are left alone, so the engine is not native and says why."""
    variant = rtn(scheme="FP8_DYNAMIC")
    facts = build(OrtGenaiConfig(), tmp_path, variant=variant, reference=reference(variant, base_checkpoint))
    assert (False, 0, True) == (facts["native"], facts["carried_modules"], facts["weights_equal"])
    assert "activations are not quantized" in str(facts["native_note"])


def test_a_changed_weight_fails_the_build(
    w4: Path, base_checkpoint: Path, reference: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """One flipped bit in the engine's file is found by reading it back."""
    out = tmp_path / "engine"
    out.mkdir()
    build(OrtGenaiConfig(), out, variant=w4, reference=reference(w4, base_checkpoint))
    weights = EngineWeights(out / "model.onnx")
    name = weights.nodes["/model/layers.0/mlp/up_proj/MatMulNBits"].input[1]
    offset = next(int(e.value) for e in weights.initializers[name].external_data if e.key == "offset")
    data = bytearray((out / "model.onnx.data").read_bytes())
    data[offset] ^= 1
    (out / "model.onnx.data").write_bytes(data)
    nodes = {"/model/layers.0/mlp/up_proj/MatMulNBits": ("model.layers.0.mlp.up_proj",)}
    assert list(nodes) == list(differing_weights(EngineWeights(out / "model.onnx"), nodes, open_quantized(w4)))


def test_a_bound_that_is_not_met_fails_the_build(
    w4: Path, base_checkpoint: Path, reference: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """Logits that differ by more than allowed end the build with the figure and the key."""
    with pytest.raises(StageFailed, match=r"engine\.max_abs_dlogit"):
        build(OrtGenaiConfig(max_abs_dlogit=1e-9), tmp_path, variant=w4, reference=reference(w4, base_checkpoint))


def test_our_dequantization_is_the_vendors(w4: Path, ids: NDArray[np.int32]) -> None:
    """The checkpoint as compressed-tensors unpacks it and as we read it give the same logits, bit for bit."""
    np.testing.assert_array_equal(logits(load(w4), ids[:1]), logits(load_dense(w4, lazily=True), ids[:1]))


def test_a_checkpoint_that_transformers_would_misread_is_refused(base_checkpoint: Path, tmp_path: Path) -> None:
    """A method transformers does not know makes it skip the quantization; reloading refuses instead."""
    variant = _copy(base_checkpoint, tmp_path, {"quantization_config": {"quant_method": "olive"}})
    with pytest.raises(StageFailed, match="'olive' is unknown to transformers"):
        load(variant)


def test_missing_tensors_are_refused(base_checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint whose config asks for more layers than it holds does not load with random ones."""
    variant = _copy(base_checkpoint, tmp_path, {"num_hidden_layers": 31})
    with pytest.raises(StageFailed, match="missing keys"):
        load(variant)


def _copy(checkpoint: Path, out: Path, changes: dict[str, object]) -> Path:
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            (out / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | changes))
    return out


ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "granite": {},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 4096},
}


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "w4"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_each_listed_architecture_exports_and_computes(
    kind: str, quantized: bool, base_checkpoint: Path, tmp_path: Path
) -> None:
    """A two-layer random model of every architecture on the list: engine logits equal transformers' to 1e-3."""
    from pipelines.engine.ort_builder import build_graph

    variant, out = _random_model(kind, quantized, base_checkpoint, tmp_path / "variant"), tmp_path / "out"
    out.mkdir()
    loaded = load_dense(variant, lazily=True)
    nodes = build_graph(variant, out, loaded.model, open_quantized(variant), 1)
    assert ("/model/layers.0/attn/qkv_proj/MatMulNBits" in nodes) == quantized
    row = np.arange(3, 43, dtype=np.int32)
    np.testing.assert_allclose(logits(loaded, row)[0], engine_logits(open_engine(out, 2), row), rtol=0, atol=1e-3)


def _random_model(kind: str, quantized: bool, base: Path, out: Path) -> Path:
    import torch
    import transformers

    shape = {
        "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
        "bos_token_id": 1, "eos_token_id": 2,
    } | ARCHITECTURES[kind]  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **shape))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, out / name)
    if quantized:
        saved = transformers.AutoModelForCausalLM.from_pretrained(out)
        _round(saved, _weights(group=32))
        saved.save_pretrained(out, save_compressed=True)
    return out


def test_columns_that_gptq_reordered_are_carried_with_their_order(base_checkpoint: Path, tmp_path: Path) -> None:
    """A GPTQ checkpoint with g_idx out of order (desc_act), version 1 words: the engine computes what the codes say."""
    from safetensors.numpy import load_file, save_file

    from pipelines.engine.ort_builder import build_graph
    from tests.unit.test_packing import words

    variant, out = _random_model("llama", False, base_checkpoint, tmp_path / "variant"), tmp_path / "out"
    out.mkdir()
    rng = np.random.default_rng(0)
    order = {width: rng.permutation(np.repeat(np.arange(width // 32), 32)).astype(np.int32) for width in (64, 128)}
    tensors = load_file(variant / "model.safetensors")
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        rows, columns = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
        zeros = rng.integers(1, 16, (columns // 32, rows), dtype=np.uint8)
        tensors |= {
            f"{module}.qweight": np.ascontiguousarray(words(codes, 4).T),
            f"{module}.qzeros": (words(zeros, 4).view(np.uint32) - np.uint32(0x11111111)).view(np.int32),
            f"{module}.scales": rng.uniform(0.001, 0.01, (columns // 32, rows)).astype(np.float16),
            f"{module}.g_idx": order[columns],
        }
    save_file(tensors, variant / "model.safetensors", {"format": "pt"})
    config = json.loads((variant / "config.json").read_text())
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    (variant / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    loaded = load_dense(variant, lazily=True)
    nodes = build_graph(variant, out, loaded.model, open_quantized(variant), 1)
    weights = EngineWeights(out / "model.onnx")
    assert "/model/layers.0/attn/qkv_proj/MatMul/Reorder" in weights.nodes
    assert [] == list(differing_weights(weights, nodes, open_quantized(variant)))
    row = np.arange(3, 43, dtype=np.int32)
    np.testing.assert_allclose(logits(loaded, row)[0], engine_logits(open_engine(out, 2), row), rtol=0, atol=1e-3)
