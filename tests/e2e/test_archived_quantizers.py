"""AutoAWQ and AutoGPTQ in their own toolchain, and what they made in this one: reloaded, scored and built.

The steps are run as a campaign runs them: each in its interpreter, from a store. The model is the small real one with
its first layers only.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipelines import stages
from pipelines.compose import compose
from pipelines.config import CONF_DIR
from pipelines.engine.ort_genai import OrtGenaiConfig
from pipelines.engine.table import TARGETS
from pipelines.errors import Problem
from pipelines.flow import surroundings, venvs
from pipelines.flow.executor import execute
from pipelines.flow.launch import package_path
from pipelines.flow.plan import plan
from pipelines.flow.stage import Stage, Step, resolve
from pipelines.flow.store import Manifest, Store, manifest
from pipelines.flow.toolchain import CURRENT, Toolchain, VenvConfig, toolchains
from pipelines.intake.calibration import CalibrationConfig, pinned
from pipelines.intake.checkpoint import CheckpointConfig, inspect
from pipelines.intake.digests import DigestCache, text_sha256
from pipelines.quantize import autoawq, autogptq
from pipelines.quantize.coverage import read
from pipelines.quantize.reference import ReferenceConfig
from pipelines.quantize.table import QUANTIZERS
from tests.short_model import first_layers

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("default")]  # the libraries' own warnings

LAYERS = 3
TEXTS = CONF_DIR.parent / "evalsets"
HOME = CONF_DIR.parent / "toolchains"


@pytest.fixture(scope="module")
def legacy() -> Toolchain:
    """The toolchain of the archived libraries, if it has been made."""
    problems: list[Problem] = []
    found = toolchains(compose([])["toolchain"], HOME, problems)["legacy"]
    assert [] == problems
    if not isinstance(found.spec, VenvConfig) or not venvs.venv(found, found.spec).made:
        pytest.skip("needs the toolchain `legacy`: `quantgate toolchain sync legacy` makes it (1.6 GB)")
    return found


@pytest.fixture(scope="module")
def short(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small real model with its first layers only."""
    return first_layers(base_checkpoint, tmp_path_factory.mktemp("short"), LAYERS)


@dataclass(frozen=True)
class Run:
    """The steps of one variant, and the store they are made in."""

    store: Store
    variant: Step
    checked: Step
    built: Step

    def made(self, step: Step) -> tuple[Path, Manifest]:
        path = self.store.path(step.stage.kind, step.key)
        return path, manifest(path)


@pytest.fixture(scope="module")
def run(short: Path, legacy: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Take the base through a quantizer of the table, in the toolchain of its row, to an engine."""
    store = Store(tmp_path_factory.mktemp("store"))
    store.prepare()
    inspected = inspect(CheckpointConfig(source=str(short)), DigestCache(store.root / "digests.json"))
    base = step(stages.CHECKPOINT, inspected.config)
    texts = CalibrationConfig(source=str(TEXTS / "calibration" / "items.jsonl"), samples=4, max_tokens=64)
    shown = step(stages.CALIBRATION, pinned(texts), checkpoint=base)
    plain = variant("baseline", checkpoint=base)
    known = checked(variant=plain)

    def make(quantizer: str, **settings: Any) -> Run:
        row = QUANTIZERS[quantizer]
        assert "legacy" == row.toolchain
        quantized = variant(quantizer, runs_in=legacy, settings=settings, checkpoint=base, calibration=shown)
        reference = checked(variant=quantized, base=known)
        target = TARGETS["ort_genai"]
        stage = Stage("engine", target.name, target.version, target.build, target.config_type, target.packages)
        engine = step(stage, OrtGenaiConfig(), batch="build", variant=quantized, reference=reference)
        outcomes = execute(plan([engine], store), store, lambda _: None, {"HF_HUB_OFFLINE": "1"})
        assert [] == [o.message for o in outcomes.values() if o.state not in ("made", "reused")]
        return Run(store, quantized, reference, engine)

    return make


def step(stage: Stage, config: Any, *, runs_in: Toolchain = CURRENT, batch: str | None = None, **inputs: Step) -> Step:
    return Step(stage, stage.kind, config, inputs, runs_in.versions(stage.packages), batch=batch, runs_in=runs_in)


def variant(
    quantizer: str, *, runs_in: Toolchain = CURRENT, settings: dict[str, Any] | None = None, **inputs: Step
) -> Step:
    row = QUANTIZERS[quantizer]
    config = resolve(row.config_type).model_validate({"quantizer": quantizer, **(settings or {})})  # type: ignore[attr-defined]
    stage = Stage("variant", row.name, row.version, row.function, row.config_type, row.packages)
    return step(stage, config, runs_in=runs_in, **inputs)


def checked(**inputs: Step) -> Step:
    text = TEXTS / "heldout_text" / "items.jsonl"
    config = ReferenceConfig(text_path=str(text), text_sha256=text_sha256(text), windows=2, length=128)
    return step(stages.REFERENCE, config, batch="build", **inputs)


ROWS = [
    ("autoawq", "awq", "gemm", {"scheme": "W4A16_G64_ASYM", "options": {"apply_clip": False}}),
    ("autogptq", "gptq", "gptq", {"scheme": "W4A16_G64", "options": {"desc_act": False}}),
]


@pytest.mark.parametrize(("quantizer", "method", "layout", "settings"), ROWS, ids=[row[0] for row in ROWS])
def test_a_variant_of_an_archived_library_becomes_an_engine(
    run: Callable[..., Run], legacy: Toolchain, short: Path, quantizer: str, method: str, layout: str, settings: Any
) -> None:
    """Every layer is quantized in one toolchain, reloads in another, and its own codes are the engine's to the bit."""
    made = run(quantizer, **settings)
    path, record = made.made(made.variant)
    facts = record.facts
    assert {"toolchain": "legacy", "python": "3.11", "transformers": "4.51.3"}.items() <= record.toolchain.items()
    assert (method, layout) == (facts["quant_method"], facts["format"])
    assert (7 * LAYERS, "lm_head") == (facts["quantized_modules"], facts["skipped_modules"])
    assert "as there is no accelerator" in str(facts["adaptations"])
    config, base = (json.loads((p / "config.json").read_text()) for p in (path, short))
    assert method == config.pop("quantization_config")["quant_method"]
    assert base == config
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (short / name).read_bytes() == (path / name).read_bytes()
    _, found = made.made(made.checked)
    assert 0.9 < float(found.facts["perplexity"] or 0) / float(found.facts["base_perplexity"] or 1) < 1.3
    _, engine = made.made(made.built)
    assert (True, 7 * LAYERS) == (engine.facts["weights_equal"], engine.facts["carried_modules"])
    assert float(engine.facts["max_abs_dlogit"] or 1) < 1e-3


def test_columns_in_order_of_activation_reload_and_build(run: Callable[..., Run]) -> None:
    """What AutoGPTQ does by default: groups whose columns lie apart, carried with their order."""
    made = run("autogptq", scheme="W4A16_G64")
    path, record = made.made(made.variant)
    assert True is json.loads((path / "config.json").read_text())["quantization_config"]["desc_act"]
    assert True is made.made(made.built)[1].facts["weights_equal"]
    assert all(layer.error is not None for layer in read(path) if layer.scheme != "kept")
    assert 7 * LAYERS == record.facts["quantized_modules"]


def legacy_python(legacy: Toolchain, root: Path, code: str) -> str:
    """What a line of Python prints in the toolchain, with our package on its path."""
    assert isinstance(legacy.spec, VenvConfig)
    python = venvs.venv(legacy, legacy.spec).python
    env = surroundings.foreign({"HF_HUB_OFFLINE": "1"}, package_path(root), python.parent)
    done = subprocess.run([str(python), "-P", "-W", "ignore", "-c", code], capture_output=True, text=True, env=env)
    assert 0 == done.returncode, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_recorded_model_types_are_in_the_libraries_tables(legacy: Toolchain, tmp_path: Path) -> None:
    """Plans refuse by a list on record; each type in it is one that the pinned release knows."""
    code = (
        "import json; from importlib.metadata import version;"
        "from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP as A; from auto_gptq.modeling.auto import "
        "GPTQ_CAUSAL_LM_MODEL_MAP as G; from auto_gptq.modeling._const import SUPPORTED_MODELS as S;"
        "print(json.dumps([version('autoawq'), sorted(A), version('auto_gptq'), sorted(set(G) & set(S))]))"
    )
    awq, awq_types, gptq, gptq_types = json.loads(legacy_python(legacy, tmp_path, code))
    assert (autoawq.KNOWN.version, autogptq.KNOWN.version) == (awq, gptq)
    assert set(autoawq.KNOWN.model_types) <= set(awq_types)
    assert set(autogptq.KNOWN.model_types) <= set(gptq_types)


def test_unadapted_the_backup_of_weights_is_no_copy(legacy: Toolchain, tmp_path: Path) -> None:
    """The fault that is mended is in the pinned release: on a CPU its search for scales changes the weights."""
    code = (
        "import torch; from contextlib import nullcontext; from awq.quantize.quantizer import AwqQuantizer as Q;"
        "from pipelines.quantize.autoawq_cpu import without_accelerator;"
        "q = Q.__new__(Q); q.__dict__.update(duo_scaling=True, group_size=8, zero_point=True, w_bit=4, version='gemm',"
        " n_parallel_calib_samples=None, max_chunk_memory=2**30); torch.manual_seed(0)\n"
        "def kept(mended):\n"
        "    m = torch.nn.Linear(8, 8, bias=False); was = m.weight.detach().clone(); x = torch.rand(2, 4, 8)\n"
        "    with torch.no_grad(), mended: q._compute_best_scale(x, torch.rand(8), torch.rand(8), m, [m], m(x))\n"
        "    return torch.equal(was, m.weight)\n"
        "print(kept(nullcontext()), kept(without_accelerator()))"
    )
    assert "False True" == legacy_python(legacy, tmp_path, code)


def test_clipping_ranges_are_the_librarys(legacy: Toolchain, tmp_path: Path) -> None:
    """The search by second moments takes the ranges that the library's own takes, some of them narrower than all."""
    code = (
        "import torch; from awq.quantize.quantizer import AwqQuantizer as Q;"
        "from pipelines.quantize.autoawq_cpu import best_clip;"
        "q = Q.__new__(Q); q.__dict__.update(group_size=32, zero_point=True, w_bit=4); torch.manual_seed(0);"
        "w = torch.randn(64, 64) * torch.rand(64, 1); x = torch.randn(2, 520, 64) * torch.rand(64);"
        "a, b = q._compute_best_clip(w, x), best_clip(q, w, x);"
        "print(torch.equal(a, b), float((a < w.reshape(64, 2, 32).abs().amax(-1, keepdim=True)).float().mean()) > 0.1)"
    )
    assert "True True" == legacy_python(legacy, tmp_path, code)
