"""Every quantizer there is, a row each. A new one is a module (config and function), a row here and a conf file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.errors import Problem
from pipelines.flow.store import Fact
from pipelines.quantize import autoawq, autogptq, gguf, gptqmodel, llmcompressor, modelopt, optimum_gptq
from pipelines.quantize.estimate import Effort, effort_of

if TYPE_CHECKING:
    from pipelines.intake.checkpoint import Inspected


def _nothing(config: object) -> Mapping[str, Fact]:
    del config
    return {}


def _no_problems(config: object, base: object) -> list[Problem]:
    del config, base
    return []


@dataclass(frozen=True, slots=True)
class Quantizer:
    """What the rest of the pipeline knows of a quantizer; nothing outside this room names one.

    `function` is "module:name", called as (config, out, *, checkpoint, calibration?) -> facts. `schemes` are patterns
    of scheme names. `promises` are facts that hold of a variant before it is made, such as its quant_method, for the
    preflight of engines; `preflight` tells all that its library has against a base, with keys within the variant's own
    config. `toolchain` is where it runs unless a conf file says otherwise. `effort` is what estimates of time and
    memory rest on. Raise `version` when the code changes what comes out.
    """

    name: str
    version: int
    summary: str
    config_type: str
    function: str
    packages: tuple[str, ...]
    schemes: tuple[str, ...]
    needs_calibration: Callable[[Any], bool]
    promises: Callable[[Any], Mapping[str, Fact]] = _nothing
    preflight: Callable[[Any, Inspected], list[Problem]] = _no_problems
    toolchain: str = "current"
    effort: Callable[[Any], Effort] | None = None

    def work(self, config: Any) -> Effort:
        """What the method does to every layer; without a word of the row, two passes over data that it reads."""
        if self.effort is not None:
            return self.effort(config)
        return effort_of(getattr(config, "options", None), calibrated=self.needs_calibration(config))


def _correcting(config: Any) -> Effort:
    return effort_of(config.options, calibrated=True, hessian=True)


def _searching(config: Any) -> Effort:
    step = getattr(config.options, "alpha_step", 0.05)
    tried = getattr(config.options, "n_grid", round(1 / step))
    return effort_of(config.options, calibrated=True, tried=tried)


def _never(config: object) -> bool:
    del config
    return False


def _always(config: object) -> bool:
    del config
    return True


def _llmcompressor(name: str, config: str, schemes: tuple[str, ...], summary: str) -> Quantizer:
    return Quantizer(
        name=f"llmcompressor_{name}",
        version=2,
        summary=summary,
        config_type=f"pipelines.quantize.llmcompressor:{config}",
        function="pipelines.quantize.llmcompressor_run:run",
        packages=("llmcompressor", "compressed-tensors", "transformers", "torch"),
        schemes=schemes,
        needs_calibration=llmcompressor.needs_calibration,
        promises=llmcompressor.promises,
        effort=llmcompressor.effort,
    )


def _modelopt(
    name: str,
    config: str,
    schemes: tuple[str, ...],
    summary: str,
    effort: Callable[[Any], Effort] | None = None,
) -> Quantizer:
    return Quantizer(
        name=f"modelopt_{name}",
        version=1,
        summary=summary,
        config_type=f"pipelines.quantize.modelopt:{config}",
        function="pipelines.quantize.modelopt_run:run",
        packages=("nvidia-modelopt", "transformers", "torch"),
        schemes=schemes,
        needs_calibration=modelopt.needs_calibration,
        promises=modelopt.promises,
        preflight=modelopt.preflight,
        effort=effort,
    )


_ROWS = (
    Quantizer(
        name="baseline",
        version=2,
        summary="the base as it is, for comparison",
        config_type="pipelines.quantize.baseline:BaselineConfig",
        function="pipelines.quantize.baseline:run",
        packages=(),
        schemes=("BF16", "FP16", "FP32"),
        needs_calibration=_never,
        promises=lambda _: {"quant_method": ""},
    ),
    _llmcompressor("rtn", "RtnConfig", llmcompressor.RTN_SCHEMES, "round to nearest: the control others must beat"),
    _llmcompressor("awq", "AwqConfig", llmcompressor.AWQ_SCHEMES, "activation-aware scales, then round to nearest"),
    _llmcompressor("gptq", "GptqConfig", llmcompressor.GPTQ_SCHEMES, "rounding errors corrected column by column"),
    _llmcompressor(
        "smoothquant",
        "SmoothQuantConfig",
        llmcompressor.SMOOTHQUANT_SCHEMES,
        "outliers of activations moved into the weights, then both in 8-bit integers",
    ),
    _llmcompressor("fp8", "Fp8Config", llmcompressor.FP8_SCHEMES, "8-bit floats for weights and activations"),
    _llmcompressor("fp4", "Fp4Config", llmcompressor.FP4_SCHEMES, "4-bit floats in small groups: NVFP4 and MXFP4"),
    Quantizer(
        name="gptqmodel_gptq",
        version=2,
        summary="GPTQ in the classic format that most runtimes read",
        config_type="pipelines.quantize.gptqmodel:GptqModelConfig",
        function="pipelines.quantize.gptqmodel_run:run",
        packages=("gptqmodel", "transformers", "torch"),
        schemes=gptqmodel.SCHEMES,
        needs_calibration=_always,
        effort=_correcting,
        promises=gptqmodel.promises,
    ),
    Quantizer(
        name="gptqmodel_awq",
        version=1,
        summary="AWQ in the layout that most runtimes read",
        config_type="pipelines.quantize.gptqmodel:AwqModelConfig",
        function="pipelines.quantize.gptqmodel_run:run",
        packages=("gptqmodel", "transformers", "torch"),
        schemes=gptqmodel.AWQ_SCHEMES,
        needs_calibration=_always,
        effort=_searching,
        promises=gptqmodel.promises,
        preflight=gptqmodel.preflight,
    ),
    Quantizer(
        name="optimum_gptq",
        version=1,
        summary="GPTQ by GPTQModel's kernels in optimum's own loop, which knows any decoder",
        config_type="pipelines.quantize.optimum_gptq:OptimumGptqConfig",
        function="pipelines.quantize.optimum_gptq_run:run",
        packages=("optimum", "gptqmodel", "transformers", "torch"),
        schemes=optimum_gptq.SCHEMES,
        needs_calibration=_always,
        effort=_correcting,
        promises=optimum_gptq.promises,
        preflight=optimum_gptq.preflight,
    ),
    Quantizer(
        name="autoawq",
        version=1,
        summary="AWQ by the archived library whose layout most runtimes read",
        config_type="pipelines.quantize.autoawq:AutoAwqConfig",
        function="pipelines.quantize.autoawq_run:run",
        packages=("autoawq", "transformers", "torch"),
        schemes=autoawq.SCHEMES,
        needs_calibration=_always,
        effort=_searching,
        promises=autoawq.promises,
        preflight=autoawq.preflight,
        toolchain="legacy",
    ),
    Quantizer(
        name="autogptq",
        version=1,
        summary="GPTQ by the archived library that gave the classic format its name",
        config_type="pipelines.quantize.autogptq:AutoGptqConfig",
        function="pipelines.quantize.autogptq_run:run",
        packages=("auto_gptq", "transformers", "torch"),
        schemes=autogptq.SCHEMES,
        needs_calibration=_always,
        effort=_correcting,
        promises=autogptq.promises,
        preflight=autogptq.preflight,
        toolchain="legacy",
    ),
    _modelopt(
        "awq", "ModelOptAwqConfig", modelopt.AWQ_SCHEMES, "AWQ in the layout that TensorRT-LLM reads", _searching
    ),
    _modelopt("fp8", "ModelOptFp8Config", modelopt.FP8_SCHEMES, "8-bit floats as TensorRT-LLM reads them"),
    _modelopt("nvfp4", "ModelOptNvfp4Config", modelopt.NVFP4_SCHEMES, "4-bit floats for Blackwell's tensor cores"),
    _modelopt(
        "smoothquant",
        "ModelOptSmoothQuantConfig",
        modelopt.SMOOTHQUANT_SCHEMES,
        "8-bit integers for TensorRT-LLM's engines",
    ),
    Quantizer(
        name="gguf",
        version=1,
        summary="llama.cpp's own rounding, without data: one file that llama.cpp serves",
        config_type="pipelines.quantize.gguf:GgufConfig",
        function="pipelines.quantize.gguf_run:run",
        packages=("llama_cpp_python", "gguf", "transformers", "torch"),
        schemes=gguf.SCHEMES,
        needs_calibration=_never,
        promises=gguf.promises,
        preflight=gguf.preflight,
        toolchain="llama_cpp",
    ),
)

QUANTIZERS: dict[str, Quantizer] = {row.name: row for row in _ROWS}
