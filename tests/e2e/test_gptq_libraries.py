"""GPTQModel's AWQ and optimum's GPTQ for real, and what is adapted of them without an accelerator."""

from __future__ import annotations

import json
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.quantize import gptqmodel_cpu
from pipelines.quantize.coverage import read
from pipelines.quantize.reload import load, load_dense, logits
from tests.e2e.test_quantizers import LAYERS, divergence, quantize, short, shown, undone, words  # noqa: F401 - fixtures

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]  # the libraries' own warnings

RUNS = [
    ("gptqmodel_awq", {"scheme": "W4A16_G64_ASYM", "options": {"offload_to_disk": False, "batch_size": 4}}),
    ("optimum_gptq", {"scheme": "W4A16_G64", "ignore": ["lm_head", r"re:.*\.o_proj$"], "options": {"batch_size": 4}}),
]


@pytest.mark.long
@pytest.mark.parametrize(("quantizer", "settings"), RUNS, ids=[name for name, _ in RUNS])
def test_what_is_saved_reloads(
    short: Path, shown: Path, undone: NDArray[np.float32], words: NDArray[np.int64], tmp_path: Path,  # noqa: F811
    quantizer: str, settings: dict[str, Any],
) -> None:  # fmt: skip
    """transformers reads what our dequantization reads, it is still the model, and each layer has its error."""
    facts = quantize(tmp_path, short, shown, quantizer, **settings)
    kept = {"lm_head"} | (
        {f"model.layers.{k}.self_attn.o_proj" for k in range(LAYERS)} if "ignore" in settings else set()
    )
    rows = read(tmp_path)
    assert kept == {row.module for row in rows if row.scheme == "kept"}
    assert all(row.error is not None and row.error >= 0 for row in rows if row.scheme != "kept")
    reloaded = logits(load(tmp_path), words)
    assert divergence(logits(load_dense(tmp_path), words), reloaded) < 1e-3
    assert divergence(undone, reloaded) < 0.3
    assert ("gemm" if "awq" in quantizer else "gptq") == facts["format"]


@pytest.mark.long
def test_optimum_leaves_no_texts(short: Path, shown: Path, tmp_path: Path) -> None:  # noqa: F811
    """The library writes the calibration set into both of its configs; neither is left with a token of it."""
    quantize(tmp_path, short, shown, "optimum_gptq", scheme="W4A16_G64", options={"batch_size": 4})
    config = json.loads((tmp_path / "config.json").read_text())
    said = [config["quantization_config"], json.loads((tmp_path / "quantize_config.json").read_text())]
    assert said[0] == said[1]
    assert ("gptq", False, False) == (
        said[0]["checkpoint_format"],
        "dataset" in said[0],
        "input_ids" in json.dumps(said),
    )
    assert json.loads((short / "config.json").read_text()) == {
        k: v for k, v in config.items() if k != "quantization_config"
    }


@pytest.mark.parametrize("symmetric", [False, True])
def test_clipping_ranges_are_the_librarys(symmetric: bool) -> None:
    """The search by second moments takes the ranges that the library's own takes, for more tokens than it looks at."""
    import torch
    from gptqmodel.looper.awq_processor import AWQProcessor

    asked = SimpleNamespace(qcfg=SimpleNamespace(group_size=32, bits=4, sym=symmetric))
    asked._pseudo_quantize_tensor_into = MethodType(AWQProcessor._pseudo_quantize_tensor_into, asked)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator) * torch.rand(64, 1, generator=generator)
    inputs = torch.randn(2, 520, 64, generator=generator) * torch.rand(64, generator=generator)
    wanted = AWQProcessor._compute_best_clip(asked, weight, inputs)
    found = gptqmodel_cpu.best_clip(asked, weight, inputs)
    assert torch.equal(wanted, found)
    assert float((found < weight.reshape(64, 2, 32).abs().amax(-1, keepdim=True)).float().mean()) > 0.1


@pytest.mark.parametrize("accelerator", [False, True])
def test_awq_is_adapted_without_an_accelerator_only(monkeypatch: pytest.MonkeyPatch, accelerator: bool) -> None:
    """With an accelerator, and after quantizing, the library is as it came; so is a release that nobody tried."""
    import torch
    from gptqmodel.looper.awq_processor import AWQProcessor
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    search, dtypes = AWQProcessor._compute_best_clip, AwqTorchLinear.SUPPORTS_DTYPES
    with gptqmodel_cpu.awq_without_accelerator() as adapted:
        assert accelerator == (AWQProcessor._compute_best_clip is search) == (adapted == "")
        assert accelerator == (torch.float32 not in AwqTorchLinear.SUPPORTS_DTYPES)
    assert (True, True) == (AWQProcessor._compute_best_clip is search, AwqTorchLinear.SUPPORTS_DTYPES is dtypes)
    monkeypatch.setattr(gptqmodel_cpu, "AWQ_TESTED", ("0.0",))
    with gptqmodel_cpu.awq_without_accelerator() as adapted:
        assert ("", True) == (adapted, AWQProcessor._compute_best_clip is search)
