"""What NVIDIA ModelOpt can be asked for: AWQ, FP8, NVFP4 and SmoothQuant, in the checkpoints TensorRT-LLM reads.

The work is in modelopt_run.py, which needs the library; this needs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from pipelines.config import Strict
from pipelines.errors import Problem
from pipelines.flow.store import Fact
from pipelines.quantize.checks import HEAD
from pipelines.quantize.known import Known
from pipelines.quantize.scheme import Misfit, Scheme, folded, matches, one_of, parse

if TYPE_CHECKING:
    from pipelines.intake.checkpoint import Inspected


AWQ_SCHEMES = ("W4A16_G*[0-9]", "W4A8_FP8_STATIC_G*[0-9]", "*_KVFP8")
FP8_SCHEMES = ("W8A8_FP8_STATIC_TENSOR", "W8A8_FP8_DYNAMIC", "*_KVFP8")
NVFP4_SCHEMES = ("W4A4_NVFP4", "W4A16_NVFP4", "*_KVFP8")
SMOOTHQUANT_SCHEMES = ("W8A8_INT8_STATIC", "*_KVFP8")
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that read the same input."""
EXPORTED = Known("the TensorRT-LLM export of ModelOpt", "0.47.0", ("gemma", "llama", "mistral", "qwen2", "qwen3"))


class CalibrateOptions(Strict):
    """How the model is shown the calibration set."""

    num_calibration_samples: int | None = Field(
        default=None, ge=1, description="use only the first so many of the calibration set's samples; null: all"
    )
    batch_size: int = Field(default=1, ge=1, description="samples of equal length in one forward pass")


class AwqOptions(Strict):
    """Names and defaults are those of the library's `AWQLiteCalibConfig` and `AWQClipCalibConfig`."""

    algorithm: Literal["awq_lite", "awq_clip", "awq_full"] = Field(
        default="awq_lite", description="search scales, clipping ranges, or both; clipping takes far longer"
    )
    alpha_step: float = Field(default=0.1, gt=0, le=1, description="step of the exponents tried for scales")
    max_co_batch_size: int = Field(default=1024, ge=1, description="outputs searched at once for clipping ranges")
    max_tokens_per_batch: int = Field(
        default=64, ge=1, description="tokens of a batch that clipping ranges are tried on"
    )
    min_clip_ratio: float = Field(default=0.5, gt=0, lt=1, description="the most that is clipped, as what is left")
    shrink_step: float = Field(default=0.05, gt=0, le=1, description="step of the clipping ratios tried")
    calibrate: CalibrateOptions = CalibrateOptions()


class Fp8Options(Strict):
    """Names and defaults are those of the library's `MaxCalibConfig` and `MseCalibConfig`."""

    algorithm: Literal["max", "mse"] = Field(
        default="max", description="scales of weights from the largest number, or with the least squared error"
    )
    step_size: float = Field(default=0.1, gt=0, description="mse: step of the multiples of the largest number tried")
    start_multiplier: float = Field(default=0.25, gt=0, description="mse: the least multiple tried")
    stop_multiplier: float = Field(default=4.0, gt=0, description="mse: the greatest multiple tried")
    calibrate: CalibrateOptions = CalibrateOptions()


class Nvfp4Options(Strict):
    """Scales come from the largest numbers; the library's other searches need a GPU."""

    calibrate: CalibrateOptions = CalibrateOptions()


class SmoothQuantOptions(Strict):
    """SmoothQuant (arXiv 2211.10438); name and default are those of the library's `SmoothQuantCalibConfig`."""

    alpha: float = Field(
        default=1.0, ge=0, le=1, description="how much of the activations' outliers moves into the weights"
    )
    calibrate: CalibrateOptions = CalibrateOptions()


class TrtllmCheckpoint(Strict):
    """A TensorRT-LLM checkpoint beside the Hugging Face one: what `trtllm-build` (up to 1.2.1) makes engines of."""

    tp: int = Field(default=1, ge=1, description="GPUs that each layer is split over")
    pp: int = Field(default=1, ge=1, description="GPUs that the layers are dealt out to")

    @property
    def directory(self) -> str:
        """Where it lies in the variant."""
        return f"trtllm/tp{self.tp}" + (f"_pp{self.pp}" if self.pp > 1 else "")


class Shared(Strict):
    """What every method of this library takes."""

    ignore: tuple[str, ...] = Field(default=(HEAD,), description="layers left as they are: names, or re: patterns")
    compute_dtype: Literal["auto", "float32", "checkpoint"] = Field(
        default="auto",
        description="auto: float32 without an accelerator, else the checkpoint's; what is stored does not change",
    )
    seed: int = Field(default=0, ge=0, description="seed of everything random in the library")
    trtllm: TrtllmCheckpoint | None = Field(
        default=None, description="also write a TensorRT-LLM checkpoint, which the library will drop in 0.49"
    )

    @model_validator(mode="after")
    def _head_stays(self) -> Shared:
        if HEAD not in self.ignore:
            raise ValueError(f"this quantizer leaves {HEAD} alone, as the runtimes of its checkpoints expect")
        return self


class ModelOptAwqConfig(Shared):
    """Scale salient channels up before rounding."""

    quantizer: Literal["modelopt_awq"] = "modelopt_awq"
    scheme: Annotated[str, AfterValidator(one_of(AWQ_SCHEMES))]
    options: AwqOptions = AwqOptions()


class ModelOptFp8Config(Shared):
    """Eight-bit floats for weights and activations, one scale each for a whole tensor, or per channel and token."""

    quantizer: Literal["modelopt_fp8"] = "modelopt_fp8"
    scheme: Annotated[str, AfterValidator(one_of(FP8_SCHEMES))]
    options: Fp8Options = Fp8Options()


class ModelOptNvfp4Config(Shared):
    """Four-bit floats in groups of 16."""

    quantizer: Literal["modelopt_nvfp4"] = "modelopt_nvfp4"
    scheme: Annotated[str, AfterValidator(one_of(NVFP4_SCHEMES))]
    options: Nvfp4Options = Nvfp4Options()

    @model_validator(mode="after")
    def _exported_whole(self) -> ModelOptNvfp4Config:
        if self.trtllm is not None and parse(self.scheme).activation_bits is None:
            raise ValueError(
                "the library's TensorRT-LLM export writes half the hidden size for 4-bit floats without rounded "
                "activations; use W4A4_NVFP4, or no trtllm"
            )
        return self


class ModelOptSmoothQuantConfig(Shared):
    """Eight-bit integers for weights and activations, after outliers are moved into the weights."""

    quantizer: Literal["modelopt_smoothquant"] = "modelopt_smoothquant"
    scheme: Annotated[str, AfterValidator(one_of(SMOOTHQUANT_SCHEMES))]
    options: SmoothQuantOptions = SmoothQuantOptions()


ModelOptConfig = ModelOptAwqConfig | ModelOptFp8Config | ModelOptNvfp4Config | ModelOptSmoothQuantConfig


def needs_calibration(config: ModelOptConfig) -> bool:
    """Whether a calibration set is read: always, but where only weights are looked at and the cache stays."""
    scheme = parse(config.scheme)
    if scheme.kv:
        return True
    if isinstance(config, ModelOptFp8Config):
        return not scheme.dynamic
    return not isinstance(config, ModelOptNvfp4Config) or scheme.activation_bits is not None


def algorithm(config: ModelOptConfig) -> str:
    """The library's name of a scheme, which its checkpoints carry as `quant_algo`."""
    scheme = parse(config.scheme)
    if isinstance(config, ModelOptAwqConfig):
        return "W4A8_AWQ" if scheme.activation_bits else "W4A16_AWQ"
    if isinstance(config, ModelOptFp8Config):
        return "FP8_PER_CHANNEL_PER_TOKEN" if scheme.dynamic else "FP8"
    if isinstance(config, ModelOptNvfp4Config):
        return "NVFP4" if scheme.activation_bits else "W4A16_NVFP4"
    return "W8A8_SQ_PER_CHANNEL"


def promises(config: ModelOptConfig) -> dict[str, Fact]:
    """What its checkpoints say of themselves, and which TensorRT-LLM checkpoint lies beside."""
    found: dict[str, Fact] = {
        "quant_method": "modelopt",
        "quant_algo": algorithm(config),
        "kv_cache_quant_algo": parse(config.scheme).kv or "",
    }
    if config.trtllm is not None:
        found |= {
            "trtllm_checkpoint": config.trtllm.directory,
            "trtllm_tp": config.trtllm.tp,
            "trtllm_pp": config.trtllm.pp,
        }
    return found


def preflight(config: ModelOptConfig, base: Inspected) -> list[Problem]:
    """What the library has against a base; groups that do not divide are told for every scheme alike."""
    layers = {name: shape for name, shape in base.linear_shapes.items() if not matches(name, config.ignore)}
    found = _torn(config, layers, base)
    odd = [Misfit(name, out, 2) for name, (out, _) in layers.items() if out % 2]
    if odd and isinstance(config, ModelOptAwqConfig):
        message = f"two outputs share a byte, and these layers have an odd number of them: {_told(odd)}"
        found.append(Problem("scheme", config.scheme, message, "name these layers in `ignore`"))
    if config.trtllm is not None:
        found += _export_problems(config.trtllm, parse(config.scheme), layers, base)
    return found


def _torn(config: ModelOptConfig, layers: Mapping[str, tuple[int, int]], base: Inspected) -> list[Problem]:
    """Layers that read one input are saved with one scale for it, so the library takes all of them or none."""
    if isinstance(config, ModelOptFp8Config) and config.trtllm is None:
        return []
    torn = []
    for name in base.linear_shapes:
        parent, _, own = name.rpartition(".")
        group = next((group for group in TOGETHER if own == group[0]), ())
        there = [f"{parent}.{each}" for each in group if f"{parent}.{each}" in base.linear_shapes]
        taken = [each for each in there if each in layers]
        if 0 < len(taken) < len(there):
            torn += [each for each in there if each not in layers]
    if not torn:
        return []
    shown = ", ".join(torn[:3]) + (" and others" if len(torn) > 3 else "")
    message = f"leaves {shown} alone, but not the layers that read the same input, which the library saves as one"
    return [Problem("ignore", list(config.ignore), message, "; ".join(", ".join(group) for group in TOGETHER))]


def _export_problems(
    asked: TrtllmCheckpoint, scheme: Scheme, layers: Mapping[str, tuple[int, int]], base: Inspected
) -> list[Problem]:
    found = [replace(p, key="trtllm") for p in EXPORTED.problems(asked.directory, base.model_type)]
    against = _against_split(asked.tp, scheme, layers, base)
    if against:
        fitting = [n for n in range(1, max(1, base.heads) + 1) if not _against_split(n, scheme, layers, base)]
        allowed = f"would fit: {', '.join(map(str, fitting))}" if fitting else ""
        found.append(Problem("trtllm.tp", asked.tp, "; ".join(against), allowed))
    if base.layers % asked.pp:
        found.append(Problem("trtllm.pp", asked.pp, f"{base.layers} layers do not divide over {asked.pp} GPUs"))
    return found


def _against_split(tp: int, scheme: Scheme, layers: Mapping[str, tuple[int, int]], base: Inspected) -> list[str]:
    """Why a model cannot be split over so many GPUs: the library cuts the inputs of every layer, of whatever kind."""
    found = []
    if base.heads % tp:
        found.append(f"{base.heads} attention heads do not divide over {tp} GPUs")
    if base.kv_heads and base.kv_heads % tp and tp % base.kv_heads:
        found.append(f"{base.kv_heads} heads of keys and values neither divide over {tp} GPUs nor into them")
    group = scheme.group_size or 1
    uneven = [Misfit(name, width, group) for name, (_, width) in layers.items() if width % (tp * group)]
    if uneven:
        parts = f"whole groups of {group}" if group > 1 else "equal parts"
        found.append(f"inputs of these layers do not divide into {parts} on {tp} GPUs: {_told(uneven)}")
    return found


def _told(found: Sequence[Misfit]) -> str:
    return ", ".join(f"{name} ({width})" for name, width in folded(found))
