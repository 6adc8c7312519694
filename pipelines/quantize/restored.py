"""What a library on transformers 4 saved, put back into the base's terms: its config, its dtypes, each tensor once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import StageFailed
from pipelines.quantize.checks import HEAD, is_embedding
from pipelines.quantize.shards import INDEX, Shards, shard_files

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def restore(variant: Path, checkpoint: Path, quantization: Mapping[str, Any]) -> None:
    """Rewrite saved files: the base's config with this `quantization_config`, the base's dtype for each of its tensors.

    Scales are stored in float16, as readers of the classic formats expect. Dropped are a second copy of a tied head,
    and biases of zeros where the base has none. A single file gets the name every reader looks for.

    Raises:
        StageFailed: a head that is no copy of the embedding, or a bias that is not zero, where the base has neither.
    """
    saved, base = Shards(variant), Shards(checkpoint)
    surplus = {name for name in saved if name not in base and _is_surplus(variant, saved, name)}
    files = shard_files(variant)
    for file in files:
        _rewrite(file, base, surplus)
    (variant / INDEX).unlink(missing_ok=True)
    if len(files) == 1:
        files[0].rename(variant / SINGLE)
    else:
        entries = Shards(variant).entries
        size = sum(entry.size for entry in entries.values())
        where = {name: entry.file.name for name, entry in entries.items()}
        _write(variant / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    config = json.loads((checkpoint / "config.json").read_text())
    _write(variant / "config.json", config | {"quantization_config": dict(quantization)})


def _is_surplus(variant: Path, saved: Shards, name: str) -> bool:
    import numpy as np

    module, _, part = name.rpartition(".")
    if part == "bias" and f"{module}.qweight" in saved:
        if saved[name].any():
            raise StageFailed(f"{variant}: {name} is not zero, and the base has no such bias")
        return True
    if module != HEAD or part != "weight":
        return False
    tables = [n for n in saved if n.endswith(".weight") and is_embedding(n)]
    if not any(np.array_equal(saved[name], saved[table]) for table in tables):
        raise StageFailed(f"{variant}: {name} was saved, which the base shares with its embedding, and differs from it")
    return True


def _rewrite(file: Path, base: Shards, surplus: Set[str]) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, framework="pt") as held:
        names = [name for name in held.keys() if name not in surplus]  # noqa: SIM118 - no mapping
        tensors = {name: _stored(held.get_tensor(name), base.dtype(name)) for name in names}
    rewritten = file.with_suffix(".rewritten")
    save_file(tensors, rewritten, metadata={"format": "pt"})
    rewritten.rename(file)


def _stored(tensor: torch.Tensor, of_base: str) -> torch.Tensor:
    """A tensor in the dtype the base has it in; what is not the base's is narrowed to half precision."""
    import torch

    if not tensor.is_floating_point() or (of_base and of_base not in DTYPES):
        return tensor
    return tensor.to(getattr(torch, DTYPES[of_base]) if of_base else torch.float16).contiguous()


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
