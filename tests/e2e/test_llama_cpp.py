"""llama.cpp in its own toolchain: GGUF variants made, reloaded, built and served by the real `llama-server`.

The steps are run as a campaign runs them: each in its interpreter, from a store. The model is the small real one with
its first layers only.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow.parquet
import pytest

from pipelines import stages
from pipelines.compose import compose
from pipelines.config import CONF_DIR
from pipelines.engine.llama_cpp import LlamaCppConfig
from pipelines.engine.serving import Served, serve
from pipelines.engine.table import TARGETS
from pipelines.errors import EndpointError, Problem
from pipelines.flow import venvs
from pipelines.flow.executor import Outcome, execute
from pipelines.flow.plan import plan
from pipelines.flow.stage import Stage, Step, resolve
from pipelines.flow.store import Manifest, Store, manifest
from pipelines.flow.toolchain import CURRENT, Toolchain, VenvConfig, carried, toolchains
from pipelines.intake.checkpoint import CheckpointConfig, inspect
from pipelines.intake.digests import DigestCache, text_sha256
from pipelines.probe import stage as probe
from pipelines.probe.config import ProbeConfig
from pipelines.quantize.coverage import read
from pipelines.quantize.gguf import FILE
from pipelines.quantize.reference import ReferenceConfig
from pipelines.quantize.table import QUANTIZERS
from tests.short_model import first_layers

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("default")]  # the libraries' own warnings

LAYERS = 3
TEXT = CONF_DIR.parent / "evalsets" / "heldout_text" / "items.jsonl"
HOME = Path(os.environ.get("QUANTGATE_TEST_TOOLCHAINS", CONF_DIR.parent / "toolchains"))
TARGET = TARGETS["llama_cpp"]
PROMPT = [504, 3575, 282, 4649, 314]


@pytest.fixture(scope="module")
def llama() -> Toolchain:
    """The toolchain of llama.cpp, if it has been made."""
    problems: list[Problem] = []
    found = toolchains(compose([])["toolchain"], HOME, problems)["llama_cpp"]
    assert [] == problems
    if not isinstance(found.spec, VenvConfig) or not venvs.venv(found, found.spec).made:
        pytest.skip(
            "needs the toolchain `llama_cpp`: `quantgate toolchain sync llama_cpp` compiles it (12 minutes of CPU)"
        )
    return found


@dataclass(frozen=True)
class Made:
    """The base and two GGUF variants of it, reloaded and built, in one store."""

    store: Store
    outcomes: dict[str, Outcome]
    variants: dict[str, Step]
    checked: dict[str, Step]
    engines: dict[str, Step]

    def at(self, step: Step) -> tuple[Path, Manifest]:
        """Where a step's artifact lies, and its manifest."""
        path = self.store.path(step.stage.kind, step.key)
        return path, manifest(path)


def step(stage: Stage, config: Any, *, runs_in: Toolchain = CURRENT, batch: str | None = None, **inputs: Step) -> Step:
    return Step(stage, stage.kind, config, inputs, runs_in.versions(stage.packages), batch=batch, runs_in=runs_in)


def variant(quantizer: str, runs_in: Toolchain, base: Step, **settings: str) -> Step:
    row = QUANTIZERS[quantizer]
    config = resolve(row.config_type).model_validate({"quantizer": quantizer, **settings})  # type: ignore[attr-defined]
    stage = Stage("variant", row.name, row.version, row.function, row.config_type, row.packages)
    return step(stage, config, runs_in=runs_in, batch=f"variant {runs_in.name}", checkpoint=base)


@pytest.fixture(scope="module")
def made(base_checkpoint: Path, llama: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Everything that is looked at, made once."""
    short = first_layers(base_checkpoint, tmp_path_factory.mktemp("short"), LAYERS)
    store = Store(tmp_path_factory.mktemp("store"))
    store.prepare()
    inspected = inspect(CheckpointConfig(source=str(short)), DigestCache(store.root / "digests.json"))
    base = step(stages.CHECKPOINT, inspected.config)
    variants = {"baseline": variant("baseline", CURRENT, base)}
    variants |= {scheme: variant("gguf", llama, base, scheme=scheme) for scheme in ("Q8_0", "Q4_K_M")}
    text = ReferenceConfig(text_path=str(TEXT), text_sha256=text_sha256(TEXT), windows=2, length=128)
    known = step(stages.REFERENCE, text, batch="build", variant=variants["baseline"])
    checked = {"baseline": known} | {
        name: step(stages.REFERENCE, text, batch="build", variant=one, base=known)
        for name, one in variants.items()
        if name != "baseline"
    }
    stage = Stage("engine", TARGET.name, TARGET.version, TARGET.build, TARGET.config_type, TARGET.packages)
    config = LlamaCppConfig(max_length=256, parallel=2)
    engines = {
        name: step(stage, config, runs_in=llama, batch="llama", variant=one, reference=checked[name])
        for name, one in variants.items()
    }
    outcomes = execute(plan(list(engines.values()), store), store, lambda _: None, {"HF_HUB_OFFLINE": "1"})
    assert [] == [o.message for o in outcomes.values() if o.state not in ("made", "reused")]
    return Made(store, outcomes, variants, checked, engines)


def test_a_file_type_reloads_as_nearly_the_base(made: Made) -> None:
    """transformers reads the file back: 8 bits cost next to nothing, the 4-bit mixture more, neither is noise."""
    lost = {}
    for scheme in ("Q8_0", "Q4_K_M"):
        facts = made.at(made.checked[scheme])[1].facts
        assert "gguf dequantized" in str(facts["implementation"])
        lost[scheme] = float(facts["perplexity"] or 0) / float(facts["base_perplexity"] or 1)
    assert lost["Q8_0"] == pytest.approx(1, abs=0.02)
    assert lost["Q4_K_M"] == pytest.approx(1, abs=0.35)


def test_every_layer_is_accounted_for(made: Made) -> None:
    """q, k, v, o, gate, up of 576 inputs are no K types, down of 1,536 is; the shared head goes with the embedding."""
    path, record = made.at(made.variants["Q4_K_M"])
    layers = {layer.module: layer for layer in read(path)}
    assert 7 * LAYERS + 1 == len(layers)
    assert "no multiple of 256" in layers["model.layers.0.self_attn.q_proj"].reason
    assert layers["model.layers.0.mlp.down_proj"].scheme in ("Q4_K", "Q6_K")
    assert "shares the embedding's tensor" in layers["lm_head"].reason
    assert (7 * LAYERS + 1, 0) == (record.facts["quantized_modules"], record.facts["kept_modules"])
    assert 4.5 < float(record.facts["bits_per_linear_weight"] or 0) < 6.6
    eight = made.at(made.variants["Q8_0"])[1].facts
    assert (8.5, "") == (eight["bits_per_linear_weight"], eight["other_types"])  # 34 bytes for 32 weights


def test_an_engine_is_held_to_its_checkpoint(made: Made) -> None:
    """llama.cpp's own predictions with the file: in f16 all but the checkpoint's, quantized near them."""
    facts = {name: made.at(step)[1].facts for name, step in made.engines.items()}
    assert float(facts["baseline"]["kl_mean"] or 0) < 1e-4
    assert ("f16", "half") == (facts["baseline"]["precision"], facts["baseline"]["arithmetic"])
    assert ("Q8_0", "int8_activations") == (facts["Q8_0"]["precision"], facts["Q8_0"]["arithmetic"])
    assert float(facts["Q4_K_M"]["kl_mean"] or 0) < 0.1
    assert (made.at(made.engines["Q8_0"])[0] / FILE).is_symlink()


def serving(made: Made, llama: Toolchain, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in carried([llama]).items():
        monkeypatch.setenv(name, value)
    return made.at(made.engines["Q8_0"])[0]


def test_the_server_answers_about_the_ids_it_was_sent(
    made: Made, llama: Toolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Token ids arrive as they are, greedy answers repeat, what it cannot do is an error, metrics are there."""
    engine = serving(made, llama, monkeypatch)
    with serve(engine, threads=2, log=tmp_path / "log") as served:
        first = served.endpoint.generate(PROMPT, max_tokens=12, ignore_eos=True)
        again = served.endpoint.generate(PROMPT, max_tokens=12, ignore_eos=True)
        assert (len(PROMPT), 12, "length") == (first.tokens_in, first.tokens_out, first.finish_reason)
        assert first.text == again.text
        with pytest.raises(EndpointError, match="gives no log-probabilities of prompts"):
            served.endpoint.score([PROMPT])
        told = httpx.get(f"{served.endpoint.base_url.removesuffix('/v1')}/metrics", trust_env=False).text
        assert "llamacpp:prompt_tokens_total" in told
        asked = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
        assert "token_logprobs" not in served.endpoint._post(asked)["choices"][0]["logprobs"]  # so it declares none


def test_nothing_is_left_of_a_server_that_was_stopped(
    made: Made, llama: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leader and group are gone when the block ends, and the port answers nobody; starting took seconds."""
    engine = serving(made, llama, monkeypatch)
    with serve(engine, threads=1) as served:
        assert isinstance(served, Served)
        assert served.pid is not None
        assert served.ready_s < 60
        group = [p for p in psutil.process_iter() if _group(p) == served.pid]
        url = served.endpoint.base_url
    deadline = time.monotonic() + 5
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [] == [p for p in group if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/models", trust_env=False)


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except (ProcessLookupError, PermissionError):
        return None


def test_a_server_that_cannot_start_says_why(
    made: Made, llama: Toolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that is no GGUF ends it at once, and its last words are in the error."""
    engine = serving(made, llama, monkeypatch)
    broken = made.store.root / "engine" / "broken"
    broken.mkdir()
    for file in engine.iterdir():
        (broken / file.name).write_bytes(b"GGUF" if file.name == FILE else file.read_bytes())
    with pytest.raises(EndpointError, match="its last words"), serve(broken, threads=1, log=tmp_path / "log"):
        pass


def test_it_is_probed(made: Made, llama: Toolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two engines in turn: every request is answered with the tokens it asked for, in one schedule."""
    serving(made, llama, monkeypatch)
    lines = [{"id": str(n), "text": f"Request number {n} asks for a short story about the sea."} for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    config = ProbeConfig.model_validate(
        {
            "profiles": [{"name": "pair", "mode": "closed", "concurrency": 2, "requests": 6}],
            "prompts": str(tmp_path / "prompts.jsonl"),
            "rounds": 2,
            "max_tokens": 8,
            "threads": 2,
        }
    )
    out = tmp_path / "out"
    out.mkdir()
    facts = probe.run(config, out, engines=[made.at(made.engines[name])[0] for name in ("baseline", "Q8_0")])
    assert (24, 0, 0) == (facts["requests"], facts["failed_requests"], facts["other_lengths"])
    answered = pyarrow.parquet.read_table(out / "requests.parquet").column("output_tokens").to_pylist()
    assert [8] * 24 == answered
