"""Inputs rounded as a checkpoint has them, against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipelines.errors import StageFailed
from pipelines.quantize.rounding import Rounding, rounded, rounding_of
from pipelines.quantize.scheme import parse
from pipelines.quantize.shards import Shards
from pipelines.quantize.stored import scheme_of

M = "m.up_proj"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_int8_inputs_are_multiples_of_the_scale_within_a_byte() -> None:
    """With a scale of 0.5: 0.7 is nearest to one step, halves go to the even one, and 127 steps are the most."""
    x = torch.tensor([0.7, 0.75, -0.25, 1000.0, -1000.0])
    assert [0.5, 1.0, 0.0, 63.5, -64.0] == rounded(x, Rounding("int8", 0.5)).tolist()


def test_float8_inputs_have_three_bits_behind_the_point() -> None:
    """Between 16 and 32 E4M3 has steps of 2, from 256 on of 32, and 448 is the most it holds."""
    x = torch.tensor([17.1, 18.9, -270.0, 460.0, 2.0**-9])
    assert [18.0, 18.0, -256.0, 448.0, 2.0**-9] == rounded(x, Rounding("float8", 1.0)).tolist()
    assert [36.0] == rounded(torch.tensor([35.0]), Rounding("float8", 2.0)).tolist()


@pytest.mark.parametrize("sign", [1, -1])
def test_float4_inputs_go_to_the_nearest_value_and_ties_to_the_even_one(sign: int) -> None:
    """With a block's largest number at 6, its scale is 1: halfway numbers go to 0, 1, 2, 4, whose last bit is 0."""
    x = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.26, 0.74, 5.1, 3.4, 0, 0, 0, 0])
    wanted = [6.0, 0, 1, 1, 2, 2, 4, 4, 0.5, 0.5, 6, 3, 0, 0, 0, 0]
    assert [sign * w for w in wanted] == rounded(sign * x, Rounding("float4", 1.0, 16)).tolist()


def test_float4_scales_of_blocks_are_e4m3_numbers_times_the_tensors_own() -> None:
    """A block up to 12.6 has the scale 2.1 / 1, of which the nearest E4M3 number is 2; its 12.6 becomes 12."""
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 16] = 12.6, 6.0
    found = rounded(x, Rounding("float4", 1.0, 16))
    assert (12.0, 6.0) == (float(found[0, 0]), float(found[1, 16]))
    assert torch.equal(found == 0, x == 0)


def test_float4_gives_only_what_four_bits_hold() -> None:
    """Whatever comes in, each block is its scale times one of fifteen values."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32))
    found = rounded(x, Rounding("float4", 0.001, 16)).reshape(-1, 16)
    for block in found.numpy():
        steps = np.abs(block) / np.abs(block).max()
        assert {round(float(s), 5) for s in steps} <= {round(v / top, 5) for top in (6, 4, 3) for v in E2M1}


def saved(directory: Path, algorithm: str, **tensors: torch.Tensor) -> tuple[Shards, dict[str, Any]]:
    save_file({f"{M}.{name}": tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}))
    return Shards(directory), config


FP8 = {"weight": torch.zeros(4, 32).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.5)}
INT4 = {"weight": torch.zeros(2, 32, dtype=torch.uint8), "weight_scale": torch.ones(4, 2)}
FP4 = {
    "weight": torch.zeros(4, 16, dtype=torch.uint8),
    "weight_scale": torch.ones(4, 2).to(torch.float8_e4m3fn),
    "weight_scale_2": torch.tensor(0.5),
}
INT8 = {"weight": torch.zeros(4, 32, dtype=torch.int8), "weight_scale": torch.ones(4)}
INPUT = {"input_scale": torch.tensor(0.25)}


@pytest.mark.parametrize(
    ("algorithm", "tensors", "scheme", "rounding"),
    [
        ("FP8", FP8 | INPUT, "W8A8_FP8_STATIC_TENSOR", Rounding("float8", 0.25)),
        ("FP8_PER_CHANNEL_PER_TOKEN", FP8 | {"weight_scale": torch.ones(4)}, "W8A8_FP8_DYNAMIC", None),
        ("NVFP4", FP4 | INPUT, "W4A4_NVFP4", Rounding("float4", 0.25, 16)),
        ("W4A16_NVFP4", FP4, "W4A16_NVFP4", None),
        ("W4A16_AWQ", INT4, "W4A16_G16", None),
        ("W4A8_AWQ", INT4 | INPUT, "W4A8_FP8_STATIC_G16", Rounding("float8", 0.25)),
        ("W8A8_SQ_PER_CHANNEL", INT8 | INPUT, "W8A8_INT8_STATIC", Rounding("int8", 0.25)),
    ],
)
def test_an_algorithms_name_says_how_inputs_are_rounded(
    tmp_path: Path, algorithm: str, tensors: dict[str, torch.Tensor], scheme: str, rounding: Rounding | None
) -> None:
    """The scheme is read from tensors and quant_algo together, the scale of inputs from the layer."""
    shards, config = saved(tmp_path, algorithm, **tensors)
    found = scheme_of(shards, M, config)
    assert (parse(scheme), rounding) == (found, rounding_of(shards, M, found))


@pytest.mark.parametrize(
    ("algorithm", "tensors", "match"),
    [
        ("FP8", INT4 | INPUT, r"says num_bits 8, where its tensors have 4"),
        ("NVFP4", INT4 | INPUT, r"says type float, where its tensors have int"),
        ("FP8", FP8, r"there is no m\.up_proj\.input_scale"),
        ("W4A8_NVFP4_FP8", FP4, r"'W4A8_NVFP4_FP8' cannot be read .*NVFP4"),
    ],
)
def test_an_algorithm_that_the_tensors_contradict_is_refused(
    tmp_path: Path, algorithm: str, tensors: dict[str, torch.Tensor], match: str
) -> None:
    """A reader that believes the name would load noise."""
    shards, config = saved(tmp_path, algorithm, **tensors)
    with pytest.raises(StageFailed, match=match):
        scheme_of(shards, M, config)
