"""What llm-compressor can be asked for: RTN, AWQ, GPTQ, SmoothQuant, FP8 and FP4, with its own options and defaults.

The work is in llmcompressor_run.py, which needs the library; this needs nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipelines.config import Strict
from pipelines.flow.store import Fact
from pipelines.quantize.estimate import Effort, effort_of
from pipelines.quantize.scheme import one_of, parse

WEIGHT_ONLY = ("W[248]A16", "W[248]A16_ASYM", "W[248]A16_G*[0-9]", "W[248]A16_G*[0-9]_ASYM")
INT8 = ("W8A8_INT8_DYNAMIC",)
FP8 = ("W8A8_FP8_DYNAMIC", "W8A8_FP8_DYNAMIC_BLOCK128", "W8A8_FP8_STATIC", "W8A8_FP8_STATIC_TENSOR")
FP4 = ("W4A16_NVFP4", "W4A4_NVFP4", "W4A16_MXFP4", "W4A4_MXFP4")
CACHE = "*_KVFP8"
"""Each scheme also with keys and values in FP8, one scale for each layer's keys and one for its values, calibrated."""
RTN_SCHEMES = (*WEIGHT_ONLY, *INT8, CACHE)
AWQ_SCHEMES = (*WEIGHT_ONLY, CACHE)
GPTQ_SCHEMES = (*WEIGHT_ONLY, *INT8, CACHE)
SMOOTHQUANT_SCHEMES = (*INT8, CACHE)
FP8_SCHEMES = (*FP8, CACHE)
FP4_SCHEMES = (*FP4, CACHE)

Observer = Literal["memoryless_minmax", "static_minmax", "minmax", "memoryless_mse", "mse", "imatrix_mse"]
HeadScheme = Annotated[str, AfterValidator(one_of(WEIGHT_ONLY))]


class SequentialOptions(Strict):
    """How calibration runs layer by layer; the defaults are those of `llmcompressor.oneshot`."""

    sequential_targets: tuple[str, ...] | None = Field(
        default=None, description="classes calibrated as one unit; null: the decoder layers the model declares"
    )
    sequential_targets_per_subgraph: int = Field(
        default=1, ge=1, description="units calibrated at once; more is faster and takes more memory"
    )
    sequential_offload_device: str = Field(default="cpu", description="where activations wait between units")
    sequential_prefetch: bool = Field(default=False, description="fetch the next batch in the background (on a GPU)")
    propagate_error: bool = Field(default=True, description="calibrate each unit on the quantized ones' outputs")
    num_calibration_samples: int | None = Field(
        default=None, ge=1, description="use only the first so many of the calibration set's samples; null: all"
    )
    batch_size: int = Field(default=1, ge=1, description="calibration samples in one forward pass")
    data_collator: Literal["truncation", "padding"] = Field(
        default="truncation",
        description="samples of unequal length in one batch: cut to the shortest, or pad to the longest",
    )
    moe_calibrate_all_experts: bool = Field(default=True, description="let every expert see every calibration token")


class RtnOptions(Strict):
    """Round to nearest."""

    weight_observer: Observer = Field(
        default="memoryless_minmax", description="how a scale is found from a group's weights"
    )
    calibrate: SequentialOptions = Field(default=SequentialOptions(), description="used by observers that need data")


class Fp8Options(Strict):
    """FP8 (E4M3); static schemes need a calibration set, dynamic ones none."""

    weight_observer: Observer = Field(default="memoryless_minmax", description="how a scale is found from the weights")
    input_observer: Observer = Field(default="static_minmax", description="static schemes: scales of activations")
    calibrate: SequentialOptions = Field(default=SequentialOptions(), description="used by static schemes")


class Fp4Options(Strict):
    """4-bit floats (E2M1). W4A4_NVFP4 needs a calibration set, for the range within which activations are scaled."""

    weight_observer: Observer = Field(default="memoryless_minmax", description="how a scale is found from the weights")
    input_observer: Observer = Field(default="static_minmax", description="W4A4_NVFP4: the range of activations")
    calibrate: SequentialOptions = Field(default=SequentialOptions(), description="used by W4A4_NVFP4 and by caches")


class AwqMapping(Strict):
    """A layer whose outputs are scaled down, and those that take them and are scaled up."""

    smooth_layer: str = Field(description="re: pattern of the norm or linear layer before")
    balance_layers: tuple[str, ...] = Field(description="re: patterns of the linear layers that read its output")
    activation_hook_target: str | None = Field(
        default=None, description="submodule of the parent whose input is measured; for parallel transformer blocks"
    )


class AwqOptions(Strict):
    """AWQ (arXiv 2306.00978)."""

    n_grid: int = Field(default=20, ge=4, description="scales tried per mapping; fewer is faster and slightly worse")
    duo_scaling: bool | Literal["both"] = Field(
        default=True,
        description="scales from activations and weights (true), activations alone (false), or half the grid each",
    )
    mappings: tuple[AwqMapping, ...] | None = Field(
        default=None, description="null: the library's own for the architecture"
    )
    offload_device: str | None = Field(
        default="auto",
        description="where cached inputs wait; auto: cpu for mixtures of experts, else as null: nowhere",
    )
    weight_observer: Observer = Field(default="memoryless_minmax", description="how a scale is found after smoothing")
    calibrate: SequentialOptions = SequentialOptions()


class Columns(Strict):
    """How GPTQ goes through the columns of a layer."""

    block_size: int = Field(default=128, ge=1, description="columns updated in one pass")
    dampening_frac: float | None = Field(
        default=0.01, gt=0, description="added to the Hessian's diagonal, as a fraction of its mean"
    )
    actorder: Literal["static", "weight", "group", "dynamic"] | None = Field(
        default="static",
        description="column order; static (or weight) costs nothing at run time; null keeps the layer's own",
    )
    batched_quantization: Literal["auto"] | int | None = Field(
        default="auto",
        description="layers of one shape quantized at once: auto by memory, a number, or null for one by one",
    )


class GptqOptions(Columns):
    """GPTQ (arXiv 2210.17323)."""

    weight_observer: Observer = Field(default="memoryless_minmax", description="how a group's scale is found")
    calibrate: SequentialOptions = SequentialOptions()


class SmoothMapping(Strict):
    """A norm or layer whose outputs are made smaller where they are large, and the layers that make up for it."""

    smooth_layer: str = Field(description="re: pattern of the norm or linear layer before")
    balance_layers: tuple[str, ...] = Field(description="re: patterns of the linear layers that read its output")


class SmoothQuantOptions(Strict):
    """SmoothQuant (arXiv 2211.10438), then GPTQ, as the library's own INT8 recipe has it (with a strength of 0.8)."""

    smoothing_strength: float = Field(
        default=0.5, ge=0, le=1, description="how much of activations' range moves into the weights"
    )
    algorithm: Literal["smoothquant", "log_equalization"] = Field(
        default="smoothquant", description="log_equalization (arXiv 2308.15987) looks at activations alone"
    )
    mappings: tuple[SmoothMapping, ...] | None = Field(
        default=None, description="null: the library's own for the architecture"
    )
    gptq: Columns | None = Field(default=Columns(), description="null: weights are rounded to nearest")
    weight_observer: Observer = Field(default="memoryless_minmax", description="how a scale is found after smoothing")
    calibrate: SequentialOptions = SequentialOptions()


class Shared(Strict):
    """What every method of this library takes."""

    ignore: tuple[str, ...] = Field(default=("lm_head",), description="layers left as they are: names, or re: patterns")
    targets: tuple[str, ...] = Field(
        default=("Linear",), description="layers to quantize: Linear for all, names, or re: patterns"
    )
    head: HeadScheme | None = Field(
        default=None,
        description="scheme of lm_head; null leaves it alone. A head that shares the embedding's tensor is untied",
    )
    compute_dtype: Literal["auto", "float32", "checkpoint"] = Field(
        default="auto",
        description="auto: float32 without an accelerator, else the checkpoint's; what is stored does not change",
    )
    seed: int = Field(default=0, ge=0, description="seed of everything random in the library")


class RtnConfig(Shared):
    """Round to nearest: no data, no error correction; the control that AWQ and GPTQ must beat."""

    quantizer: Literal["llmcompressor_rtn"] = "llmcompressor_rtn"
    scheme: Annotated[str, AfterValidator(one_of(RTN_SCHEMES))]
    options: RtnOptions = RtnOptions()


class AwqConfig(Shared):
    """Scale salient channels up before rounding."""

    quantizer: Literal["llmcompressor_awq"] = "llmcompressor_awq"
    scheme: Annotated[str, AfterValidator(one_of(AWQ_SCHEMES))]
    options: AwqOptions = AwqOptions()


class GptqConfig(Shared):
    """Round column by column, each error corrected in the columns still to come."""

    quantizer: Literal["llmcompressor_gptq"] = "llmcompressor_gptq"
    scheme: Annotated[str, AfterValidator(one_of(GPTQ_SCHEMES))]
    options: GptqOptions = GptqOptions()


class SmoothQuantConfig(Shared):
    """Move activations' outliers into the weights, then quantize both to 8-bit integers."""

    quantizer: Literal["llmcompressor_smoothquant"] = "llmcompressor_smoothquant"
    scheme: Annotated[str, AfterValidator(one_of(SMOOTHQUANT_SCHEMES))]
    options: SmoothQuantOptions = SmoothQuantOptions()


class Fp8Config(Shared):
    """Eight-bit floats for weights and activations."""

    quantizer: Literal["llmcompressor_fp8"] = "llmcompressor_fp8"
    scheme: Annotated[str, AfterValidator(one_of(FP8_SCHEMES))]
    options: Fp8Options = Fp8Options()


class Fp4Config(Shared):
    """Four-bit floats in small groups with 8-bit scales."""

    quantizer: Literal["llmcompressor_fp4"] = "llmcompressor_fp4"
    scheme: Annotated[str, AfterValidator(one_of(FP4_SCHEMES))]
    options: Fp4Options = Fp4Options()


LlmCompressorConfig = RtnConfig | AwqConfig | GptqConfig | SmoothQuantConfig | Fp8Config | Fp4Config


def needs_calibration(config: LlmCompressorConfig) -> bool:
    """Whether a calibration set is read: by methods that look at activations, and for every scale that is fixed."""
    if isinstance(config, AwqConfig | GptqConfig | SmoothQuantConfig):
        return True
    scheme = parse(config.scheme)
    fixed = scheme.activation_bits is not None and (not scheme.dynamic or scheme.fp4 == "NVFP4")
    return fixed or scheme.kv is not None or config.options.weight_observer == "imatrix_mse"


def effort(config: LlmCompressorConfig) -> Effort:
    """What a method does to every layer; SmoothQuant has a calibration of its own before the one of GPTQ."""
    if isinstance(config, GptqConfig):
        return effort_of(config.options, calibrated=True, hessian=True)
    if isinstance(config, AwqConfig):
        return effort_of(config.options, calibrated=True, tried=config.options.n_grid)
    if isinstance(config, SmoothQuantConfig):
        found = effort_of(config.options, calibrated=True, hessian=config.options.gptq is not None)
        return replace(found, passes=2 * found.passes)
    return effort_of(config.options, calibrated=needs_calibration(config))


def promises(config: LlmCompressorConfig) -> dict[str, Fact]:
    """What its checkpoints say of themselves, whatever the method."""
    del config
    return {"quant_method": "compressed-tensors"}
