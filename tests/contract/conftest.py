"""A world to record in, made once for a module and copied for each of its tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.track.connection import session
from tests import decisions
from tests.tracked import World


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store and an initialised database, copied for each test."""
    root = tmp_path_factory.mktemp("template")
    made = decisions.decision()
    decisions.engines(root / "store", made)
    decisions.variants(root / "store", made)
    decisions.scores(root / "store", made)
    decisions.requests(root / "store", made, 20)
    with session(f"sqlite:///{root}/mlruns/mlflow.db"):
        pass
    return root


@pytest.fixture
def world(template: Path, tmp_path: Path) -> Iterator[World]:
    shutil.copytree(template, tmp_path / "world")
    yield World(tmp_path / "world")
    from mlflow.tracking._tracking_service.utils import _get_store

    _get_store(f"sqlite:///{tmp_path}/world/mlruns/mlflow.db").engine.dispose()
