"""Checks of saved variants: each failure that libraries exit cleanly with is caught from the files alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipelines.errors import InputError, StageFailed
from pipelines.quantize import baseline, checks
from pipelines.quantize.carry import carry_over
from pipelines.quantize.checks import check_saved, linear_shapes, targeted

UP, DOWN, NORM, EMBED = "model.layers.0.up_proj", "model.layers.0.down_proj", "model.norm", "model.embed_tokens"
Tensors = dict[str, np.ndarray]


def base_tensors() -> Tensors:
    return {
        f"{EMBED}.weight": np.ones((32, 16), np.float32),
        f"{UP}.weight": np.ones((24, 16), np.float32),
        f"{DOWN}.weight": np.ones((16, 24), np.float32),
        f"{NORM}.weight": np.ones(16, np.float32),
    }


def packed(module: str, out: int, columns: int) -> Tensors:
    """A layer as compressed-tensors packs it: eight 4-bit codes to a word, groups of 8."""
    return {
        f"{module}.weight_packed": np.zeros((out, columns // 8), np.int32),
        f"{module}.weight_scale": np.ones((out, columns // 8), np.float32),
        f"{module}.weight_shape": np.array([out, columns], np.int64),
    }


def variant_tensors() -> Tensors:
    kept = {name: tensor for name, tensor in base_tensors().items() if "_proj" not in name}
    return kept | packed(UP, 24, 16) | packed(DOWN, 16, 24)


def save(directory: Path, tensors: Tensors, quantization: Mapping[str, object] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = {"model_type": "llama", "dtype": "float32"} | (
        {"quantization_config": quantization} if quantization else {}
    )
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Tensors], Path]:
    """Save a variant beside its base, which is in `base`."""
    save(tmp_path / "base", base_tensors())
    pack = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return lambda tensors: save(tmp_path / "variant", tensors, pack)


def check(variant: Path, *more: str) -> None:
    check_saved(variant, variant.parent / "base", [UP, DOWN, *more])


def test_a_sound_variant_passes(saved: Callable[[Tensors], Path]) -> None:
    """Two packed layers, the base's other tensors, and a shared head that is in no file."""
    check(saved(variant_tensors()))


def test_unknown_tensors_are_named(saved: Callable[[Tensors], Path]) -> None:
    """A tensor that is neither the base's nor part of a quantized layer is an error, not a curiosity."""
    with pytest.raises(StageFailed, match=r"unknown: model\.rotation"):
        check(saved(variant_tensors() | {"model.rotation": np.ones(2, np.float32)}))


def test_missing_tensors_are_named(saved: Callable[[Tensors], Path]) -> None:
    """A tensor of the base that is not quantized must still be there."""
    tensors = variant_tensors()
    del tensors[f"{NORM}.weight"]
    with pytest.raises(StageFailed, match=r"missing: model\.norm\.weight"):
        check(saved(tensors))


def test_a_doubled_head_is_found(saved: Callable[[Tensors], Path]) -> None:
    """A head that shares the embedding's tensor must not be written out a second time."""
    with pytest.raises(StageFailed, match="shared head"):
        check(saved(variant_tensors() | {"lm_head.weight": np.ones((32, 16), np.float32)}))


def test_a_head_with_codes_of_its_own_is_part_of_the_variant(saved: Callable[[Tensors], Path]) -> None:
    """An untied, quantized head is as good as any other quantized layer."""
    check(saved(variant_tensors() | packed("lm_head", 32, 16)), "lm_head")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_must_be_finite(saved: Callable[[Tensors], Path], value: float) -> None:
    """One scale that is no number makes a whole group noise."""
    tensors = variant_tensors()
    tensors[f"{UP}.weight_scale"][3, 1] = value
    with pytest.raises(StageFailed, match=f"1 layers have scales that are not finite: {UP}"):
        check(saved(tensors))


def test_pickles_are_refused(saved: Callable[[Tensors], Path]) -> None:
    """A variant with a file that runs code when loaded is not one."""
    variant = saved(variant_tensors())
    (variant / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(StageFailed, match=r"pickles.*pytorch_model\.bin"):
        check(variant)


def test_linear_shapes_come_from_headers(tmp_path: Path) -> None:
    """Matrices but no embeddings or norms; a head that shares the embedding's tensor has its shape."""
    shapes = linear_shapes(save(tmp_path, base_tensors()))
    assert {UP: (24, 16), DOWN: (16, 24), "lm_head": (32, 16)} == shapes


def test_targets_and_ignored_layers() -> None:
    """Linear is every layer; names and patterns narrow it; what is ignored never counts."""
    layers = ["a.up", "a.down", "lm_head"]
    assert ["a.up", "a.down"] == targeted(layers, ["Linear"], ["lm_head"])
    assert ["a.up"] == targeted(layers, ["re:.*up$", "lm_head"], ["re:lm_.*"])


def test_what_libraries_rewrite_is_put_back(tmp_path: Path) -> None:
    """Tokenizer, template, generation settings and licences are the base's bytes; what it lacks is removed."""
    base, variant = tmp_path / "base", tmp_path / "variant"
    for directory, names in (
        (base, ["tokenizer.json", "generation_config.json", "LICENSE", "config.json"]),
        (variant, []),
    ):
        directory.mkdir()
        for name in names:
            (directory / name).write_text("from the base")
    for name in ("generation_config.json", "chat_template.jinja", "config.json"):
        (variant / name).write_text("from the library")
    assert ["LICENSE", "generation_config.json", "tokenizer.json"] == carry_over(base, variant)
    assert ["LICENSE", "config.json", "generation_config.json", "tokenizer.json"] == sorted(
        p.name for p in variant.iterdir()
    )
    assert "from the base" == (variant / "generation_config.json").read_text()
    assert "from the library" == (variant / "config.json").read_text()


def test_the_baseline_is_linked_and_not_copied(tmp_path: Path) -> None:
    """The unchanged variant takes no room, leaves the base's manifest behind, and knows its scheme from the weights."""
    base, out = save(tmp_path / "base", base_tensors()), tmp_path / "out"
    (base / "manifest.json").write_text("{}")
    out.mkdir()
    facts = baseline.run(baseline.BaselineConfig(), out, checkpoint=base)
    assert ["config.json", "model.safetensors"] == sorted(p.name for p in out.iterdir() if p.is_symlink())
    assert ("FP32", 0) == (facts["scheme"], facts["quantized_modules"])
    assert checks.linear_shapes(out) == linear_shapes(base)


def test_a_quantized_base_has_no_baseline(tmp_path: Path) -> None:
    """A checkpoint that is quantized already is no base to compare with."""
    base, out = save(tmp_path / "base", base_tensors(), {"quant_method": "gptq"}), tmp_path / "out"
    out.mkdir()
    with pytest.raises(InputError, match="quantized already"):
        baseline.run(baseline.BaselineConfig(), out, checkpoint=base)
