"""A base of transformers 5 staged for version 4; what a library on version 4 saved, put back in the base's terms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.errors import InputError, StageFailed
from pipelines.quantize.restored import restore
from pipelines.quantize.transformers4 import as_version_4, staged

TABLE, HEAD, NORM, UP = "model.embed_tokens", "lm_head", "model.norm", "model.layers.0.mlp.up_proj"
Tensors = dict[str, torch.Tensor]


def test_plain_positions_and_dtype_get_their_old_names() -> None:
    """Version 4 looks for rope_theta and torch_dtype at the top, and would take defaults where they are not."""
    old = as_version_4({"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}, "x": 1})
    assert {"torch_dtype": "bfloat16", "rope_theta": 1e5, "rope_scaling": None, "x": 1} == old


def test_scaled_and_partial_positions_are_told_as_version_4_has_them() -> None:
    """Everything of a scaling but theta and the rotated share is `rope_scaling`."""
    rope = {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_type": "llama3", "factor": 8.0}
    assert {
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    } == as_version_4({"rope_parameters": rope})


def test_a_config_of_version_4_stays_as_it_is() -> None:
    """An older checkpoint says it in old words already."""
    config = {"torch_dtype": "float16", "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert config == as_version_4(config)


def test_positions_by_layer_type_are_refused() -> None:
    """Version 4 has one set of positions; two would be calibrated as one."""
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(InputError, match=r"differ by layer type \(full_attention, sliding_attention\)"):
        as_version_4({"rope_parameters": rope})


def test_code_that_came_with_the_base_is_not_named() -> None:
    """AutoGPTQ loads configs with trust_remote_code; there must be nothing to trust."""
    assert {} == as_version_4({"auto_map": {"AutoConfig": "code.Config"}})


def test_the_staged_base_is_links_and_gone_afterwards(tmp_path: Path) -> None:
    """Weights are not copied, code and tokenizer are not taken along."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    (tmp_path / "code.py").write_text("raise SystemExit")
    with staged(tmp_path) as directory:
        assert ["config.json", "model.safetensors"] == sorted(p.name for p in directory.iterdir())
        assert (tmp_path / "model.safetensors").resolve() == (directory / "model.safetensors").resolve()
        assert {"torch_dtype": "float32"} == json.loads((directory / "config.json").read_text())
    assert not directory.exists()


def base(directory: Path) -> Path:
    directory.mkdir()
    tensors = {f"{TABLE}.weight": torch.arange(8.0).reshape(4, 2), f"{NORM}.weight": torch.ones(2)}
    tensors |= {f"{UP}.weight": torch.ones(2, 2)}
    save_file({k: v.to(torch.bfloat16) for k, v in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return directory


def saved(more: Mapping[str, torch.Tensor] | None = None) -> Tensors:
    """What AutoGPTQ leaves: everything in float32, the tied head twice, a bias for each layer."""
    return {
        f"{TABLE}.weight": torch.arange(8.0).reshape(4, 2),
        f"{HEAD}.weight": torch.arange(8.0).reshape(4, 2),
        f"{NORM}.weight": torch.ones(2),
        f"{UP}.qweight": torch.ones(1, 2, dtype=torch.int32),
        f"{UP}.scales": torch.full((1, 2), 0.1),
        f"{UP}.bias": torch.zeros(2),
    } | dict(more or {})


def put_back(tmp_path: Path, *files: Tensors) -> tuple[Tensors, dict[str, Any]]:
    variant = tmp_path / "variant"
    variant.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, variant / f"gptq_model-{number}.safetensors")
    (variant / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32", "x": 1}))
    restore(variant, base(tmp_path / "base"), {"quant_method": "gptq"})
    found = {k: v for file in sorted(variant.glob("*.safetensors")) for k, v in load_file(file).items()}
    return found, json.loads((variant / "config.json").read_text())


def test_saved_files_come_back_in_the_bases_terms(tmp_path: Path) -> None:
    """The base's dtypes and config, scales in half precision, no second head, no empty bias, the usual name."""
    tensors, config = put_back(tmp_path, saved())
    assert {
        f"{TABLE}.weight": torch.bfloat16,
        f"{NORM}.weight": torch.bfloat16,
        f"{UP}.qweight": torch.int32,
        f"{UP}.scales": torch.float16,
    } == {name: tensor.dtype for name, tensor in tensors.items()}
    assert {"model_type": "llama", "dtype": "bfloat16", "quantization_config": {"quant_method": "gptq"}} == config
    assert ["config.json", "model.safetensors"] == sorted(p.name for p in (tmp_path / "variant").iterdir())


def test_several_files_have_an_index_of_what_is_left(tmp_path: Path) -> None:
    """A tensor that is dropped is in no index, and a head in another file than the embedding is still found out."""
    first = {name: tensor for name, tensor in saved().items() if name.startswith(TABLE)}
    rest = {name: tensor for name, tensor in saved().items() if name not in first}
    tensors, _ = put_back(tmp_path, first, rest)
    index = json.loads((tmp_path / "variant" / "model.safetensors.index.json").read_text())
    assert {"gptq_model-0.safetensors", "gptq_model-1.safetensors"} == set(index["weight_map"].values())
    assert set(tensors) == set(index["weight_map"])
    assert sum(t.nbytes for t in tensors.values()) == index["metadata"]["total_size"]


def test_a_head_that_is_no_copy_is_not_dropped(tmp_path: Path) -> None:
    """The base shares its head with the embedding; another head would be lost, so it is an error."""
    with pytest.raises(StageFailed, match=r"lm_head\.weight was saved.*and differs"):
        put_back(tmp_path, saved({f"{HEAD}.weight": torch.ones(4, 2)}))


def test_a_bias_that_the_base_has_not_must_be_zero(tmp_path: Path) -> None:
    """A bias from nowhere would be added to every output."""
    with pytest.raises(StageFailed, match=r"up_proj\.bias is not zero"):
        put_back(tmp_path, saved({f"{UP}.bias": torch.ones(2)}))
