"""Settings as YAML without a YAML library, which toolchains do not promise: blocks of keys with JSON scalars."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_READ_AS_OTHERS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def yaml_of(settings: Mapping[str, Any], comment: str = "") -> str:
    """Write nested settings; any YAML reader gives them back equal. Lists stand on one line."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + ("\n".join(_lines(settings, "")) + "\n" if settings else "{}\n")


def _lines(settings: Mapping[str, Any], indent: str) -> list[str]:
    found = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found += [f"{indent}{_key(name)}:", *_lines(value, indent + "  ")]
        else:
            found.append(f"{indent}{_key(name)}: {_scalar(value)}")
    return found


def _key(name: str) -> str:
    plain = re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) and name.lower() not in _READ_AS_OTHERS
    return name if plain else _quoted(name)


def _scalar(value: Any) -> str:
    """JSON, but for numbers such as 1e-05, which YAML readers take for a text unless they have a point."""
    text = _quoted(value)
    if isinstance(value, float) and "." not in text:
        text = text.replace("e", ".0e")
    return text


def _quoted(value: Any) -> str:
    """JSON in ASCII, but for its surrogate pairs, which YAML does not put together."""

    def one(pair: re.Match[str]) -> str:
        high, low = (int(half, 16) for half in pair.groups())
        return f"\\U{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:08x}"

    return re.sub(r"\\u(d[89ab]..)\\u(d[c-f]..)", one, json.dumps(value))
