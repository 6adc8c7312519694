"""What a GGUF file holds of each linear layer of its base, read from the file itself.

llama.cpp takes another type for a layer that the asked one does not fit, and says so in a log only; here it is told.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.errors import StageFailed
from pipelines.flow.store import Fact
from pipelines.quantize import coverage
from pipelines.quantize.checks import HEAD, check_no_pickles, is_embedding, linear_shapes
from pipelines.quantize.coverage import KEPT, Layer
from pipelines.quantize.gguf import FILE, METHOD, GgufConfig
from pipelines.quantize.scheme import parse
from pipelines.quantize.shards import Shards

PLAIN = {"F32": 32, "F16": 16, "BF16": 16}
TYPES: Mapping[str, tuple[int, int]] = {
    "Q4_0": (4, 32), "Q4_1": (4, 32), "Q5_0": (5, 32), "Q5_1": (5, 32), "Q8_0": (8, 32), "Q2_K": (2, 16),
    "Q3_K": (3, 16), "Q4_K": (4, 32), "Q5_K": (5, 32), "Q6_K": (6, 16), "IQ4_NL": (4, 32),
}  # fmt: skip
"""Bits of a weight, and weights that share a scale, in each of ggml's types that a file type here is a mixture of."""
BLOCK, SUPER_BLOCK = 32, 256
"""Weights in a block of the plain types, and in one of those whose name ends in _K: a row is whole blocks."""


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of a file: ggml's name of its type, its shape as torch has it, and its bytes."""

    type: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A file's tensors by the names that the base has for them, and what it calls its own type."""

    tensors: Mapping[str, Held]
    file_type: str
    lost: tuple[str, ...]


def read(path: Path, base: Shards) -> Saved:
    """Read a file's tensor table; weights are not touched.

    Raises:
        StageFailed: llama.cpp's table of names does not know its architecture.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    named = str(fields.get("general.architecture", "?"))
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    if named not in known:
        raise StageFailed(f"{path}: architecture {named!r} is none that gguf knows")
    names = gguf.get_tensor_name_map(known[named], int(fields[f"{named}.block_count"]))
    held = {
        t.name: Held(t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), int(t.n_bytes))
        for t in reader.tensors
    }
    found = {name: names.get_name(name, (".weight", ".bias")) for name in base}
    file_type = gguf.LlamaFileType(int(fields.get("general.file_type", 1024))).name.removeprefix("MOSTLY_")
    return Saved(
        {name: held[its] for name, its in found.items() if its in held},
        file_type,
        tuple(name for name, its in found.items() if its not in held),
    )


def account(variant: Path, checkpoint: Path, config: GgufConfig) -> dict[str, Fact]:
    """Check a saved variant layer by layer, write layers.json into it and give its facts.

    Raises:
        StageFailed: a tensor is lost or of another shape, the file is of another type than asked, or a layer that the
            type fits was left as it was.
    """
    check_no_pickles(variant)
    base = Shards(checkpoint)
    saved = read(variant / FILE, base)
    _refuse_other_files(variant, saved, base, config)
    layers = list(rows(saved, linear_shapes(checkpoint), config))
    coverage.write(variant, layers)
    return {
        "size_bytes": sum(p.stat().st_size for p in variant.iterdir() if p.is_file()),
        "quant_method": METHOD,
        "format": saved.file_type,
        **coverage.summary(layers),
        **density(saved, linear_shapes(checkpoint), base),
        "embedding": ", ".join(sorted({h.type for n, h in saved.tensors.items() if is_embedding(n)})),
        "other_types": other_types(layers),
    }


def _refuse_other_files(variant: Path, saved: Saved, base: Shards, config: GgufConfig) -> None:
    if saved.lost:
        raise StageFailed(f"{variant}: {len(saved.lost)} of the base's tensors are lost: {', '.join(saved.lost[:5])}")
    if saved.file_type != config.scheme:
        raise StageFailed(f"{variant}: {FILE} says that it is of type {saved.file_type}, not {config.scheme}")
    other = [f"{n} {h.shape}, not {base.shape(n)}" for n, h in saved.tensors.items() if h.shape != base.shape(n)]
    if other:
        raise StageFailed(f"{variant}: {len(other)} tensors have other shapes than the base's: {'; '.join(other[:5])}")


def rows(saved: Saved, linears: Mapping[str, tuple[int, int]], config: GgufConfig) -> Iterator[Layer]:
    """A row for each linear layer of the base.

    Raises:
        StageFailed: a layer that the type fits was left as it was.
    """
    for module, (_, width) in linears.items():
        own = saved.tensors.get(f"{module}.weight")
        held, shared = (own, "") if own is not None else (_table(saved), "shares the embedding's tensor")
        if held is None:
            raise StageFailed(f"{module}: nothing in {FILE} holds it")
        if held.type in TYPES:
            bits, size = TYPES[held.type]
            reason = "; ".join(filter(None, (shared, _misfit(held.type, width, config))))
            yield Layer(module=module, scheme=held.type, reason=reason, bits=bits, group_size=size)
            continue
        if held.type not in PLAIN:
            raise StageFailed(f"{module}: is stored as {held.type}, which is not read here")
        yield Layer(module=module, scheme=KEPT, reason=_kept(module, width, config), bits=PLAIN[held.type])


def _table(saved: Saved) -> Held | None:
    return next((held for name, held in saved.tensors.items() if is_embedding(name)), None)


def _misfit(held: str, width: int, config: GgufConfig) -> str:
    """Why a layer is in another type than a mixture of K types would have it in, "" where it is in one of them."""
    mixes = parse(config.scheme).group_size is None
    if not mixes or held.endswith("_K") or width % SUPER_BLOCK == 0:
        return ""
    return f"{held} for want of a K type: its width of {width} is no multiple of {SUPER_BLOCK}"


def _kept(module: str, width: int, config: GgufConfig) -> str:
    if width % BLOCK:
        return f"its width of {width} is no multiple of {BLOCK}"
    if module == HEAD and not config.options.quantize_output_tensor:
        return "quantize_output_tensor is false"
    raise StageFailed(f"{module}: llama.cpp left it as it was, though {config.scheme} fits its width of {width}")


def other_types(layers: list[Layer]) -> str:
    """Layers that are in another type for want of width, by type; "" where there are none."""
    counts = Counter(layer.scheme for layer in layers if "for want of a K type" in layer.reason)
    return ", ".join(f"{scheme} x {count}" for scheme, count in counts.most_common())


def density(saved: Saved, linears: Mapping[str, tuple[int, int]], base: Shards) -> dict[str, Fact]:
    """Bits a weight takes on disk, scales included: of linear layers with a tensor of their own, and of all tensors."""
    own = {m: h for m in linears if (h := saved.tensors.get(f"{m}.weight")) is not None}
    weights = sum(math.prod(linears[module]) for module in own)
    every = sum(math.prod(entry.shape) for entry in base.entries.values())
    return {
        "bits_per_linear_weight": round(8 * sum(h.size for h in own.values()) / weights, 4) if weights else 0.0,
        "bits_per_weight": round(8 * sum(h.size for h in saved.tensors.values()) / every, 4),
    }
