"""Every quantizer by its real library: what is saved reloads through transformers and is still the model.

Most runs take the first layers of the small real model, so that each ends in seconds; the comparison with rounding
takes all of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from pipelines.config import CONF_DIR
from pipelines.errors import StageFailed
from pipelines.flow import progress
from pipelines.flow.stage import resolve
from pipelines.intake import calibration
from pipelines.intake.calibration import CalibrationConfig, pinned
from pipelines.quantize import llmcompressor_cpu
from pipelines.quantize.codes import Codes
from pipelines.quantize.coverage import read
from pipelines.quantize.packing import open_quantized
from pipelines.quantize.reload import load, load_dense, logits, perplexity, token_logprobs
from pipelines.quantize.table import QUANTIZERS
from tests.short_model import first_layers

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]  # the libraries' own warnings

LAYERS = 3
SOURCE = CONF_DIR.parent / "evalsets" / "calibration" / "items.jsonl"
HELD_OUT = CONF_DIR.parent / "evalsets" / "heldout_text" / "items.jsonl"
Quantize = Callable[..., tuple[Path, dict[str, Any]]]


def freeze(out: Path, checkpoint: Path, samples: int, max_tokens: int) -> Path:
    config = pinned(CalibrationConfig(source=str(SOURCE), samples=samples, max_tokens=max_tokens))
    facts = calibration.run(config, out, checkpoint=checkpoint)
    assert samples * max_tokens == facts["tokens"]
    return out


def quantize(out: Path, checkpoint: Path, shown: Path, quantizer: str, **settings: Any) -> dict[str, Any]:
    row = QUANTIZERS[quantizer]
    config = resolve(row.config_type).model_validate({"quantizer": quantizer, **settings})  # type: ignore[attr-defined]
    given = {"calibration": shown} if row.needs_calibration(config) else {}
    facts: dict[str, Any] = resolve(row.function)(config, out, checkpoint=checkpoint, **given)
    return facts


@pytest.fixture(scope="module")
def short(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small real model with its first layers only, and a licence to carry."""
    out = first_layers(base_checkpoint, tmp_path_factory.mktemp("short"), LAYERS)
    (out / "LICENSE").write_text("Apache-2.0")
    return out


@pytest.fixture(scope="module")
def shown(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration set far too small for use and large enough to run."""
    return freeze(tmp_path_factory.mktemp("calibration"), short, samples=4, max_tokens=64)


@pytest.fixture
def run(short: Path, shown: Path, tmp_path: Path) -> Quantize:
    """Run a row of the table on the short model."""

    def make(quantizer: str, **settings: Any) -> tuple[Path, dict[str, Any]]:
        return tmp_path, quantize(tmp_path, short, shown, quantizer, **settings)

    return make


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """What a stage reports while it runs."""
    found: list[tuple[int, int, str]] = []
    monkeypatch.setattr(progress, "_sink", [lambda done, total, what, _: found.append((done, total, what))])
    return found


@pytest.fixture(scope="module")
def words(short: Path) -> NDArray[np.int64]:
    """Token ids of held-out text, two windows."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(short / "tokenizer.json"))
    text = " ".join(json.loads(line)["text"] for line in HELD_OUT.read_text().splitlines()[:20])
    ids = tokenizer.encode(text).ids
    return np.array([ids[:128], ids[128:256]])


def divergence(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Mean KL divergence, in nats, between the next-token distributions of two logits."""

    def log_softmax(scores: NDArray[np.float32]) -> NDArray[np.float64]:
        wide = scores.astype(np.float64)
        wide -= wide.max(axis=-1, keepdims=True)
        return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))

    p, q = log_softmax(one), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


@pytest.fixture(scope="module")
def undone(short: Path, words: NDArray[np.int64]) -> NDArray[np.float32]:
    """The base's own logits."""
    return logits(load(short), words)


WEIGHT_ONLY = [
    ("llmcompressor_rtn", {"scheme": "W4A16_G64"}),
    ("llmcompressor_rtn", {"scheme": "W8A16_G64"}),
    ("llmcompressor_rtn", {"scheme": "W4A16_G64_ASYM"}),
    ("llmcompressor_gptq", {"scheme": "W4A16_G64"}),
    ("llmcompressor_gptq", {"scheme": "W4A16_G64", "head": "W8A16_G64"}),
    ("llmcompressor_awq", {"scheme": "W4A16_G64_ASYM", "options": {"n_grid": 4}}),
    ("gptqmodel_gptq", {"scheme": "W4A16_G64", "options": {"offload_to_disk": False}}),
]


@pytest.mark.parametrize(("quantizer", "settings"), WEIGHT_ONLY, ids=lambda v: v if isinstance(v, str) else v["scheme"])
def test_weights_reload_as_they_were_saved(
    run: Quantize, undone: NDArray[np.float32], words: NDArray[np.int64], quantizer: str, settings: dict[str, Any]
) -> None:
    """Every linear layer is quantized, transformers reads what our dequantization reads, and it is still the model."""
    variant, facts = run(quantizer, **settings)
    head = "head" in settings
    assert (7 * LAYERS + head, "" if head else "lm_head") == (facts["quantized_modules"], facts["skipped_modules"])
    reloaded = logits(load(variant), words)
    # transformers runs the classic format through a kernel that multiplies in bfloat16
    assert divergence(logits(load_dense(variant), words), reloaded) < 1e-3
    assert divergence(undone, reloaded) < 0.3


def test_fp8_reloads(run: Quantize, undone: NDArray[np.float32], words: NDArray[np.int64]) -> None:
    """FP8 weights are stored in a byte each, and the model with rounded activations is still the model."""
    variant, facts = run("llmcompressor_fp8", scheme="W8A8_FP8_DYNAMIC")
    assert ("float-quantized", 7 * LAYERS) == (facts["format"], facts["quantized_modules"])
    assert divergence(undone, logits(load(variant), words)) < 0.05


def test_static_fp8_is_calibrated(run: Quantize, undone: NDArray[np.float32], words: NDArray[np.int64]) -> None:
    """Static schemes store a scale for activations, found on the calibration set."""
    variant, _ = run("llmcompressor_fp8", scheme="W8A8_FP8_STATIC_TENSOR")
    with safe_open(variant / "model.safetensors", framework="np") as f:
        scales = [name for name in f.keys() if name.endswith("input_scale")]  # noqa: SIM118
    assert 7 * LAYERS == len(scales)
    assert divergence(undone, logits(load(variant), words)) < 0.1


LIGHT = [
    ("llmcompressor_fp4", "W4A16_NVFP4", "nvfp4-pack-quantized", 0.2),
    ("llmcompressor_fp4", "W4A4_NVFP4", "nvfp4-pack-quantized", 0.3),
    ("llmcompressor_fp4", "W4A4_MXFP4", "mxfp4-pack-quantized", 0.6),
    ("llmcompressor_smoothquant", "W8A8_INT8_DYNAMIC", "int-quantized", 0.05),
    ("llmcompressor_gptq", "W8A16", "pack-quantized", 0.01),
]


@pytest.mark.parametrize(("quantizer", "scheme", "form", "bound"), LIGHT, ids=lambda v: v if isinstance(v, str) else "")
def test_other_formats_reload(
    run: Quantize,
    undone: NDArray[np.float32],
    words: NDArray[np.int64],
    quantizer: str,
    scheme: str,
    form: str,
    bound: float,
) -> None:
    """Each format is what config.json and the tensors say, layer by layer, and the model is still the model."""
    variant, facts = run(quantizer, scheme=scheme)
    assert (f"{scheme} x {7 * LAYERS}", form) == (facts["layer_schemes"], facts["format"])
    assert divergence(undone, logits(load(variant), words)) < bound


def test_blocks_of_float8_reload_where_they_fit(short: Path, shown: Path, tmp_path: Path) -> None:
    """A random model whose sides are multiples of 128: a scale per block, read as the library reads it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    base, out = tmp_path / "base", tmp_path / "out"
    out.mkdir()
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 49152}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, dtype="bfloat16")).to(torch.bfloat16).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(short / name, base / name)
    facts = quantize(out, base, shown, "llmcompressor_fp8", scheme="W8A8_FP8_DYNAMIC_BLOCK128")
    assert ("W8A8_FP8_DYNAMIC_BLOCK128 x 14", "float-quantized") == (facts["layer_schemes"], facts["format"])
    ids = np.arange(300, 364)[None]
    assert divergence(logits(load_dense(out), ids), logits(load(out), ids)) < 0.01


def test_errors_are_told_layer_by_layer(run: Quantize) -> None:
    """GPTQ's loss and AWQ's error of the block reach the table of layers; rounding has none to tell."""
    variant, _ = run("llmcompressor_gptq", scheme="W4A16_G64")
    rows = [row for row in read(variant) if row.scheme != "kept"]
    assert 7 * LAYERS == sum(row.error is not None and row.error > 0 for row in rows)


def test_an_engine_says_what_of_a_format_it_does_not_compute(run: Quantize, short: Path, tmp_path_factory: Any) -> None:
    """4-bit floats and an FP8 cache in ONNX Runtime: exact weights in float32, marked as emulated with each reason."""
    from pipelines.engine.ort_genai import OrtGenaiConfig, build
    from tests.e2e.test_ort_genai import reference_of

    variant, facts = run("llmcompressor_fp4", scheme="W4A4_NVFP4_KVFP8")
    assert f"FP8, {2 * LAYERS} scales" == facts["kv_cache"]
    ids = np.arange(300, 428, dtype=np.int32).reshape(2, 64)
    reference, out = (tmp_path_factory.mktemp(name) for name in ("reference", "engine"))
    reference_of(reference, variant, short, ids)
    built = build(OrtGenaiConfig(), out, variant=variant, reference=reference)
    assert (False, True) == (built["native"], built["weights_equal"])
    for reason in ("stored and multiplied as float32", "activations are not quantized", "cached in float32"):
        assert reason in str(built["native_note"])


def test_int8_activations_reload(run: Quantize, undone: NDArray[np.float32], words: NDArray[np.int64]) -> None:
    """W8A8 in integers keeps the model too."""
    variant, facts = run("llmcompressor_rtn", scheme="W8A8_INT8")
    assert "int-quantized" == facts["format"]
    assert divergence(undone, logits(load(variant), words)) < 0.05


def test_the_baseline_is_the_base(run: Quantize, undone: NDArray[np.float32], words: NDArray[np.int64]) -> None:
    """The unchanged variant gives the base's logits to the bit."""
    variant, facts = run("baseline")
    assert "BF16" == facts["scheme"]
    assert np.array_equal(undone, logits(load(variant), words))


def test_a_quantized_head_is_untied(run: Quantize) -> None:
    """A head of its own scheme has its own codes; the embedding stays, once, and the config no longer ties them."""
    variant, _ = run("llmcompressor_rtn", scheme="W4A16_G64", head="W8A16_G64")
    layers = open_quantized(variant)
    head, body = layers["lm_head"], layers["model.layers.0.mlp.up_proj"]
    assert isinstance(head, Codes)
    assert isinstance(body, Codes)
    assert (8, 4) == (head.bits, body.bits)
    assert False is json.loads((variant / "config.json").read_text())["tie_word_embeddings"]


def test_files_beside_the_weights_are_the_bases(run: Quantize, short: Path) -> None:
    """Tokenizer, template, settings and licence are carried byte for byte; the dtype on disk is the base's."""
    variant, facts = run("llmcompressor_gptq", scheme="W4A16_G64")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE"):
        assert (short / name).read_bytes() == (variant / name).read_bytes()
    with safe_open(variant / "model.safetensors", framework="pt") as f:
        stored = {str(f.get_tensor(n).dtype) for n in f.keys() if n.endswith(("_scale", "norm.weight"))}  # noqa: SIM118
    assert ({"torch.bfloat16"}, "llmcompressor") == (stored, facts["library"])


def test_equal_runs_save_equal_weights(short: Path, shown: Path, tmp_path: Path) -> None:
    """The same base, texts, options and seed give the same tensors."""
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        quantize(tmp_path / name, short, shown, "llmcompressor_gptq", scheme="W4A16_G64")
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[0] == made[1]


def test_progress_is_reported_layer_by_layer(run: Quantize, reports: list[tuple[int, int, str]]) -> None:
    """Whoever waits sees each layer once."""
    run("llmcompressor_gptq", scheme="W4A16_G64")
    assert [(k, LAYERS, "layers calibrated") for k in range(LAYERS)] == [r for r in reports if "layers" in r[2]]


def test_a_group_that_does_not_divide_fails_before_anything_is_saved(run: Quantize, tmp_path: Path) -> None:
    """The library's refusal becomes one sentence, and nothing is left behind."""
    with pytest.raises(StageFailed, match="could not quantize"):
        run("llmcompressor_rtn", scheme="W4A16_G128")
    assert [] == list(tmp_path.iterdir())


def test_nothing_is_written_elsewhere(run: Quantize, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A library that logs to the working directory leaves nothing there, and equal runs save equal files."""
    here = tmp_path_factory.mktemp("here")
    with chdir(here):
        variant, _ = run("gptqmodel_gptq", scheme="W4A16_G64")
    assert [] == list(here.iterdir())
    said = (variant / "quantize_config.json").read_text() + (variant / "quant_log.csv").read_text()
    assert (False, False) == ("offload_to_disk_path" in said, "time" in said)


@pytest.mark.parametrize("accelerator", [False, True])
def test_pinning_is_adapted_without_an_accelerator_only(monkeypatch: pytest.MonkeyPatch, accelerator: bool) -> None:
    """With an accelerator, and after quantizing, the library is as it came."""
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    original = IntermediatesCache.pin_memory
    with llmcompressor_cpu.memory_pinning() as adapted:
        assert accelerator == (IntermediatesCache.pin_memory is original)
        assert accelerator == (adapted == "")
    assert IntermediatesCache.pin_memory is original


def test_an_untested_release_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release nobody tried may pin memory properly; it is not touched."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    original = IntermediatesCache.pin_memory
    monkeypatch.setattr(llmcompressor_cpu, "TESTED", ("0.0",))
    with llmcompressor_cpu.memory_pinning() as adapted:
        assert ("", True) == (adapted, IntermediatesCache.pin_memory is original)


QUICK: dict[str, dict[str, Any]] = {
    "llmcompressor_gptq": {
        "block_size": 32,
        "batched_quantization": 4,
        "calibrate": {"batch_size": 8, "num_calibration_samples": 8},
    },
    "llmcompressor_awq": {"n_grid": 6, "calibrate": {"batch_size": 4, "num_calibration_samples": 4}},
}
"""Settings that two CPU cores finish in about a minute each; with less, a method need not beat rounding."""


@pytest.mark.timeout(1800)
def test_methods_beat_the_control(base_checkpoint: Path, tmp_path: Path) -> None:
    """On the whole model, with the quick calibration set, GPTQ and AWQ lose less than rounding at the same scheme."""
    import yaml
    from tokenizers import Tokenizer

    quick = yaml.safe_load((CONF_DIR / "calibration" / "quick.yaml").read_text())
    (tmp_path / "calibration").mkdir()
    shown = freeze(tmp_path / "calibration", base_checkpoint, quick["samples"], quick["max_tokens"])
    tokenizer = Tokenizer.from_file(str(base_checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(" ".join(json.loads(line)["text"] for line in HELD_OUT.read_text().splitlines())).ids
    text = np.array([ids[k : k + 512] for k in np.linspace(0, len(ids) - 512, 4).astype(int)])

    def perplexity_of(quantizer: str, scheme: str) -> float:
        out = tmp_path / quantizer / scheme
        out.mkdir(parents=True)
        quantize(out, base_checkpoint, shown, quantizer, scheme=scheme, options=QUICK.get(quantizer, {}))
        return perplexity(token_logprobs(load(out), text))

    base = perplexity(token_logprobs(load(base_checkpoint), text))
    for method, scheme in (("llmcompressor_gptq", "W4A16_G64"), ("llmcompressor_awq", "W4A16_G64_ASYM")):
        assert base < perplexity_of(method, scheme) < perplexity_of("llmcompressor_rtn", scheme)
