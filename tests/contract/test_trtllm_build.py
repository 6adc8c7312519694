"""TensorRT-LLM engines and bundles, built with stand-ins for the library's commands: the whole path, no computing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from pipelines.engine import trtllm_engine, trtllm_pytorch
from pipelines.engine.card import read_card
from pipelines.engine.smoke import Checks
from pipelines.engine.table import TARGETS
from pipelines.engine.trtllm import flags, record
from pipelines.engine.trtllm.options import KvCache, Plugins
from pipelines.errors import ConfigError, EnvironmentProblem, InputError, QuantgateError, StageFailed, TransientFailure
from pipelines.flow.store import Fact, Manifest
from tests import fake_trtllm

WORDS = 32
ABOUT = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": WORDS, "dtype": "float16",
    "max_position_embeddings": 2048, "eos_token_id": 2, "bos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
CHECKS = Checks(startup_timeout_s=60)
SCORED = {"gather_context_logits": True, "kv_cache": KvCache(enable_block_reuse=False), "checks": CHECKS}

Build = Callable[..., dict[str, Fact]]


def artifact(path: Path, kind: str, facts: dict[str, Fact], inputs: dict[str, str | list[str]] | None = None) -> Path:
    """Give a directory the manifest of an artifact."""
    made = Manifest(
        kind=kind, stage=kind, version=1, key="0" * 64, config={}, inputs=inputs or {}, toolchain={}, device=None,
        facts=facts, files={}, started="2026-11-30T12:00:00+00:00", seconds=1.0, peak_rss=1,
    )  # fmt: skip
    (path / "manifest.json").write_text(made.model_dump_json())
    return path


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-ins first on PATH; gives the examples directory."""
    programs = fake_trtllm.install(tmp_path / "tools")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TLLM_LOG_LEVEL", "INFO")
    return tmp_path / "tools" / "examples"


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """Two held-out windows of a model that finds all words equally likely, as the stand-in server does."""
    path = tmp_path / "reference"
    path.mkdir()
    ids = np.arange(24, dtype=np.int32).reshape(2, 12)
    np.savez(path / "tokens.npz", ids=ids, logprobs=np.full((2, 11), -np.log(WORDS), np.float32))
    return artifact(path, "reference", {"perplexity": float(WORDS), "base_perplexity": float(WORDS)})


def variant_of(tmp_path: Path, facts: dict[str, Fact], **about: object) -> Path:
    path = tmp_path / "variant"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(ABOUT | about))
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "LICENSE").write_text("Apache-2.0")
    save_file({"model.norm.weight": np.ones(4, np.float16)}, path / "model.safetensors")
    return artifact(path, "variant", {"scheme": "BF16", "quant_method": "", **facts}, {"calibration": "c" * 64})


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The unquantized base."""
    return variant_of(tmp_path, {})


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    """GPTQ in the classic format."""
    return variant_of(tmp_path, {"scheme": "W4A16_G64", "quant_method": "gptq"}, quantization_config=GPTQ)


@pytest.fixture
def modelopt(tmp_path: Path) -> Path:
    """A ModelOpt variant with the TensorRT-LLM checkpoint that it brings along."""
    facts: dict[str, Fact] = {
        "scheme": "W8A8_FP8_STATIC_TENSOR", "quant_method": "modelopt", "quant_algo": "FP8",
        "trtllm_checkpoint": "trtllm/tp2", "trtllm_tp": 2, "trtllm_pp": 1,
    }  # fmt: skip
    variant = variant_of(tmp_path, facts, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    written = {
        **{name: ABOUT[name] for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")},
        **{name: ABOUT[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")},
        "architecture": "LlamaForCausalLM", "dtype": "float16", "rotary_base": 100000.0,
        "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None},
    }  # fmt: skip
    fake_trtllm.write_checkpoint(variant / "trtllm" / "tp2", written, {})
    return variant


def engine(tools: Path, **options: Any) -> trtllm_engine.TrtllmEngineConfig:
    return trtllm_engine.TrtllmEngineConfig(examples=str(tools), **{**SCORED, **options})


def built(config: trtllm_engine.TrtllmEngineConfig, out: Path, variant: Path, reference: Path) -> dict[str, Fact]:
    out.mkdir()
    return trtllm_engine.build(config, out, variant=variant, reference=reference)


def quirk(monkeypatch: pytest.MonkeyPatch, command: str, **what: object) -> None:
    monkeypatch.setenv(f"FAKE_TRTLLM_{command}", json.dumps(what))


def test_a_base_is_converted_built_and_asked(tools: Path, plain: Path, reference: Path, tmp_path: Path) -> None:
    """The facts say what was run, on what, and that none of it was the real library."""
    facts = built(engine(tools), tmp_path / "out", plain, reference)
    assert facts["simulated"] is True
    assert facts["native"] is False
    assert "TensorRT-LLM is not installed" in str(facts["native_note"])
    assert "--checkpoint_dir" in str(facts["build_argv"]) and "--model_dir" in str(facts["convert_argv"])
    assert str(facts["serve_argv"]).startswith("trtllm-serve llama-variant --backend tensorrt")
    assert "TLLM_LOG_LEVEL=INFO" == facts["env"]
    assert ("", 1, 1, "c" * 64) == (facts["quant_algo"], facts["tp"], facts["pp"], facts["calibration_key"])
    assert facts["perplexity"] == pytest.approx(WORDS) and facts["ppl_drift"] == pytest.approx(1)
    assert 2 == facts["smoke_answers"] and facts["deserialized"] is True
    assert json.loads(str(facts["build_config"]))["gather_context_logits"] is True
    assert 64 == len(str(facts["checkpoint_sha256"])) == len(str(facts["tokenizer_sha256"]))
    assert all(isinstance(facts[name], int | float) for name in ("convert_seconds", "build_seconds", "peak_host_bytes"))
    assert facts["peak_gpu_mib"] is None  # nothing looked


def test_what_is_left_can_be_served_and_holds_no_scratch(
    tools: Path, plain: Path, reference: Path, tmp_path: Path
) -> None:
    """Engine, tokenizer, settings, licence and logs; the converted checkpoint is gone."""
    out = tmp_path / "out"
    built(engine(tools), out, plain, reference)
    names = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert {"llama-variant/config.json", "llama-variant/rank0.engine", "engine.json", "trtllm.json", "llm.yaml",
            "tokenizer.json", "chat_template.jinja", "LICENSE", "timing.cache", "logs/build.log"} <= names  # fmt: skip
    assert not any(".scratch" in name for name in names)
    card = read_card(out)
    assert (2048, 2047, [2], "llama-variant") == (card.max_length, card.max_prompt, card.eos_token_ids, card.model_id)
    tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    assert "PreTrainedTokenizerFast" == tokenizer["tokenizer_class"]  # transformers 4 knows no TokenizersBackend
    settings = yaml.safe_load((out / "llm.yaml").read_text())
    assert settings["kv_cache_config"]["enable_block_reuse"] is False


@pytest.mark.parametrize("row", ["trtllm_engine", "trtllm_pytorch"])
def test_the_server_is_started_as_the_snapshot_has_it(
    row: str, tools: Path, plain: Path, reference: Path, tmp_path: Path
) -> None:
    """argv of `serve` holds to the release, and says of prompts what the build found."""
    out = tmp_path / "out"
    if row == "trtllm_engine":
        built(engine(tools), out, plain, reference)
    else:
        out.mkdir()
        config = trtllm_pytorch.TrtllmPytorchConfig(checks=CHECKS)
        trtllm_pytorch.build(config, out, variant=plain, reference=reference)
    argv, env = TARGETS[row].serve(out, 8123, 4)
    assert [] == flags.argv_problems(flags.load("1.2.1"), argv[0], argv[1:])
    assert "4" == env["OMP_NUM_THREADS"]
    found = TARGETS[row].capabilities(out)
    assert not found.prompt_logprobs and found.ignore_eos
    assert (row == "trtllm_engine") == found.context_logits


def test_gptq_is_converted_with_its_codes(tools: Path, gptq: Path, reference: Path, tmp_path: Path) -> None:
    """The group size is the checkpoint's, the algorithm GPTQ with zero points."""
    facts = built(engine(tools), tmp_path / "out", gptq, reference)
    assert "W4A16_GPTQ" == facts["quant_algo"]
    assert "--weight_only_precision int4_gptq --per_group --group_size 64" in str(facts["convert_argv"])


def test_a_modelopt_checkpoint_is_used_as_it_is(tools: Path, modelopt: Path, reference: Path, tmp_path: Path) -> None:
    """Nothing is converted, every rank is built, and the split is found by what config.json says."""
    out = tmp_path / "out"
    facts = built(engine(tools, tp=2), out, modelopt, reference)
    assert "convert_argv" not in facts and facts["convert_seconds"] is None
    assert ("FP8", 2) == (facts["quant_algo"], facts["tp"])
    assert ["rank0.engine", "rank1.engine"] == sorted(p.name for p in (out / "llama-variant").glob("*.engine"))
    with pytest.raises(StageFailed, match=r"no TensorRT-LLM checkpoint for tp 1 pp 1 .*tp 2 pp 1"):
        built(engine(tools), tmp_path / "other", modelopt, reference)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"rotary_base": 10000.0}, ["rotary_base: asked 100000.0, written 10000.0"]),
        ({"rotary_base": None}, ["rotary_base: asked 100000.0, written nothing"]),
        (
            {"quantization.quant_algo": None, "mapping.tp_size": 2},
            ["quant_algo: asked 'W4A16_GPTQ'", "mapping.tp_size"],
        ),
        ({"quantization.group_size": 128}, ["quantization.group_size: asked 64, written 128"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads: asked 2, written 4"]),
    ],
)
def test_a_converter_that_writes_something_else_fails_with_every_difference(
    what: dict[str, object], told: list[str], tools: Path, gptq: Path, reference: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Exit code 0 proves nothing: rope_theta lost under transformers 5, an algorithm dropped, another group size."""
    quirk(monkeypatch, "CONVERT_CHECKPOINT", change=what)
    with pytest.raises(StageFailed, match=r"config\.json is not what was asked") as caught:
        built(engine(tools), tmp_path / "out", gptq, reference)
    assert all(one in str(caught.value) for one in told)
    assert f"{len(what)} keys differ" in str(caught.value)


def test_an_error_that_the_converter_swallowed_is_a_failure(
    tools: Path, gptq: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bare except turns a refused checkpoint into a warning."""
    quirk(monkeypatch, "CONVERT_CHECKPOINT", say="[W] AutoConfig cannot load the huggingface config.")
    with pytest.raises(StageFailed, match="went on after an error it caught"):
        built(engine(tools), tmp_path / "out", gptq, reference)


@pytest.mark.parametrize(
    ("options", "what", "told"),
    [
        ({}, {"change": {"build_config.max_batch_size": 8}}, "max_batch_size: asked 2048, written 8"),
        ({"max_seq_len": 1024}, {"change": {"build_config.max_seq_len": 2048}}, "max_seq_len: asked 1024"),
        ({}, {"change": {"version": "1.1.0"}}, "version: asked '1.2.1', written '1.1.0'"),
        ({}, {"change": {"pretrained_config.mapping.tp_size": 2}}, "mapping.tp_size: asked 1, written 2"),
        ({"plugins": Plugins(use_fp8_context_fmha="enable")}, {}, "use_fp8_context_fmha: asked True, written False"),
        ({}, {"drop_rank": True}, "rank0.engine: is missing or empty"),
    ],
)
def test_an_engine_that_is_not_what_was_asked_fails(
    options: dict[str, Any], what: dict[str, Any], told: str, tools: Path, plain: Path, reference: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The builder clips limits and switches plugins off with no more than a warning."""
    quirk(monkeypatch, "BUILD", **what)
    with pytest.raises(StageFailed, match="not the engine that was asked for") as caught:
        built(engine(tools, **options), tmp_path / "out", plain, reference)
    assert told in str(caught.value)


def test_plugins_are_recognized_in_the_form_the_builder_writes(
    tools: Path, plain: Path, reference: Path, tmp_path: Path
) -> None:
    """auto becomes the model's dtype, disable null, enable true; none is a difference."""
    given = {"gemm_plugin": "auto", "moe_plugin": "disable", "multiple_profiles": "enable", "tokens_per_block": 64}
    facts = built(engine(tools, plugins=Plugins.model_validate(given)), tmp_path / "out", plain, reference)
    assert "--gemm_plugin auto --moe_plugin disable --multiple_profiles enable" in str(facts["build_argv"])


def test_a_failing_builder_is_told_with_its_last_words(
    tools: Path, plain: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit codes fail the stage; a kill is worth another try."""
    quirk(monkeypatch, "BUILD", say="No valid weight only groupwise GEMM tactic", exit=1)
    with pytest.raises(StageFailed, match=r"trtllm-build ended with exit code 1(.|\n)*groupwise GEMM tactic"):
        built(engine(tools), tmp_path / "out", plain, reference)
    killed = tmp_path / "tools" / "bin" / "trtllm-build"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(TransientFailure, match="trtllm-build was ended by SIGKILL"):
        built(engine(tools), tmp_path / "again", plain, reference)


def test_without_the_commands_the_toolchain_is_named(plain: Path, reference: Path, tmp_path: Path) -> None:
    """No traceback where the image is not what it should be."""
    config = trtllm_engine.TrtllmEngineConfig(examples=str(tmp_path / "none"))
    with pytest.raises(QuantgateError, match=r"convert_checkpoint\.py ended with exit code 2|No such file"):
        built(config, tmp_path / "out", plain, reference)
    with pytest.raises(EnvironmentProblem, match="trtllm-serve: cannot be started"):
        trtllm_pytorch.build(
            trtllm_pytorch.TrtllmPytorchConfig(), fresh(tmp_path / "bundle"), variant=plain, reference=reference
        )


def fresh(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"say": "cudaError 35", "exit": 3}, "trtllm-serve ended with 3(.|\n)*cudaError 35"),
        ({"rows_lost": 11}, "12 prompt tokens were sent, context logits came for 1: blocks of the cache were reused"),
        ({"tokens_lost": 1}, "16 tokens were asked for, 15 came"),
    ],
)
def test_a_server_that_fails_or_answers_about_less_fails_the_build(
    what: dict[str, object], told: str, tools: Path, plain: Path, reference: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An engine that does not start, cuts context logits, or stops early is none."""
    quirk(monkeypatch, "SERVE", **what)
    with pytest.raises(StageFailed, match=told):
        built(engine(tools), tmp_path / "out", plain, reference)


def test_an_engine_that_predicts_otherwise_than_its_variant_fails(
    tools: Path, plain: Path, reference: Path, tmp_path: Path
) -> None:
    """Perplexity 32 of the engine against 16 of the variant is a factor of two."""
    with np.load(reference / "tokens.npz") as held:
        ids = held["ids"]
    np.savez(reference / "tokens.npz", ids=ids, logprobs=np.full((2, 11), -np.log(16), np.float32))
    with pytest.raises(StageFailed, match="perplexity 32 of the engine, 16 of the variant"):
        built(engine(tools), tmp_path / "out", plain, reference)


def test_figures_of_part_of_the_windows_are_not_told_as_theirs(
    tools: Path, plain: Path, reference: Path, tmp_path: Path
) -> None:
    """With fewer scored tokens the drift is checked, and no perplexity is claimed."""
    config = engine(tools, checks=CHECKS.model_copy(update={"scored_tokens": 6}))
    facts = built(config, tmp_path / "out", plain, reference)
    assert facts["ppl_drift"] == pytest.approx(1)
    assert "perplexity" not in facts


def test_a_bundle_links_its_checkpoint_in_words_both_transformers_read(
    tools: Path, modelopt: Path, reference: Path, tmp_path: Path
) -> None:
    """rope_theta stands where transformers 4 looks, weights are links, the settings are the library's own."""
    del tools
    out = fresh(tmp_path / "out")
    cache = trtllm_pytorch.TorchKvCache(enable_block_reuse=False)
    config = trtllm_pytorch.TrtllmPytorchConfig(context_logits=True, kv_cache=cache, tp=2, checks=CHECKS)
    facts = trtllm_pytorch.build(config, out, variant=modelopt, reference=reference)
    about = json.loads((out / "llama-variant" / "config.json").read_text())
    assert (100000.0, "float16") == (about["rope_theta"], about["torch_dtype"])
    assert "modelopt" == about["quantization_config"]["quant_method"]
    assert (out / "llama-variant" / "model.safetensors").is_symlink()
    settings = yaml.safe_load((out / "llm.yaml").read_text())
    assert (2, False) == (settings["tensor_parallel_size"], settings["kv_cache_config"]["enable_block_reuse"])
    assert [] == flags.settings_problems(flags.load("1.2.1"), "TorchLlmArgs", settings)
    assert ("bundle", "FP8", True) == (facts["kind"], facts["quant_algo"], facts["simulated"])
    assert "bundle" == record.read(out).kind


def test_gptq_in_several_files_is_not_converted(tools: Path, gptq: Path, reference: Path, tmp_path: Path) -> None:
    """The converter reads one file, and would leave the others out."""
    save_file({"model.embed.weight": np.ones(4, np.float16)}, gptq / "model-2.safetensors")
    with pytest.raises(InputError, match="from one safetensors file, and there are 2"):
        built(engine(tools), tmp_path / "out", gptq, reference)


def test_an_artifact_without_a_record_is_none(tmp_path: Path) -> None:
    """Serving something else is one clear error."""
    with pytest.raises(InputError, match="not a readable record of a TensorRT-LLM build"):
        TARGETS["trtllm_engine"].serve(tmp_path, 1, 1)
    (tmp_path / "trtllm.json").write_text("{}")
    with pytest.raises(ConfigError, match="missing"):
        TARGETS["trtllm_engine"].capabilities(tmp_path)
