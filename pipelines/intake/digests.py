"""Digests of source files, cached by size, mtime and inode, so that 100 GB are hashed once and not each run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.flow import progress
from pipelines.flow.store import digest_of, sha256_of


class DigestCache:
    """A JSON file from path to (size, mtime, inode, sha256), and from digest to what a slow reader found there.

    Losing it costs time, never correctness.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[object] | dict[str, Any]] = {}
        try:
            loaded = json.loads(path.read_text())
        except (OSError, ValueError):
            return
        if isinstance(loaded, dict):
            self._known = loaded

    def of(self, file: Path) -> str:
        """The sha256 of a file's bytes, read again only if size, mtime or inode changed."""
        stat = file.stat()
        mark = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = self._known.get(str(file))
        if isinstance(known, list) and known[:3] == mark:
            return str(known[3])
        digest = sha256_of(file)
        self._known[str(file)] = [*mark, digest]
        return digest

    def of_all(self, files: Iterable[Path], root: Path) -> str:
        """One digest over files by relative name and content; what was hashed anew is saved."""
        listed, before = sorted(files), dict(self._known)
        digests: dict[str, object] = {}
        for k, file in enumerate(listed):
            progress.report(k, len(listed), f"hashing {file.name}")
            digests[file.relative_to(root).as_posix()] = self.of(file)
        if self._known != before:
            self._save()
        return digest_of(digests)

    def found_in(self, digest: str, read: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """What `read` finds in the content with this digest: plain data, read once."""
        known = self._known.get(f"content {digest}")
        if isinstance(known, dict):
            return known
        found = dict(read())
        self._known[f"content {digest}"] = found
        self._save()
        return found

    def _save(self) -> None:
        """Write through a file of its own and rename, so that a reader never sees half of it.

        A place that cannot be written is not this cache's to complain about.
        """
        fresh = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(self._known))
            fresh.replace(self._path)


def text_sha256(path: Path) -> str:
    """Hash a small text file each time: cheap, and never stale."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
