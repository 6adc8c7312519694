"""A base that transformers 5 wrote, as transformers 4 reads it.

Version 4 ignores `rope_parameters` and `dtype` without a word: it would calibrate a model with other positions. No
tokenizer is staged, since quantizers are given token ids.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.errors import InputError
from pipelines.quantize.shards import INDEX, shard_files

RENAMED = frozenset({"rope_parameters", "dtype"})
BESIDE_ROPE = ("rope_theta", "partial_rotary_factor")
"""What version 5 keeps in `rope_parameters`, and version 4 at the top of the config."""


@contextmanager
def staged(checkpoint: Path) -> Iterator[Path]:
    """A directory, gone afterwards, from which version 4 reads the base: links to its shards and a config of old.

    Raises:
        InputError: the base has positions that version 4 has no words for.
    """
    config = as_version_4(json.loads((checkpoint / "config.json").read_text()))
    with tempfile.TemporaryDirectory(prefix="transformers4_") as name:
        directory = Path(name)
        for file in [*shard_files(checkpoint), checkpoint / INDEX, checkpoint / "generation_config.json"]:
            if file.is_file():
                (directory / file.name).symlink_to(file.resolve())
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        yield directory


def as_version_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json in the words of transformers 4. Code that came with the checkpoint is not named in it.

    Raises:
        InputError: `rope_parameters` differ by layer type.
    """
    old = {key: value for key, value in config.items() if key not in RENAMED | {"auto_map"}}
    if "dtype" in config:
        old["torch_dtype"] = config["dtype"]
    rope = dict(config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise InputError(
            f"config.json: rope_parameters differ by layer type ({', '.join(rope)}), which transformers 4 cannot say; "
            "use a quantizer that runs on transformers 5"
        )
    if rope:
        old |= {key: rope.pop(key) for key in BESIDE_ROPE if key in rope}
        old["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    return old
