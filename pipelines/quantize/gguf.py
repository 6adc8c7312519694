"""What llama.cpp's own quantization can be asked for: file types of GGUF, which need no calibration set.

The work is in gguf_run.py, which needs the toolchain `llama_cpp`; this needs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from pipelines.config import Strict
from pipelines.errors import Problem, closest
from pipelines.flow.store import Fact
from pipelines.quantize.scheme import one_of

if TYPE_CHECKING:
    from pipelines.intake.checkpoint import Inspected

SCHEMES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
METHOD = "gguf"
"""The quant_method of these variants; in no library's list, since no library but llama.cpp's reads the file itself."""
FILE = "model.gguf"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
"""What both llama.cpp's converter writes and transformers reads back, so that it can be checked."""


class GgufOptions(Strict):
    """Names and defaults are those of `llama_model_quantize_params`."""

    pure: bool = Field(default=False, description="one type for all layers, instead of the mixture of the file type")
    quantize_output_tensor: bool = Field(
        default=True, description="also lm_head; one that shares the embedding's tensor is quantized with that"
    )


class GgufConfig(Strict):
    """A file type of llama.cpp."""

    quantizer: Literal["gguf"] = "gguf"
    scheme: Annotated[str, AfterValidator(one_of(SCHEMES))]
    converted: Literal["auto", "f32", "f16", "bf16"] = Field(
        default="auto", description="what the base is converted to before; auto: the 16-bit type nearest to its own"
    )
    options: GgufOptions = GgufOptions()


def promises(config: GgufConfig) -> dict[str, Fact]:
    """What is known of its variants before they exist."""
    del config
    return {"quant_method": METHOD}


def preflight(config: GgufConfig, base: Inspected) -> list[Problem]:
    """Say that the base is of a model type that could not be written, or not be checked."""
    if base.model_type in MODEL_TYPES:
        return []
    message = f"models of type {base.model_type!r} cannot be written as GGUF and read back"
    return [Problem("quantizer", config.quantizer, message, closest(base.model_type, MODEL_TYPES))]
