"""Estimates of quantizing: what they grow with, and that they come near what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.quantize.estimate import START_S, Effort, Job, effort_of, estimate
from pipelines.quantize.llmcompressor import GptqOptions, RtnOptions, SequentialOptions

SHAPES = {
    **{f"model.layers.{i}.self_attn.{p}_proj": (192 if p in "kv" else 576, 576) for i in range(30) for p in "qkvo"},
    **{f"model.layers.{i}.mlp.{p}_proj": (1536, 576) for i in range(30) for p in ("gate", "up")},
    **{f"model.layers.{i}.mlp.down_proj": (576, 1536) for i in range(30)},
}
JOB = Job(SHAPES, 134_515_008, 269_030_016, 576, 30, 49152, samples=8, tokens=256, cores=2)
RTN, GPTQ = Effort(), Effort(passes=2, hessian=True, samples=6, batch=6)
AWQ = Effort(passes=2, tried=6, samples=4, batch=4)


@pytest.mark.parametrize(
    ("effort", "seconds", "mebibytes"),
    [(RTN, 11.5, 1277), (GPTQ, 66.2, 1277), (AWQ, 52.9, 1287), (replace(GPTQ, samples=8, batch=8), 117.0, 1645)],
    ids=["rtn", "gptq of 6", "awq", "gptq of 8"],
)
def test_it_comes_near_what_was_measured(effort: Effort, seconds: float, mebibytes: int) -> None:
    """Wall times and peaks of campaigns on two cores: within a factor of two, and a quarter."""
    found = estimate(JOB, effort)
    assert 0.5 < found.seconds / seconds < 2
    assert 0.75 < found.memory_bytes / 2**20 / mebibytes < 1.25


def test_rounding_reads_no_data() -> None:
    """Without forward passes the calibration set costs nothing."""
    assert estimate(JOB, RTN) == estimate(replace(JOB, samples=512, tokens=4096), RTN)


def test_twice_the_tokens_take_twice_the_passes() -> None:
    """What is not start-up and moving weights grows with tokens shown."""
    passes = Effort(passes=2)
    fixed = estimate(JOB, RTN).seconds
    once, twice = (estimate(replace(JOB, samples=n), passes).seconds - fixed for n in (64, 128))
    assert 2 * once == pytest.approx(twice)


def test_a_seven_billion_model_in_gptq_takes_hours_here_and_minutes_on_a_gpu() -> None:
    """Layers of 4096 and 11008 on 128 sequences of 2048: the estimate separates a coffee from a night."""
    shapes = {
        f"l.{i}.{k}": shape for i in range(32) for k, shape in enumerate([(4096, 4096)] * 4 + [(11008, 4096)] * 3)
    }
    job = Job(shapes, 6_700_000_000, 13_400_000_000, 4096, 32, 32000, samples=128, tokens=2048, cores=2)
    effort = Effort(passes=2, hessian=True)
    here, there = estimate(job, effort), estimate(replace(job, gpu=True), effort)
    assert here.seconds > 10 * 3600
    assert there.seconds < 3600
    assert 25 * 2**30 < here.memory_bytes < 50 * 2**30


def test_ignored_layers_cost_nothing() -> None:
    """With everything ignored only start-up and moving the weights remain."""
    assert estimate(JOB, GPTQ, ("re:.*",)).seconds == pytest.approx(START_S + 3 * 269_030_016 / 1e9)


def test_options_say_how_much_is_shown() -> None:
    """Samples and batch come from the library's own options, wherever it has them."""
    options = GptqOptions(calibrate=SequentialOptions(num_calibration_samples=4, batch_size=2))
    assert Effort(2, 0, True, 4, 2) == effort_of(options, calibrated=True, hessian=True)
    assert Effort() == effort_of(RtnOptions(), calibrated=False)
