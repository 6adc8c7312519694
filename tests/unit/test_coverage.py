"""Per-layer facts: read from the files, complete, and a failure where a layer is not what was asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipelines.errors import InputError, StageFailed
from pipelines.quantize.coverage import Asked, Layer, account, density, expected, read, unmatched

UP, DOWN, ROUTER, EMBED = "m.layers.0.up_proj", "m.layers.0.down_proj", "m.layers.0.router", "m.embed_tokens"
Tensors = dict[str, np.ndarray]
ASKED = Asked("W4A16_G8", ignore=("lm_head", "re:.*router"))
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 8}, "input_activations": None}


def base_tensors() -> Tensors:
    return {
        f"{EMBED}.weight": np.ones((32, 16), np.float16),
        f"{UP}.weight": np.ones((24, 16), np.float16),
        f"{DOWN}.weight": np.ones((16, 24), np.float16),
        f"{ROUTER}.weight": np.ones((4, 16), np.float16),
    }


def packed(module: str, out: int, columns: int, group: int = 8) -> Tensors:
    """A layer as compressed-tensors packs it: eight 4-bit codes to a word."""
    return {
        f"{module}.weight_packed": np.zeros((out, columns // 8), np.int32),
        f"{module}.weight_scale": np.ones((out, columns // group), np.float16),
        f"{module}.weight_shape": np.array([out, columns], np.int64),
    }


def variant_tensors() -> Tensors:
    kept = {name: tensor for name, tensor in base_tensors().items() if "_proj" not in name}
    return kept | packed(UP, 24, 16) | packed(DOWN, 16, 24)


def save(directory: Path, tensors: Tensors, quantization: dict[str, Any] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = {"model_type": "llama"} | ({"quantization_config": quantization} if quantization else {})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


Make = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """Save a variant beside its base, which is in `base`."""
    save(tmp_path / "base", base_tensors())

    def make(tensors: Tensors, group: dict[str, Any] = GROUP, **more: Any) -> Path:
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
        return save(tmp_path / "variant", tensors, config | more)

    return make


def base_of(variant: Path) -> Path:
    return variant.parent / "base"


def test_every_layer_has_a_row(made: Make) -> None:
    """Quantized layers say to what and how well, kept ones why; the counts and densities follow from the files."""
    variant = made(variant_tensors())
    facts = account(variant, base_of(variant), Asked(ASKED.scheme, ignore=ASKED.ignore, errors={UP: 0.25}))
    assert [
        Layer(module=UP, scheme="W4A16_G8", bits=4, group_size=8, error=0.25),
        Layer(module=DOWN, scheme="W4A16_G8", bits=4, group_size=8),
        Layer(module=ROUTER, scheme="kept", reason="ignored by 're:.*router'", bits=16),
        Layer(module="lm_head", scheme="kept", reason="ignored by 'lm_head'; shares the embedding's tensor", bits=16),
    ] == sorted(read(variant), key=lambda row: [UP, DOWN, ROUTER, "lm_head"].index(row.module))
    assert (2, 2, "W4A16_G8 x 2") == (facts["quantized_modules"], facts["kept_modules"], facts["layer_schemes"])


def test_densities_count_scales_and_everything_stored(made: Make) -> None:
    """768 weights in 4 bits, 96 scales of 16, two shapes of 128 bits, 64 weights kept in 16; then the embedding."""
    variant = made(variant_tensors())
    linear = 768 * 4 + 96 * 16 + 2 * 128 + 64 * 16
    found = density(variant, base_of(variant))
    assert found["bits_per_linear_weight"] == pytest.approx(linear / (768 + 64), abs=1e-4)
    assert found["bits_per_weight"] == pytest.approx((linear + 512 * 16) / (768 + 64 + 512), abs=1e-4)


def test_a_layer_left_out_is_named(made: Make) -> None:
    """A layer that should be quantized and is still a plain weight fails the variant, and no layers.json is left."""
    tensors = {name: tensor for name, tensor in variant_tensors().items() if not name.startswith(DOWN)}
    variant = made(tensors | {f"{DOWN}.weight": np.ones((16, 24), np.float16)})
    with pytest.raises(StageFailed, match=f"1 of 2 layers were silently left unquantized: {DOWN}"):
        account(variant, base_of(variant), ASKED)
    assert not (variant / "layers.json").exists()


def test_a_layer_quantized_unasked_is_named(made: Make) -> None:
    """What the ignore list names must be as it was."""
    variant = made(variant_tensors())
    with pytest.raises(StageFailed, match=f"1 layers were quantized unasked: {UP}"):
        account(variant, base_of(variant), Asked(ASKED.scheme, ignore=(*ASKED.ignore, UP)))


def test_a_layer_stored_otherwise_is_named(made: Make) -> None:
    """One group size for the whole row is another scheme than groups of 8."""
    group = {**GROUP, "weights": {"num_bits": 4, "type": "int"}}
    variant = made(variant_tensors() | packed(DOWN, 16, 24, group=24), group)
    with pytest.raises(StageFailed, match=f"1 layers were stored otherwise than asked: {DOWN} in W4A16, not W4A16_G8"):
        account(variant, base_of(variant), ASKED)


def test_a_group_as_wide_as_the_row_is_one_scale_per_row(made: Make) -> None:
    """W4A16_G16 of a layer of 16 columns is what one scale per channel is."""
    group = {**GROUP, "weights": {"num_bits": 4, "type": "int", "group_size": 16}}
    kept = {name: tensor for name, tensor in base_tensors().items() if name.split(".")[-2] != "up_proj"}
    variant = made(kept | packed(UP, 24, 16, group=16), group)
    asked = Asked("W4A16_G16", ignore=(*ASKED.ignore, DOWN))
    assert "W4A16 x 1" == account(variant, base_of(variant), asked)["layer_schemes"]


def test_a_config_that_says_other_bits_is_refused(made: Make) -> None:
    """Readers trust config.json; where the tensors are packed otherwise they would load noise."""
    variant = made(variant_tensors(), {**GROUP, "weights": {"num_bits": 8, "type": "int", "group_size": 8}})
    with pytest.raises(StageFailed, match=r"config\.json says num_bits 8, where its tensors have 4"):
        account(variant, base_of(variant), ASKED)


def test_activations_and_cache_come_from_the_config(made: Make) -> None:
    """Tensors say nothing of what happens while running; config.json does."""
    inputs = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    scales = {f"m.layers.0.{part}_scale": np.ones(1, np.float32) for part in "kv"}
    group = {**GROUP, "input_activations": inputs}
    variant = made(variant_tensors() | scales, group, kv_cache_scheme={"num_bits": 8})
    found = account(variant, base_of(variant), Asked("", ignore=ASKED.ignore))
    assert "W4A8_INT8_DYNAMIC_G8_KVFP8 x 2" == found["layer_schemes"]
    assert "FP8, 2 scales" == found["kv_cache"]


def test_a_cache_format_without_scales_is_refused(made: Make) -> None:
    """A runtime would take 1 for each scale and cut keys and values off."""
    variant = made(variant_tensors(), kv_cache_scheme={"num_bits": 8})
    with pytest.raises(StageFailed, match="declares an FP8 cache, but has no scale for it"):
        account(variant, base_of(variant), Asked("", ignore=ASKED.ignore))


def test_an_ignore_entry_that_names_nothing_is_an_error(made: Make) -> None:
    """A typo would quantize the layer it meant to spare; the closest names are offered."""
    base = base_of(made(variant_tensors()))
    with pytest.raises(InputError, match=r"ignore='re:\.\*ruoter': names no linear layer .*allowed: lm_head"):
        expected(base, Asked(ignore=("re:.*ruoter",)))
    (problem,) = unmatched(("m.layers.0.up_prj", "lm_head"), [UP, DOWN], "variant.x.ignore")
    assert ("variant.x.ignore", f"did you mean '{UP}'") == (problem.key, problem.allowed.split("?")[0])


def test_ignoring_everything_is_an_error(made: Make) -> None:
    """A variant with nothing to quantize is a mistake."""
    with pytest.raises(InputError, match="is no layer"):
        expected(base_of(made(variant_tensors())), Asked(ignore=("re:.*",)))


def test_experts_in_one_tensor_are_not_passed_over(tmp_path: Path) -> None:
    """A tensor of all experts is no linear layer to a quantizer, which would leave it without a word."""
    fused = {"m.layers.0.experts.up": np.ones((2, 16, 16), np.float16)}
    base = save(tmp_path / "base", base_tensors() | fused)
    with pytest.raises(InputError, match=r"1 tensors hold all experts .*m\.layers\.0\.experts\.up"):
        expected(base, ASKED)
    assert [UP, DOWN] == sorted(expected(base, Asked(ignore=(*ASKED.ignore, "re:.*experts"))), reverse=True)
