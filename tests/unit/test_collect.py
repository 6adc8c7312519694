"""Which artifacts garbage collection keeps: what decisions reach, nothing else."""

from __future__ import annotations

from pathlib import Path

from pipelines.flow.store import Manifest, Store, hash_tree
from pipelines.verbs.store import reachable


def made(key: str, kind: str = "thing", **inputs: str | list[str]) -> Manifest:
    return Manifest(
        kind=kind, stage=kind, version=1, key=key, config={}, inputs=dict(inputs), toolchain={}, device=None,
        facts={}, files={}, started="2026-11-01T00:00:00+00:00", seconds=0.0, peak_rss=0,
    )  # fmt: skip


def test_what_a_root_is_made_from_is_reached() -> None:
    """Inputs of inputs are kept, single and listed; what nobody reads is not."""
    everything = [
        made("base"),
        made("variant", checkpoint="base"),
        made("engine", variant="variant"),
        made("decision", engines=["engine"]),
        made("orphan", checkpoint="base"),
    ]
    assert {"base", "variant", "engine", "decision"} == reachable(everything, {"decision"})


def test_a_root_that_is_gone_reaches_nothing() -> None:
    """A promoted decision whose artifacts were removed by hand is no reason to fail."""
    assert set() == reachable([made("a")], {"missing"})


def test_removing_leaves_no_trace(tmp_path: Path) -> None:
    """The directory vanishes as a whole and the store no longer has it."""
    store = Store(tmp_path)
    store.prepare()
    key = "e" * 64
    with store.staging("thing", key) as out:
        (out / "f").write_text("x")
        path = store.commit(out, made(key).model_copy(update={"files": hash_tree(out)}))
    store.remove("thing", key)
    assert not path.exists()
    assert not store.has("thing", key)
    assert [] == list((tmp_path / ".tmp").iterdir())
