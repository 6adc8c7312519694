"""Run llm-compressor on a checkpoint, on a GPU where there is one, and check what it saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import InputError
from pipelines.flow import progress
from pipelines.intake import calibration as calibration_set
from pipelines.intake.lean import without_unused
from pipelines.quantize.carry import carry_over
from pipelines.quantize.coverage import Asked, account, expected
from pipelines.quantize.failures import library_failures
from pipelines.quantize.llmcompressor import (
    AwqConfig,
    LlmCompressorConfig,
    SequentialOptions,
    needs_calibration,
)
from pipelines.quantize.llmcompressor_cpu import FLOAT32, computes_in_float32, memory_pinning, narrow
from pipelines.quantize.llmcompressor_recipe import ignored, recipe
from pipelines.quantize.llmcompressor_told import Told, gptq_told

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel

_NOT_PASSED_ON = ("sequential_targets", "data_collator", "batch_size", "num_calibration_samples")


def run(
    config: LlmCompressorConfig, out: Path, *, checkpoint: Path, calibration: Path | None = None
) -> dict[str, str | int | float]:
    """Quantize a checkpoint into a directory that transformers and vLLM load.

    Raises:
        InputError: the method needs a calibration set and was given none.
        StageFailed: what was saved fails a check.
    """
    if needs_calibration(config) and calibration is None:
        raise InputError(
            f"{config.quantizer} with {config.scheme} needs a calibration set; choose one with `calibration=`"
        )
    asked = Asked(config.scheme, config.targets, tuple(ignored(config)), config.head or "")
    expected(checkpoint, asked)
    samples = calibration_set.load(calibration) if calibration is not None and needs_calibration(config) else []
    told = Told()
    with without_unused():
        adaptations = _quantize(config, samples, checkpoint, out, told)
    carry_over(checkpoint, out)
    return {
        "scheme": config.scheme + (f", head {config.head}" if config.head else ""),
        "quantizer": config.quantizer,
        "library": "llmcompressor",
        "library_version": _version(),
        "adaptations": "; ".join(adaptations),
        **account(out, checkpoint, replace(asked, errors=told.errors, notes=told.notes)),
    }


def _quantize(
    config: LlmCompressorConfig, samples: Sequence[Sequence[int]], checkpoint: Path, out: Path, told: Told
) -> list[str]:
    """Quantize and save; give what had to be adapted."""
    import torch
    from llmcompressor import reset_session
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(config.seed)
    stored = AutoConfig.from_pretrained(checkpoint).dtype or torch.float32
    widened = stored != torch.float32 and computes_in_float32(config.compute_dtype)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32 if widened else "auto")
    pinning: AbstractContextManager[str] = memory_pinning() if isinstance(config, AwqConfig) else nullcontext("")
    try:
        with library_failures("llm-compressor", checkpoint.name), pinning as adapted, _layers_reported(model):
            _oneshot(model, config, samples, checkpoint, stored if widened else None, told)
            progress.report(0, 1, "saving")
            if widened:
                narrow(model, stored)
            model.save_pretrained(out, save_compressed=True)
    finally:
        reset_session()
    # The recipe has Python tags that safe YAML readers refuse; the manifest says all of it.
    (out / "recipe.yaml").unlink(missing_ok=True)
    return [adapted] * bool(adapted) + [FLOAT32.format(str(stored).removeprefix("torch."))] * widened


def _oneshot(
    model: PreTrainedModel,
    config: LlmCompressorConfig,
    samples: Sequence[Sequence[int]],
    checkpoint: Path,
    scale_dtype: torch.dtype | None,
    told: Told,
) -> None:
    from llmcompressor import oneshot
    from transformers import AutoTokenizer

    options = config.options.calibrate
    shown = samples[: options.num_calibration_samples]
    with gptq_told(told, {module: name for name, module in model.named_modules()}):
        oneshot(
            model=model,
            processor=AutoTokenizer.from_pretrained(checkpoint),
            recipe=recipe(config, scale_dtype, told),
            dataset=_batches(shown, options) if shown else None,
            num_calibration_samples=len(shown),
            shuffle_calibration_samples=False,
            tie_word_embeddings=config.head is None,
            sequential_targets=list(options.sequential_targets) if options.sequential_targets else None,
            **options.model_dump(exclude=set(_NOT_PASSED_ON)),
        )


def _batches(samples: Sequence[Sequence[int]], options: SequentialOptions) -> DataLoader[dict[str, Tensor]]:
    """The frozen samples in their order; the library's own loader would shuffle and tokenize again."""
    import torch
    from torch.utils.data import DataLoader

    def collate(rows: list[Sequence[int]]) -> dict[str, Tensor]:
        cut = min(map(len, rows)) if options.data_collator == "truncation" else max(map(len, rows))
        ids = torch.zeros(len(rows), cut, dtype=torch.long)
        mask = torch.zeros(len(rows), cut, dtype=torch.long)
        for row, sample in enumerate(rows):
            kept = torch.tensor(sample[:cut])
            ids[row, : len(kept)], mask[row, : len(kept)] = kept, 1
        return {"input_ids": ids, "attention_mask": mask}

    return DataLoader(list(samples), batch_size=options.batch_size, collate_fn=collate)  # type: ignore[arg-type]


@contextmanager
def _layers_reported(model: PreTrainedModel) -> Iterator[None]:
    """Report each decoder layer when calibration first reaches it."""
    from torch.nn import ModuleList

    total = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
    layers = next((m for m in model.modules() if isinstance(m, ModuleList) and len(m) == total), ())
    seen: set[int] = set()

    def reach(k: int) -> None:
        if k not in seen:
            seen.add(k)
            progress.report(k, total, "layers calibrated")

    def hook_of(k: int) -> Any:
        def hook(_module: Module, _args: object) -> None:
            reach(k)

        return hook

    handles = [layer.register_forward_pre_hook(hook_of(k)) for k, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _version() -> str:
    from importlib.metadata import version

    return version("llmcompressor")
