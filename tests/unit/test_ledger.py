"""The ledger of promotions: what it takes to believe it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.errors import EvidenceError
from pipelines.release.ledger import Change, Ledger
from pipelines.release.sealed import FIRST

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger" / "ledger.jsonl"


def change(version: str = "2", model: str = "m") -> Change:
    return Change(
        action="promote",
        model=model,
        version=version,
        champion_before="1",
        previous_before=None,
        actor="ada",
        override_reason=None,
        decision_key="d",
        engine_key="e",
    )


def filled(path: Path, transactions: int = 2) -> Ledger:
    ledger = Ledger(path)
    for n in range(transactions):
        for state in ("intent", "alias_set", "committed"):
            ledger.append(f"t{n}", state, change(str(n + 2)))
    return ledger


def test_entries_are_chained_by_sha256_over_the_line_before(tmp_path: Path) -> None:
    """Each seal is the hash of its own line without the seal, and the next line carries it."""
    ledger = filled(tmp_path / "ledger.jsonl", 1)
    lines = ledger.path.read_text().splitlines()
    before = FIRST
    for line in lines:
        data = json.loads(line)
        unsealed = line.replace(f'"seal":"{data["seal"]}"', '"seal":""')
        assert before == data["before"]
        assert hashlib.sha256(unsealed.encode()).hexdigest() == data["seal"]
        before = data["seal"]
    assert [1, 2, 3] == [e.seq for e in ledger.entries()]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """No single byte of the file can be replaced without the line, or one after it, being named."""
    ledger = filled(tmp_path_factory.mktemp("ledger") / "ledger.jsonl")
    raw = bytearray(ledger.path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 2))
    raw[at] = data.draw(st.integers(32, 126).filter(lambda b: b != raw[at]))
    ledger.path.write_bytes(bytes(raw))
    with pytest.raises(EvidenceError, match=r"ledger\.jsonl:\d+"):
        ledger.entries()


@pytest.mark.parametrize("edit", ["removed", "swapped", "repeated"])
def test_lines_cannot_be_removed_swapped_or_repeated(tmp_path: Path, edit: str) -> None:
    """The first line out of place is named."""
    ledger = filled(tmp_path / "ledger.jsonl")
    lines = ledger.path.read_text().splitlines(keepends=True)
    edited = {
        "removed": [lines[0], *lines[2:]],
        "swapped": [lines[0], lines[2], lines[1], *lines[3:]],
        "repeated": [lines[0], lines[0], *lines[1:]],
    }[edit]
    ledger.path.write_text("".join(edited))
    with pytest.raises(EvidenceError, match=r"ledger\.jsonl:2:"):
        ledger.entries()


def test_a_line_cut_short_by_a_crash_is_passed_over_and_then_dropped(tmp_path: Path) -> None:
    """What was never finished is no entry; the next entry takes its place and the chain holds."""
    ledger = filled(tmp_path / "ledger.jsonl", 1)
    with ledger.path.open("ab") as f:
        f.write(b'{"seq":4,"at":"2026-')
    assert 3 == len(ledger.entries())
    ledger.append("t9", "intent", change())
    assert [1, 2, 3, 4] == [e.seq for e in ledger.entries()]


def test_an_open_transaction_is_one_that_neither_committed_nor_aborted(tmp_path: Path) -> None:
    """It is seen after intent and alias_set, and gone after its end."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert ledger.open_transaction() is None
    seen = []
    for state in ("intent", "alias_set", "committed", "intent", "aborted"):
        ledger.append("t", state, change())
        left = ledger.open_transaction()
        seen.append(left.state if left else None)
    assert ["intent", "alias_set", None, "intent", None] == seen


def test_the_champion_is_the_last_committed_of_its_model(tmp_path: Path) -> None:
    """Aborted attempts and other models do not count."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("a", "committed", change("4"))
    ledger.append("b", "committed", change("7", model="other"))
    ledger.append("c", "aborted", change("5"))
    assert ("4", "7", None) == tuple(ledger.champion(m) for m in ("m", "other", "third"))


def test_a_ledger_of_before_there_was_evidence_in_it_still_verifies(tmp_path: Path) -> None:
    """Its lines lack the fields that came later; new lines are chained to them."""
    path = tmp_path / "ledger.jsonl"
    shutil.copyfile(GOLDEN, path)
    ledger = Ledger(path)
    past = ledger.entries()
    assert (12, None, "") == (len(past), past[0].change.evidence, past[0].change.registry)
    assert ("support-bot", "1") == (past[-1].change.model, ledger.champion("support-bot"))
    ledger.append("t", "intent", change().model_copy(update={"registry": "sqlite:///mlflow.db"}))
    assert past[-1].seal == ledger.entries()[-1].before
    assert path.read_bytes().startswith(GOLDEN.read_bytes())


def test_a_line_is_the_same_only_byte_for_byte(tmp_path: Path) -> None:
    """A space that changes nothing of what a line says is a change of the line."""
    ledger = filled(tmp_path / "ledger.jsonl", 1)
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b',"state"', b', "state"', 1))
    assert [f"{ledger.path}:1: the ledger was changed here; the line does not match its seal"] == list(
        ledger.read().faults
    )


def test_previous_is_the_champion_of_before_and_never_the_champion(tmp_path: Path) -> None:
    """Where nobody was champion it stays whoever it was, unless that is champion now."""
    cases = [("2", "1", None, "1"), ("2", "1", "3", "1"), ("2", None, "3", "3"), ("2", None, "2", None),
             ("2", "2", "1", "1"), ("2", None, None, None)]  # fmt: skip
    for version, champion, previous, after in cases:
        made = change(version).model_copy(update={"champion_before": champion, "previous_before": previous})
        assert after == made.previous
