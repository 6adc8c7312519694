"""A probe of the real host that loses its server, or is stopped: what is kept, and that it is measured anew."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from pipelines.config import Strict
from pipelines.flow.executor import Event, Outcome, Watch, execute
from pipelines.flow.plan import plan
from pipelines.flow.stage import Stage, Step
from pipelines.flow.store import Manifest, Store, digest_of, manifest
from pipelines.probe.config import ProbeConfig
from pipelines.stages import LATENCY
from tests.short_model import first_layers

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ENGINE = Stage("engine", "engine.made", 1, "", "")
KEYS = [digest_of({"engine": name}) for name in ("a", "b")]


@pytest.fixture(scope="module")
def store(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store that holds the same engine twice: two layers of the base in float32."""
    short = first_layers(base_checkpoint, tmp_path_factory.mktemp("short"), 2)
    made = Store(tmp_path_factory.mktemp("store"))
    made.prepare()
    engine = tmp_path_factory.mktemp("engine")
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(short), "-o", str(engine)]
    cache = str(tmp_path_factory.mktemp("cache"))
    subprocess.run([*builder, "-e", "cpu", "-p", "fp32", "-c", cache], check=True, capture_output=True)
    card = {"target": "ort_genai", "native": True, "native_note": "", "max_length": 2048, "eos_token_ids": [2],
            "bos_token_id": 1, "vocab_size": 49152, "model_id": "short"}  # fmt: skip
    (engine / "engine.json").write_text(json.dumps(card))
    for key in KEYS:
        with made.staging("engine", key) as out:
            shutil.copytree(engine, out, dirs_exist_ok=True)
            record = Manifest(
                kind="engine", stage="engine.made", version=1, key=key, config={}, inputs={}, toolchain={}, device=None,
                facts={}, files={}, started="2026-01-01T00:00:00+00:00", seconds=1.0, peak_rss=1,
            )  # fmt: skip
            made.commit(out, record)
    return made


def latency(seed: int) -> Step:
    """One round of two loads on both engines."""
    config = ProbeConfig.model_validate(
        {
            "profiles": [
                {"name": "first", "mode": "closed", "concurrency": 2, "requests": 8},
                {"name": "second", "mode": "open", "rate": 8.0, "requests": 24},
            ],
            "prompts": str(ROOT / "conf/probe/requests.jsonl"), "rounds": 1, "warmup_requests": 2,
            "warmup_max_requests": 16, "max_tokens": 16, "threads": 1, "seed": seed,
        }
    )  # fmt: skip
    engines = tuple(Step(ENGINE, f"engine {key[:4]}", Strict(), pinned=key) for key in KEYS)
    return Step(LATENCY, "latency of all engines", config, {"engines": engines})


def run(store: Store, step: Step, watch: Watch = lambda _: None) -> Outcome:
    return execute(plan([step], store), store, watch, {})[step.key]


def rows(store: Store, step: Step, table: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = pq.read_table(store.path("latency", step.key) / f"{table}.parquet").to_pylist()
    return found


def kill_the_server(event: Event) -> None:
    """SIGKILL to the host, as memory that ran out would, once the first load has ended."""
    if event.what == "progress" and event.done == 8:
        hosts = [p for p in psutil.Process().children(recursive=True) if "pipelines.engine.host" in p.cmdline()]
        assert 1 == len(hosts)
        hosts[0].kill()


def test_a_server_killed_in_the_middle_leaves_a_partial_result_that_is_made_anew(store: Store) -> None:
    """One engine's rows fail from then on and say why, the other's are whole; the next run measures all again."""
    step = latency(seed=1)
    assert "made" == run(store, step, kill_the_server).state
    facts = manifest(store.path("latency", step.key)).facts
    assert manifest(store.path("latency", step.key)).partial
    assert f"{KEYS[0][:16]}, round 0: the server was ended by SIGKILL" == facts["ended"]
    requests = rows(store, step, "requests")
    first = [row for row in requests if (row["engine"], row["profile"]) == (KEYS[0][:16], "first")]
    second = [row for row in requests if (row["engine"], row["profile"]) == (KEYS[0][:16], "second")]
    assert all(row["ok"] for row in first)
    assert "refused" in {row["error"] for row in second} <= {None, "refused", "broken_stream"}
    assert all(row["ok"] for row in requests if row["engine"] == KEYS[1][:16])
    assert [False, True, False, False] == [block["partial"] for block in rows(store, step, "blocks")]

    assert "made before, but only in part" == plan([step], store).steps[-1].why
    assert "made" == run(store, step).state
    whole = manifest(store.path("latency", step.key))
    assert (False, "", 0) == (whole.partial, whole.facts["ended"], whole.facts["failed_requests"])
    assert "reuse" == plan([step], store).steps[-1].state
    for block in rows(store, step, "blocks"):
        assert 100e6 < block["idle_rss_bytes"] <= block["peak_rss_bytes"]  # type: ignore[operator]
        assert block["queue_peak"] is not None or block["profile"] == "first"
        assert block["ready_s"] > 0  # type: ignore[operator]
    assert {"", "first", "second"} == {sample["profile"] for sample in rows(store, step, "resources")}


def test_ctrl_c_keeps_what_was_measured(store: Store) -> None:
    """The worker stops its server, writes what it has and is named; no process of it is left."""
    told: list[Event] = []

    def stop(event: Event) -> None:
        told.append(event)
        if event.what == "progress" and event.done == 8:
            raise KeyboardInterrupt

    step = latency(seed=2)
    with pytest.raises(KeyboardInterrupt):
        run(store, step, stop)
    assert "interrupted" == told[-1].what
    artifact = store.path("latency", step.key)
    assert f"what was measured is in {artifact}, marked partial" == told[-1].text
    assert (True, True) == (manifest(artifact).partial, manifest(artifact).facts["interrupted"])
    requests = rows(store, step, "requests")
    assert all(row["ok"] for row in requests if row["profile"] == "first")
    assert {KEYS[0][:16]} == {row["engine"] for row in requests}
    assert [] == [p for p in psutil.Process().children(recursive=True) if "pipelines.engine" in " ".join(p.cmdline())]
