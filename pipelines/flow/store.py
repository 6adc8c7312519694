"""The artifact store: `<root>/<kind>/<key16>/` with a manifest written last, so a directory that exists is complete.

Every write goes to a staging directory first and is renamed into place under a lock on its key.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from pipelines.config import Strict
from pipelines.errors import EnvironmentProblem, EvidenceError
from pipelines.flow.locks import Held, locked

MANIFEST = "manifest.json"
HANDED_ON = ("licence", "licence_source")
"""Facts that go from an artifact to whatever is made from it, unless the stage that makes it says otherwise."""
Fact = str | int | float | bool | None


class Manifest(Strict):
    """What an artifact is, what it was made from, by what, and what was found."""

    kind: str
    stage: str
    version: int
    key: str
    config: dict[str, Any]
    inputs: dict[str, str | list[str]]
    toolchain: dict[str, str]
    device: dict[str, str] | None
    facts: dict[str, Fact]
    files: dict[str, tuple[str, int]]
    started: str
    seconds: float
    peak_rss: int
    simulated: bool = Field(default=False, description="made by a stand-in for a container; never to be promoted")
    partial: bool = Field(default=False, description="lacks something that was to be in it, or was made from such")
    beside: int = Field(
        default=0, description="most other processes of its run at once; `seconds` are then not its own"
    )


def manifest(artifact: Path) -> Manifest:
    """Read an artifact's manifest.

    Raises:
        EvidenceError: the directory holds no readable manifest, so it is no artifact.
    """
    path = artifact / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path}: no readable manifest ({error}); run `quantgate verify`") from None


def handed_on(inputs: Iterable[Manifest]) -> dict[str, Fact]:
    """What an artifact says because the first of its inputs that says so does: what it may be used under."""
    first = next((one.facts for one in inputs if HANDED_ON[0] in one.facts), {})
    return {name: first[name] for name in HANDED_ON if name in first}


def facts(artifact: Path) -> dict[str, Fact]:
    """Read what the stage that made this artifact found out."""
    return manifest(artifact).facts


def sha256_of(path: Path) -> str:
    """Hash one file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def hash_tree(root: Path) -> dict[str, tuple[str, int]]:
    """Hash every file under an artifact (following links), by relative path; the manifest is left out."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {p.relative_to(root).as_posix(): (sha256_of(p), p.stat().st_size) for p in files}


def relink(staged: Path, root: Path) -> None:
    """Make a staged artifact's links to other artifacts relative: the store has another path inside a container, and
    may be moved. Staging directories lie as deep as artifacts, so the links hold before and after the rename."""
    for link in staged.rglob("*"):
        if link.is_symlink() and link.readlink().is_relative_to(root):
            target = os.path.relpath(link.readlink(), link.parent)
            link.unlink()
            link.symlink_to(target)


def verify(artifact: Path) -> list[str]:
    """Re-hash an artifact; name each file that is missing, added or differs from its manifest."""
    recorded = manifest(artifact).files
    found = hash_tree(artifact)
    names = sorted(recorded.keys() | found.keys())
    return [name for name in names if recorded.get(name) != found.get(name)]


class Store:
    """A directory of artifacts, safe for several writers at once on one machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Create the store and prove that it can be written.

        Raises:
            EnvironmentProblem: no permission, or the path is not a directory.
        """
        try:
            for name in (".locks", ".tmp", ".logs", ".requests"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            probe = self.root / ".tmp" / f".write-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise EnvironmentProblem(
                f"paths.store={str(self.root)!r}: cannot write there ({error.strerror}); choose another directory"
            ) from None

    def path(self, kind: str, key: str) -> Path:
        """Where the artifact with this key lives, whether it exists or not."""
        return self.root / kind / key[:16]

    def has(self, kind: str, key: str) -> bool:
        """Say whether the artifact is there, complete."""
        return os.path.isfile(f"{self.root}/{kind}/{key[:16]}/{MANIFEST}")  # noqa: PTH113 - asked thousands of times a plan

    def lock(self, key: str, *, wait_s: float | None = None) -> AbstractContextManager[None]:
        """The lock that whoever makes this artifact holds; released by the kernel when its holder dies."""
        return locked(self.root / ".locks" / f"{key[:16]}.lock", wait_s=wait_s)

    def remove(self, kind: str, key: str) -> None:
        """Rename an artifact away under its lock, then delete it, so that no reader finds half of it."""
        with self.lock(key):
            gone = self.root / ".tmp" / f"gone-{key[:16]}"
            self.path(kind, key).rename(gone)
            shutil.rmtree(gone)

    def log_path(self, key: str) -> Path:
        return self.root / ".logs" / f"{key[:16]}.log"

    @contextmanager
    def staging(self, kind: str, key: str) -> Iterator[Path]:
        """An empty directory that becomes the artifact through `commit`, or vanishes.

        The caller holds the key's lock, so whatever stands there was left by a writer that died.
        """
        where = self.root / ".tmp" / f"{kind}-{key[:16]}"
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir(parents=True)
        try:
            yield where
        finally:
            shutil.rmtree(where, ignore_errors=True)

    def commit(self, staged: Path, record: Manifest) -> Path:
        """Write the manifest, make it durable, and rename the staged directory into place."""
        target = self.path(record.kind, record.key)
        target.parent.mkdir(parents=True, exist_ok=True)
        with (staged / MANIFEST).open("w") as f:
            f.write(record.model_dump_json(indent=1))
            f.flush()
            os.fsync(f.fileno())
        if target.exists():  # an incomplete directory cannot stand here by a rename; it was tampered with
            shutil.rmtree(target)
        staged.rename(target)
        return target

    def artifacts(self) -> Iterator[Path]:
        """Every complete artifact."""
        for path in sorted(self.root.glob(f"*/*/{MANIFEST}")):
            if not path.parent.parent.name.startswith("."):
                yield path.parent

    def sweep(self) -> None:
        """Remove staging directories whose writer is gone."""
        for left in (self.root / ".tmp").glob("*-*"):
            try:
                with self.lock(left.name.rsplit("-", 1)[1], wait_s=0):
                    shutil.rmtree(left, ignore_errors=True)
            except Held:
                continue


def canonical(value: object) -> str:
    """The one JSON text of a value: sorted keys, no spaces, so that equal values have equal keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_of(value: Mapping[str, object]) -> str:
    """Hash a plain value by its canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()
