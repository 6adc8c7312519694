"""Run GPTQModel on a checkpoint and check what it saved."""

from __future__ import annotations

import csv
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipelines.errors import InputError
from pipelines.flow import progress
from pipelines.intake import calibration as calibration_set
from pipelines.intake.lean import without_unused
from pipelines.quantize.carry import carry_over
from pipelines.quantize.coverage import Asked, account, expected
from pipelines.quantize.failures import library_failures
from pipelines.quantize.gptqmodel import AwqModelConfig, GptqModelConfig
from pipelines.quantize.gptqmodel_cpu import (
    FLOAT32,
    awq_without_accelerator,
    narrow,
    stored_dtype,
    two_workers,
)
from pipelines.quantize.llmcompressor_cpu import computes_in_float32
from pipelines.quantize.packing import open_quantized
from pipelines.quantize.scheme import parse

NOT_PART = frozenset({"offload_to_disk_path"})
"""Where this run put its temporary files: not a property of what it made."""


CALLED = frozenset({"batch_size", "calibration_sort", "calibration_data_min_length"})
"""Options of the call that quantizes; the others are of the library's config."""


def run(
    config: GptqModelConfig | AwqModelConfig, out: Path, *, checkpoint: Path, calibration: Path | None = None
) -> dict[str, str | int | float]:
    """Quantize a checkpoint into a directory that transformers, vLLM and ONNX Runtime's builder load.

    Raises:
        InputError: there is no calibration set.
        StageFailed: what was saved fails a check.
    """
    if calibration is None:
        raise InputError(f"{config.quantizer} needs a calibration set; choose one with `calibration=`")
    samples = calibration_set.load(calibration)
    asked = Asked("" if config.options.dynamic else config.scheme, ignore=config.ignore)
    expected(checkpoint, asked)
    with without_unused("torchao"), two_workers() as pooled, _scratch() as scratch:
        adapted = _quantize(config, samples, checkpoint.resolve(), out.resolve(), scratch)
    _settle(out)
    carry_over(checkpoint, out)
    return {
        "scheme": config.scheme,
        "quantizer": config.quantizer,
        "library": "gptqmodel",
        "library_version": version("gptqmodel"),
        "adaptations": "; ".join(filter(None, (pooled, *adapted))),
        **account(out, checkpoint, replace(asked, errors=_losses(out))),
    }


def _quantize(
    config: GptqModelConfig | AwqModelConfig,
    samples: Sequence[Sequence[int]],
    checkpoint: Path,
    out: Path,
    scratch: Path,
) -> list[str]:
    """Quantize and save; give what had to be adapted."""
    import torch
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    torch.manual_seed(config.seed)
    stored = stored_dtype(checkpoint)
    widened = stored != "float32" and computes_in_float32(config.compute_dtype)
    by_awq = isinstance(config, AwqModelConfig)
    shown = samples[: config.options.num_calibration_samples] if isinstance(config, AwqModelConfig) else samples
    adapting: AbstractContextManager[str] = awq_without_accelerator() if by_awq else nullcontext("")
    packing = BACKEND.AWQ_TORCH if by_awq and not torch.accelerator.is_available() else BACKEND.AUTO
    with library_failures("GPTQModel", checkpoint.name), adapting as adapted:
        loading = {"dtype": torch.float32} if widened else {}
        model = GPTQModel.load(str(checkpoint), QuantizeConfig(**_settings(config, scratch)), **loading)
        model.layer_callback = _LayersReported(int(model.model.config.get_text_config().num_hidden_layers))
        model.quantize(
            [{"input_ids": list(ids), "attention_mask": [1] * len(ids)} for ids in shown],
            backend=packing,
            **config.options.model_dump(include=set(CALLED)),
        )
        progress.report(0, 1, "saving")
        model.save(str(out))
    if widened:
        narrow(out, stored)
    return [adapted, FLOAT32 if widened else ""]


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory to work in while the library does, which writes logs wherever it is run."""
    with tempfile.TemporaryDirectory(prefix="gptqmodel_") as directory, chdir(directory):
        yield Path(directory)


def _settings(config: GptqModelConfig | AwqModelConfig, scratch: Path) -> dict[str, Any]:
    """The library's own config: a scheme in its terms, and layers to leave alone as negative rules of `dynamic`."""
    from gptqmodel.quantization.config import FORMAT, METHOD, HessianConfig
    from gptqmodel.quantization.config import Fallback as LibraryFallback

    scheme, options = parse(config.scheme), config.options
    rules: dict[str, dict[str, int | str | bool]] = {
        f"-:{_pattern(entry)}": {} for entry in config.ignore if entry != "lm_head"
    }
    rules |= options.dynamic or {}
    ours = CALLED | {"fallback", "hessian", "dynamic", "num_calibration_samples"}
    settings = {
        **options.model_dump(exclude=set(ours)),
        "bits": scheme.weight_bits,
        "group_size": scheme.group_size or -1,
        "sym": scheme.symmetric,
        "offload_to_disk_path": str(scratch / "offloaded") if options.offload_to_disk else None,
        "dynamic": rules or None,
        "fallback": LibraryFallback(**options.fallback.model_dump()) if options.fallback else None,
    }
    if isinstance(config, AwqModelConfig):
        return {**settings, "method": METHOD.AWQ, "format": FORMAT.GEMM}
    hessian = HessianConfig(**config.options.hessian.model_dump())
    return {**settings, "method": METHOD.GPTQ, "format": FORMAT.GPTQ, "hessian": hessian}


def _pattern(entry: str) -> str:
    return entry.removeprefix("re:") if entry.startswith("re:") else f"^{re.escape(entry)}$"


class _LayersReported:
    """What the library calls after each decoder layer, on two occasions; the second is when it is done."""

    def __init__(self, total: int) -> None:
        self._total = total

    def layer_complete(self, *, layer_idx: int, submodule_finalized: bool) -> None:
        if submodule_finalized:
            progress.report(layer_idx + 1, self._total, "layers quantized")


def _losses(out: Path) -> dict[str, float]:
    """The library's loss of each layer from its log, by module name; a layer it could only round has no number."""
    log = out / "quant_log.csv"
    if not log.is_file():
        return {}
    with log.open(newline="") as file:
        told = {f".{row['layer']}.{row['module']}": row["loss"] for row in csv.DictReader(file)}
    found = {}
    for name in open_quantized(out):
        loss = next((loss for end, loss in told.items() if name.endswith(end)), "")
        with suppress(ValueError):
            found[name] = float(loss)
    return found


def _settle(out: Path) -> None:
    """Take out of the saved files what differs between two equal runs: a temporary path, and seconds per layer."""
    for name in ("config.json", "quantize_config.json"):
        path = out / name
        data = json.loads(path.read_text())
        meta = (data.get("quantization_config") or data).get("meta") or {}
        for key in NOT_PART & meta.keys():
            del meta[key]
        path.write_text(json.dumps(data, indent=2) + "\n")
    log = out / "quant_log.csv"
    if log.is_file():
        with log.open(newline="") as file:
            rows = [{k: v for k, v in row.items() if k != "time"} for row in csv.DictReader(file)]
        with log.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["layer"])
            writer.writeheader()
            writer.writerows(rows)
