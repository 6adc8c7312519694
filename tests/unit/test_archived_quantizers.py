"""AutoAWQ and AutoGPTQ: what is refused before they run, and how little they are changed where there is no GPU.

The libraries live in another environment; here stand-ins do what theirs does, fault and all.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from pipelines.errors import StageFailed
from pipelines.intake.checkpoint import CheckpointConfig, Inspected, inspect
from pipelines.intake.digests import DigestCache
from pipelines.quantize import autoawq, autoawq_cpu, autoawq_run, autogptq, autogptq_cpu, autogptq_run
from pipelines.quantize.autoawq import AutoAwqConfig
from pipelines.quantize.autogptq import AutoGptqConfig

LINEARS = {
    f"model.layers.{k}.{name}": (64, 64) for k in (0, 1, 10) for name in ("self_attn.o_proj", "mlp.down_proj")
} | {"lm_head": (64, 64)}


@pytest.fixture
def llama(tmp_path: Path) -> Inspected:
    """A base of a type that both libraries know, from headers alone."""
    from tests.unit.test_checks import base_tensors, save

    save(tmp_path / "base", base_tensors())
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    found = inspect(CheckpointConfig(source=str(tmp_path / "base")), DigestCache(tmp_path / "digests.json"))
    return replace(found, linear_shapes=LINEARS)


def awq(**given: Any) -> AutoAwqConfig:
    return AutoAwqConfig.model_validate({"scheme": "W4A16_G64_ASYM", **given})


def gptq(**given: Any) -> AutoGptqConfig:
    return AutoGptqConfig.model_validate({"scheme": "W4A16_G64", **given})


def test_a_known_model_type_has_no_problems(llama: Inspected) -> None:
    """A model type is read from the base's config.json, and llama is known to both."""
    assert "llama" == llama.model_type
    assert [] == [*autoawq.preflight(awq(), llama), *autogptq.preflight(gptq(), llama)]


def test_a_model_type_that_a_library_does_not_know_is_told_with_the_closest(llama: Inspected) -> None:
    """The plan names the release whose table was asked."""
    foreign = replace(llama, model_type="llama4_text")
    for problem in (*autoawq.preflight(awq(), foreign), *autogptq.preflight(gptq(), foreign)):
        assert "quantizes no model of type 'llama4_text'" in problem.message
        assert "did you mean 'llama'?" in problem.allowed
    assert "AutoGPTQ 0.7.1" in autogptq.preflight(gptq(), foreign)[0].message


def test_a_layer_is_ignored_in_every_block_or_in_none(llama: Inspected) -> None:
    """AutoAWQ tells layers apart by their name within a block; an entry for one block is a problem of the plan."""
    torn = autoawq.preflight(awq(ignore=["lm_head", "model.layers.10.mlp.down_proj"]), llama)
    assert ["ignore"] == [p.key for p in torn]
    assert "leaves mlp.down_proj alone in some decoder layers only" in torn[0].message
    assert [] == autoawq.preflight(awq(ignore=["lm_head", r"re:.*\.down_proj$"]), llama)
    assert (["mlp.down_proj"], []) == autoawq.untouched(LINEARS, ("lm_head", r"re:.*\.down_proj$"))


@pytest.mark.parametrize("scheme", ["W4A16_G64", "W8A16_G64_ASYM", "W4A16_ASYM"])
def test_awq_has_groups_zero_points_and_four_bits(scheme: str) -> None:
    """What the library packs wrongly or not at all is no option."""
    with pytest.raises(ValidationError, match="it has W4A16_G<size>_ASYM"):
        awq(scheme=scheme)


def test_heads_stay() -> None:
    """Neither library can quantize a head."""
    with pytest.raises(ValidationError, match="leaves lm_head alone"):
        awq(ignore=[])
    with pytest.raises(ValidationError):
        gptq(ignore=[])
    with pytest.raises(ValidationError):
        gptq(ignore=["lm_head", "model.layers.0.mlp.down_proj"])


class Searching:
    """AutoAWQ's quantizer as far as it goes wrong: weights are scaled in place and taken back from the backup."""

    def _compute_best_scale(
        self, x: Any, w_mean: Any, x_mean: Any, module: torch.nn.Linear, *more: Any
    ) -> torch.Tensor:
        backup = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
        for _ in range(3):
            with torch.no_grad():
                module.weight.mul_(2)
            module.load_state_dict(backup)
        return torch.ones(2)

    def _compute_best_clip(self, w: Any, input_feat: Any) -> torch.Tensor:
        return torch.zeros(0)


@pytest.fixture
def awq_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The parts of AutoAWQ that are adapted, on a machine with a device of one's choice."""
    machine = SimpleNamespace(device="cpu")
    quantizer, utils = ModuleType("awq.quantize.quantizer"), ModuleType("awq.utils.utils")
    quantizer.AwqQuantizer = type("AwqQuantizer", (Searching,), {})  # type: ignore[attr-defined]
    utils.get_best_device = lambda: machine.device  # type: ignore[attr-defined]
    for name in ("awq", "awq.quantize", "awq.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "awq.quantize.quantizer", quantizer)
    monkeypatch.setitem(sys.modules, "awq.utils.utils", utils)
    monkeypatch.setattr(autoawq_cpu, "version", lambda _: "0.2.9")
    machine.quantizer = quantizer.AwqQuantizer  # type: ignore[attr-defined]
    yield machine


def searched(kind: type) -> torch.Tensor:
    module = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(module.weight)
    kind()._compute_best_scale(None, None, None, module)
    assert "state_dict" not in vars(module)
    return module.weight.detach()


def test_the_stand_in_has_the_fault() -> None:
    """On a CPU the backup is the weights themselves, so each scale tried stays in them: 2 * 2 * 2."""
    assert torch.equal(torch.full((2, 2), 8.0), searched(Searching))


def test_on_a_cpu_the_search_for_scales_leaves_weights_alone(awq_library: SimpleNamespace) -> None:
    """With a backup that is a copy, weights are what they were; afterwards the library is as it came."""
    plain = awq_library.quantizer._compute_best_scale
    with autoawq_cpu.without_accelerator() as adapted:
        assert torch.equal(torch.ones(2, 2), searched(awq_library.quantizer))
    assert autoawq_cpu.ON_CPU == adapted
    assert plain is awq_library.quantizer._compute_best_scale


@pytest.mark.parametrize(("device", "release"), [("cuda:0", "0.2.9"), ("cpu", "0.3.0")])
def test_with_an_accelerator_or_another_release_awq_is_left_alone(
    awq_library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, device: str, release: str
) -> None:
    """There the backup is a copy already, or nobody has looked."""
    monkeypatch.setattr(autoawq_cpu, "version", lambda _: release)
    awq_library.device = device
    plain = awq_library.quantizer._compute_best_scale
    with autoawq_cpu.without_accelerator() as adapted:
        assert ("", True) == (adapted, plain is awq_library.quantizer._compute_best_scale)


def test_samples_that_do_not_arrive_fail_the_stage() -> None:
    """The library drops samples in silence; what arrives at the first layer is held against what was given."""

    class Dropping:
        calib_data = ([1] * 8, [2] * 8, [3] * 8)

        def init_quant(self, n_samples: int, max_seq_len: int) -> tuple[None, None, torch.Tensor]:
            return None, None, torch.zeros(arrived, max_seq_len, 4)

    kind: Any = type("Watched", (autoawq_run._Watched, Dropping), {"errors": {}})
    arrived = 3
    assert (3, 8, 4) == kind().init_quant(n_samples=3, max_seq_len=8)[2].shape
    arrived = 2
    with pytest.raises(StageFailed, match="calibrates on 16 of 24 tokens"):
        kind().init_quant(n_samples=3, max_seq_len=8)


def test_errors_are_those_of_the_best_scale_and_inputs_must_be_finite() -> None:
    """Layers scaled together share the least loss; of activations that overflow the library says only `Exception`."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    class Trying:
        def _search_best_scale(self, module: Any, layers: Any, inp: Any) -> None:
            for loss in (3.0, float("nan"), 1.0, 2.0):
                self._compute_loss(loss)

        def _compute_loss(self, loss: float) -> float:
            return loss

    errors: dict[str, float] = {}
    kind: Any = type("Watched", (autoawq_run._Watched, Trying), {"errors": errors, "model": model})
    kind()._search_best_scale(model, layers=list(model), inp=torch.ones(1, 2))
    assert {"0": 1.0, "1": 1.0} == errors
    with pytest.raises(StageFailed, match="inputs of 0 are not finite"):
        kind()._search_best_scale(model, layers=list(model), inp=torch.tensor([[1.0, torch.nan]]))


@pytest.fixture
def gptq_library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The part of AutoGPTQ that is adapted."""
    base = ModuleType("auto_gptq.modeling._base")
    base.CUDA_0 = torch.device("cuda:0")  # type: ignore[attr-defined]
    modeling = ModuleType("auto_gptq.modeling")
    modeling._base = base  # type: ignore[attr-defined]
    for name, module in (("auto_gptq", ModuleType("auto_gptq")), ("auto_gptq.modeling", modeling)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "auto_gptq.modeling._base", base)
    monkeypatch.setattr(autogptq_cpu, "version", lambda _: "0.7.1")
    return base


def test_without_cuda_the_first_gpu_is_the_cpu(gptq_library: ModuleType) -> None:
    """During the call layers go to the CPU and nothing waits for a GPU; afterwards all is as it was."""
    wait = torch.cuda.synchronize
    with autogptq_cpu.without_cuda() as adapted:
        torch.cuda.synchronize()
        assert torch.device("cpu") == gptq_library.CUDA_0
    assert autogptq_cpu.ON_CPU == adapted
    assert (torch.device("cuda:0"), True) == (gptq_library.CUDA_0, torch.cuda.synchronize is wait)


@pytest.mark.parametrize(("cuda", "release"), [(True, "0.7.1"), (False, "0.8.0")])
def test_with_cuda_or_another_release_gptq_is_left_alone(
    gptq_library: ModuleType, monkeypatch: pytest.MonkeyPatch, cuda: bool, release: str
) -> None:
    """Nothing is touched where the library runs as it is, or where nobody has looked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(autogptq_cpu, "version", lambda _: release)
    wait = torch.cuda.synchronize
    with autogptq_cpu.without_cuda() as adapted:
        assert torch.device("cuda:0") == gptq_library.CUDA_0
        assert ("", True) == (adapted, torch.cuda.synchronize is wait)


def test_errors_are_heard_in_the_log() -> None:
    """AutoGPTQ says a layer's error only in its log, at a level that is off; the log is left as it was."""
    logger, level = logging.getLogger("auto_gptq.modeling"), logging.getLogger("auto_gptq").level
    with autogptq_run._listening() as heard:
        for layer in (1, 2):
            logger.info("Quantizing mlp.up_proj in layer %d/2...", layer)
            logging.getLogger("auto_gptq.quantization.gptq").info("duration: 0.5")
            logging.getLogger("auto_gptq.quantization.gptq").info("avg loss: 0.25")
    assert {"0.mlp.up_proj": 0.25, "1.mlp.up_proj": 0.25} == heard.errors
    assert (level, []) == (logging.getLogger("auto_gptq").level, logging.getLogger("auto_gptq").handlers)
