"""What was asked of a converter or builder against the config.json it wrote: every difference, not the first.

Converters swallow errors and builders override options with no more than a warning, so an exit code proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Asked = Mapping[str, tuple[object, ...]]
"""Dotted path in what was written, and the values that count as what was asked."""

ABSENT = "nothing"
ON, OFF = (True, "enable"), (False, None, "disable")
DTYPES = ("float16", "bfloat16", "float32")


def differences(asked: Asked, written: Mapping[str, Any]) -> list[str]:
    """Say of each key what was asked and what stands there, where that is something else."""
    told = []
    for path, accepted in asked.items():
        found = _at(written, path)
        if not any(_same(found, one) for one in accepted):
            told.append(f"{path}: asked {accepted[0]!r}, written {found if found == ABSENT else repr(found)}")
    return told


def _at(tree: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; a path that is not there is ABSENT, a null is None."""
    found: Any = tree
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return ABSENT
        found = found[part]
    return found


def _same(found: object, wanted: object) -> bool:
    if isinstance(wanted, bool) or isinstance(found, bool):
        return found is wanted
    if isinstance(wanted, (int, float)) and isinstance(found, (int, float)):
        return abs(found - wanted) <= 1e-6 * max(1.0, abs(wanted))
    return found == wanted or (found == ABSENT and wanted is None)


def of_switch(value: str) -> tuple[object, ...]:
    """What a plugin or feature may be written as: `auto` becomes the model's dtype, `disable` null or false."""
    if value == "enable":
        return ON
    if value == "disable":
        return OFF
    return (value, *DTYPES) if value == "auto" else (value,)
