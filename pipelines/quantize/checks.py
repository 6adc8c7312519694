"""What a saved variant must show before it is one: several library paths exit cleanly with files that load as noise.

Everything here reads headers and small tensors with numpy alone, never through the library that wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipelines.errors import StageFailed
from pipelines.quantize.packing import cache_scales, check_declared_format
from pipelines.quantize.scheme import matches
from pipelines.quantize.shards import Shards, quantization_config

PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
EMBEDDINGS = ("embed", "wte", "wpe")
HEAD = "lm_head"


def is_embedding(tensor: str) -> bool:
    """Whether a weight is a table that is looked up, by its module's own name."""
    return any(mark in tensor.rpartition(".")[0].rpartition(".")[2] for mark in EMBEDDINGS)


def linear_shapes(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """The weight matrices of a checkpoint that is not quantized, (out, in), by module name, from headers alone.

    A head that shares the embedding's tensor is not in the files; it is listed all the same.
    """
    shards = Shards(checkpoint)
    found: dict[str, tuple[int, int]] = {}
    embedding: tuple[int, int] | None = None
    for name in shards:
        module, _, part = name.rpartition(".")
        shape = shards.shape(name)
        if part != "weight" or len(shape) != 2:
            continue
        if is_embedding(name):
            embedding = embedding or (shape[0], shape[1])
        else:
            found[module] = (shape[0], shape[1])
    if HEAD not in found and embedding is not None:
        found[HEAD] = embedding
    return found


def fused_experts(checkpoint: Path) -> list[str]:
    """Tensors that hold the matrices of all experts of a layer, by name."""
    shards = Shards(checkpoint)
    return [name for name in shards if len(shards.shape(name)) > 2 and "experts" in name]


def targeted(linears: Iterable[str], targets: Iterable[str], ignore: Iterable[str]) -> list[str]:
    """The layers a quantizer was told to quantize: `Linear` means all; `re:` entries are regular expressions."""
    wanted, skip = tuple(targets), tuple(ignore)
    return [name for name in linears if ("Linear" in wanted or matches(name, wanted)) and not matches(name, skip)]


def check_saved(variant: Path, checkpoint: Path, quantized: Iterable[str]) -> None:
    """Check a variant as it lies on disk against the checkpoint it came from; `quantized` are its quantized layers.

    Raises:
        StageFailed: a tensor is unknown or missing, a scale is not finite, the declared format is not the one on
            disk, or there is a pickle.
    """
    check_no_pickles(variant)
    check_names(variant, checkpoint, quantized)
    check_declared_format(variant)
    check_scales(variant)


def check_no_pickles(variant: Path) -> None:
    """Refuse files that run code when they are loaded."""
    found = sorted(p.name for p in variant.rglob("*") if p.suffix in PICKLES)
    if found:
        raise StageFailed(f"{variant}: holds pickles, which run code when loaded: {', '.join(found[:5])}")


def check_names(variant: Path, checkpoint: Path, quantized: Iterable[str]) -> None:
    """Check that each tensor is the base's own or part of a quantized layer, and that none of the base's is lost."""
    layers = set(quantized)
    saved, base = set(Shards(variant)), set(Shards(checkpoint))
    kept = {name for name in base if name.rpartition(".")[0] not in layers or name.endswith(".bias")}
    scales = set(cache_scales(saved, quantization_config(variant)))
    unknown = sorted(name for name in saved - kept - scales if name.rpartition(".")[0] not in layers)
    head = f"{HEAD}.weight"
    missing = sorted(kept - saved - {head})
    if unknown == [head] and head not in base:
        raise StageFailed(f"{variant}: a copy of the shared head was written ({head}); the embedding is in it twice")
    if unknown or missing:
        said = [f"unknown: {', '.join(unknown[:5])}"] if unknown else []
        said += [f"missing: {', '.join(missing[:5])}"] if missing else []
        raise StageFailed(f"{variant}: tensors do not match the base checkpoint ({'; '.join(said)})")


def check_scales(variant: Path) -> None:
    """Check that every scale is a finite number."""
    import numpy as np

    shards = Shards(variant)
    ends = ("_scale", ".scales", "_scale_2")
    bad = [n for n in shards if n.endswith(ends) and not bool(np.isfinite(shards[n]).all())]
    if bad:
        raise StageFailed(f"{variant}: {len(bad)} layers have scales that are not finite: {', '.join(bad[:5])}")


def saved_facts(variant: Path) -> dict[str, str | int]:
    """What the manifest says of a variant's files; checkpoints for other runtimes in subdirectories are not counted."""
    config = quantization_config(variant)
    named = (config.get(key) for key in ("checkpoint_format", "format", "version", "quant_algo"))
    return {
        "size_bytes": sum(p.stat().st_size for p in variant.iterdir() if p.is_file()),
        "quant_method": str(config.get("quant_method", "")),
        "format": next((str(name) for name in named if name), ""),
    }
