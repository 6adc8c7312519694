"""Run AutoGPTQ on a checkpoint, in a toolchain with transformers 4, and check what it saved."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from pipelines.errors import InputError
from pipelines.flow import progress
from pipelines.flow.store import Fact
from pipelines.intake import calibration as calibration_set
from pipelines.quantize.autogptq import AutoGptqConfig
from pipelines.quantize.autogptq_cpu import FLOAT32, load, without_cuda
from pipelines.quantize.carry import carry_over
from pipelines.quantize.coverage import Asked, account, expected
from pipelines.quantize.failures import library_failures
from pipelines.quantize.gptqmodel_cpu import stored_dtype
from pipelines.quantize.llmcompressor_cpu import computes_in_float32
from pipelines.quantize.restored import restore
from pipelines.quantize.scheme import parse
from pipelines.quantize.shards import quantization_config
from pipelines.quantize.transformers4 import staged

PLACES = frozenset({"model_name_or_path", "model_file_base_name"})
"""Where a run put its files: not a property of what it made."""
FORMAT = "gptq"
"""Version 1, the only one this library writes and the one it does not name."""


def run(config: AutoGptqConfig, out: Path, *, checkpoint: Path, calibration: Path | None = None) -> dict[str, Fact]:
    """Quantize a checkpoint into a directory that transformers, vLLM and ONNX Runtime's builder load.

    Raises:
        InputError: there is no calibration set, or the base cannot be said in transformers 4.
        StageFailed: what was saved fails a check.
    """
    if calibration is None:
        raise InputError(f"{config.quantizer} needs a calibration set; choose one with `calibration=`")
    samples = calibration_set.load(calibration)
    expected(checkpoint, Asked(scheme=config.scheme, ignore=config.ignore))
    with without_cuda() as shimmed:
        widened, errors = _quantize(config, samples, checkpoint, out, adapted=bool(shimmed))
    settings = {k: v for k, v in quantization_config(out).items() if k not in PLACES} | {"checkpoint_format": FORMAT}
    restore(out, checkpoint, settings)
    (out / "quantize_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    carry_over(checkpoint, out)
    return {
        "scheme": config.scheme,
        "quantizer": config.quantizer,
        "library": "auto_gptq",
        "library_version": version("auto_gptq"),
        "adaptations": "; ".join(filter(None, (shimmed, widened))),
        **account(out, checkpoint, Asked(scheme=config.scheme, ignore=config.ignore, errors=errors)),
    }


def _quantize(
    config: AutoGptqConfig, samples: Sequence[Sequence[int]], checkpoint: Path, out: Path, *, adapted: bool
) -> tuple[str, Mapping[str, float]]:
    """Quantize and save; give what had to be adapted beside the device, and each layer's error."""
    import torch
    from auto_gptq import BaseQuantizeConfig

    scheme, options = parse(config.scheme), config.options
    stored = stored_dtype(checkpoint)
    widened = stored != "float32" and computes_in_float32(config.compute_dtype)
    settings = BaseQuantizeConfig(
        bits=scheme.weight_bits,
        group_size=scheme.group_size or -1,
        sym=scheme.symmetric,
        **options.model_dump(exclude={"batch_size", "cache_examples_on_gpu"}),
    )
    with library_failures("AutoGPTQ", checkpoint.name), staged(checkpoint) as base, _listening() as heard:
        model = load(base, settings, torch.float32 if widened else getattr(torch, stored), adapted=adapted)
        model.quantize(
            [{"input_ids": list(ids), "attention_mask": [1] * len(ids)} for ids in samples],
            batch_size=options.batch_size,
            cache_examples_on_gpu=options.cache_examples_on_gpu and not adapted,
        )
        progress.report(0, 1, "saving")
        model.save_quantized(str(out))
    errors = {f"{model.layers_block_name}.{name}": error for name, error in heard.errors.items()}
    return FLOAT32 if widened else "", errors


@contextmanager
def _listening() -> Iterator[_Heard]:
    """Hear what the library says in its log, whatever level it logs at."""
    heard = _Heard()
    logger = logging.getLogger("auto_gptq")
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        yield heard
    finally:
        logger.setLevel(level)
        logger.removeHandler(heard)


class _Heard(logging.Handler):
    """Listens for layers, which are reported, and for their errors, kept by name within the decoder.

    An error is the squared change of the layer's output that rounding makes, summed, per calibration sample.
    """

    LAYER = re.compile(r"Quantizing (?P<name>\S+) in layer (?P<layer>\d+)/(?P<total>\d+)")
    LOSS = re.compile(r"avg loss: (?P<loss>\S+)")

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.errors: dict[str, float] = {}
        self._layer = -1
        self._name = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Take one line of the log."""
        said = record.getMessage()
        if found := self.LAYER.search(said):
            layer = int(found["layer"]) - 1
            if layer != self._layer:
                progress.report(layer, int(found["total"]), "layers quantized")
            self._layer = layer
            self._name = f"{layer}.{found['name']}"
        elif (found := self.LOSS.search(said)) and self._name:
            self.errors[self._name] = float(found["loss"])
