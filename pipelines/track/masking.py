"""Secrets out of what is shown or sent: settings whose name says secret, and credentials inside texts."""

from __future__ import annotations

import re
from collections.abc import Iterator

MASK = "***"
_ALWAYS = {
    "secret",
    "secrets",
    "password",
    "passwd",
    "pwd",
    "passphrase",
    "credential",
    "credentials",
    "authorization",
    "apikey",
}
_LAST = {"token", "key", "auth"}
_HARMLESS = {
    "eos",
    "bos",
    "pad",
    "unk",
    "sep",
    "cls",
    "mask",
    "stop",
    "campaign",
    "engine",
    "decision",
    "variant",
    "cache",
    "sort",
    "order",
}
# A password may hold an @ or a slash that should have been escaped: up to the last @ it is all credentials.
_URL_USER = re.compile(r"(?<=://)(?:[^/@\s\"']*:[^\s\"']*|[^/\s\"']+)(?=@)")
_PARAMETER = re.compile(
    r"(?i)\b((?:(?:access|api|auth|secret|account|private)_?)?key=|\w*(?:token|secret|password|passwd|pwd|passphrase)="
    r"|(?:x-amz-)?(?:sig|signature|credential)=)[^&\s\"']+"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_SHAPED = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|glpat-[\w-]{16,}|AKIA[A-Z0-9]{16}|xox[abpr]-[\w-]{10,})"
)


def masked(data: object) -> object:
    """Copy plain data with every secret replaced by three stars."""
    if isinstance(data, dict):
        return {k: MASK if _is_secret(str(k)) and _is_scalar(v) else masked(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [masked(v) for v in data]
    return masked_text(data) if isinstance(data, str) else data


def exposed(data: object, key: str = "") -> Iterator[str]:
    """The dotted names of settings that hold a secret beyond doubt: by their own name, in a URL, or by a token's shape.

    Other texts are only masked where they are shown: to refuse them would refuse prose.
    """
    if isinstance(data, dict):
        for name, value in data.items():
            at = f"{key}.{name}" if key else str(name)
            if _is_secret(str(name)) and isinstance(value, str) and value:
                yield at
            else:
                yield from exposed(value, at)
    elif isinstance(data, list | tuple):
        for n, value in enumerate(data):
            yield from exposed(value, f"{key}.{n}")
    elif isinstance(data, str) and (_URL_USER.search(data) or _SHAPED.search(data)):
        yield key


def masked_text(text: str) -> str:
    """Replace credentials in URLs, in query parameters and headers, and well-known token shapes."""
    text = _URL_USER.sub(MASK, text)
    text = _PARAMETER.sub(rf"\g<1>{MASK}", text)
    text = _BEARER.sub(rf"\g<1> {MASK}", text)
    return _SHAPED.sub(MASK, text)


def _is_secret(name: str) -> bool:
    """Say whether a setting's name, taken word by word, speaks of a secret: hf_token does, max_tokens does not."""
    words = [w.lower() for w in re.split(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])", name) if w]
    if not words:
        return False
    return bool(_ALWAYS & set(words)) or (words[-1] in _LAST and not _HARMLESS & set(words[:-1]))


def _is_scalar(value: object) -> bool:
    return value not in (None, "") and not isinstance(value, dict | list | tuple | bool)
