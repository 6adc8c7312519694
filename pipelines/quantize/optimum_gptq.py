"""What optimum's GPTQQuantizer can be asked for: GPTQ by GPTQModel's kernels, block by block, in the classic format.

The work is in optimum_gptq_run.py, which needs the library; this needs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from pipelines.config import Strict
from pipelines.errors import Problem
from pipelines.flow.store import Fact
from pipelines.quantize.autoawq import untouched
from pipelines.quantize.checks import HEAD
from pipelines.quantize.scheme import one_of

if TYPE_CHECKING:
    from pipelines.intake.checkpoint import Inspected

SCHEMES = ("W[248]A16", "W[248]A16_G*[0-9]")
"""Asymmetric zero points are not offered: the library then keeps version 2 of the format, which few runtimes read."""


class OptimumGptqOptions(Strict):
    """Names and defaults are those of `optimum.gptq.GPTQQuantizer`."""

    damp_percent: float = Field(
        default=0.1, gt=0, lt=1, description="added to the Hessian's diagonal, in fractions of its mean"
    )
    desc_act: bool = Field(
        default=False, description="order columns by activation at run time: slower, few kernels take it"
    )
    act_group_aware: bool = Field(default=True, description="order columns within groups: free at run time")
    true_sequential: bool = Field(
        default=True, description="quantize a block's layers in turn, each on the quantized before it"
    )
    cache_block_outputs: bool = Field(
        default=True, description="keep each block's outputs as the next one's inputs; false runs the model again"
    )
    batch_size: int = Field(default=1, ge=1, description="calibration samples in one forward pass")

    @model_validator(mode="after")
    def _one_order(self) -> OptimumGptqOptions:
        if self.desc_act and self.act_group_aware:
            raise ValueError("desc_act and act_group_aware are two orders of the same columns; set one to false")
        return self


class OptimumGptqConfig(Strict):
    """GPTQ by optimum."""

    quantizer: Literal["optimum_gptq"] = "optimum_gptq"
    scheme: Annotated[str, AfterValidator(one_of(SCHEMES))]
    ignore: tuple[str, ...] = Field(
        default=(HEAD,), description="layers left as they are, in every decoder layer alike: names, or re: patterns"
    )
    compute_dtype: Literal["auto", "float32", "checkpoint"] = Field(
        default="auto",
        description="auto: float32 without an accelerator, else the checkpoint's; storage does not change",
    )
    seed: int = Field(default=0, ge=0, description="seed of everything random in the library")
    options: OptimumGptqOptions = OptimumGptqOptions()

    @model_validator(mode="after")
    def _head_stays(self) -> OptimumGptqConfig:
        if HEAD not in self.ignore:
            raise ValueError(
                f"this quantizer leaves {HEAD} alone; a quantized head is for llmcompressor_gptq with head"
            )
        return self


def promises(config: OptimumGptqConfig) -> dict[str, Fact]:
    """What its checkpoints say of themselves: version 1 of the format, columns reordered at run time or not."""
    return {"quant_method": "gptq", "desc_act": config.options.desc_act}


def preflight(config: OptimumGptqConfig, base: Inspected) -> list[Problem]:
    """Layers to ignore that the library cannot tell apart: it knows them by their name within a block."""
    _, torn = untouched(base.linear_shapes, config.ignore)
    if not torn:
        return []
    message = f"leaves {', '.join(torn)} alone in some decoder layers only; this library does in all or in none"
    return [Problem("ignore", list(config.ignore), message, r"as 're:.*\.down_proj$', which names it in all")]
