"""Which layers a variant's error lies in: heat maps drawn from layers.json, for the variants that charts draw.

Libraries measure a layer's error each on a scale of its own, so a shade says how a layer compares with the median of
its variant, and never which variant is better.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pipelines.decide.model import Candidate
from pipelines.errors import InputError
from pipelines.quantize import coverage
from pipelines.quantize.coverage import KEPT, Layer
from pipelines.track.figures import plain
from pipelines.track.heatmap import Cell, HeatMap

BOUNDS = {1 / 16: "1/16", 1 / 4: "1/4", 1 / 2: "1/2", 1.0: "1", 2.0: "2", 4.0: "4", 16.0: "16"}
"""Between shades, in times the median: the errors of one model's layers lie several powers of two apart."""
_PLACE = re.compile(r"^(?:.*?\.)?(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class Maps:
    """The maps, and a sentence for each variant that has none."""

    drawn: tuple[HeatMap, ...]
    missing: tuple[str, ...]


def maps(drawn: Iterable[Candidate], variants: Sequence[Path]) -> Maps:
    """Read the layers of each variant that is drawn, once, in however many engines it is."""
    at = {path.name: path for path in variants}
    found, missing = [], []
    for name, key in {one.variant: one.keys.get("variant", "")[:16] for one in drawn if not one.reference}.items():
        if key not in at:
            continue  # it failed before there were layers
        try:
            layers = coverage.read(at[key])
        except InputError as error:
            missing.append(f"{name}: {error}")
            continue
        one = heat_map(name, layers)
        if one is None:
            missing.append(f"{name}: its library gives no error by layer")
        else:
            found.append(one)
    return Maps(tuple(found), tuple(missing))


def heat_map(label: str, layers: Sequence[Layer]) -> HeatMap | None:
    """A row for each kind of projection, a column for each layer of the model; None where no error is known.

    Of several modules in one place, such as experts, the worst one counts.
    """
    errors = [layer.error for layer in layers if layer.error is not None]
    middle = median([e for e in errors if e > 0.0] or [0.0])
    if middle == 0.0:
        return None
    placed: dict[tuple[str, int], list[Layer]] = {}
    for layer in layers:
        if (at := _PLACE.match(layer.module)) is not None:
            placed.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", at[2]), int(at[1])), []).append(layer)
    kinds = list(dict.fromkeys(kind for kind, _ in placed))
    cells = tuple(_cell(kinds.index(kind), column, mine, middle) for (kind, column), mine in placed.items())
    quantized = sum(layer.scheme != KEPT for layer in layers)
    note = (
        f"{plain(min(errors))} to {plain(max(errors))}, median {plain(middle)}, on the library's own scale; "
        f"{quantized} of {len(layers)} layers quantized"
    )
    columns = 1 + max((column for _, column in placed), default=0)
    return HeatMap(label, note, tuple(_short(kinds).values()), columns, cells) if cells else None


def _cell(row: int, column: int, layers: Sequence[Layer], middle: float) -> Cell:
    known = [layer for layer in layers if layer.error is not None]
    if known:
        worst = max(known, key=lambda layer: layer.error or 0.0)
        ratio = (worst.error or 0.0) / middle
        shade = bisect.bisect_right(list(BOUNDS), ratio)
        more = f", the worst of {len(layers)}" if len(layers) > 1 else ""
        return Cell(row, column, shade, f"{worst.module}: {plain(worst.error)}, {plain(ratio)} times the median{more}")
    kept = [layer for layer in layers if layer.scheme == KEPT]
    if len(kept) == len(layers):
        return Cell(
            row, column, "kept", f"{layers[0].module}: left as it was ({layers[0].reason or 'no reason given'})"
        )
    return Cell(row, column, "unknown", f"{layers[0].module}: {layers[0].scheme}, no error given")


def _short(kinds: Sequence[str]) -> Mapping[str, str]:
    """The last parts of names, as many as it takes to tell them apart."""
    deepest = max((kind.count(".") for kind in kinds), default=0) + 1
    for parts in range(1, deepest + 1):
        found = {kind: ".".join(kind.split(".")[-parts:]) for kind in kinds}
        if len(set(found.values())) == len(kinds):
            return found
    return {kind: kind for kind in kinds}
