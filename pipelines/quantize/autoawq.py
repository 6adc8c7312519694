"""What AutoAWQ can be asked for: AWQ with zero points in the gemm layout, which vLLM and ONNX Runtime's builder read.

The work is in autoawq_run.py, which needs the library in a toolchain of its own; this needs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from pipelines.config import Strict
from pipelines.errors import Problem
from pipelines.flow.store import Fact
from pipelines.quantize.checks import HEAD
from pipelines.quantize.known import Known
from pipelines.quantize.scheme import matches, one_of

if TYPE_CHECKING:
    from pipelines.intake.checkpoint import Inspected

SCHEMES = ("W4A16_G*[0-9]_ASYM",)
"""Other widths have no kernel in the library; without groups its search fails, without zero points its packing does."""
KNOWN = Known(
    "AutoAWQ", "0.2.9", ("cohere", "gemma", "gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3", "stablelm")
)
_NUMBERED = re.compile(r"^.*?\.\d+\.(?P<inside>.+)$")


class AutoAwqOptions(Strict):
    """Names and defaults are those of `AutoAWQForCausalLM.quantize`."""

    duo_scaling: bool = Field(default=True, description="scales from activations and weights; false: activations alone")
    apply_clip: bool = Field(default=True, description="search the range that each group's weights are clipped to, too")
    n_parallel_calib_samples: int | None = Field(
        default=None, ge=1, description="samples in one forward pass; null: all at once, which takes the most memory"
    )
    max_calib_samples: int = Field(
        default=128, ge=1, description="use only the first so many of the calibration set's samples"
    )
    max_chunk_memory: int = Field(default=2**30, ge=2**20, description="bytes that sums of errors may take at once")


class AutoAwqConfig(Strict):
    """AWQ by AutoAWQ."""

    quantizer: Literal["autoawq"] = "autoawq"
    scheme: Annotated[str, AfterValidator(one_of(SCHEMES))]
    ignore: tuple[str, ...] = Field(
        default=(HEAD,), description="layers left as they are, in every decoder layer alike: names, or re: patterns"
    )
    compute_dtype: Literal["auto", "float32", "checkpoint"] = Field(
        default="auto",
        description="auto: float32 without an accelerator, else the checkpoint's; storage does not change",
    )
    options: AutoAwqOptions = AutoAwqOptions()

    @model_validator(mode="after")
    def _head_stays(self) -> AutoAwqConfig:
        if HEAD not in self.ignore:
            raise ValueError(f"this quantizer leaves {HEAD} alone; a quantized head is for llmcompressor_awq with head")
        return self


def promises(config: AutoAwqConfig) -> dict[str, Fact]:
    """What its checkpoints say of themselves."""
    del config
    return {"quant_method": "awq"}


def preflight(config: AutoAwqConfig, base: Inspected) -> list[Problem]:
    """A model type the library does not know, or layers to ignore that it cannot tell apart."""
    found = KNOWN.problems(config.quantizer, base.model_type)
    _, torn = untouched(base.linear_shapes, config.ignore)
    if torn:
        message = f"leaves {', '.join(torn)} alone in some decoder layers only; this library does in all or in none"
        found.append(Problem("ignore", list(config.ignore), message, r"as 're:.*\.down_proj$', which names it in all"))
    return found


def untouched(linears: Iterable[str], ignore: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Names within a decoder layer that are ignored in every one of them, and those ignored in some only."""
    inside = {name: found["inside"] for name in linears if (found := _NUMBERED.match(name))}
    ignored = {inside[name] for name in inside if matches(name, ignore)}
    taken = {inside[name] for name in inside if not matches(name, ignore)}
    return sorted(ignored - taken), sorted(ignored & taken)
