"""The checks of the script for machines with a GPU, tried on this one with a tiny model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests import fake_trtllm
from tests.device import gpu_check
from tests.device.decoding import Shape, compiled, decode, speed, write_model
from tests.device.gpu_check import CHECKS, Setting

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]  # the libraries' own

TINY = {"hidden": 128, "layers": 2, "intermediate": 256, "vocabulary": 512}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A work directory with the tiny model in it."""
    work = tmp_path_factory.mktemp("work")
    write_model(work / "base", Shape(**TINY), "cpu")
    return Setting(work, "cpu", "eager", TINY, tokens=6, turns=1, samples=4)


def test_compiled_and_eager_decode_the_same_tokens(setting: Setting) -> None:
    """Random weights, one answer: what is compared in speed is the same work; time is that after the prompt."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(setting.work / "base", dtype="float32").eval()
    ticks = iter([10.0, 12.5])
    eager, seconds = decode(model, "cpu", 6, model, lambda: next(ticks))
    traced, _ = decode(model, "cpu", 6, compiled(model, "eager"))
    prompt = torch.arange(1, 65)[None]
    generated = model.generate(prompt, max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert generated[0, 65:].tolist() == eager == traced
    assert 2.5 == seconds


def test_what_llm_compressor_writes_is_decoded(setting: Setting) -> None:
    """The FP8 check quantizes as the pipeline does, and what it wrote is loaded and decoded; the figures are of it."""
    by_name = {check.name: check for check in CHECKS}
    made = by_name["fp8"].run(setting)
    assert 0 < made["size_ratio"] < 0.7
    found = speed(setting.work / "fp8", "cpu", 4, 1)
    assert found.tokens_per_s > 0 and found.peak_gpu_bytes is None


@pytest.mark.parametrize("target", ["trtllm_pytorch", "trtllm_engine"])
def test_tensorrt_llm_is_taken_to_a_server_that_answers(
    target: str, setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stand-ins for its commands, which say of themselves that they are; the real ones are only on their machine."""
    programs = fake_trtllm.install(tmp_path / "tools")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    examples = {"examples": str(programs.parent / "examples")} if target == "trtllm_engine" else {}
    found = gpu_check.trtllm(target, **examples)(setting)
    assert (True, True) == (found["simulated"], int(found["smoke_answers"] or 0) > 0)


@pytest.mark.long
def test_the_whole_script_runs_and_ends_with_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    """On a CPU it is slow and proves nothing but itself: five checks give figures, TensorRT-LLM is not run."""
    gpu_check.main(["--device", "cpu", "--shape", json.dumps(TINY), "--seconds", "550"])
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert {} == found["failed"]
    assert {"trtllm_pytorch", "trtllm_engine"} == found["not_run"].keys()
    assert {"model", "eager", "compiled", "fp8", "awq", "fp8_decoded", "awq_decoded"} == found["figures"].keys()
