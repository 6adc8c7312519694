"""Stages in a real container. Needs docker or podman that answers, and an image with Python 3.11 and pydantic."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import Problem
from pipelines.flow import containers
from pipelines.flow.launch import serving
from pipelines.flow.store import Store, manifest
from pipelines.flow.toolchain import Toolchain, carried, toolchains
from tests.contract.test_toolchains import baseline, checkpoint, engine, run

pytestmark = pytest.mark.device
ASKED = "QUANTGATE_TEST_IMAGE"  # repository@sha256:..., the image as it is run


@pytest.fixture
def image() -> Toolchain:
    """The image that the environment names, in the runtime that answers."""
    named = os.environ.get(ASKED, "")
    if "@" not in named:
        pytest.skip(f"needs {ASKED}=repository@sha256:..., an image that holds Python 3.11 and pydantic")
    runtime = next((r for r in ("docker", "podman") if not containers.runtime_problem(r)), None)
    if runtime is None:
        pytest.skip("needs docker or podman that answers")
    repository, _, digest = named.partition("@")
    data: dict[str, Any] = {"kind": "container", "runtime": runtime, "image": repository, "digest": digest,
                            "gpus": None, "model_cache": None}  # fmt: skip
    problems: list[Problem] = []
    made = toolchains({"real": data}, Path("/none"), problems)["real"]
    assert [] == problems
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.prepare()
    return made


def left(name: str, runtime: str) -> str:
    """Containers whose name begins so."""
    argv = [runtime, "ps", "--all", "--quiet", "--filter", f"name={name}"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_a_stage_runs_in_a_real_container(image: Toolchain, store: Store, tmp_path: Path) -> None:
    """What it made is ours, its links hold here, the manifest says where it ran, and no container is left."""
    step = baseline(checkpoint(store, tmp_path / "base"), image)
    outcome = run(store, step)[step.key]
    assert ("made", "") == (outcome.state, outcome.message)
    artifact = store.path("variant", step.key)
    record = manifest(artifact)
    assert not record.simulated
    assert image.spec.digest == record.toolchain["image"]  # type: ignore[union-attr]
    assert os.getuid() == (artifact / "manifest.json").stat().st_uid
    assert (artifact / "model.safetensors").is_file()
    assert "" == left(f"quantgate-{step.key[:16]}", image.spec.runtime)  # type: ignore[union-attr]


def test_a_server_in_a_container_is_found_from_outside(
    image: Toolchain, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first process has an id here, which leads the group that is watched while latency is measured."""
    monkeypatch.setenv(*next(iter(carried([image]).items())))
    where = engine(store, image)
    with serving(where, ["python3", "-c", "print('up', flush=True); import time; time.sleep(60)"], {}) as started:
        child = subprocess.Popen(started.argv, env=started.env, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            assert "up\n" == child.stdout.readline()
            pid = started.pid()
            assert pid is not None and pid == os.getpgid(pid)
        finally:
            child.terminate()
            child.wait()
            started.tidy()
