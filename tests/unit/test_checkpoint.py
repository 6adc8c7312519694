"""Base checkpoints: what is wrong with one is said once, clearly, before anything is built on it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipelines.errors import InputError
from pipelines.intake import shards
from pipelines.intake.checkpoint import CheckpointConfig, inspect
from pipelines.intake.digests import DigestCache
from pipelines.intake.imported import run as import_checkpoint


def make(path: Path, **tensors: np.ndarray) -> Path:
    """A checkpoint directory with the given tensors, or two small ones."""
    path.mkdir(parents=True, exist_ok=True)
    given = tensors or {
        "model.layers.0.mlp.up_proj.weight": np.ones((8, 4), np.float32),
        "norm": np.ones(4, np.float32),
    }
    save_file(given, path / "model.safetensors")
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4})
    )
    (path / "tokenizer.json").write_text("{}")
    return path


def look(path: Path, tmp_path: Path, **more: str) -> object:
    return inspect(CheckpointConfig(source=str(path), **more), DigestCache(tmp_path / "digests.json"))


def test_shapes_and_sizes_come_from_headers(tmp_path: Path) -> None:
    """A good checkpoint tells its linear layers as (out, in), its parameters and bytes."""
    found = inspect(CheckpointConfig(source=str(make(tmp_path / "ok"))), DigestCache(tmp_path / "d.json"))
    assert {"model.layers.0.mlp.up_proj": (8, 4)} == dict(found.linear_shapes)
    assert (36, 144) == (found.parameters, found.size_bytes)


def test_a_missing_path_names_the_key(tmp_path: Path) -> None:
    """The message names checkpoint.source and what it may be."""
    with pytest.raises(InputError, match=r"checkpoint\.source=.*no such directory"):
        look(tmp_path / "nowhere", tmp_path)


def test_an_empty_directory_is_said_to_be_empty(tmp_path: Path) -> None:
    """Not "no config.json": empty."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="the directory is empty"):
        look(tmp_path / "empty", tmp_path)


def test_a_truncated_shard_is_found_by_its_size(tmp_path: Path) -> None:
    """A shard shorter than its header declares is named with both sizes."""
    shard = make(tmp_path / "c") / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"model\.safetensors: truncated or padded: its header declares \d+ bytes"):
        look(tmp_path / "c", tmp_path)


def test_a_shard_cut_inside_its_header_is_found(tmp_path: Path) -> None:
    """A file that ends before its own header does is truncated, not a crash."""
    shard = make(tmp_path / "c") / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:20])
    with pytest.raises(InputError, match="truncated"):
        look(tmp_path / "c", tmp_path)


NO_OFFSETS = b'{"a":{"dtype":"F32","shape":[1]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x04",
        b"\x04\x00\x00\x00\x00\x00\x00\x00nope",
        b"\x03\x00\x00\x00\x00\x00\x00\x00[1]",
        bytes([len(NO_OFFSETS)]) + bytes(7) + NO_OFFSETS,
    ],
)
def test_a_file_that_is_no_safetensors_is_found(tmp_path: Path, content: bytes) -> None:
    """Whatever the bytes, the file is named."""
    (make(tmp_path / "c") / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        look(tmp_path / "c", tmp_path)


def test_a_shard_of_the_index_that_is_missing_is_named(tmp_path: Path) -> None:
    """The index is believed over what lies around."""
    path = make(tmp_path / "c")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (path / shards.INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors"):
        look(path, tmp_path)


def test_a_tensor_of_the_index_that_no_shard_has_is_named(tmp_path: Path) -> None:
    """An index that promises more than the shards hold is an error."""
    path = make(tmp_path / "c")
    (path / shards.INDEX).write_text(json.dumps({"weight_map": {"ghost": "model.safetensors"}}))
    with pytest.raises(InputError, match="ghost"):
        look(path, tmp_path)


def test_pickles_alone_are_refused(tmp_path: Path) -> None:
    """A checkpoint of pickles could run code; it is refused by name."""
    path = make(tmp_path / "c")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(InputError, match="only pickle weights"):
        look(path, tmp_path)


def test_no_tokenizer_is_said(tmp_path: Path) -> None:
    """Weights alone are no checkpoint."""
    (make(tmp_path / "c") / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="no tokenizer"):
        look(tmp_path / "c", tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '{"model_type": "llama", "hidden_size": "wide"}'])
def test_a_config_that_says_nothing_is_said(tmp_path: Path, content: str) -> None:
    """Broken JSON and a missing model_type both name config.json."""
    (make(tmp_path / "c") / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"config\.json"):
        look(tmp_path / "c", tmp_path)


@pytest.mark.parametrize("revision", [None, "main", "abc123"])
def test_a_hub_id_needs_a_commit(tmp_path: Path, revision: str | None) -> None:
    """A branch can move, so only 40 hex digits will do."""
    with pytest.raises(InputError, match=r"checkpoint\.revision"):
        inspect(CheckpointConfig(source="owner/name", revision=revision), DigestCache(tmp_path / "d.json"))


def test_a_package_that_is_not_installed_is_said(tmp_path: Path) -> None:
    """package: sources name the package that is missing."""
    with pytest.raises(InputError, match="no_such_package_here"):
        inspect(CheckpointConfig(source="package:no_such_package_here/x.gguf"), DigestCache(tmp_path / "d.json"))


def test_a_file_that_is_no_gguf_is_said(tmp_path: Path) -> None:
    """Garbage with the right suffix is named."""
    (tmp_path / "x.gguf").write_bytes(b"not a gguf file at all, but long enough to be read as one")
    with pytest.raises(InputError, match=r"x\.gguf: not a readable GGUF"):
        look(tmp_path / "x.gguf", tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    """The stage reads every weight and names the bad tensor."""
    weights = np.ones((4, 4), np.float32)
    weights[2, 1] = value
    found = shards.nonfinite(make(tmp_path / "c", good=np.ones(3, np.float32), bad=weights))
    assert ["bad"] == found


def test_large_finite_weights_are_not_mistaken_for_infinite(tmp_path: Path) -> None:
    """A tensor whose sum overflows but whose values are finite is fine."""
    assert [] == shards.nonfinite(make(tmp_path / "c", big=np.full(8, 3e38, np.float32)))


def test_an_unknown_architecture_offers_the_closest(tmp_path: Path) -> None:
    """A model_type transformers does not know fails with the nearest one it does."""
    path = make(tmp_path / "c")
    (path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    config = inspect(CheckpointConfig(source=str(path)), DigestCache(tmp_path / "d.json")).config
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(InputError, match="did you mean 'llama'"):
        import_checkpoint(config, out)


def test_digests_follow_content_and_are_cached_by_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged file is not read again; a changed one has another digest."""
    path = make(tmp_path / "c")
    first = look(path, tmp_path).config.digest
    monkeypatch.setattr("pipelines.intake.digests.sha256_of", lambda _: pytest.fail("read again"))
    assert first == look(path, tmp_path).config.digest
    monkeypatch.undo()
    file = path / "config.json"
    file.write_text(file.read_text() + " ")
    assert first != look(path, tmp_path).config.digest


def test_a_damaged_digest_cache_costs_time_only(tmp_path: Path) -> None:
    """A cache that is not JSON is ignored and written anew."""
    path = make(tmp_path / "c")
    first = look(path, tmp_path).config.digest
    (tmp_path / "digests.json").write_text("{broken")
    assert first == look(path, tmp_path).config.digest


def test_same_content_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    """Where a checkpoint lies does not matter, nor do files that are not part of it."""
    one, other = make(tmp_path / "one"), make(tmp_path / "elsewhere" / "other")
    (other / "notes.md").write_text("mine")
    os.utime(other / "config.json", (0, 0))
    assert look(one, tmp_path).config.digest == look(other, tmp_path).config.digest


def test_what_a_slow_reader_found_is_read_once(tmp_path: Path) -> None:
    """The same content is not parsed twice, by this process or the next."""
    calls: list[int] = []

    def read() -> dict[str, int]:
        calls.append(1)
        return {"answer": 42}

    for _ in range(2):
        assert {"answer": 42} == DigestCache(tmp_path / "d.json").found_in("abc", read)
    assert [1] == calls


def test_weights_without_tensors_are_said(tmp_path: Path) -> None:
    """A valid file that holds nothing is no base."""
    path = make(tmp_path / "c")
    (path / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(InputError, match="hold no tensors"):
        look(path, tmp_path)


def test_a_base_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
    """Quantizing what is quantized is a mistake that would otherwise show hours later."""
    path = make(tmp_path / "c")
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(InputError, match="quantized already"):
        look(path, tmp_path)


def test_a_tokenizer_that_is_no_json_is_said(tmp_path: Path) -> None:
    """Found when planning, not when the first text is tokenized."""
    (make(tmp_path / "c") / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        look(tmp_path / "c", tmp_path)
