"""The table of targets, and what is said against an ONNX Runtime engine before it is built."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from pipelines.engine.ort_check import compare
from pipelines.engine.ort_genai import OrtGenaiConfig, Perplexities
from pipelines.engine.pairing import Longest, Pairing, Workload
from pipelines.engine.table import TARGETS, Target, target
from pipelines.errors import ConfigError, StageFailed
from pipelines.flow.stage import resolve
from pipelines.quantize import scheme as schemes

DEVICE = {"memory_gib": "24"}
FUNCTIONS = ("preflight", "redundant", "serve", "misplaced", "capabilities")
ORT = TARGETS["ort_genai"]


@pytest.mark.parametrize("row", TARGETS.values(), ids=list(TARGETS))
def test_every_row_names_what_exists(row: Target) -> None:
    """Config and functions of each row can be imported."""
    for name in (row.config_type, row.build, *(f"{row.module}:{f}" for f in FUNCTIONS)):
        assert callable(resolve(name))
    assert ["config", "pairing"] == list(inspect.signature(resolve(f"{row.module}:preflight")).parameters)


def test_an_unknown_target_is_answered_with_the_closest() -> None:
    """A typo is a configuration error that says which target was meant."""
    with pytest.raises(ConfigError, match="did you mean 'ort_genai'"):
        target("ort_gena")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"architecture": "GPTBigCodeForCausalLM"}, "no such architecture"),
        ({"quant_method": "olive"}, "codes of this method"),
        ({"scheme": "W3A16_G64"}, "4- and 8-bit codes"),
        ({"scheme": "W4A16_G24"}, "multiple of 16"),
        ({"max_positions": 1024}, "the model knows 1024 positions"),
        ({"parameters": 70_000_000_000}, "24 GiB"),
    ],
)
def test_what_would_fail_is_said_before_work_starts(facts: dict[str, str | int], said: str) -> None:
    """Each fact that a build could not live with is one problem with its reason."""
    problems = ORT.preflight(OrtGenaiConfig(), Pairing(facts, device=DEVICE))
    assert 1 == len(problems)
    assert said in str(problems[0])


def test_requests_that_an_engine_cannot_hold_are_told_with_their_origin() -> None:
    """2,049 tokens do not fit 2,048; the largest request is named with who sends it."""
    asked = Workload(request=Longest(2049, "the probe"))
    (problem,) = ORT.preflight(OrtGenaiConfig(), Pairing(workload=asked))
    assert "engine.max_length=2048: the longest request, of the probe, takes 2049 tokens" in str(problem)
    assert [] == ORT.preflight(OrtGenaiConfig(max_length=2049), Pairing(workload=asked))


def test_a_variant_that_fits_raises_no_problem() -> None:
    """The demo's own facts pass."""
    facts = {
        "architecture": "LlamaForCausalLM", "quant_method": "compressed-tensors", "scheme": "W4A16_G64",
        "parameters": 134_515_008, "max_positions": 8192,
    }  # fmt: skip
    assert [] == ORT.preflight(OrtGenaiConfig(), Pairing(facts, device=DEVICE))


@pytest.mark.parametrize(
    ("level", "scheme", "same"),
    [
        (4, "BF16", True),
        (4, "W8A8_FP8_DYNAMIC", True),
        (4, "W4A16_G64", False),
        (1, "BF16", False),
        (1, "W4A16_G64", False),
    ],
)
def test_int8_activations_are_redundant_without_integer_codes(level: int, scheme: str, same: bool) -> None:
    """accuracy_level 4 touches only carried codes, so plain and FP8 variants have no such engine."""
    reason = ORT.redundant(OrtGenaiConfig.model_validate({"accuracy_level": level}), schemes.parse(scheme))
    assert same == (reason is not None)


@pytest.mark.parametrize(
    ("engine", "emulated", "drift"),
    [(10.0, False, 1.4), (10.0, True, 1.0), (16.0, True, 16 / 14), (8.0, True, 9 / 8), (14.0, False, 1.0)],
)
def test_an_engine_that_leaves_roundings_out_may_lie_between_base_and_variant(
    engine: float, emulated: bool, drift: float
) -> None:
    """With a base of 9 and a variant of 14, an emulated engine at 10 is as it should be, a native one is not."""
    assert drift == pytest.approx(Perplexities(engine, 14.0, 9.0, emulated).drift())


def test_divergence_is_that_of_the_definition() -> None:
    """KL((1/2, 1/2) || (1/4, 3/4)) is 0.5 ln 2 + 0.5 ln (2/3), about 0.1438 nats; one of two top tokens agrees."""
    reference = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], dtype=np.float32))
    engine = np.log(np.array([[0.25, 0.75], [0.9, 0.1]], dtype=np.float32))
    found = compare(reference, engine)
    assert found.kl_mean == pytest.approx((0.5 * np.log(2) + 0.5 * np.log(2 / 3)) / 2, rel=1e-6)
    assert found.max_abs_dlogit == pytest.approx(np.log(2), rel=1e-6)
    assert 0.5 == found.top1


def test_logits_of_another_shape_are_no_comparison() -> None:
    """An engine with another vocabulary is not the variant."""
    with pytest.raises(StageFailed, match="shape"):
        compare(np.zeros((2, 4), np.float32), np.zeros((2, 5), np.float32))
