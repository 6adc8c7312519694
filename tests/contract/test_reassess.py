"""`quantgate reassess` on the command line: what it refuses, and that it says so in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.cli import main


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """A store, a ledger and a database of its own, all empty."""
    return [
        "campaign=mine",
        f"paths.store={tmp_path / 'store'}",
        f"paths.ledger={tmp_path / 'ledger.jsonl'}",
        f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}",
    ]


def test_without_a_champion_there_is_nothing_to_reassess(
    capsys: pytest.CaptureFixture[str], places: list[str], tmp_path: Path
) -> None:
    """One error that says what to do, exit code 7, in JSON too; nothing is written."""
    assert 7 == main(["reassess", *places, "--json"])
    out, err = capsys.readouterr()
    said = "campaign='mine': nobody is champion of mine; promote one first, e.g. `quantgate promote`"
    assert [f"error: {said}"] == err.splitlines()
    assert ("EvidenceError", said) == tuple(json.loads(out)[name] for name in ("error", "message"))
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("override", ["variant=[baseline]", "engine=[vllm]", "reference=other"])
def test_the_champions_own_recipe_is_not_for_choosing(
    capsys: pytest.CaptureFixture[str], places: list[str], override: str
) -> None:
    """A variant, an engine or a reference of one's own is what `run` is for."""
    assert 2 == main(["reassess", *places, override])
    assert "a reassessment keeps the champion's own" in capsys.readouterr().err
