"""What only a GPU can show: `.venv/bin/python -m pytest tests/device` on a machine with one; speed: gpu_check.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.flow.stage import resolve
from pipelines.quantize.table import QUANTIZERS

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip with a sentence where there is none; the CPU paths of the same code run in tests/e2e."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: on one, the libraries run without any CPU adaptation of ours")


@pytest.mark.parametrize("name", ["llmcompressor_rtn", "llmcompressor_fp8"])
def test_a_quantizer_needs_no_adaptation_on_a_gpu(name: str, base_checkpoint: Path, tmp_path: Path) -> None:
    """Adaptations are for machines without an accelerator; here the facts name none."""
    row = QUANTIZERS[name]
    scheme = {"llmcompressor_rtn": "W4A16_G64", "llmcompressor_fp8": "W8A8_FP8_DYNAMIC"}[name]
    config = resolve(row.config_type)(quantizer=name, scheme=scheme)
    facts = resolve(row.function)(config, tmp_path, checkpoint=base_checkpoint)
    assert "" == facts["adaptations"]
