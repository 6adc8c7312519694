"""Which layers a variant quantized, to what, and which it left and why: read from the saved files, written beside them.

A library that leaves a layer out says nothing; here that is a failure, and so is an `ignore` entry that names nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipelines.config import Strict
from pipelines.errors import InputError, Problem, StageFailed, closest
from pipelines.quantize.checks import (
    HEAD,
    check_saved,
    fused_experts,
    is_embedding,
    linear_shapes,
    saved_facts,
    targeted,
)
from pipelines.quantize.packing import open_quantized
from pipelines.quantize.scheme import Scheme, matches, parse
from pipelines.quantize.shards import Shards, quantization_config
from pipelines.quantize.stored import scheme_of

LAYERS = "layers.json"
KEPT = "kept"


class Layer(Strict):
    """A linear layer of the base in a variant.

    `scheme` is "kept" where the layer is as it was; `reason` then says why, and for others what is special. `bits` are
    those of one stored weight without scales. `error` is the library's own figure, on its own scale.
    """

    module: str
    scheme: str
    reason: str = ""
    bits: int
    group_size: int | None = None
    error: float | None = None


_LAYERS = TypeAdapter(list[Layer])


@dataclass(frozen=True, slots=True)
class Asked:
    """What a quantizer was told, and what of each layer it reported.

    `scheme` is what every layer must be stored in, "" where the library may choose layer by layer; `head` is that of
    lm_head where it has its own. `exempt` are layers the method cannot take, with the reason. `errors` and `notes`
    are by module name.
    """

    scheme: str = ""
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()
    head: str = ""
    exempt: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def scheme_for(self, module: str) -> Scheme | None:
        """The scheme a layer must have, None where anything will do."""
        name = self.head if module == HEAD and self.head else self.scheme
        return parse(name) if name else None


def unmatched(entries: Iterable[str], modules: Iterable[str], key: str) -> list[Problem]:
    """A problem for each entry of an ignore or target list that names no layer, with the closest names."""
    known = list(dict.fromkeys([*modules, HEAD]))
    return [
        Problem(key, entry, "names no linear layer of the base", closest(entry.removeprefix("re:"), known))
        for entry in entries
        if entry != "Linear" and not any(matches(name, (entry,)) for name in known)
    ]


def naming_problems(
    key: str, targets: Iterable[str], ignore: Iterable[str], linears: Iterable[str], fused: Sequence[str]
) -> list[Problem]:
    """What is wrong with a variant's lists of layers: entries that name nothing, experts that no entry names.

    Experts stored as one tensor are no linear layers to any quantizer here, so they would stay as they are in silence.
    """
    known, skipped = [*linears, *fused], tuple(ignore)
    found = [*unmatched(skipped, known, f"{key}ignore"), *unmatched(targets, known, f"{key}targets")]
    silent = [name for name in fused if not matches(name, skipped)]
    if silent:
        message = f"{len(silent)} tensors hold all experts of a layer and would not be quantized: {_listed(silent)}"
        found.append(Problem(f"{key}ignore", list(skipped), message, "name them in `ignore` if that is meant"))
    return found


def expected(checkpoint: Path, asked: Asked) -> list[str]:
    """The layers that must come out quantized; asked for before the work begins.

    Raises:
        InputError: an entry of `ignore` or `targets` names nothing, experts would be passed over, or nothing is left.
    """
    linears = linear_shapes(checkpoint)
    wrong = naming_problems("", asked.targets, asked.ignore, linears, fused_experts(checkpoint))
    if wrong:
        raise InputError("; ".join(map(str, wrong)))
    found = [name for name in targeted(linears, asked.targets, asked.ignore) if name not in asked.exempt]
    if asked.head and HEAD not in found:
        found.append(HEAD)
    if not found:
        raise InputError(f"{checkpoint}: targets {list(asked.targets)} without ignore {list(asked.ignore)} is no layer")
    return found


def account(variant: Path, checkpoint: Path, asked: Asked) -> dict[str, str | int | float]:
    """Check a saved variant layer by layer, write layers.json into it and give its facts.

    Raises:
        StageFailed: a layer was left out, quantized against the ignore list or otherwise than asked, or the files
            fail a check of their own (`checks.check_saved`).
    """
    wanted = expected(checkpoint, asked)
    linears = linear_shapes(checkpoint)
    quantized = open_quantized(variant)
    _refuse_wrong_ones(variant, set(quantized), wanted)
    check_saved(variant, checkpoint, quantized)
    config = quantization_config(variant)
    schemes = {name: scheme_of(quantized.shards, name, config) for name in quantized}
    _refuse_other_schemes(variant, schemes, linears, asked)
    _refuse_unscaled_cache(variant, quantized.cache_scales, linears, config)
    layers = [
        _quantized(name, schemes[name], asked) if name in schemes else _kept(quantized.shards, name, asked)
        for name in linears
    ]
    write(variant, layers)
    cache = {"kv_cache": f"FP8, {len(quantized.cache_scales)} scales"} if config.get("kv_cache_scheme") else {}
    return {**saved_facts(variant), **summary(layers), **density(variant, checkpoint), **cache}


def unchanged(variant: Path, reason: str) -> dict[str, str | int | float]:
    """Write layers.json for a variant of which nothing is quantized, and give its facts."""
    shards = Shards(variant)
    layers = [_as_it_was(shards, name, reason) for name in linear_shapes(variant)]
    write(variant, layers)
    return {**summary(layers), **density(variant, variant)}


def write(variant: Path, layers: Iterable[Layer]) -> None:
    """Write layers.json."""
    rows = _LAYERS.dump_json(list(layers), indent=1)
    (variant / LAYERS).write_bytes(rows + b"\n")


def read(variant: Path) -> list[Layer]:
    """Read layers.json.

    Raises:
        InputError: there is none, or it is not one.
    """
    path = variant / LAYERS
    try:
        return _LAYERS.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a list of layers ({error})") from None


def summary(layers: Iterable[Layer]) -> dict[str, str | int]:
    """How many layers there are of each kind."""
    rows = list(layers)
    kept = [row.module for row in rows if row.scheme == KEPT]
    counts = Counter(row.scheme for row in rows if row.scheme != KEPT)
    return {
        "quantized_modules": len(rows) - len(kept),
        "kept_modules": len(kept),
        "skipped_modules": _listed(kept),
        "layer_schemes": ", ".join(f"{scheme} x {count}" for scheme, count in counts.most_common()),
    }


def density(variant: Path, checkpoint: Path) -> dict[str, float]:
    """Bits a weight takes on disk, scales and zero points included: of linear layers, and of the whole file.

    A head that shares the embedding's tensor is no linear layer here: its bits belong to the embedding.
    """
    base, saved = Shards(checkpoint), Shards(variant)
    linears = linear_shapes(checkpoint)
    parts: dict[str, int] = {}
    for name, entry in saved.entries.items():
        module, _, part = name.rpartition(".")
        if module in linears and part != "bias":
            parts[module] = parts.get(module, 0) + entry.size
    weights = sum(out * into for module, (out, into) in linears.items() if module in parts)
    every = sum(math.prod(entry.shape) for entry in base.entries.values())
    return {
        "bits_per_linear_weight": round(8 * sum(parts.values()) / weights, 4) if weights else 0.0,
        "bits_per_weight": round(8 * sum(e.size for e in saved.entries.values()) / every, 4),
    }


def _quantized(name: str, scheme: Scheme, asked: Asked) -> Layer:
    error = asked.errors.get(name)
    return Layer(
        module=name,
        scheme=str(scheme),
        reason=asked.notes.get(name, ""),
        bits=scheme.weight_bits,
        group_size=scheme.group_size,
        error=error if error is not None and math.isfinite(error) else None,
    )


def _kept(shards: Shards, name: str, asked: Asked) -> Layer:
    by = next((entry for entry in asked.ignore if matches(name, (entry,))), None)
    reason = f"ignored by {by!r}" if by else asked.exempt.get(name, f"not among the targets {list(asked.targets)}")
    return _as_it_was(shards, name, reason)


def _as_it_was(shards: Shards, name: str, reason: str) -> Layer:
    entry = shards.entries.get(f"{name}.weight")
    if entry is None:  # a head that shares the embedding's tensor
        tables = (e for n, e in shards.entries.items() if n.endswith(".weight") and is_embedding(n))
        entry = next(tables, None)
        reason += "; shares the embedding's tensor"
    bits = 8 * entry.size // max(1, math.prod(entry.shape)) if entry else 0
    return Layer(module=name, scheme=KEPT, reason=reason, bits=bits)


def _refuse_wrong_ones(variant: Path, quantized: set[str], wanted: Iterable[str]) -> None:
    asked = list(wanted)
    left_out = [name for name in asked if name not in quantized]
    if left_out:
        raise StageFailed(
            f"{variant}: {len(left_out)} of {len(asked)} layers were silently left unquantized: {_listed(left_out)}; "
            "name them in the variant's `ignore` if that is meant"
        )
    against = sorted(quantized - set(asked))
    if against:
        raise StageFailed(f"{variant}: {len(against)} layers were quantized unasked: {_listed(against)}")


def _refuse_other_schemes(
    variant: Path, schemes: Mapping[str, Scheme], linears: Mapping[str, tuple[int, int]], asked: Asked
) -> None:
    other = []
    for name, found in schemes.items():
        want = asked.scheme_for(name)
        if want is not None and want.granularity == "group" and want.group_size == linears[name][1]:
            want = replace(want, granularity="channel", group_size=None)  # one group is the whole row
        if want is not None and want != found:
            other.append(f"{name} in {found}, not {want}")
    if other:
        raise StageFailed(f"{variant}: {len(other)} layers were stored otherwise than asked: {_listed(other)}")


def _refuse_unscaled_cache(
    variant: Path, scales: Iterable[str], linears: Iterable[str], config: Mapping[str, Any]
) -> None:
    """A runtime takes 1 for a scale that is missing, and keys and values out of FP8's range are cut off."""
    if not config.get("kv_cache_scheme"):
        return
    held = {name.replace(".k_proj.k_scale", ".k_scale").replace(".v_proj.v_scale", ".v_scale") for name in scales}
    wanted = {
        f"{name.rpartition('.')[0]}.{name[-6]}_scale" for name in linears if name.endswith((".k_proj", ".v_proj"))
    }
    lost = sorted(wanted - held)
    if lost or not held:
        raise StageFailed(
            f"{variant}: declares an FP8 cache, but has no scale for it: {_listed(lost) or 'none at all'}"
        )


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
