"""What ModelOpt needs where there is no accelerator; with one, nothing here happens."""

from __future__ import annotations

from pathlib import Path

from pipelines.quantize.shards import Shards, shard_files

FLOAT32 = "modelopt: computed in float32, as there is no accelerator; stored as the base is"
DTYPES = {"BF16": "bfloat16", "F16": "float16"}


def narrow(variant: Path, checkpoint: Path) -> None:
    """Store the base's own tensors as the base had them; scales stay float32, as the library writes them everywhere.

    Norms that took up a factor of the layers after them are rounded here once, as they would be anywhere.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    base = Shards(checkpoint)
    for file in shard_files(variant):
        with safe_open(file, framework="pt") as held:
            tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118 - no mapping
        for name, tensor in tensors.items():
            stored = DTYPES.get(base.dtype(name))
            if stored and tensor.dtype == torch.float32:
                tensors[name] = tensor.to(getattr(torch, stored))
        save_file(tensors, file, metadata={"format": "pt"})
