"""What may be wrong with the record of promotions: each fault is found and named, and a sound record has none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.decide.model import Candidate
from pipelines.flow.store import hash_tree
from pipelines.release.audit import Audit, audit
from pipelines.release.ledger import Ledger
from pipelines.track.connection import session
from tests import decisions
from tests.released import champions, rolled_back
from tests.tracked import World

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
FIRST, SECOND = "rtn_w4a16_g64", "awq_w4a16_g64"


def released(world: World) -> Path:
    """Two promotions and a rollback: version 1 is champion again, 2 is previous. Gives the ledger's file."""
    champions(world, FIRST, SECOND)
    rolled_back(world, "latency alarm")
    return world.registry.ledger


def audited(world: World) -> Audit:
    return audit(world.registry, world.store)


def engine_of(world: World, label: str) -> Path:
    (one,) = (c for c in decisions.decision().candidates if c.label == label)
    return engine(world, one)


def engine(world: World, one: Candidate) -> Path:
    return world.store.path("engine", one.keys["engine"])


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def test_a_sound_record_has_no_faults(world: World) -> None:
    """Nine lines of three changes, and two engines and one decision that were hashed."""
    released(world)
    assert Audit(entries=9, promotions=3, artifacts=3, faults=(), notes=()) == audited(world)


def test_nothing_promoted_yet_is_no_fault_and_makes_no_database(world: World) -> None:
    """Neither a ledger nor a registry is there, and none is there afterwards."""
    shutil.rmtree(world.root / "mlruns")
    assert Audit(entries=0, promotions=0, artifacts=0, faults=(), notes=()) == audited(world)
    assert not (world.root / "mlruns").exists()


def test_each_tampered_line_is_named(world: World) -> None:
    """Another actor in the second, another reason in the last: both are named, with the file and the line."""
    path = released(world)
    edited = lines(path)
    edited[1] = edited[1].replace('"actor":"ada"', '"actor":"eve"')
    edited[8] = edited[8].replace("latency alarm", "latency alarms")
    path.write_text("".join(edited))
    told = [fault for fault in audited(world).faults if "seal" in fault]
    assert [f"{path}:2: ", f"{path}:9: "] == [fault.partition("the ledger")[0] for fault in told]


def test_a_line_that_was_sealed_anew_breaks_the_chain_after_it(world: World) -> None:
    """Who edits a line and gives it a fitting seal is found by the line after it."""
    path = released(world)
    forged = Ledger(path.with_name("forged.jsonl"))
    entry = Ledger(path).entries()[0]
    forged.append(entry.transaction, "intent", entry.change.model_copy(update={"actor": "eve"}))
    edited = [*lines(forged.path), *lines(path)[1:]]
    path.write_text("".join(edited))
    assert f"{path}:2: the ledger was changed here; its hash chain is broken before this line" in audited(world).faults


@pytest.mark.parametrize("kept", [8, 6, 3, 0])
def test_a_tail_that_was_cut_off_is_named(world: World, kept: int) -> None:
    """The chain of what is left holds; the registry remembers line 9."""
    path = released(world)
    path.write_text("".join(lines(path)[:kept]))
    faults = audited(world).faults
    assert not [fault for fault in faults if "chain" in fault or "seal;" in fault]
    assert 1 == len([fault for fault in faults if "told of line 9 with seal" in fault and f"{kept} lines" in fault])


def test_a_changed_byte_of_an_engine_is_named(world: World) -> None:
    """Also of the one that is not champion: it may be gone back to."""
    released(world)
    path = engine_of(world, SECOND) / "model.onnx"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert (f"{path.parent}: differs from its manifest: model.onnx",) == audited(world).faults


def test_an_engine_whose_manifest_was_made_to_fit_is_named(world: World) -> None:
    """File and manifest agree, and neither is what was promoted."""
    released(world)
    where = engine_of(world, FIRST)
    (where / "model.onnx").write_bytes(b"something else")
    record = json.loads((where / "manifest.json").read_text())
    record["files"] = hash_tree(where)
    (where / "manifest.json").write_text(json.dumps(record))
    faults = audited(world).faults
    assert faults and all(f"{where}/manifest.json is not the one that was recorded" in fault for fault in faults)


def _decision_gone(world: World) -> None:
    shutil.rmtree(world.store.path("decision", decisions.key_of("decision", "demo", "promote")))


def _version_deleted(world: World) -> None:
    with session(world.uri) as client:
        client.delete_model_version("demo", "1")


def _alias_moved(world: World) -> None:
    with session(world.uri) as client:
        client.set_registered_model_alias("demo", "champion", "2")


def _tag_changed(world: World) -> None:
    with session(world.uri) as client:
        client.set_model_version_tag("demo", "2", "engine_key", "beef")


def _registry_gone(world: World) -> None:
    (world.root / "mlruns" / "mlflow.db").unlink()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_decision_gone, ["version 1: its decision", "is gone"]),
        (_version_deleted, ["version 1 was deleted from the registry", "alias champion points at no version"]),
        (_alias_moved, ["alias champion points at version 2 in the registry, by the ledger at version 1"]),
        (_tag_changed, ["version 2: tag engine_key is 'beef'"]),
        (_registry_gone, ["mlflow.db: the registry is gone"]),
    ],
    ids=lambda one: one.__name__.strip("_") if callable(one) else None,
)
def test_what_was_done_behind_our_back_is_named(world: World, harm: Callable[[World], None], said: list[str]) -> None:
    """By hand in MLflow or in the store."""
    released(world)
    harm(world)
    faults = "\n".join(audited(world).faults)
    assert [] == [part for part in said if part not in faults]


def test_a_champion_that_was_set_by_hand_alone_is_named(world: World) -> None:
    """The ledger knows of nobody."""
    with session(world.uri) as client:
        client.create_registered_model("demo")
        client.create_model_version("demo", source="quantgate://engine/x")
        client.set_registered_model_alias("demo", "champion", "1")
    assert ("demo: alias champion points at version 1 in the registry, by the ledger at no version",) == audited(
        world
    ).faults


def test_the_verbs_show_and_verify(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`history` has a row a change, `verify-ledger` ends with 7 for a fault and with 0 once that is repaired."""
    path = released(world)
    ledger = Ledger(path)
    last = ledger.entries()[-1].change
    cut_short = last.model_copy(update={"champion_before": "1", "version": "2", "previous_before": "2"})
    ledger.append("t9", "intent", cut_short)
    where = [f"paths.ledger={path}", f"paths.store={world.root}/store", f"tracking.uri={world.uri}", "campaign=demo"]

    def call(*argv: str) -> tuple[int, dict[str, object], str]:
        code = main([*argv, *where, "--json"])
        out = capsys.readouterr()
        return code, json.loads(out.out.splitlines()[-1]), out.out + out.err

    code, document, text = call("history")
    rows = document["history"]
    assert isinstance(rows, list)
    assert (0, ["promote", "promote", "rollback", "rollback"]) == (code, [row["action"] for row in rows])
    assert ["1", "2", "1", "2"] == [row["version"] for row in rows]
    assert [FIRST, SECOND, FIRST, FIRST] == [row["candidate"] for row in rows]
    assert ["committed", "committed", "committed", "cut short"] == [row["outcome"] for row in rows]
    assert "latency alarm" in text and "ada" in text
    code, document, text = call("verify-ledger")
    assert (7, 1) == (code, len(document["faults"]))  # type: ignore[arg-type]
    assert f"fault: {path}:10: the rollback to version 2 of demo was cut short" in text
    code, document, text = call("verify-ledger", "--repair")
    assert (0, []) == (code, document["faults"])
    assert "gave up the rollback to version 2: cut short before anything changed" in text
    code, document, text = call("history")
    assert "aborted: cut short before anything changed" in text
