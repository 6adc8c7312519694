"""The process killed after every single durable step of promote, rollback and their repair: nothing is left half done.

A child is forked that kills itself with SIGKILL, on a real registry and a real ledger; the parent starts again.
"""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines.release import registry
from pipelines.release.audit import audit
from pipelines.release.ledger import Ledger
from tests import decisions
from tests.released import champions, promoted, rolled_back
from tests.tracked import World

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
WRITES = (
    "create_registered_model", "create_model_version", "set_model_version_tag", "set_registered_model_alias",
    "delete_registered_model_alias", "set_registered_model_tag",
)  # fmt: skip
BEFORE = {"champion": "2", "previous": "1", "challenger": "3"}
AFTER = {
    "promote": {"champion": "3", "previous": "2"},
    "rollback": {"champion": "1", "previous": "2", "challenger": "3"},
}
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Kept:
    """A world whose registry and ledger are put back as they were; its paths stay the same, as they are recorded."""

    world: World
    decision: Path

    def put_back(self) -> None:
        """Let go of the database, so that no child inherits it, and restore it with the ledger."""
        let_go(self.world)
        shutil.rmtree(self.world.root / "mlruns")
        shutil.copytree(self.world.root / "kept", self.world.root / "mlruns")

    def act(self, action: str) -> None:
        if action == "promote":
            promoted(self.world, self.decision)
        else:
            rolled_back(self.world, "drill")


def wrong(world: World) -> list[str]:
    """What `verify-ledger` says, but for half a line that no entry took the place of yet."""
    found = audit(world.registry, world.store)
    return [*found.faults, *(note for note in found.notes if "half a line" not in note)]


def let_go(world: World) -> None:
    """Close every connection to the database: MLflow keeps some for runs and some for the registry."""
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as Models
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as Runs

    for engines in (Models._engine_map, Runs._engine_map):
        if world.uri in engines:
            engines[world.uri].dispose()


@pytest.fixture(scope="module")
def kept(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Two were champions, and the winner of a decision made against the second is challenger."""
    root = tmp_path_factory.mktemp("kept") / "world"
    shutil.copytree(template, root)
    world = World(root)
    champions(world, "rtn_w4a16_g64", "awq_w4a16_g64")
    decision = world.decided(decisions.decision())
    world.record(decision)
    assert BEFORE == world.aliases()
    let_go(world)
    shutil.copytree(root / "mlruns", root / "kept")
    yield Kept(world, decision)
    let_go(world)


def killed_after(act: Callable[[], object], step: int) -> int:
    """Do something in a child that dies at its step-th durable change, counted from 0; give how the child ended.

    An appended line is two: half of it may be written, or all.
    """
    child = os.fork()
    if child == 0:
        try:
            _die_at(step)
            act()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - nobody else hears why a forked test ended
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _die_at(step: int) -> None:
    from mlflow.tracking import MlflowClient

    left = [step]

    def passed() -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    def wrapped(name: str) -> Callable[..., object]:
        original = getattr(MlflowClient, name)

        def counted(*args: object, **kwargs: object) -> object:
            result = original(*args, **kwargs)
            passed()
            return result

        return counted

    append = Ledger.append

    def torn(ledger: Ledger, *args: object) -> object:
        if left[0] == 0:
            with ledger.path.open("ab") as file:
                file.write(b'{"seq":99,"at":"2026-11-')
        passed()
        entry = append(ledger, *args)  # type: ignore[arg-type]
        passed()
        return entry

    for name in WRITES:
        setattr(MlflowClient, name, wrapped(name))
    Ledger.append = torn  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(("action", "steps"), [("promote", 15), ("rollback", 9)])
def test_a_kill_after_any_step_is_finished_or_undone_at_the_next_start(kept: Kept, action: str, steps: int) -> None:
    """Exactly one champion with the right previous, as before or as wanted; ledger, evidence and registry agree."""
    world, step, seen = kept.world, 0, []
    while True:
        kept.put_back()
        ended = killed_after(lambda: kept.act(action), step)
        if ended != KILLED:
            break
        registry.repair(world.registry)
        aliases = world.aliases()
        assert aliases in (BEFORE, AFTER[action]), f"killed at step {step}"
        assert [] == wrong(world), f"killed at step {step}"
        assert Ledger(world.registry.ledger).champion("demo") == aliases["champion"]
        seen.append(aliases == AFTER[action])
        if action == "promote":
            kept.act(action)
            assert AFTER[action] == world.aliases(), f"promoted again after a kill at step {step}"
        step += 1
    assert 0 == ended
    assert AFTER[action] == world.aliases()
    assert (steps, [False, True]) == (step, sorted(set(seen)))
    assert seen == sorted(seen), "once it holds, a later kill does not undo it"


@pytest.mark.parametrize("action", ["promote", "rollback"])
def test_a_kill_after_any_step_of_the_repair_is_repaired_too(kept: Kept, action: str) -> None:
    """Killed as soon as the champion was set, and again after each step of what then is left to be done."""
    world, again, step = kept.world, 0, 0
    while True:
        kept.put_back()
        while KILLED == killed_after(lambda: kept.act(action), step) and not _only_champion_set(world, action):
            kept.put_back()
            step += 1
        let_go(world)
        ended = killed_after(lambda: registry.repair(world.registry), again)
        registry.repair(world.registry)
        assert AFTER[action] == world.aliases()
        assert [] == wrong(world)
        if ended == 0:
            break
        assert KILLED == ended
        again += 1
    assert {"promote": 8, "rollback": 7}[action] == again


def _only_champion_set(world: World, action: str) -> bool:
    left = Ledger(world.registry.ledger).open_transaction()
    return left is not None and left.state == "intent" and world.aliases()["champion"] == AFTER[action]["champion"]
