"""The unchanged base as a variant, so that it is built, scored and probed like every other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from pipelines.config import Strict
from pipelines.errors import InputError
from pipelines.quantize.coverage import unchanged
from pipelines.quantize.scheme import of_dtype
from pipelines.quantize.shards import Shards

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class BaselineConfig(Strict):
    """Nothing to choose: the scheme is the base's own dtype."""

    quantizer: Literal["baseline"] = Field(default="baseline", description="the row of the quantizer table")
    scheme: Literal["BASE"] = Field(default="BASE", description="whatever dtype the base is in; the facts name it")


def run(
    config: BaselineConfig, out: Path, *, checkpoint: Path, calibration: Path | None = None
) -> dict[str, str | int | float]:
    """Link the base's files into a directory of its own; nothing is copied, however large the base is."""
    del config, calibration
    for file in sorted(p for p in checkpoint.iterdir() if p.is_file() and p.name != "manifest.json"):
        (out / file.name).symlink_to(file.resolve())
    return {
        "scheme": str(of_dtype(_dtype(checkpoint))),
        "quantizer": "baseline",
        "library": "",
        "library_version": "",
        **unchanged(out, "the base as it is"),
        "adaptations": "",
        "size_bytes": sum(p.stat().st_size for p in out.iterdir() if p.is_symlink()),
        "quant_method": "",
        "format": "",
    }


def _dtype(checkpoint: Path) -> str:
    """The dtype most of the weights are stored in; config.json is not trusted to know.

    Raises:
        InputError: the base is stored in a dtype that is not a plain floating-point one.
    """
    shards = Shards(checkpoint)
    sizes: dict[str, int] = {}
    for entry in shards.entries.values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.size
    stored = max(sizes, key=lambda dtype: sizes[dtype])
    if stored not in DTYPES or json.loads((checkpoint / "config.json").read_text()).get("quantization_config"):
        raise InputError(
            f"{checkpoint}: the base is quantized already ({stored}); give a checkpoint in {', '.join(DTYPES)}"
        )
    return DTYPES[stored]
