"""What AutoGPTQ needs where there is no CUDA; with it, nothing here happens.

Each adaptation is small, made only for releases it was tested with, and named in the variant's facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TESTED = ("0.7.1",)
"""Releases that put layers on `cuda:0` and wait for it, whatever the machine has."""
ON_CPU = "autogptq: layers stay on the CPU and the model is loaded by transformers, as it knows only CUDA"
FLOAT32 = "autogptq: computed in float32, as there is no accelerator; stored as the base is"


@contextmanager
def without_cuda() -> Iterator[str]:
    """Where there is no CUDA, let the library's first GPU be the CPU, and waiting for it nothing.

    Yields:
        What was adapted, "" where nothing was.
    """
    import torch
    from auto_gptq.modeling import _base

    if torch.cuda.is_available() or version("auto_gptq") not in TESTED:
        yield ""
        return
    device, wait = _base.CUDA_0, torch.cuda.synchronize

    def nothing_to_wait_for() -> None:
        """There is no CUDA."""

    _base.CUDA_0 = torch.device("cpu")
    torch.cuda.synchronize = nothing_to_wait_for  # type: ignore[assignment]
    try:
        yield ON_CPU
    finally:
        _base.CUDA_0 = device
        torch.cuda.synchronize = wait


def load(checkpoint: Path, settings: Any, dtype: torch.dtype, *, adapted: bool) -> Any:
    """The library's model of a checkpoint, not quantized yet.

    Its own loader refuses to work without CUDA; then (`adapted`) the same model is loaded by transformers and given
    to the class that the loader would have made.
    """
    from auto_gptq import AutoGPTQForCausalLM
    from auto_gptq.modeling.auto import GPTQ_CAUSAL_LM_MODEL_MAP
    from transformers import AutoModelForCausalLM

    if not adapted:
        return AutoGPTQForCausalLM.from_pretrained(str(checkpoint), settings, torch_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype=dtype).eval()
    return GPTQ_CAUSAL_LM_MODEL_MAP[model.config.model_type](model, False, settings)
