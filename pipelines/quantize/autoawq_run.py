"""Run AutoAWQ on a checkpoint, in a toolchain with transformers 4, and check what it saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import InputError, StageFailed
from pipelines.flow import progress
from pipelines.flow.store import Fact
from pipelines.intake import calibration as calibration_set
from pipelines.quantize.autoawq import AutoAwqConfig, untouched
from pipelines.quantize.autoawq_cpu import FLOAT32, without_accelerator
from pipelines.quantize.carry import carry_over
from pipelines.quantize.checks import linear_shapes
from pipelines.quantize.coverage import Asked, account, expected
from pipelines.quantize.failures import library_failures
from pipelines.quantize.gptqmodel_cpu import stored_dtype
from pipelines.quantize.llmcompressor_cpu import computes_in_float32
from pipelines.quantize.restored import restore
from pipelines.quantize.scheme import parse
from pipelines.quantize.shards import quantization_config
from pipelines.quantize.transformers4 import staged

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Linear, Module


def run(config: AutoAwqConfig, out: Path, *, checkpoint: Path, calibration: Path | None = None) -> dict[str, Fact]:
    """Quantize a checkpoint into a directory that transformers, vLLM and ONNX Runtime's builder load.

    Raises:
        InputError: there is no calibration set, or the base cannot be said in transformers 4.
        StageFailed: samples were lost on the way, or what was saved fails a check.
    """
    if calibration is None:
        raise InputError(f"{config.quantizer} needs a calibration set; choose one with `calibration=`")
    samples = calibration_set.load(calibration)[: config.options.max_calib_samples]
    expected(checkpoint, Asked(scheme=config.scheme, ignore=config.ignore))
    with without_accelerator() as adapted:
        widened, errors = _quantize(config, samples, checkpoint, out)
    restore(out, checkpoint, quantization_config(out))
    carry_over(checkpoint, out)
    return {
        "scheme": config.scheme,
        "quantizer": config.quantizer,
        "library": "autoawq",
        "library_version": version("autoawq"),
        "adaptations": "; ".join(filter(None, (adapted, widened))),
        **account(out, checkpoint, Asked(scheme=config.scheme, ignore=config.ignore, errors=errors)),
    }


def _quantize(
    config: AutoAwqConfig, samples: Sequence[Sequence[int]], checkpoint: Path, out: Path
) -> tuple[str, Mapping[str, float]]:
    """Quantize and save; give what had to be adapted, and each layer's error."""
    import torch
    from awq import AutoAWQForCausalLM
    from awq.quantize.quantizer import AwqQuantizer

    stored = stored_dtype(checkpoint)
    widened = stored != "float32" and computes_in_float32(config.compute_dtype)
    ignored, _ = untouched(linear_shapes(checkpoint), config.ignore)
    errors: dict[str, float] = {}
    kind = type("Watched", (_Watched, AwqQuantizer), {"errors": errors})
    with library_failures("AutoAWQ", checkpoint.name), staged(checkpoint) as base:
        dtype = torch.float32 if widened else getattr(torch, stored)
        model = AutoAWQForCausalLM.from_pretrained(str(base), torch_dtype=dtype, trust_remote_code=False)
        model.quantize(
            quant_config={
                "zero_point": True,
                "q_group_size": parse(config.scheme).group_size,
                "w_bit": parse(config.scheme).weight_bits,
                "version": "gemm",
                "modules_to_not_convert": ignored or None,
            },
            calib_data=[list(ids) for ids in samples],
            max_calib_seq_len=max(map(len, samples)),
            quantizer_cls=kind,
            **config.options.model_dump(),
        )
        progress.report(0, 1, "saving")
        model.save_quantized(str(out))
    return FLOAT32 if widened else "", errors


class _Watched:
    """Mixed in before the library's quantizer: counts the samples that arrive, reports layers, keeps errors.

    An error is the mean squared change that quantization makes to the output of the block a layer is in, at the best
    scale found; layers scaled together share it.
    """

    errors: dict[str, float]
    calib_data: list[list[int]]
    modules: Any
    model: Any
    _layer = -1
    _loss = float("inf")

    def init_quant(self, n_samples: int, max_seq_len: int) -> tuple[Any, Any, Tensor]:
        """Hold what arrived against what was given: longer samples are dropped in silence, the rest joined and cut."""
        blocks, kwargs, inputs = super().init_quant(n_samples=n_samples, max_seq_len=max_seq_len)  # type: ignore[misc]
        given = sum(map(len, self.calib_data))
        if inputs.shape[:2] != (given // max_seq_len, max_seq_len):
            arrived = inputs.shape[0] * inputs.shape[1]
            raise StageFailed(f"AutoAWQ calibrates on {arrived} of {given} tokens; the others were dropped in silence")
        return blocks, kwargs, inputs

    def _get_input_feat(self, layer: Module, named_linears: dict[str, Linear]) -> dict[str, Tensor]:
        self._layer += 1
        progress.report(self._layer, len(self.modules), "layers quantized")
        found: dict[str, Tensor] = super()._get_input_feat(layer, named_linears)  # type: ignore[misc]
        return found

    def _search_best_scale(self, module: Module, **group: Any) -> tuple[str, tuple[str, ...], Tensor]:
        import torch

        names = {held: name for name, held in self.model.named_modules()}
        if not bool(torch.isfinite(group["inp"]).all()):
            first = names[group["layers"][0]]
            raise StageFailed(f"the inputs of {first} are not finite on the calibration set; no scale can be found")
        self._loss = float("inf")
        found: tuple[str, tuple[str, ...], Tensor] = super()._search_best_scale(module, **group)  # type: ignore[misc]
        self.errors.update({names[layer]: self._loss for layer in group["layers"]})
        return found

    def _compute_loss(self, *outputs: Any) -> float:
        loss: float = super()._compute_loss(*outputs)  # type: ignore[misc]
        self._loss = min(self._loss, loss)
        return loss
