"""Schemes: names round-trip, and every layer a group size does not divide is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.quantize.scheme import (
    Misfit,
    Scheme,
    fitting_groups,
    folded,
    misfit_problems,
    misfits,
    of_dtype,
    parse,
    supported,
)

SMOLLM2 = {
    **{f"model.layers.{i}.self_attn.{p}_proj": (192 if p in "kv" else 576, 576) for i in range(30) for p in "qkvo"},
    **{f"model.layers.{i}.mlp.{p}_proj": (1536, 576) for i in range(30) for p in ("gate", "up")},
    **{f"model.layers.{i}.mlp.down_proj": (576, 1536) for i in range(30)},
    "lm_head": (49152, 576),
}


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    """Any scheme that has a name."""
    kv = draw(st.sampled_from(["FP8", None]))
    if draw(st.integers(0, 4)) == 0:
        activation = draw(st.sampled_from([(4, "float"), (None, None)]))
        return Scheme(4, "float", "group", draw(st.sampled_from([16, 32])), *activation, kv=kv)
    floating = draw(st.booleans())
    quantized_activations = draw(st.booleans())
    mixed = not floating and quantized_activations and draw(st.booleans())  # integers times 8-bit floats
    granularity = draw(st.sampled_from(["channel", "group", "tensor", "block"]))
    return Scheme(
        weight_bits=8 if floating else draw(st.integers(2, 7 if mixed else 8)),
        weight_type="float" if floating else "int",
        granularity=granularity,
        group_size=draw(st.integers(1, 512)) if granularity in ("group", "block") else None,
        activation_bits=8 if quantized_activations else None,
        activation_type=("float" if floating or mixed else "int") if quantized_activations else None,
        dynamic=draw(st.booleans()) if quantized_activations else True,
        symmetric=floating or mixed or draw(st.booleans()),
        kv=kv,
    )


@given(schemes())
def test_a_name_says_everything(scheme: Scheme) -> None:
    """Printing a scheme and parsing its name gives the scheme back."""
    assert scheme == parse(str(scheme))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("W4A16_G64", Scheme(4, granularity="group", group_size=64)),
        ("W8A16_G64", Scheme(8, granularity="group", group_size=64)),
        ("W4A16", Scheme(4)),
        ("w4a16_g128_asym", Scheme(4, granularity="group", group_size=128, symmetric=False)),
        ("W8A8_FP8_DYNAMIC", Scheme(8, "float", activation_bits=8, activation_type="float")),
        ("W8A8_FP8", Scheme(8, "float", activation_bits=8, activation_type="float")),
        (
            "W8A8_FP8_STATIC_TENSOR",
            Scheme(8, "float", "tensor", activation_bits=8, activation_type="float", dynamic=False),
        ),
        ("W8A8_INT8", Scheme(8, activation_bits=8, activation_type="int")),
        (
            "W4A8_FP8_STATIC_G128",
            Scheme(4, "int", "group", 128, activation_bits=8, activation_type="float", dynamic=False),
        ),
        ("W4A16_NVFP4", Scheme(4, "float", "group", 16)),
        ("W4A4_NVFP4", Scheme(4, "float", "group", 16, 4, "float")),
        ("W4A16_MXFP4", Scheme(4, "float", "group", 32)),
        ("W8A8_FP8_DYNAMIC_KVFP8", Scheme(8, "float", activation_bits=8, activation_type="float", kv="FP8")),
        ("W4A16_G64_KVFP8", Scheme(4, granularity="group", group_size=64, kv="FP8")),
        ("BF16", Scheme(16, "bfloat")),
        ("FP32", Scheme(32, "float")),
    ],
)
def test_usual_names(name: str, scheme: Scheme) -> None:
    """The names used in the field mean what they mean there, whatever their case."""
    assert scheme == parse(name)


@pytest.mark.parametrize(
    "name",
    [
        "AWQ",
        "W4",
        "W4A16_G0",
        "W16A16",
        "W8A4",
        "W8A8",
        "W4A16_DYNAMIC",
        "W4A16_FP8",
        "W4A8_FP8_ASYM",
        "",
        "W4A16_",
        "W4A8_NVFP4",
        "W4A4",
        "W4A4_MXFP4_G64",
        "W8A8_FP8_KVINT8",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    """What is not a scheme is a ValueError, never a guess."""
    with pytest.raises(ValueError, match=r"write|bits|is a positive|there is no|fixes"):
        parse(name)


def test_a_dtype_is_a_scheme() -> None:
    """A checkpoint that is not quantized has the scheme of its dtype."""
    assert ["BF16", "FP16", "FP32"] == [str(of_dtype(d)) for d in ("bfloat16", "float16", "float32")]


def test_group_128_misfits_hidden_size_576() -> None:
    """With hidden size 576, group 128 misfits six of seven linear layers of each of the 30 blocks."""
    assert 180 == len(misfits(parse("W4A16_G128"), SMOLLM2, ["lm_head"]))


def test_group_64_fits_hidden_size_576() -> None:
    """576 = 9 x 64 and 1536 = 24 x 64, so 16, 32 and 64 fit everywhere."""
    assert ([], (16, 32, 64)) == (misfits(parse("W4A16_G64"), SMOLLM2), fitting_groups(SMOLLM2))


def test_one_scale_per_channel_fits_everything() -> None:
    """Without groups there is nothing to divide."""
    assert [] == misfits(parse("W8A8_FP8_DYNAMIC"), SMOLLM2)


def test_blocks_must_divide_both_sides() -> None:
    """A 128 x 128 block misfits by height as well as by width."""
    assert [Misfit("a", 192, 128)] == misfits(parse("W8A8_FP8_BLOCK128"), {"a": (192, 256), "b": (128, 128)})


def test_a_block_that_does_not_fit_is_one_problem() -> None:
    """Layers are counted once though both sides may misfit, and no group size is offered for a block."""
    (problem,) = misfit_problems("variant.fp8.scheme", parse("W8A8_FP8_BLOCK128"), SMOLLM2, ["lm_head"])
    assert "128 does not divide both sides of 210 layers: model.layers.{0-29}.self_attn.q_proj (576)" in str(problem)
    assert "one scale per channel, without _BLOCK" in str(problem)


def test_the_problem_names_every_layer_once() -> None:
    """Layers that differ in their number share a line; nothing is left out; the sizes that fit are offered."""
    (problem,) = misfit_problems("variant.gptq.scheme", parse("W4A16_G128"), SMOLLM2, ["lm_head"])
    assert "variant.gptq.scheme='W4A16_G128'" in str(problem)
    assert "180 layers: model.layers.{0-29}.self_attn.q_proj (576)" in str(problem)
    assert "would fit all: G16, G32, G64" in str(problem)


def test_gaps_in_layer_numbers_are_shown() -> None:
    """Folding keeps gaps, so that no layer is named that fits."""
    found = [Misfit(f"m.{i}.up", 10, 4) for i in (0, 1, 2, 5)] + [Misfit("head", 10, 4)]
    assert [("m.{0-2,5}.up", 10), ("head", 10)] == folded(found)


@given(st.dictionaries(st.text("abc.", min_size=1), st.tuples(st.integers(1, 512), st.integers(1, 512))))
def test_fitting_groups_fit(shapes: dict[str, tuple[int, int]]) -> None:
    """Every group size offered leaves no misfit."""
    assert all(not misfits(parse(f"W4A16_G{g}"), shapes) for g in fitting_groups(shapes))


def test_ignored_layers_are_not_misfits() -> None:
    """An ignore list takes exact names and `re:` patterns."""
    shapes = {"lm_head": (8, 10), "model.vision.fc": (8, 10), "model.fc": (8, 10)}
    assert ["model.fc"] == [m.layer for m in misfits(parse("W4A16_G64"), shapes, ["lm_head", "re:.*vision"])]


def test_patterns_say_what_a_quantizer_supports() -> None:
    """W4A16_G* takes any group size and nothing asymmetric unless it says so."""
    patterns = ("W4A16", "W4A16_G[0-9]*[0-9]")
    names = ("W4A16", "W4A16_G64", "W8A16_G64", "W4A16_G64_ASYM")
    assert [True, True, False, False] == [supported(parse(n), patterns) for n in names]


def test_a_cache_format_is_supported_where_it_is_named() -> None:
    """A cache format comes on top of a scheme that is supported, where the quantizer has it at all."""
    names = ("W4A16_G64_KVFP8", "W4A16_KVFP8", "W8A16_KVFP8")
    assert [False] * 3 == [supported(parse(n), ("W4A16", "W4A16_G*[0-9]")) for n in names]
    assert [True, True, False] == [supported(parse(n), ("W4A16", "W4A16_G*[0-9]", "*_KVFP8")) for n in names]
