"""What AutoGPTQ can be asked for: GPTQ in the classic format (version 1), which most runtimes read.

The work is in autogptq_run.py, which needs the library in a toolchain of its own; this needs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from pipelines.config import Strict
from pipelines.errors import Problem
from pipelines.flow.store import Fact
from pipelines.quantize.known import Known
from pipelines.quantize.scheme import one_of

if TYPE_CHECKING:
    from pipelines.intake.checkpoint import Inspected

SCHEMES = ("W[248]A16_G*[0-9]",)
"""Asymmetric zero points are not offered: version 1 of the format cannot hold a zero point of 0. Nor are scales per
channel, whose checkpoints transformers' kernel on a CPU reads no further than the first layer.
"""
KNOWN = Known("AutoGPTQ", "0.7.1", ("bloom", "codegen", "gemma", "gptj", "llama", "mistral", "opt", "qwen2"))


class AutoGptqOptions(Strict):
    """Names and defaults are those of `auto_gptq.BaseQuantizeConfig` and its models' `quantize`."""

    damp_percent: float = Field(
        default=0.01, gt=0, lt=1, description="added to the Hessian's diagonal, in fractions of its mean"
    )
    desc_act: bool = Field(
        default=True, description="quantize columns in order of activation: better, but slower to run and few kernels"
    )
    static_groups: bool = Field(
        default=False, description="fix scales of all groups before the first column; with desc_act, columns stay put"
    )
    true_sequential: bool = Field(
        default=True, description="quantize a block's layers in turn, each on the quantized before it"
    )
    batch_size: int = Field(
        default=1, ge=1, description="calibration samples in one forward pass; shorter ones are padded, padding counted"
    )
    cache_examples_on_gpu: bool = Field(default=True, description="keep activations on the GPU, if there is one")


class AutoGptqConfig(Strict):
    """GPTQ by AutoGPTQ."""

    quantizer: Literal["autogptq"] = "autogptq"
    scheme: Annotated[str, AfterValidator(one_of(SCHEMES))]
    ignore: tuple[Literal["lm_head"]] = Field(
        default=("lm_head",), description="nothing to choose: the library takes every linear layer of each block"
    )
    compute_dtype: Literal["auto", "float32", "checkpoint"] = Field(
        default="auto",
        description="auto: float32 without an accelerator, else the checkpoint's; storage does not change",
    )
    options: AutoGptqOptions = AutoGptqOptions()


def promises(config: AutoGptqConfig) -> dict[str, Fact]:
    """What its checkpoints say of themselves."""
    return {"quant_method": "gptq", "desc_act": config.options.desc_act}


def preflight(config: AutoGptqConfig, base: Inspected) -> list[Problem]:
    """A model type the library does not know."""
    return KNOWN.problems(config.quantizer, base.model_type)
