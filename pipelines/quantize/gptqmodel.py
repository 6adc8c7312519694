"""What GPTQModel can be asked for: GPTQ in the classic format (version 1), and AWQ in AutoAWQ's gemm layout.

The work is in gptqmodel_run.py, which needs the library; this needs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from pipelines.config import Strict
from pipelines.errors import Problem
from pipelines.flow.store import Fact
from pipelines.quantize.checks import HEAD
from pipelines.quantize.scheme import Misfit, folded, matches, one_of

if TYPE_CHECKING:
    from pipelines.intake.checkpoint import Inspected

SCHEMES = ("W[2348]A16", "W[2348]A16_G*[0-9]")
"""Asymmetric zero points are not offered: format version 1 cannot hold a zero point of 0."""
_GROUPS = ("16", "32", "64", "128")
AWQ_SCHEMES = (*(f"W4A16_G{size}" for size in _GROUPS), *(f"W4A16_G{size}_ASYM" for size in _GROUPS))
"""The gemm layout holds 4 bits; without groups the library's search fails, and other groups have no kernel in it."""
PACKED: tuple[int, str, tuple[str, ...]] = (8, "AWQ packs", ())
CLIPPED: tuple[int, str, tuple[str, ...]] = (64, "the library searches clipping ranges", ("q_", "k_", "query", "key"))
"""Outputs that go together, what does that, and parts of the names of layers that it spares."""


class Fallback(Strict):
    """What to do with a layer that calibration hardly reaches, as experts of a mixture."""

    strategy: Literal["rtn", "midpoint", "mean", "median", "stdclip"] = Field(
        default="rtn", description="how it is rounded then"
    )
    threshold: float | str = Field(default="0.5%", description="tokens, or a share of all, below which it is used")


class Hessian(Strict):
    """How the Hessian of a layer's inputs is summed."""

    chunk_size: int | None = Field(default=None, ge=1, description="rows added at once; null: all of a batch")
    chunk_bytes: int | None = Field(default=None, ge=1, description="or so many bytes")
    staging_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32", description="what rows are multiplied in"
    )
    dedup_shared_inputs: bool = Field(default=True, description="sum once for layers that read the same input")


class LibraryOptions(Strict):
    """What both methods take. Names and defaults are those of `gptqmodel.QuantizeConfig` and `GPTQModel.quantize`."""

    true_sequential: bool = Field(
        default=True, description="quantize a block's layers in turn, each on the quantized before it"
    )
    dynamic: dict[str, dict[str, int | str | bool]] | None = Field(
        default=None, description="regular expression of layer names to settings of their own"
    )
    fallback: Fallback | None = Fallback()
    pack_impl: Literal["cpu", "gpu", "original"] = Field(default="cpu", description="who packs the words")
    offload_to_disk: bool = Field(
        default=True, description="move finished layers to disk, for models larger than memory"
    )
    batch_size: int = Field(default=1, ge=1, description="calibration samples in one forward pass")
    calibration_sort: Literal["asc", "desc", "shuffle"] | None = Field(
        default="desc", description="order of samples by length"
    )
    calibration_data_min_length: int = Field(default=10, ge=1, description="shorter samples are dropped")


class GptqModelOptions(LibraryOptions):
    """GPTQ (arXiv 2210.17323)."""

    desc_act: bool = Field(
        default=False, description="order columns by activation at run time: slower, few kernels take it"
    )
    act_group_aware: bool | None = Field(
        default=None, description="order columns within groups: free at run time; null: unless desc_act"
    )
    static_groups: bool = Field(default=False, description="fix scales of all groups before the first column")
    damp_percent: float = Field(
        default=0.05, gt=0, lt=1, description="added to the Hessian's diagonal, in fractions of its mean"
    )
    damp_auto_increment: float = Field(
        default=0.01, ge=0, description="raised by this while the Hessian cannot be inverted"
    )
    mse: float = Field(
        default=0.0, ge=0, description="norm of the error that scales minimize; 0: from minimum and maximum"
    )
    rotation: Literal["hadamard", "random"] | None = Field(
        default=None, description="rotate weights first; runtimes must know"
    )
    hessian: Hessian = Hessian()

    @model_validator(mode="after")
    def _one_order(self) -> GptqModelOptions:
        if self.desc_act and self.act_group_aware:
            raise ValueError("desc_act and act_group_aware are two orders of the same columns; set one to false")
        return self


class AwqModelOptions(LibraryOptions):
    """AWQ (arXiv 2306.00978). The library always searches 20 scales per block and 10 clipping ranges per group."""

    scale_search_chunked_activations: bool = Field(
        default=True, description="search scales on a few samples at a time: slower, takes less memory"
    )
    num_calibration_samples: int | None = Field(
        default=None, ge=1, description="use only the first so many of the calibration set's samples; null: all"
    )


class Shared(Strict):
    """What both methods take beside their options."""

    ignore: tuple[str, ...] = Field(default=(HEAD,), description="layers left as they are: names, or re: patterns")
    compute_dtype: Literal["auto", "float32", "checkpoint"] = Field(
        default="auto",
        description="auto: float32 without an accelerator, else the checkpoint's; storage does not change",
    )
    seed: int = Field(default=0, ge=0, description="seed of everything random in the library")

    @model_validator(mode="after")
    def _head_stays(self) -> Shared:
        if HEAD not in self.ignore:
            raise ValueError(
                f"this quantizer leaves {HEAD} alone; for a quantized head use llmcompressor_gptq or _awq with head"
            )
        return self


class GptqModelConfig(Shared):
    """GPTQ by GPTQModel."""

    quantizer: Literal["gptqmodel_gptq"] = "gptqmodel_gptq"
    scheme: Annotated[str, AfterValidator(one_of(SCHEMES))]
    options: GptqModelOptions = GptqModelOptions()


class AwqModelConfig(Shared):
    """AWQ by GPTQModel."""

    quantizer: Literal["gptqmodel_awq"] = "gptqmodel_awq"
    scheme: Annotated[str, AfterValidator(one_of(AWQ_SCHEMES))]
    options: AwqModelOptions = AwqModelOptions()


def promises(config: GptqModelConfig | AwqModelConfig) -> dict[str, Fact]:
    """What its checkpoints say of themselves: version 1 of the format, columns reordered at run time or not."""
    if isinstance(config, AwqModelConfig):
        return {"quant_method": "awq"}
    return {"quant_method": "gptq", "desc_act": config.options.desc_act}


def preflight(config: AwqModelConfig, base: Inspected) -> list[Problem]:
    """Layers whose outputs AWQ's packing or its search for clipping ranges cannot take."""
    found = []
    layers = [(name, out) for name, (out, _) in base.linear_shapes.items() if not matches(name, config.ignore)]
    for least, why, spared in (PACKED, CLIPPED):
        bad = [Misfit(name, out, least) for name, out in layers if out % least and not any(s in name for s in spared)]
        if bad:
            shown = ", ".join(f"{name} ({out})" for name, out in folded(bad))
            message = f"{why} {least} outputs at a time, and these layers have a number it does not divide: {shown}"
            found.append(Problem("scheme", config.scheme, message, "name these layers in `ignore`"))
    return found
