"""What GPTQModel needs where there is no accelerator; with one, nothing here happens.

Each adaptation is small, made only where it is needed, and named in the variant's facts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.quantize.clipping import best_ranges

if TYPE_CHECKING:
    from torch import Tensor

TESTED = ("7.6.0", "7.7.0")
"""Releases whose pool for loading wants two workers where a machine with two cores is given one."""
WORKERS = "GPTQMODEL_CPU_WORKERS"
AWQ_TESTED = ("7.6.0",)
"""Releases whose AWQ was compared with what is done here instead."""
AWQ = (
    "gptqmodel: AWQ packs float32, by its torch kernel, and takes errors of clipping ranges from the inputs' second "
    "moments, as there is no accelerator"
)
FLOAT32 = "gptqmodel: computed in float32, as there is no accelerator; stored as the base is"


@contextmanager
def two_workers() -> Iterator[str]:
    """Give the library's pool the two workers its loader asks for, where there is no accelerator and few cores.

    The pool is made when the library is first used, so this must be around its import.

    Yields:
        What was adapted, "" where nothing was.
    """
    import torch

    needed = (os.cpu_count() or 1) < 3 and not torch.accelerator.is_available()
    if not needed or WORKERS in os.environ or version("gptqmodel") not in TESTED:
        yield ""
        return
    os.environ[WORKERS] = "2"
    try:
        yield f"gptqmodel: {WORKERS}=2, as its loader wants two workers"
    finally:
        del os.environ[WORKERS]


@contextmanager
def awq_without_accelerator() -> Iterator[str]:
    """Without an accelerator, let AWQ's torch kernel pack float32, and search clipping ranges with less work.

    Yields:
        What was adapted, "" where nothing was.
    """
    import torch
    from gptqmodel.looper.awq_processor import AWQProcessor
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    if torch.accelerator.is_available() or version("gptqmodel") not in AWQ_TESTED:
        yield ""
        return
    search, dtypes = AWQProcessor._compute_best_clip, AwqTorchLinear.SUPPORTS_DTYPES
    AWQProcessor._compute_best_clip, AwqTorchLinear.SUPPORTS_DTYPES = best_clip, [*dtypes, torch.float32]
    try:
        yield AWQ
    finally:
        AWQProcessor._compute_best_clip, AwqTorchLinear.SUPPORTS_DTYPES = search, dtypes


def best_clip(self: Any, w: Tensor, input_feat: Tensor, **grid: Any) -> Tensor:
    """Stand in for a method of the library: weights [out, in], inputs [..., in] to ranges [out, groups, 1]."""
    import torch

    def rounded(weight: Tensor) -> Tensor:
        into = torch.empty_like(weight)
        self._pseudo_quantize_tensor_into(weight, into)
        return into

    return best_ranges(w, input_feat, self.qcfg.group_size, rounded, **grid)


def stored_dtype(checkpoint: Path) -> str:
    """The dtype that a checkpoint's config.json declares, under its new name or its old one."""
    config = json.loads((checkpoint / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def narrow(variant: Path, dtype: str) -> None:
    """Store what is not quantized as the base had it: those tensors were widened on loading and have not changed."""
    import torch
    from safetensors.torch import load_file, save_file

    wanted = getattr(torch, dtype)
    for shard in sorted(variant.glob("*.safetensors")):
        tensors = {n: t.to(wanted) if t.dtype == torch.float32 else t for n, t in load_file(shard).items()}
        save_file(tensors, shard, metadata={"format": "pt"})
    path = variant / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")
