"""Run NVIDIA ModelOpt on a checkpoint, on a GPU where there is one, and check what it saved."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import InputError, StageFailed
from pipelines.flow import progress
from pipelines.flow.store import Fact
from pipelines.intake import calibration as calibration_set
from pipelines.intake.lean import without_unused
from pipelines.quantize.carry import carry_over
from pipelines.quantize.checks import linear_shapes
from pipelines.quantize.coverage import Asked, account, expected
from pipelines.quantize.failures import library_failures
from pipelines.quantize.gptqmodel_cpu import stored_dtype
from pipelines.quantize.llmcompressor_cpu import computes_in_float32
from pipelines.quantize.modelopt import (
    CalibrateOptions,
    ModelOptAwqConfig,
    ModelOptConfig,
    ModelOptFp8Config,
    ModelOptSmoothQuantConfig,
    algorithm,
    needs_calibration,
    promises,
)
from pipelines.quantize.modelopt_cpu import FLOAT32, narrow
from pipelines.quantize.modelopt_trtllm import check_written, export
from pipelines.quantize.scheme import matches, misfit_problems, parse

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PRESETS = {
    "W4A16_AWQ": "INT4_AWQ_CFG",
    "W4A8_AWQ": "W4A8_AWQ_BETA_CFG",
    "FP8": "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "NVFP4": "NVFP4_DEFAULT_CFG",
    "W4A16_NVFP4": "W4A16_NVFP4_CFG",
    "W8A8_SQ_PER_CHANNEL": "INT8_SMOOTHQUANT_CFG",
}
"""The library's own recipe for each of its algorithms, by the name it has in `modelopt.torch.quantization`."""
UNREACHED = "calibration did not reach it: rounded to nearest"


@dataclass
class Found:
    """What came up while quantizing, layer by layer."""

    exempt: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def run(config: ModelOptConfig, out: Path, *, checkpoint: Path, calibration: Path | None = None) -> dict[str, Fact]:
    """Quantize a checkpoint into a directory that TensorRT-LLM and vLLM load, transformers not.

    Raises:
        InputError: the method needs a calibration set and was given none, or a group does not divide a layer.
        StageFailed: what was saved fails a check.
    """
    if needs_calibration(config) and calibration is None:
        raise InputError(
            f"{config.quantizer} with {config.scheme} needs a calibration set; choose one with `calibration=`"
        )
    linears, asked = linear_shapes(checkpoint), Asked(config.scheme, ignore=config.ignore)
    expected(checkpoint, asked)
    if misfits := misfit_problems("scheme", parse(config.scheme), linears, config.ignore):
        raise InputError("; ".join(map(str, misfits)))
    samples = calibration_set.load(calibration) if calibration is not None and needs_calibration(config) else []
    with without_unused():
        found, widened = _quantize(config, samples, checkpoint, out)
    _settle(out, checkpoint)
    _check_declared(config, out)
    carry_over(checkpoint, out)
    asked = Asked(config.scheme, ("Linear",), config.ignore, "", found.exempt, found.errors, found.notes)
    facts = account(out, checkpoint, asked)
    beside = {} if config.trtllm is None else check_written(config.trtllm, out, checkpoint)
    return {
        "scheme": config.scheme,
        "quantizer": config.quantizer,
        "library": "modelopt",
        "library_version": version("nvidia-modelopt"),
        "adaptations": FLOAT32 if widened else "",
        **facts,
        **promises(config),
        **beside,
    }


def _quantize(
    config: ModelOptConfig, samples: Sequence[Sequence[int]], checkpoint: Path, out: Path
) -> tuple[Found, bool]:
    """Quantize and save; say what came up, and whether weights were widened to float32 meanwhile."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    stored = stored_dtype(checkpoint)
    widened = stored != "float32" and computes_in_float32(config.compute_dtype)
    placed = {"device_map": "auto"} if torch.accelerator.is_available() else {}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32 if widened else "auto", **placed)
    model.eval()
    linears = linear_shapes(checkpoint)
    recipe = copy.deepcopy(getattr(mtq, PRESETS[algorithm(config)]))
    found = Found(exempt=_left_alone(recipe, linears, config.ignore))
    with library_failures("ModelOpt", checkpoint.name):
        mtq.quantize(model, _recipe(config, recipe, linears, mtq.FP8_KV_CFG), _shown(config.options.calibrate, samples))
        _collect(model, found)
        progress.report(0, 1, "saving")
        if config.trtllm is not None:
            export(config.trtllm, copy.deepcopy(model), getattr(torch, stored), out)
        export_hf_checkpoint(model, dtype=getattr(torch, stored), export_dir=out)
    if widened:
        narrow(out, checkpoint)
    return found, widened


def _recipe(
    config: ModelOptConfig, recipe: dict[str, Any], linears: Mapping[str, tuple[int, int]], cache: Mapping[str, Any]
) -> dict[str, Any]:
    """The library's recipe with our group size, layers to leave alone, cache and search."""
    scheme, entries = parse(config.scheme), recipe["quant_cfg"]
    for entry in entries if isinstance(config, ModelOptAwqConfig) else []:
        held = entry.get("cfg")
        for attributes in held if isinstance(held, list) else [held or {}]:
            if attributes.get("num_bits") == 4:
                attributes["block_sizes"][-1] = scheme.group_size
    ignored = [name for name in linears if matches(name, config.ignore)]
    recipe["quant_cfg"] = [
        *entries,
        *({"quantizer_name": f"{name}.*", "enable": False} for name in ignored),
        *(copy.deepcopy(cache["quant_cfg"]) if scheme.kv else []),
    ]
    recipe["algorithm"] = _search(config)
    return recipe


def _search(config: ModelOptConfig) -> dict[str, Any]:
    """How scales are found, in the library's terms; `debug` has it keep what we then read of each layer."""
    options = config.options
    if isinstance(config, ModelOptAwqConfig):
        settings = config.options.model_dump(exclude={"calibrate", "algorithm"})
        of_scales = {"alpha_step": settings.pop("alpha_step")}
        used = {"awq_lite": of_scales, "awq_clip": settings, "awq_full": of_scales | settings}
        return {"method": config.options.algorithm, "debug": True, **used[config.options.algorithm]}
    if isinstance(config, ModelOptFp8Config) and config.options.algorithm == "mse":
        return {"method": "mse", **options.model_dump(exclude={"calibrate", "algorithm"})}
    if isinstance(config, ModelOptSmoothQuantConfig):
        return {"method": "smoothquant", "alpha": config.options.alpha}
    return {"method": "max"}


def _left_alone(
    recipe: Mapping[str, Any], linears: Mapping[str, tuple[int, int]], ignore: tuple[str, ...]
) -> dict[str, str]:
    """Layers that the library's own recipe never quantizes (routers, vision towers), with the entry that says so."""
    entries = [e["quantizer_name"] for e in recipe["quant_cfg"] if e.get("enable") is False and "parent_class" not in e]
    patterns = [name for name in entries if name not in ("*", "*input_quantizer")]
    return {
        layer: f"left alone by the library's own {pattern!r}"
        for layer in linears
        if not matches(layer, ignore)
        for pattern in patterns
        if fnmatchcase(f"{layer}.weight_quantizer", pattern)
    }


def _shown(options: CalibrateOptions, samples: Sequence[Sequence[int]]) -> Callable[[PreTrainedModel], None] | None:
    """What shows the model the frozen samples, in their order; methods ask for it once or more."""
    import torch

    if not samples:
        return None
    chosen = [list(ids) for ids in samples[: options.num_calibration_samples]]
    batches: list[Tensor] = []
    for _, alike in groupby(chosen, key=len):
        rows = list(alike)
        batches += [torch.tensor(rows[k : k + options.batch_size]) for k in range(0, len(rows), options.batch_size)]
    passes = 0

    def show(model: PreTrainedModel) -> None:
        nonlocal passes
        passes += 1
        with torch.no_grad():
            for done, ids in enumerate(batches):
                progress.report(done, len(batches), f"calibration batches, pass {passes}")
                model(ids.to(model.device), use_cache=False)

    return show


def _collect(model: PreTrainedModel, found: Found) -> None:
    """Take each layer's error from what the search kept: mean squared change of its output, at the best scale."""
    for name, module in model.named_modules():
        search = getattr(module, "awq_lite", None)
        if search is not None:
            if search.is_enabled:
                found.errors[name] = float(search.loss[search.best_alpha]) / max(1, search.num_search_steps)
            else:
                found.notes[name] = UNREACHED
        for kept in ("awq_lite", "awq_clip"):
            if hasattr(module, kept):
                delattr(module, kept)


def _settle(out: Path, checkpoint: Path) -> None:
    """Put the quantization into the base's own config: the library adds to the rest what its transformers has."""
    path = out / "config.json"
    said = json.loads(path.read_text())["quantization_config"]
    config = json.loads((checkpoint / "config.json").read_text())
    path.write_text(json.dumps(config | {"quantization_config": said}, indent=2) + "\n")


def _check_declared(config: ModelOptConfig, out: Path) -> None:
    """Hold hf_quant_config.json, which TensorRT-LLM reads, against what was asked.

    Raises:
        StageFailed: they differ.
    """
    said = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    scheme = parse(config.scheme)
    asked: dict[str, object] = {"quant_algo": algorithm(config), "kv_cache_quant_algo": scheme.kv}
    if scheme.granularity == "group":
        asked["group_size"] = scheme.group_size
    wrong = [f"{key} {said.get(key)!r}, not {value!r}" for key, value in asked.items() if said.get(key) != value]
    if wrong:
        raise StageFailed(f"{out}/hf_quant_config.json: {'; '.join(wrong)}")
