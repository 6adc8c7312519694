"""Names of licences: SPDX expressions, from what model cards, GGUF files and people write; and whether one is allowed.

Licences of models that SPDX does not list are named LicenseRef- and Hugging Face's own name: LicenseRef-llama3.1.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import chain

REF = "LicenseRef-"
# Hugging Face's ids that SPDX spells otherwise.
_OTHERWISE = {
    "odc-by": "ODC-By-1.0", "odbl": "ODbL-1.0", "pddl": "PDDL-1.0",
}  # fmt: skip
# Hugging Face's ids of licences that SPDX does not list, and common values of `license_name`.
_OWN = frozenset(
    (
        "llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4", "gemma", "openrail", "bigscience-openrail-m",
        "creativeml-openrail-m", "bigscience-bloom-rail-1.0", "bigcode-openrail-m", "openmdw-1.0", "c-uda",
        "h-research", "intel-research", "apple-amlr", "apple-ascl", "lgpl-lr", "deepfloyd-if-license",
        "grok2-community", "fair-noncommercial-research-license", "qwen", "qwen-research", "tongyi-qianwen",
        "deepseek", "mrl", "mnpl", "nvidia-open-model",
    )
)  # fmt: skip
# Families and ways of saying nothing: which licence it is cannot be told from these.
UNCLEAR = frozenset(
    ("", "other", "unknown", "none", "bsd", "cc", "gpl", "lgpl", "agpl", "gfdl", "not stated", "noassertion")
)
_TAIL = re.compile(r"[-_ ]+licen[cs]e([-_ ]+agreement)?$")
_WORD = re.compile(r"\(|\)|[^()\s]+")


def canonical(text: str) -> str:
    """The SPDX expression that a text means, "" where it means none for certain."""
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    name = text.strip().lower()
    if name in UNCLEAR:
        return ""
    if name in _OTHERWISE:
        return _OTHERWISE[name]
    if name in _OWN:
        return REF + name
    if name == "openrail++":  # SPDX allows no + in a name
        return REF + "openrail-plus-plus"
    try:
        return str(canonicalize_license_expression(text.strip()))
    except InvalidLicenseExpression:
        return ""


def own(name: str) -> str:
    """A licence that its author named (`license_name` beside `license: other`); "" where the name says nothing."""
    plain = _TAIL.sub("", name.strip().lower())
    known = canonical(plain) or canonical(name)
    if known or plain in UNCLEAR:
        return known
    slug = re.sub(r"[^a-z0-9.]+", "-", plain).strip("-.")
    return REF + slug if slug else ""


def same(one: str, other: str) -> bool:
    """Names of licences are the same whatever their case."""
    return one.casefold() == other.casefold()


def permitted(expression: str, allowed: Collection[str]) -> bool:
    """Whether a list covers an expression: of OR one side, of AND both. WITH an exception is a name of its own."""
    names = {name.casefold() for name in allowed}
    if expression.casefold() in names:
        return True
    words = _WORD.findall(expression)
    found, rest = _either(words, names)
    return found and not rest


def _either(words: list[str], names: Collection[str]) -> tuple[bool, list[str]]:
    found, rest = _both(words, names)
    while rest and rest[0] == "OR":
        more, rest = _both(rest[1:], names)
        found = found or more
    return found, rest


def _both(words: list[str], names: Collection[str]) -> tuple[bool, list[str]]:
    found, rest = _one(words, names)
    while rest and rest[0] == "AND":
        more, rest = _one(rest[1:], names)
        found = found and more
    return found, rest


def _one(words: list[str], names: Collection[str]) -> tuple[bool, list[str]]:
    if words and words[0] == "(":
        found, rest = _either(words[1:], names)
        return found, rest[1:]
    if len(words) > 2 and words[1] == "WITH":
        return " ".join(words[:3]).casefold() in names, words[3:]
    return bool(words) and words[0].casefold() in names, words[1:]


def known() -> tuple[str, ...]:
    """Common names, to offer where a person wrote one that is none."""
    common = ("Apache-2.0", "MIT", "BSD-3-Clause", "CC-BY-4.0", "CC-BY-NC-4.0", "GPL-3.0-only", "MPL-2.0")
    return tuple(chain(common, (REF + name for name in sorted(_OWN) if name.startswith(("llama", "gemma", "qwen")))))
