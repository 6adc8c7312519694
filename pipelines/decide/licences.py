"""Whether the licence of a base lets anything made from it be promoted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pipelines.intake import spdx
from pipelines.intake.licence import UNKNOWN

_NOT_KNOWN = ("", UNKNOWN, "not stated")
STATE_IT = (
    "read it, then state it (checkpoint.licence=Apache-2.0, or LicenseRef-NAME for one that SPDX does not list); "
    "whoever states it answers for it"
)


def of(base: Mapping[str, str]) -> str:
    """The licence that a decision was made under, "" where it is unknown."""
    found = base.get("licence", UNKNOWN)
    return "" if found in _NOT_KNOWN else found


def refusal(base: Mapping[str, str], allowed: Sequence[str] | None) -> str:
    """Why nothing made from this base may be promoted, "" where it may."""
    licence = of(base)
    if not licence:
        why = base.get("licence note", "") or "nothing states it"
        return f"the base's licence is unknown: {why}; {STATE_IT}"
    if allowed is not None and not spdx.permitted(licence, allowed):
        listed = ", ".join(allowed) or "none"
        return f"the base's licence is {licence} ({said(base)}), allowed (gate.constraints.licences): {listed}"
    return ""


def names(expression: str) -> tuple[str, ...]:
    """The licences that an expression names, in order; exceptions to them are left out."""
    words = expression.replace("(", " ").replace(")", " ").split()
    left_out = {"AND", "OR", "WITH"} | {after for before, after in pairwise(words) if before == "WITH"}
    return tuple(word for word in words if word not in left_out)


def said(base: Mapping[str, str]) -> str:
    """Who says so."""
    words = {
        "stated": "stated in the configuration",
        "card": "its card",
        "file": "its licence file",
        "gguf": "its GGUF",
    }
    return words.get(base.get("licence source", ""), "by whom was not recorded")
