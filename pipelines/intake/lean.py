"""Start faster: transformers imports some packages merely because they are installed; that takes seconds a process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("sklearn", "torchao")
"""Imported by transformers for assisted generation and for a method of its own, by nothing that is done here."""


@contextmanager
def without_unused(*needed: str) -> Iterator[None]:
    """Let imports inside believe that unused packages are not installed, less those `needed` after all. Packages
    already imported are left alone."""
    hidden = [name for name in UNUSED if name not in sys.modules and name not in needed]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
