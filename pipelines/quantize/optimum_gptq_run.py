"""Run optimum's GPTQQuantizer on a checkpoint, mend what it declares, and check what it saved.

It writes the whole calibration text into the checkpoint, and declares version 2 of the format over words of version 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import InputError, StageFailed
from pipelines.flow import progress
from pipelines.flow.store import Fact
from pipelines.intake import calibration as calibration_set
from pipelines.intake.lean import without_unused
from pipelines.quantize.autoawq import untouched
from pipelines.quantize.carry import carry_over
from pipelines.quantize.checks import linear_shapes
from pipelines.quantize.coverage import Asked, account, expected
from pipelines.quantize.failures import library_failures
from pipelines.quantize.gptqmodel_cpu import stored_dtype, two_workers
from pipelines.quantize.llmcompressor_cpu import computes_in_float32
from pipelines.quantize.optimum_gptq import OptimumGptqConfig
from pipelines.quantize.packing import format_of_words
from pipelines.quantize.restored import restore
from pipelines.quantize.scheme import parse
from pipelines.quantize.shards import Shards, quantization_config

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel

TEXTS = frozenset({"dataset", "tokenizer"})
"""What was calibrated with: not a property of the checkpoint, and somebody's data."""
FLOAT32 = "optimum: computed in float32, as there is no accelerator; stored as the base is"


def run(config: OptimumGptqConfig, out: Path, *, checkpoint: Path, calibration: Path | None = None) -> dict[str, Fact]:
    """Quantize a checkpoint into a directory that transformers, vLLM and ONNX Runtime's builder load.

    Raises:
        InputError: there is no calibration set.
        StageFailed: what was saved fails a check.
    """
    if calibration is None:
        raise InputError(f"{config.quantizer} needs a calibration set; choose one with `calibration=`")
    samples = calibration_set.load(calibration)
    expected(checkpoint, Asked(scheme=config.scheme, ignore=config.ignore))
    with without_unused("torchao"), two_workers() as pooled:
        widened, errors = _quantize(config, samples, checkpoint, out)
    settings = mended(out)
    restore(out, checkpoint, settings)
    (out / "quantize_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    carry_over(checkpoint, out)
    return {
        "scheme": config.scheme,
        "quantizer": config.quantizer,
        "library": "optimum",
        "library_version": version("optimum"),
        "adaptations": "; ".join(filter(None, (pooled, widened))),
        **account(out, checkpoint, Asked(scheme=config.scheme, ignore=config.ignore, errors=errors)),
    }


def mended(out: Path) -> dict[str, Any]:
    """The quantization config as it should have been: the format the words are in, and nobody's texts.

    Raises:
        StageFailed: the words are in no format.
    """
    found = format_of_words(Shards(out))
    if not found:
        raise StageFailed(f"{out}: its zero-point words are in no format of GPTQ; a reader would load noise")
    kept = {k: v for k, v in quantization_config(out).items() if k not in TEXTS}
    return kept | {"format": found, "checkpoint_format": found}


def _quantize(
    config: OptimumGptqConfig, samples: Sequence[Sequence[int]], checkpoint: Path, out: Path
) -> tuple[str, Mapping[str, float]]:
    """Quantize and save; give what had to be adapted, and each layer's error."""
    import torch
    from optimum.gptq import GPTQQuantizer
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    stored = stored_dtype(checkpoint)
    widened = stored != "float32" and computes_in_float32(config.compute_dtype)
    placed = {"device_map": "auto"} if torch.accelerator.is_available() else {}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32 if widened else "auto", **placed)
    scheme = parse(config.scheme)
    with library_failures("optimum", checkpoint.name), _layers_told(model) as errors:
        quantizer = GPTQQuantizer(
            bits=scheme.weight_bits,
            group_size=scheme.group_size or -1,
            sym=scheme.symmetric,
            dataset=[{"input_ids": [list(ids)], "attention_mask": [[1] * len(ids)]} for ids in samples],
            modules_in_block_to_quantize=_inside(checkpoint, config.ignore),
            model_seqlen=max(map(len, samples)),
            pad_token_id=0,  # packed samples have equal lengths, so nothing is padded; the library wants a number
            **config.options.model_dump(),
        )
        quantizer.quantize_model(model)
        progress.report(0, 1, "saving")
        quantizer.save(model, str(out))
    return FLOAT32 if widened else "", errors


def _inside(checkpoint: Path, ignore: tuple[str, ...]) -> list[list[str]] | None:
    """Names within a block of the layers to quantize, each by itself; None for all, as the library finds them."""
    linears = linear_shapes(checkpoint)
    left, _ = untouched(linears, ignore)
    if not left:
        return None
    names = dict.fromkeys(found[1] for name in linears if (found := re.match(r"^.*?\.\d+\.(.+)$", name)))
    return [[name] for name in names if name not in left]


@contextmanager
def _layers_told(model: PreTrainedModel) -> Iterator[dict[str, float]]:
    """Report each layer that is done, and keep its error: the library's loss per calibration sample."""
    from optimum.gptq import quantizer as library

    names: dict[Module, str] = {module: name for name, module in model.named_modules()}
    errors: dict[str, float] = {}
    total = int(model.config.get_text_config().num_hidden_layers)
    original = library.GPTQ

    class Telling(original):  # type: ignore[misc, valid-type]
        def fasterquant(self, *args: Any, **kwargs: Any) -> Any:
            found = super().fasterquant(*args, **kwargs)
            name = names.get(self.module, "")
            with suppress(TypeError, ValueError):  # a layer it could only round has words for a number
                errors[name] = float(found[4])
            if number := re.search(r"\.(\d+)\.", name):
                progress.report(int(number[1]), total, "layers quantized")
            return found

    library.GPTQ = Telling
    try:
        yield errors
    finally:
        library.GPTQ = original
