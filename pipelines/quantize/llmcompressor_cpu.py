"""What llm-compressor needs where there is no accelerator; with one, nothing here happens.

Each adaptation is small, made only for releases it was tested with, and named in the variant's facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TESTED = ("0.14.0.1",)
"""Releases whose AWQ pins memory without asking whether there is an accelerator."""
PINNING = "llmcompressor: AWQ does not pin memory, as there is no accelerator"
FLOAT32 = "llmcompressor: computed in float32, as there is no accelerator; scales rounded to {} while quantizing"


@contextmanager
def memory_pinning() -> Iterator[str]:
    """Without an accelerator, keep AWQ from pinning memory, which only an accelerator can do.

    Yields:
        What was adapted, "" where nothing was.
    """
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available() or version("llmcompressor") not in TESTED:
        yield ""
        return
    pinning = IntermediatesCache.pin_memory

    def leave_in_place(_cache: object, _batch: int, _names: list[str] | None = None) -> None:
        """Nothing to pin for."""

    IntermediatesCache.pin_memory = leave_in_place
    try:
        yield PINNING
    finally:
        IntermediatesCache.pin_memory = pinning


def computes_in_float32(compute_dtype: Literal["auto", "float32", "checkpoint"]) -> bool:
    """Whether to compute in float32: most CPUs multiply bfloat16 several times slower, having no instruction for it."""
    import torch

    return compute_dtype == "float32" or (compute_dtype == "auto" and not torch.accelerator.is_available())


def narrow(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Pack the quantized weights, then store what is left in the base's dtype.

    Packing comes first: a weight is its code times its scale, and rounding the product could move the code. Scales
    were rounded to this dtype while quantizing (`scale_dtype`), so casting them here loses nothing. The scale that
    NVFP4 has for a whole tensor is a float32 number in any checkpoint.
    """
    import torch
    from compressed_tensors import ModelCompressor

    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and scheme.weights is not None and scheme.weights.scale_dtype == dtype:
            scheme.weights.scale_dtype = None  # said only while quantizing; readers take the stored dtype
    ModelCompressor.from_pretrained_model(model).compress_model(model, skip_compressed=True)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dtype == torch.float32 and not name.endswith("_global_scale"):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
