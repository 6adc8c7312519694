"""How many steps run at once, and what their times teach."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pipelines import conduct
from pipelines.campaign import Campaign, Executor
from pipelines.config import Strict
from pipelines.flow.executor import Outcome
from pipelines.flow.stage import Stage, Step
from pipelines.flow.store import Manifest, Store


@pytest.mark.parametrize(
    ("given", "threads", "gpu", "expected"),
    [
        (None, 2, "none", 2),
        (None, 1, "none", 1),
        (None, 64, "none", 2),
        (None, 64, "NVIDIA L4, 580.95.05", 1),
        (1, 64, "none", 1),
        (3, 2, "NVIDIA L4, 580.95.05", 3),
    ],
)
def test_how_many_at_once(
    monkeypatch: pytest.MonkeyPatch, given: int | None, threads: int, gpu: str, expected: int
) -> None:
    """Two where there are two cores and no GPU; what a campaign says itself wins."""
    monkeypatch.setattr(conduct, "describe", lambda: {"gpu": gpu})
    config = SimpleNamespace(executor=Executor(parallel=given))
    assert expected == conduct.at_once(cast("Campaign", SimpleNamespace(config=config, threads=threads)))


def test_times_of_steps_that_had_company_teach_nothing(tmp_path: Path) -> None:
    """40 s beside another are not what the step takes; 30 s alone are, and 1.5 times its guess."""
    store = Store(tmp_path)
    store.prepare()
    outcomes = []
    for name, seconds, beside in (("crowded", 40.0, 1), ("lone", 30.0, 0)):
        step = Step(Stage("toy", name, 1, "", ""), name, Strict(), guess=20.0)
        with store.staging("toy", step.key) as out:
            record = Manifest(
                kind="toy", stage=name, version=1, key=step.key, config={}, inputs={}, toolchain={}, device=None,
                facts={}, files={}, started="", seconds=seconds, peak_rss=0, beside=beside,
            )  # fmt: skip
            store.commit(out, record)
        outcomes.append(Outcome(step, "made"))
    conduct.Timings(store).learn(outcomes, store)
    assert {"lone": 30.0, "lone pace": 1.5} == json.loads((tmp_path / ".timings.json").read_text())
