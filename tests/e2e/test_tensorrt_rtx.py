"""Engines of TensorRT-RTX, compiled by the real library in its own toolchain; no GPU is needed for that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipelines.compose import compose
from pipelines.config import CONF_DIR, Strict
from pipelines.engine import plain_graph
from pipelines.engine.plain_graph import PlainGraphConfig
from pipelines.engine.table import TARGETS
from pipelines.engine.tensorrt_rtx import ENGINE, TensorrtRtxConfig
from pipelines.errors import Problem
from pipelines.flow import venvs
from pipelines.flow.executor import Outcome, execute
from pipelines.flow.plan import plan
from pipelines.flow.stage import Stage, Step
from pipelines.flow.store import Manifest, Store, hash_tree, manifest
from pipelines.flow.toolchain import Toolchain, VenvConfig, toolchains
from tests import tiny_models
from tests.tiny_models import AWQ, FP8

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]  # the libraries' own

ROW = TARGETS["tensorrt_rtx"]
HOME = CONF_DIR.parent / "toolchains"
ALL = (80, 86, 89, 120)


class Made(Strict):
    """The config of an artifact that is put into the store by hand."""

    name: str


@pytest.fixture(scope="module")
def rtx() -> Toolchain:
    """The toolchain of the compiler, if it has been made."""
    problems: list[Problem] = []
    found = toolchains(compose([])["toolchain"], HOME, problems)["tensorrt_rtx"]
    assert [] == problems
    if not isinstance(found.spec, VenvConfig) or not venvs.venv(found, found.spec).made:
        pytest.skip("needs the toolchain `tensorrt_rtx`: `quantgate toolchain sync tensorrt_rtx` makes it (240 MB)")
    return found


class Bench:
    """A store with a variant and its graph in it, made here, and engines compiled from that in the toolchain."""

    def __init__(self, root: Path, rtx: Toolchain, variant: Path, graph: Path) -> None:
        self.store, self.rtx = Store(root), rtx
        self.store.prepare()
        self.inputs = {kind: self._put(kind, files) for kind, files in (("variant", variant), ("graph", graph))}
        self.inputs["reference"] = self.inputs["variant"]  # the compiler looks at neither

    def _put(self, kind: str, files: Path) -> Step:
        step = Step(Stage(kind, kind, 1, "", ""), kind, Made(name=kind))
        where = self.store.path(kind, step.key)
        shutil.copytree(files, where)
        facts = json.loads((files / "facts.json").read_text()) if kind == "graph" else {}
        record = Manifest(
            kind=kind, stage=kind, version=1, key=step.key, config={}, inputs={}, toolchain={}, device=None,
            facts=facts, files=hash_tree(where), started="", seconds=0.0, peak_rss=0,
        )  # fmt: skip
        (where / "manifest.json").write_text(record.model_dump_json())
        return step

    def engine(self, *sms: int) -> Step:
        """The step that compiles the graph for these GPUs."""
        config = TensorrtRtxConfig.model_validate({"compute_capabilities": sms, "max_prompt": 64, "max_length": 128})
        stage = Stage("engine", ROW.name, ROW.version, ROW.build, ROW.config_type, ROW.packages)
        versions = self.rtx.versions(ROW.packages)
        return Step(stage, f"engine {sms}", config, self.inputs, versions, batch="rtx", runs_in=self.rtx)

    def run(self, *engines: Step) -> list[Outcome]:
        """Compile them, and what they need."""
        outcomes = execute(plan(engines, self.store), self.store, lambda _: None, {"HF_HUB_OFFLINE": "1"})
        return [outcomes[e.key] for e in engines]

    def made(self, engine: Step) -> tuple[Path, Manifest]:
        """An engine's directory and manifest."""
        path = self.store.path("engine", engine.key)
        return path, manifest(path)


def graph_of(variant: Path, out: Path, vocabulary: int) -> Path:
    """Make a variant's graph, held to it on 40 random tokens."""
    reference = out.with_name(f"{out.name}-reference")
    for path in (out, reference):
        path.mkdir()
    ids = np.random.default_rng(3).integers(0, vocabulary, (1, 40), dtype=np.int32)
    np.savez(reference / "tokens.npz", ids=ids, logprobs=np.zeros((1, 39), np.float32))
    facts = plain_graph.run(PlainGraphConfig(), out, variant=variant, reference=reference)
    (out / "facts.json").write_text(json.dumps(facts))
    return out


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model in int4, and its graph."""
    root = tmp_path_factory.mktemp("int4")
    variant = tiny_models.write(root / "variant", layout=AWQ)
    return variant, graph_of(variant, root / "graph", 96)


def test_int4_is_compiled_for_every_gpu_it_is_said_to_be(
    rtx: Toolchain, int4: tuple[Path, Path], tmp_path: Path
) -> None:
    """One engine for each compute capability and one for all; what it is stands in its facts."""
    here = Bench(tmp_path, rtx, *int4)
    engines = [here.engine(sm) for sm in ALL] + [here.engine(*ALL)]
    assert [("made", "")] * 5 == [(o.state, o.message) for o in here.run(*engines)]
    path, record = here.made(engines[-1])
    facts = record.facts
    assert ("tensorrt_rtx", "tensorrt-rtx", "80,86,89,120") == (
        facts["target"], facts["library"], facts["compute_capabilities"],
    )  # fmt: skip
    assert (False, 0, "int4 x bfloat16") == (facts["deserialized"], facts["smoke_answers"], facts["precision"])
    assert "1.7.1.116" == record.toolchain["tensorrt-rtx-cu13"] == facts["library_version"]
    assert "tensorrt_rtx" == json.loads((path / "engine.json").read_text())["target"]
    assert 5 == len({here.made(e)[1].files[ENGINE][0] for e in engines})


def test_two_builds_are_equal_to_the_last_byte(rtx: Toolchain, int4: tuple[Path, Path], tmp_path: Path) -> None:
    """From the same variant, in another store and process, graph and engine come out the same."""
    variant, graph = int4
    graphs = (graph, graph_of(variant, tmp_path / "graph", 96))
    assert hash_tree(graphs[0]) == hash_tree(graphs[1])
    found = []
    for name, drawn in zip(("a", "longer/than/the/other"), graphs, strict=True):
        here = Bench(tmp_path / name, rtx, variant, drawn)
        engine = here.engine(*ALL)
        here.run(engine)
        found.append(here.made(engine)[1])
    if not found[0].facts["reproducible"]:
        pytest.skip("needs a machine that lets a process have addresses that are not randomized")
    assert found[0].files == found[1].files


def test_fp8_is_refused_where_there_is_no_hardware_for_it(rtx: Toolchain, tmp_path: Path) -> None:
    """The compiler itself says what preflight says before: not for SM 80, alone or among others."""
    variant = tiny_models.write(tmp_path / "variant", layout=FP8)
    here = Bench(tmp_path / "store", rtx, variant, graph_of(variant, tmp_path / "graph", 96))
    old, mixed, new = here.engine(80), here.engine(*ALL), here.engine(89, 120)
    refused, refused_too, made = (here.run(engine)[0] for engine in (old, mixed, new))
    assert ("failed", "failed", "made") == (refused.state, refused_too.state, made.state)
    assert "for SM 80: " in refused.message and "fp8_e4m3" in refused.message
    assert "for SM 80, SM 86, SM 89, SM 120: " in refused_too.message
    assert not here.store.path("engine", old.key).exists()
    assert "float8 x float8" == here.made(new)[1].facts["precision"]


@pytest.mark.long
def test_the_real_model_is_compiled_for_every_gpu(rtx: Toolchain, base_checkpoint: Path, tmp_path: Path) -> None:
    """Its 210 layers rounded to int4 keep their codes; the engine holds them in 4 bits, twice the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.e2e.test_ort_genai import _round

    model = AutoModelForCausalLM.from_pretrained(base_checkpoint, dtype="bfloat16")
    _round(model, {"num_bits": 4, "symmetric": True, "group_size": 64, "strategy": "group"})
    model.save_pretrained(tmp_path / "variant", save_compressed=True)
    AutoTokenizer.from_pretrained(base_checkpoint).save_pretrained(tmp_path / "variant")
    graph = graph_of(tmp_path / "variant", tmp_path / "graph", 49152)
    found = []
    for name in ("one", "two"):
        here = Bench(tmp_path / name, rtx, tmp_path / "variant", graph)
        engines = [here.engine(*ALL)] + ([here.engine(sm) for sm in ALL] if name == "one" else [])
        assert {"made"} == {o.state for o in here.run(*engines)}
        found.append(here.made(engines[0])[1])
    assert found[0].files[ENGINE] == found[1].files[ENGINE]
    # 106 million codes of 4 bits with a bfloat16 scale for each 64, and the table that is input and head in bfloat16
    stored = 106_168_320 * (4 + 16 / 64) / 8 + 49152 * 576 * 2
    assert found[0].files[ENGINE][1] == pytest.approx(stored, rel=0.3)
