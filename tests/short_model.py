"""The first layers of a real model: its widths and words at a fraction of the time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file


def first_layers(checkpoint: Path, out: Path, layers: int) -> Path:
    """Write a checkpoint with its first decoder layers only, in one shard, and every other file as it is."""
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, out / file.name)
    tensors = {}
    for shard in checkpoint.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as f:
            names = [n for n in f.keys() if ".layers." not in n or int(n.split(".layers.")[1].split(".")[0]) < layers]  # noqa: SIM118
            tensors |= {name: f.get_tensor(name) for name in names}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text()) | {"num_hidden_layers": layers}
    (out / "config.json").write_text(json.dumps(config))
    return out
