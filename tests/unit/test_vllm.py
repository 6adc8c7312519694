"""vLLM bundles: what is said before work starts, the command that serves one, and what is written beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.engine import vllm, vllm_bundle
from pipelines.engine.card import read_card
from pipelines.engine.pairing import Longest, Pairing, Workload
from pipelines.engine.table import TARGETS
from pipelines.engine.vllm import VllmConfig, refuse_other_device
from pipelines.engine.vllm_bundle import Record
from pipelines.engine.vllm_formats import emulated
from pipelines.engine.vllm_preflight import token_bytes
from pipelines.errors import InputError, StageFailed
from pipelines.quantize.scheme import parse

ROW = TARGETS["vllm"]
CPU = {"gpu": "none", "memory_gib": "24"}
GPU = {"gpu": "H100", "gpu_sm": "90", "gpu_count": "2", "gpu_memory_gib": "80", "memory_gib": "500"}
SHAPES = {
    "model.layers.0.mlp.up_proj": (1536, 576),
    "model.layers.0.mlp.down_proj": (576, 1536),
    "lm_head": (49153, 576),
}
BASE: dict[str, Any] = {
    "parameters": 134_515_008, "max_positions": 8192, "hidden_size": 576, "layers": 30, "heads": 9, "kv_heads": 3,
}  # fmt: skip


def config(**changes: Any) -> VllmConfig:
    return VllmConfig(**{"max_model_len": 2048, "kv_cache_gib": 1, "enforce_eager": True} | changes)


def said(given: VllmConfig, device: dict[str, str] = CPU, **facts: Any) -> list[str]:
    pairing = Pairing({**BASE, **facts}, SHAPES, device, Workload(in_flight=4), ignored=("lm_head",))
    return [str(problem) for problem in ROW.preflight(given, pairing)]


def on_gpu(**changes: Any) -> VllmConfig:
    return config(**{"device": "cuda", "kv_cache_gib": None} | changes)


@pytest.mark.parametrize(
    ("method", "scheme"),
    [
        ("", "BF16"),
        ("compressed-tensors", "W4A16_G64"),
        ("compressed-tensors", "W4A16_G64_ASYM"),
        ("compressed-tensors", "W8A8_INT8_DYNAMIC"),
        ("compressed-tensors", "W8A8_FP8_DYNAMIC"),
        ("gptq", "W4A16_G64"),
        ("awq", "W4A16_G64_ASYM"),
    ],
)
def test_what_processors_run_raises_no_problem(method: str, scheme: str) -> None:
    """The baseline and each format that vLLM has a kernel or an emulation for."""
    assert [] == said(config(), quant_method=method, scheme=scheme)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"quant_method": "modelopt", "scheme": "W8A8_FP8_STATIC_TENSOR", "quant_algo": "FP8"},
            "it would fail at work",
        ),
        ({"quant_method": "compressed-tensors", "scheme": "W8A8_FP8_STATIC_TENSOR"}, "it would fail at work"),
        ({"quant_method": "compressed-tensors", "scheme": "W8A8_FP8_BLOCK128"}, "only with AMX"),
        ({"quant_method": "compressed-tensors", "scheme": "W8A16_G64"}, "8-bit weights with 16-bit activations"),
        ({"quant_method": "compressed-tensors", "scheme": "W4A8_INT8"}, "4-bit weights with 8-bit activations"),
        ({"quant_method": "compressed-tensors", "scheme": "W4A4_NVFP4"}, "4-bit floats on processors"),
        ({"quant_method": "gptq", "scheme": "W4A16_G64", "desc_act": True}, "desc_act"),
        ({"quant_method": "gptq", "scheme": "W3A16_G64"}, "codes of 4 and 8 bits"),
        ({"quant_method": "modelopt", "scheme": "W4A16_G64", "quant_algo": "W4A16_AWQ"}, "no W4A16_AWQ of ModelOpt"),
        ({"quant_method": "gguf", "scheme": "W8A16"}, "no codes of this method"),
    ],
)
def test_what_processors_cannot_run_is_told_first(facts: dict[str, Any], words: str) -> None:
    """Each has one problem that says what is missing."""
    (problem,) = said(config(), **facts)
    assert words in problem


def test_four_bits_take_avx_512() -> None:
    """Without it the real library fails at its first answer; INT8 and the base run all the same."""
    older, newer = ({**CPU, "vectors": name} for name in ("avx2", "avx512"))
    (problem,) = said(config(), older, quant_method="compressed-tensors", scheme="W4A16_G64")
    assert "takes AVX-512" in problem
    assert [] == said(config(), older, quant_method="compressed-tensors", scheme="W8A8_INT8")
    assert [] == said(config(), newer, quant_method="compressed-tensors", scheme="W4A16_G64")


def test_layers_that_do_not_fit_the_tiles_are_named() -> None:
    """4-bit layers on processors have sides of multiples of 32; ignored ones and the head may have any."""
    pairing = Pairing({"quant_method": "gptq", "scheme": "W4A16_G8"}, {"a.q": (40, 64), "a.k": (64, 64), "b": (8, 8)},
                      CPU, ignored=("b",))  # fmt: skip
    (problem,) = ROW.preflight(config(), pairing)
    assert "multiples of 32, but not in a.q (40)" in str(problem)


def test_lengths_and_concurrency_are_held_to_the_settings() -> None:
    """A request, a prompt that leaves no room for an answer, and more requests than the server takes at once."""
    asked = Workload(Longest(2048, "eval set a"), Longest(2050, "eval set a"), in_flight=200)
    found = [str(p) for p in ROW.preflight(config(kv_cache_gib=20), Pairing(BASE, {}, CPU, asked))]
    words = ("takes 2050 tokens with its answer", "takes 2048 tokens; it admits 2047", "keeps 200 requests in flight")
    assert [True] * 3 == [told in problem for told, problem in zip(words, found, strict=True)]
    assert "the model knows 8192 positions" in said(config(max_model_len=9000))[0]


def test_a_token_takes_keys_and_values_of_every_layer() -> None:
    """30 layers of 3 heads of 64 numbers, keys and values, 2 bytes each: 23,040 bytes; half in FP8."""
    pairing = Pairing(BASE)
    assert 23_040 == token_bytes(config(), pairing)
    assert 11_520 == token_bytes(config(kv_cache_dtype="fp8"), pairing)
    assert 46_080 == token_bytes(config(dtype="float32"), pairing)


def test_the_cache_holds_the_longest_request_and_those_in_flight() -> None:
    """A tenth of a GiB holds 36 blocks of 128 tokens of 23,040 bytes: 4,608 tokens."""
    (alone,) = said(config(kv_cache_gib=0.1, max_model_len=8192))
    assert "holds keys and values of 4608 tokens, fewer than one request may have (8192)" in alone
    fits, beyond = (Workload(request=Longest(tokens, "the probe"), in_flight=4) for tokens in (1152, 1153))
    assert [] == ROW.preflight(config(kv_cache_gib=0.1), Pairing(BASE, {}, CPU, fits))
    (many,) = ROW.preflight(config(kv_cache_gib=0.1), Pairing(BASE, {}, CPU, beyond))
    assert "4 requests in flight of 1153 (the probe) take up to 5120, so some would wait (0.11)" in str(many)


def test_memory_is_what_the_machine_has() -> None:
    """Weights and cache beyond the machine's memory, and a cache that is left to the library, are told."""
    assert "and there are 24.0" in said(config(kv_cache_gib=30))[0]
    assert "nine tenths" in said(config(kv_cache_gib=None))[0]


@pytest.mark.parametrize(
    ("given", "device", "facts", "words"),
    [
        (on_gpu(), CPU, {}, "there is no GPU here"),
        (on_gpu(tp=4), GPU, {}, "there are 2"),
        (on_gpu(dtype="bfloat16"), {**GPU, "gpu_sm": "75"}, {}, "has no bfloat16"),
        (on_gpu(), {**GPU, "gpu_sm": "70"}, {"quant_method": "awq", "scheme": "W4A16_G64"}, "from SM 75 on"),
        (config(tp=2), CPU, {}, "one rank"),
    ],
)
def test_devices_are_held_to_what_is_asked(
    given: VllmConfig, device: dict[str, str], facts: dict[str, Any], words: str
) -> None:
    """GPUs that are not there, too few or too old, and ranks on processors."""
    (problem,) = said(given, device, **facts)
    assert words in problem


@pytest.mark.parametrize("scheme", ["W8A16_G64", "W8A8_FP8_STATIC_TENSOR", "W4A4_NVFP4", "W8A8_FP8_BLOCK128"])
def test_gpus_run_what_processors_do_not(scheme: str) -> None:
    """None of the refusals of processors holds there."""
    assert [] == said(on_gpu(), GPU, quant_method="compressed-tensors", scheme=scheme)


@pytest.mark.parametrize(
    ("scheme", "sm", "native"),
    [
        ("BF16", None, True),
        ("W4A16_G64", None, True),
        ("W8A8_INT8_DYNAMIC", None, True),
        ("W8A8_FP8_DYNAMIC", None, False),
        ("W8A8_FP8_DYNAMIC", 80, False),
        ("W8A8_FP8_DYNAMIC", 89, True),
        ("W4A4_NVFP4", 90, False),
        ("W4A4_NVFP4", 100, True),
    ],
)
def test_latency_of_emulated_formats_is_no_evidence(scheme: str, sm: int | None, native: bool) -> None:
    """FP8 on processors runs at 0.6 tokens a second; older GPUs keep activations in 16 bits."""
    assert native == (emulated(parse(scheme), sm) == "")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of a variant that has little more than a config."""
    variant, out = tmp_path / "abc123", tmp_path / "out"
    variant.mkdir()
    out.mkdir()
    about = {"model_type": "llama", "vocab_size": 10, "eos_token_id": 2, "max_position_embeddings": 4096}
    (variant / "config.json").write_text(json.dumps(about))
    (variant / "model.safetensors").write_bytes(b"weights")
    (variant / "tokenizer.json").write_text("{}")
    (variant / "manifest.json").write_text("{}")
    record = vllm._record(config(), "llama-abc123", about, variant)
    vllm_bundle.link(variant, out / record.model)
    vllm_bundle.write(out, "vllm", variant, record, "", 600)
    return out


def test_a_bundle_links_the_checkpoint_and_copies_the_tokenizer(bundle: Path) -> None:
    """Weights are links, the store's own manifest is left out, and room for one token is kept for scores."""
    model = bundle / "llama-abc123"
    assert ["config.json", "model.safetensors", "tokenizer.json"] == sorted(p.name for p in model.iterdir())
    assert all(p.is_symlink() for p in model.iterdir())
    assert not (bundle / "tokenizer.json").is_symlink()
    card = read_card(bundle)
    assert (2048, 2047, [2], "llama-abc123", True) == (
        card.max_length, card.max_prompt, card.eos_token_ids, card.model_id, card.native,
    )  # fmt: skip


def test_the_command_says_all_that_is_set(bundle: Path) -> None:
    """Loopback, lengths and cache are on the command line; threads and kernels in the environment."""
    argv, env = ROW.serve(bundle, 8123, 2)
    text = " ".join(argv)
    model = f"--model {bundle}/llama-abc123 --served-model-name llama-abc123 --host 127.0.0.1"
    assert text.startswith(f"python3 -m vllm.entrypoints.openai.api_server {model}")
    for words in ("--port 8123", "--max-model-len 2048", "--kv-cache-memory-bytes 1073741824", "--enforce-eager",
                  "--generation-config vllm", "--enable-prefix-caching"):  # fmt: skip
        assert words in text
    assert ("2", "nobind", "0") == tuple(
        env[n] for n in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_INT4_W4A8")
    )


def test_gpus_are_given_a_share_of_memory_and_no_threads(bundle: Path) -> None:
    """Without a size the cache takes what the share leaves."""
    record = vllm_bundle.read(bundle).model_copy(update={"device": "cuda", "kv_cache_memory_bytes": None})
    (bundle / vllm_bundle.RECORD).write_text(record.model_dump_json())
    argv, env = ROW.serve(bundle, 1, 2)
    assert "--kv-cache-memory-bytes" not in argv
    assert "OMP_NUM_THREADS" not in env
    assert "there is none here" in str(ROW.misplaced(bundle)[0]) or not ROW.misplaced(bundle)


def test_a_directory_without_a_record_is_no_bundle(tmp_path: Path) -> None:
    """The path is named."""
    with pytest.raises(InputError, match=r"vllm\.json: not a readable record"):
        vllm_bundle.read(tmp_path)


def test_a_server_on_another_device_is_found_out_by_its_log() -> None:
    """vLLM prints its configuration; a log that does not tell is no objection."""
    refuse_other_device("INFO ... device_config=cpu, ...", "cpu")
    refuse_other_device("INFO nothing", "cpu")
    with pytest.raises(StageFailed, match="runs on cuda"):
        refuse_other_device("device_config=cuda,", "cpu")


def test_a_model_without_a_length_must_be_given_one(tmp_path: Path) -> None:
    """Neither the settings nor the checkpoint say."""
    with pytest.raises(InputError, match=r"engine\.max_model_len"):
        vllm._record(config(max_model_len=None), "m", {}, tmp_path)
    assert isinstance(vllm._record(config(max_model_len=None), "m", {"max_position_embeddings": 64}, tmp_path), Record)
