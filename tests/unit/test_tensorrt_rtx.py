"""The TensorRT-RTX target: what it is asked, what is said against it beforehand, and how codes are laid out for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from pipelines.engine.pairing import Pairing
from pipelines.engine.plain_codes import carried, exact
from pipelines.engine.rtx_compile import shapes
from pipelines.engine.table import TARGETS
from pipelines.engine.tensorrt_rtx import TensorrtRtxConfig
from pipelines.errors import EndpointError, StageFailed
from pipelines.quantize.codes import Codes, Scaled, dequantize

RTX = TARGETS["tensorrt_rtx"]
FACTS = {
    "architecture": "LlamaForCausalLM", "scheme": "W4A16_G64", "quant_method": "compressed-tensors",
    "parameters": 134_515_008, "max_positions": 8192,
}  # fmt: skip
DEVICE = {"memory_gib": "24", "gpu": "none"}
RTX_ENGINE = Path("engine")


def said(changes: dict[str, Any], **config: Any) -> list[str]:
    """What a preflight says of the demo's facts with these changes."""
    pairing = Pairing(FACTS | changes, device=DEVICE, free_bytes=10**10)
    return [str(p) for p in RTX.preflight(TensorrtRtxConfig.model_validate(config), pairing)]


def test_what_fits_raises_no_problem_and_needs_no_gpu() -> None:
    """The demo's own facts pass on a machine without one."""
    assert [] == said({})


@pytest.mark.parametrize(
    ("scheme", "sms", "dtype", "refused"),
    [
        ("W8A8_FP8_STATIC", [80], "bfloat16", "float8 cannot be compiled for SM 80"),
        ("W8A8_FP8_STATIC", [80, 86, 89, 120], "bfloat16", "float8 cannot be compiled for SM 80, SM 86"),
        ("W8A8_FP8_STATIC", [89, 120], "bfloat16", None),
        ("W4A16_G64", [75], "float16", "int4 cannot be compiled for SM 75"),
        ("W4A16_G64", [80, 86, 89, 120, 121], "bfloat16", None),
        ("W8A16", [75], "float16", None),
        ("BF16", [75], "float16", None),
        ("BF16", [75, 80], "bfloat16", "bfloat16 cannot be compiled for SM 75"),
        ("BF16", [75, 121], "float16", None),
    ],
)
def test_formats_are_refused_where_the_compiler_refuses_them(
    scheme: str, sms: list[int], dtype: str, refused: str | None
) -> None:
    """The matrix is what TensorRT-RTX 1.7.1 itself compiled and refused, one toy product for each pair."""
    found = said({"scheme": scheme}, compute_capabilities=sms, graph={"dtype": dtype})
    assert (0 if refused is None else 1) == len(found)
    assert refused is None or refused in found[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "GemmaForCausalLM"}, "no plain graph of this architecture"),
        ({"quant_method": "bitsandbytes"}, "codes of this method are not read"),
        ({"scheme": "W4A16_G64_ASYM"}, "no zero points of weights (a symmetric scheme, such as W4A16_G64)"),
        ({"scheme": "W8A8_FP8_DYNAMIC_BLOCK128"}, "scales of blocks of rows are not carried"),
        ({"scheme": "W3A16_G64"}, "int3 weights are not carried"),
        ({"scheme": "W4A4_NVFP4"}, "float4 weights are not carried"),
        ({"scheme": "W8A8_FP8_STATIC_KVFP8"}, "keeps its cache in the type it computes in"),
        ({"max_positions": 1024}, "the model knows 1024 positions"),
        ({"parameters": 7 * 10**9}, "GiB of memory (there are 24 GiB)"),
    ],
)
def test_what_would_fail_is_said_before_work_starts(changes: dict[str, Any], message: str) -> None:
    """Each fact that a build could not live with is a problem with its reason."""
    assert any(message in line for line in said(changes, compute_capabilities=[89]))


def test_all_problems_are_told_at_once() -> None:
    """Architecture, GPU, length, memory and disk together."""
    wrong = {"architecture": "GPT2LMHeadModel", "scheme": "W8A8_FP8_DYNAMIC", "max_positions": 64, "parameters": 10**11}
    assert 5 == len(said(wrong, compute_capabilities=[80]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compute_capabilities": [90]}, "75, 80, 86, 89, 120 or 121"),
        ({"compute_capabilities": [89, 80]}, "ascending order"),
        ({"compute_capabilities": [89, 89]}, "ascending order"),
        ({"max_prompt": 4096}, "max_prompt=4096 is above max_length=2048"),
    ],
)
def test_nonsense_is_refused(given: dict[str, Any], message: str) -> None:
    """Data-centre GPUs have no TensorRT-RTX, and a list means one thing."""
    with pytest.raises(ValidationError, match=message.replace("(", r"\(")):
        TensorrtRtxConfig.model_validate(given)


def test_shapes_of_one_call_agree_with_each_other() -> None:
    """In every corner the mask is as long as cache and tokens together; an empty cache is the first call."""
    limits = {"batch": 4, "prompt": 128, "length": 512}
    tokens = shapes(limits, "input_ids", [-1, -1])
    mask = shapes(limits, "attention_mask", [-1, -1])
    cache = shapes(limits, "past_key_values.3.key", [-1, 3, -1, 64])
    assert ([1, 1], [1, 1], [4, 128]) == tokens
    assert ([1, 3, 0, 64], [1, 3, 256, 64], [4, 3, 511, 64]) == cache
    assert [t[1] + c[2] for t, c in zip(tokens, cache, strict=True)] == [m[1] for m in mask]


def test_nothing_serves_it() -> None:
    """The row says so at plan time, and asking for a command is an error that says so too."""
    assert "no server" in RTX.unserved
    with pytest.raises(EndpointError, match="built, not judged"):
        RTX.serve(RTX_ENGINE, 8000, 1)
    assert not RTX.capabilities(RTX_ENGINE).scores_prompts


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 128), (8, 64), (8, 128)])
def test_codes_are_carried_as_they_are(bits: int, group: int) -> None:
    """Signed codes times the same scales are the weight, to the last bit; int4 is what ONNX calls INT4."""
    random = np.random.default_rng(bits * group)
    codes = random.integers(0, 1 << bits, (6, 128), dtype=np.uint8)
    layer = Codes(codes, random.random((6, 128 // group), dtype=np.float32), None, bits, group)
    held = carried(layer)
    assert (ml_dtypes.int4 if bits == 4 else np.int8) == held.codes.dtype
    assert (0 if bits == 8 and group == 128 else group) == held.block
    wide = held.codes.astype(np.float32)
    scales = held.scales[:, None] if held.scales.ndim == 1 else np.repeat(held.scales, group, axis=1)
    np.testing.assert_array_equal(dequantize(layer), wide * scales)


def test_columns_in_another_order_are_put_in_the_order_of_their_groups() -> None:
    """A layer whose inputs belong to scattered groups is the same layer with its inputs gathered first."""
    random = np.random.default_rng(5)
    index = np.array([1, 0, 0, 1], np.int32)
    layer = Codes(random.integers(0, 16, (3, 4), dtype=np.uint8), np.ones((3, 2), np.float32), None, 4, 2, index)
    held = carried(layer)
    assert held.columns is not None
    assert [0, 0, 1, 1] == index[held.columns].tolist()
    np.testing.assert_array_equal(dequantize(layer)[:, held.columns], held.codes.astype(np.float32))


def test_8_bit_floats_keep_their_values() -> None:
    """E4M3 numbers are stored as such; others would be rounded, so they are refused."""
    values = np.array([[448.0, -0.015625, 0.0], [1.75, -240.0, 2.0**-9]], np.float32)
    held = carried(Scaled(values, np.array([[2.0], [0.5]], np.float32)))
    np.testing.assert_array_equal(values, held.codes.astype(np.float32))
    assert ((2,), 0) == (held.scales.shape, held.block)
    with pytest.raises(StageFailed, match="not E4M3"):
        carried(Scaled(np.array([[57344.0]], np.float32), np.ones((1, 1), np.float32)))
    with pytest.raises(StageFailed, match="2x3"):
        carried(Scaled(values, np.ones((2, 3), np.float32)))


def test_zero_points_are_refused() -> None:
    """TensorRT multiplies codes by scales and subtracts nothing."""
    codes = np.zeros((2, 4), np.uint8)
    with pytest.raises(StageFailed, match="zero points"):
        carried(Codes(codes, np.ones((2, 1), np.float32), np.full((2, 1), 3, np.uint8), 4, 4))


@pytest.mark.parametrize(
    ("value", "first", "kind"),
    [
        (0.5, "bfloat16", "bfloat16"),
        (1 + 2**-10, "bfloat16", "float16"),  # eleven bits, of which bfloat16 has eight
        (2.0**-20 * (1 + 2**-7), "float16", "bfloat16"),  # too small for float16 to hold eight bits
        (1 + 2**-20, "bfloat16", "float32"),
    ],
)
def test_a_number_is_stored_in_the_first_type_that_holds_it_exactly(value: float, first: str, kind: str) -> None:
    """A scale is never rounded: where the graph's own type cannot hold it, another does and is cast afterwards."""
    assert kind == exact(np.array([value], np.float32), first)
