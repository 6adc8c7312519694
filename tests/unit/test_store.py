"""The store: complete or absent, hashed, and swept of what dead writers left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.errors import EnvironmentProblem, EvidenceError
from pipelines.flow import store as st
from pipelines.flow.locks import Held, locked
from pipelines.flow.store import Manifest, Store


def _record(key: str, files: dict[str, tuple[str, int]]) -> Manifest:
    return Manifest(
        kind="thing", stage="thing", version=1, key=key, config={}, inputs={}, toolchain={}, device=None,
        facts={"n": 3}, files=files, started="2026-11-01T00:00:00+00:00", seconds=0.0, peak_rss=0,
    )  # fmt: skip


def _make(store: Store, key: str = "a" * 64) -> Path:
    with store.lock(key), store.staging("thing", key) as out:
        (out / "data.txt").write_text("hello")
        return store.commit(out, _record(key, st.hash_tree(out)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.prepare()
    return made


def test_a_directory_that_exists_is_complete(store: Store) -> None:
    """An artifact appears with its manifest, and its staging directory is gone."""
    artifact = _make(store)
    assert store.has("thing", "a" * 64)
    assert {"n": 3} == st.facts(artifact)
    assert [] == list((store.root / ".tmp").glob("thing-*"))


def test_nothing_appears_when_the_writer_fails(store: Store) -> None:
    """A stage that raises half way leaves neither artifact nor staging directory."""
    with pytest.raises(RuntimeError), store.staging("thing", "b" * 64) as out:
        (out / "half").write_text("x")
        raise RuntimeError
    assert not store.has("thing", "b" * 64)
    assert [] == list((store.root / ".tmp").glob("thing-*"))


def test_hashes_are_sha256(store: Store) -> None:
    """The recorded digest of "hello" is the one every sha256 tool prints."""
    artifact = _make(store)
    known = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert (known, 5) == st.manifest(artifact).files["data.txt"]


@pytest.mark.parametrize(
    ("name", "content", "differing"),
    [("data.txt", "HELLO", ["data.txt"]), ("extra.txt", "x", ["extra.txt"])],
)
def test_verify_names_what_changed(store: Store, name: str, content: str, differing: list[str]) -> None:
    """A changed or added file is named; an untouched artifact names nothing."""
    artifact = _make(store)
    assert [] == st.verify(artifact)
    (artifact / name).write_text(content)
    assert differing == st.verify(artifact)


def test_verify_names_a_missing_file(store: Store) -> None:
    """A removed file is named."""
    artifact = _make(store)
    (artifact / "data.txt").unlink()
    assert ["data.txt"] == st.verify(artifact)


def test_a_directory_without_manifest_is_no_artifact(tmp_path: Path) -> None:
    """Reading one says which file is missing."""
    with pytest.raises(EvidenceError, match=r"manifest\.json"):
        st.manifest(tmp_path)


def test_sweep_removes_what_dead_writers_left(store: Store) -> None:
    """A staging directory whose key nobody holds is removed; one whose key is locked stays."""
    dead, alive = store.root / ".tmp" / ("thing-" + "c" * 16), store.root / ".tmp" / ("thing-" + "d" * 16)
    dead.mkdir()
    alive.mkdir()
    with store.lock("d" * 64):
        store.sweep()
    assert (False, True) == (dead.exists(), alive.exists())


def test_a_store_that_cannot_be_made_names_its_key(tmp_path: Path) -> None:
    """A file where the store should be gives one error that names paths.store."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"paths\.store"):
        Store(tmp_path / "file").prepare()


def test_links_to_other_artifacts_are_relative(store: Store, tmp_path: Path) -> None:
    """The store can be moved, or mounted under another path; links to elsewhere stay as they are."""
    first, outside = _make(store), tmp_path / "outside.txt"
    outside.write_text("far")
    with store.staging("thing", "b" * 64) as out:
        (out / "deep").mkdir()
        (out / "near.txt").symlink_to(first / "data.txt")
        (out / "deep" / "near.txt").symlink_to(first / "data.txt")
        (out / "far.txt").symlink_to(outside)
        st.relink(out, store.root)
        second = store.commit(out, _record("b" * 64, st.hash_tree(out)))
    assert (f"../../thing/{first.name}/data.txt", str(outside)) == tuple(
        str((second / name).readlink()) for name in ("near.txt", "far.txt")
    )
    moved = store.root.rename(tmp_path / "moved")
    assert "hello" == (moved / "thing" / second.name / "deep" / "near.txt").read_text()


def test_a_lock_is_one_writers_or_many_readers(tmp_path: Path) -> None:
    """Readers share; a writer waits, or is told at once where it would not wait."""
    path = tmp_path / "lock"
    with (
        locked(path, shared=True),
        locked(path, shared=True),
        pytest.raises(Held, match="another"),
        locked(path, wait_s=0),
    ):
        pass
    with locked(path, wait_s=0), pytest.raises(Held), locked(path, wait_s=0.1, shared=True):
        pass


def test_canonical_text_does_not_depend_on_order() -> None:
    """Equal values have equal digests, whatever their order of insertion."""
    assert st.digest_of({"a": 1, "b": [1, 2]}) == st.digest_of(dict(reversed([("a", 1), ("b", [1, 2])])))
    assert '{"a":1,"b":2}' == st.canonical(json.loads('{"b": 2, "a": 1}'))
