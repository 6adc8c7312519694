"""GPTQModel's AWQ and optimum's GPTQ: what a plan says against them, and what is mended of what they write."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from pipelines.errors import StageFailed
from pipelines.quantize import gptqmodel, optimum_gptq
from pipelines.quantize.codes import Codes
from pipelines.quantize.gptqmodel import AwqModelConfig
from pipelines.quantize.optimum_gptq import OptimumGptqConfig
from pipelines.quantize.optimum_gptq_run import mended
from tests.unit.test_packing import a_layer, gptq
from tests.unit.test_scheme import SMOLLM2


def awq(**given: Any) -> AwqModelConfig:
    return AwqModelConfig.model_validate({"scheme": "W4A16_G64_ASYM", **given})


def optimum(**given: Any) -> OptimumGptqConfig:
    return OptimumGptqConfig.model_validate({"scheme": "W4A16_G64", **given})


def base(**linears: tuple[int, int]) -> Any:
    named = {f"model.layers.0.{name.replace('__', '.')}": shape for name, shape in linears.items()}
    return SimpleNamespace(linear_shapes=named or SMOLLM2)


def test_the_demos_base_has_no_problems() -> None:
    """All its layers have outputs in multiples of 64."""
    assert [] == [*gptqmodel.preflight(awq(), base()), *optimum_gptq.preflight(optimum(), base())]


def test_outputs_that_the_search_or_the_packing_cannot_take_are_told() -> None:
    """96 outputs are packed but not searched, unless it is a query's; 12 are neither."""
    found = gptqmodel.preflight(awq(), base(self_attn__v_proj=(96, 64), self_attn__q_proj=(96, 64)))
    assert 1 == len(found)
    assert "the library searches clipping ranges 64 outputs at a time" in found[0].message
    assert "v_proj (96)" in found[0].message
    assert "q_proj" not in found[0].message
    narrow = base(self_attn__q_proj=(12, 64))
    assert "AWQ packs 8 outputs at a time" in gptqmodel.preflight(awq(), narrow)[0].message
    assert [] == gptqmodel.preflight(awq(ignore=["lm_head", r"re:.*q_proj"]), narrow)


@pytest.mark.parametrize("scheme", ["W8A16_G64", "W4A16", "W4A16_G256"])
def test_the_gemm_layout_has_groups_of_four_bits(scheme: str) -> None:
    """Anything else is no option."""
    with pytest.raises(ValidationError, match=r"it has W4A16_G16, .*W4A16_G128_ASYM"):
        awq(scheme=scheme)


def test_optimum_ignores_a_layer_in_all_blocks_or_in_none() -> None:
    """It knows layers by their names within a block."""
    torn = optimum_gptq.preflight(optimum(ignore=["lm_head", "model.layers.3.mlp.down_proj"]), base())
    assert "leaves mlp.down_proj alone in some decoder layers only" in torn[0].message
    assert [] == optimum_gptq.preflight(optimum(ignore=["lm_head", r"re:.*\.down_proj$"]), base())


def test_heads_stay_and_columns_have_one_order() -> None:
    """What the libraries cannot do, or what contradicts itself, is no option."""
    for make in (awq, optimum):
        with pytest.raises(ValidationError, match="leaves lm_head alone"):
            make(ignore=[])
    with pytest.raises(ValidationError, match="two orders of the same columns"):
        optimum(options={"desc_act": True})


@pytest.mark.parametrize(("stored_less", "format_"), [(1, "gptq"), (0, "gptq_v2")])
def test_the_declaration_follows_the_words_and_the_texts_go(tmp_path: Path, stored_less: int, format_: str) -> None:
    """optimum declares version 2 over words of version 1, and writes the calibration set into the checkpoint."""
    layer = Codes(a_layer().codes, a_layer().scales, None, 4, 32)
    said = {"format": "gptq_v2", "sym": True, "dataset": [{"input_ids": [[1, 2]]}], "damp_percent": 0.1}
    settings = mended(gptq(tmp_path, layer, stored_less, said))
    assert (format_, format_, 0.1) == (settings["format"], settings["checkpoint_format"], settings["damp_percent"])
    assert "dataset" not in json.dumps(settings)


def test_words_of_no_format_are_not_mended(tmp_path: Path) -> None:
    """Zero points all over the place have no declaration that would be true."""
    with pytest.raises(StageFailed, match="in no format of GPTQ"):
        mended(gptq(tmp_path, a_layer(), 1, {"sym": True}))


def test_mixed_words_are_not_mended(tmp_path: Path) -> None:
    """One layer in version 1 and one in version 2 have no common declaration."""
    from tests.unit.test_packing import MODULE, words, write

    layer = Codes(a_layer().codes, a_layer().scales, None, 4, 32)
    tensors: dict[str, np.ndarray] = {}
    for name, word in ((MODULE, 0x77777777), (MODULE.replace("up", "down"), 0x88888888)):
        tensors |= {
            f"{name}.qweight": words(layer.codes, 4).T,
            f"{name}.qzeros": np.full((2, 2), word, np.uint32).view(np.int32),
            f"{name}.scales": layer.scales.T.astype(np.float16),
        }
    with pytest.raises(StageFailed, match="in no format of GPTQ"):
        mended(write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "sym": True}))
