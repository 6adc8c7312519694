"""How a benchmark ends: a table for people, then one JSON line."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from pipelines.flow.device import describe
from pipelines.flow.toolchain import versions


def conditions(packages: Sequence[str], **more: object) -> dict[str, object]:
    """What the figures depend on: device, load, versions, date."""
    return {
        **describe(),
        "platform": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(packages),
        **more,
    }


def conclude(
    name: str,
    given: Mapping[str, object],
    figures: Mapping[str, object],
    targets: Mapping[str, tuple[float | None, str, float]],
) -> None:
    """Print each target as kept or missed, then the JSON line. A target is (figure, ">=" or "<=", bound).

    A figure of None could not be measured here, so its target is not met.
    """
    kept = {}
    for what, (figure, sign, bound) in targets.items():
        kept[what] = figure is not None and (figure >= bound if sign == ">=" else figure <= bound)
        shown = "not measured" if figure is None else f"{figure:.3g}"
        print(f"{'kept  ' if kept[what] else 'missed'} {what}: {shown} {sign} {bound:g}")
    document = {
        "name": name,
        "conditions": dict(given),
        "figures": dict(figures),
        "targets": {what: f"{sign} {bound:g}" for what, (_, sign, bound) in targets.items()},
        "met": all(kept.values()),
    }
    print(json.dumps(document))
