"""An engine that exists runs only where it was built for, and says everything that differs before it is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.engine.card import EngineCard
from pipelines.engine.serving import serve
from pipelines.engine.trtllm import record
from pipelines.engine.trtllm.deploy import mismatches
from pipelines.errors import EnvironmentProblem
from pipelines.flow.store import Manifest

IMAGE = "sha256:" + "a" * 64
MADE = Manifest(
    kind="engine", stage="engine.trtllm_engine", version=1, key="0" * 64, config={}, inputs={},
    toolchain={"toolchain": "trtllm", "image": IMAGE, "tensorrt": "10.14.1", "tensorrt_llm": "1.2.1"}, device=None,
    facts={"gpu_sm": 90, "tp": 2, "pp": 1, "driver": "580.95.05"}, files={}, started="2026-11-30T12:00:00+00:00",
    seconds=1.0, peak_rss=1,
)  # fmt: skip
HERE = {"gpu": "NVIDIA H100", "gpu_sm": "90", "gpu_count": "2", "driver": "580.95.05"}
NOW = {"toolchain": "trtllm", "image": IMAGE}


def test_where_it_was_built_it_runs() -> None:
    """The same GPU, image and number of GPUs; a newer driver is none the worse."""
    assert [] == mismatches(MADE, HERE, NOW)
    assert [] == mismatches(MADE, HERE | {"driver": "590.10", "gpu_count": "8"}, NOW)


@pytest.mark.parametrize(
    ("device", "toolchain", "said"),
    [
        ({"gpu_sm": "89"}, {}, "gpu='89': it was built for SM 90"),
        ({"gpu_count": "1"}, {}, "gpu_count=1: it has 2 ranks"),
        ({"driver": "550.54.15"}, {}, "driver='550.54.15': it was built with driver 580.95.05"),
        ({}, {"image": "sha256:" + "b" * 64}, "it was built with image sha256:aaaa"),
        ({}, {"tensorrt": "10.13.3"}, "tensorrt='10.13.3': it was built with TensorRT 10.14.1"),
    ],
)
def test_what_is_not_as_it_was_is_told(device: dict[str, str], toolchain: dict[str, str], said: str) -> None:
    """Each of these ends in a deserialization error that does not say why."""
    (problem,) = mismatches(MADE, HERE | device, NOW | toolchain)
    assert said in str(problem)


def test_everything_that_differs_comes_at_once() -> None:
    """Another GPU, too few of them, an old driver and another image are four problems."""
    assert 4 == len(
        mismatches(MADE, {"gpu_sm": "89", "gpu_count": "1", "driver": "550.1"}, {"image": "sha256:" + "b" * 64})
    )
    assert ["gpu='none': it was built for SM 90, and there is no GPU here"] == [
        str(p) for p in mismatches(MADE, {"gpu": "none"}, NOW)
    ]


def test_an_engine_of_another_machine_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving looks before it starts a server that would fail late and say little."""
    card = EngineCard(
        target="trtllm_engine", native=True, native_note="", max_length=16, eos_token_ids=[2], bos_token_id=1,
        vocab_size=32, model_id="m",
    )  # fmt: skip
    (tmp_path / "engine.json").write_text(card.model_dump_json())
    (tmp_path / "manifest.json").write_text(MADE.model_copy(update={"toolchain": {}}).model_dump_json())
    monkeypatch.setattr(record, "describe", lambda: {"gpu": "none"})
    with (
        pytest.raises(EnvironmentProblem, match="cannot run here: gpu='none': it was built for SM 90"),
        serve(tmp_path, threads=1),
    ):
        pass
