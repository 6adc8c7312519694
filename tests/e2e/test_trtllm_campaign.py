"""The main job with TensorRT-LLM as its engines, as a user runs it, on stand-ins for the library's commands.

Everything but the library is real: plan, worker processes, server, scores, latency, decision. What comes out is
simulated, says so, and is promoted by nobody.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipelines.decide.model import Decision
from pipelines.flow.store import manifest
from tests import fake_trtllm
from tests.byte_model import byte_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
QUANTGATE = [sys.executable, "-c", "from pipelines.cli import entry; entry()"]
ROOT = Path(__file__).resolve().parents[2]
PLACE = "{sm: 90, count: 1, memory_gib: 80}"


@dataclass(frozen=True)
class Place:
    """A campaign's own store and ledger, the base, and the stand-ins."""

    root: Path
    programs: Path

    def call(self, verb: str, *more: str) -> tuple[int, dict[str, Any], str]:
        """Run a verb of this campaign; its exit code, document and stderr."""
        env = {**os.environ, "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}"}
        argv = [*QUANTGATE, verb, *self.overrides, *more, "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr

    @property
    def overrides(self) -> list[str]:
        return [
            "experiment=smoke",
            "variant=[baseline]",
            "engine=[trtllm_engine,trtllm_pytorch]",
            *(f"engine.{name}.toolchain=current" for name in ("trtllm_engine", "trtllm_pytorch")),
            *(f"engine.{name}.gpu={PLACE}" for name in ("trtllm_engine", "trtllm_pytorch")),
            f"engine.trtllm_engine.examples={self.programs.parent / 'examples'}",
            "evalset=[support_intent]",
            "items_per_set=3",
            "held_out.length=32",
            "divergence.prompts=0",
            f"checkpoint.source={self.root / 'base'}",
            "checkpoint.licence=Apache-2.0",
            f"paths.store={self.root / 'store'}",
            f"paths.ledger={self.root / 'ledger.jsonl'}",
            f"tracking.uri=sqlite:///{self.root / 'mlflow.db'}",
        ]

    def engines(self) -> dict[str, Path]:
        """The engines in the store by their target."""
        made = (self.root / "store" / "engine").iterdir()
        return {str(manifest(path).config["target"]): path for path in made}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    import transformers

    root = tmp_path_factory.mktemp("campaign")
    tokenizer = byte_tokenizer()
    shape = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 0,
        "bos_token_id": 0, "dtype": "float16", "initializer_range": 0.002,  # predicts nothing, as the stand-in does
    }  # fmt: skip
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **shape))
    model.save_pretrained(root / "base")
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.save_pretrained(root / "base")
    return Place(root, fake_trtllm.install(root / "tools"))


@pytest.fixture(scope="module")
def finished(place: Place) -> tuple[int, dict[str, Any]]:
    """The campaign as far as its decision."""
    code, document, stderr = place.call("decide")
    assert code in (0, 3, 4), stderr
    return code, document


def test_a_plan_tells_all_that_is_wrong_at_once_and_makes_nothing(place: Place) -> None:
    """Split, GPUs, lengths, formats and settings of both targets, in one answer."""
    wrong = {
        "variant": "[baseline,rtn_w4a16_g64]",
        "engine.trtllm_engine.tp": "3",
        "engine.trtllm_engine.max_num_tokens": "256",
        "engine.trtllm_pytorch.kv_cache.enable_block_reuse": "true",
    }
    code, document, _ = place.call("plan", *(f"{key}={value}" for key, value in wrong.items()))
    assert 2 == code
    for said in (
        "3 ranks, a GPU each, and there are 1",
        "does not divide 4 attention heads",
        "does not divide 2 key-value heads",
        "it admits 256",
        "no converter reads compressed-tensors",
        "does not read that scheme from compressed-tensors",
        "context logits of reused blocks",
    ):
        assert said in document["message"]
    assert not list((place.root / "store").glob("engine/*"))


def test_an_engine_is_what_was_planned_and_says_that_it_is_simulated(
    place: Place, finished: tuple[int, dict[str, Any]]
) -> None:
    """Converted, built, served, scored and probed; the artifact has all that would make it again."""
    engine = place.engines()["trtllm_engine"]
    about = manifest(engine)
    assert about.simulated
    assert about.facts["kind"] == "engine"
    assert about.facts["native"] is False
    assert {"rank0.engine", "config.json"} <= {Path(name).name for name in about.files}
    for command in ("convert", "build", "serve"):
        assert about.facts[f"{command}_argv"]
    assert json.loads(str(about.facts["build_config"]))["gather_context_logits"] is True
    assert float(about.facts["ppl_drift"] or 0) == pytest.approx(1, abs=0.01)


def test_a_bundle_is_called_one_and_carries_its_settings(place: Place, finished: tuple[int, dict[str, Any]]) -> None:
    """The PyTorch backend compiles nothing: checkpoint and settings, no plan."""
    bundle = place.engines()["trtllm_pytorch"]
    assert manifest(bundle).facts["kind"] == "bundle"
    assert manifest(bundle).simulated
    assert not list(bundle.rglob("*.engine"))


def test_what_stand_ins_made_is_decided_on_and_never_promoted(
    place: Place, finished: tuple[int, dict[str, Any]]
) -> None:
    """Both candidates have scores of prompts and latency; the answer is hold, and no reason given overrides that."""
    code, document = finished
    assert (3, "hold") == (code, document["outcome"])
    decision = Decision.model_validate_json(Path(document["decision"]).read_bytes())
    assert 2 == len(decision.candidates)
    for candidate in decision.candidates:
        assert {"support_intent"} == set(candidate.scores)
        assert candidate.latency
    override = ("--override", "drill", "--actor", "tester", "--candidate", decision.candidates[1].label)
    for given in ((), override):
        code, document, _ = place.call("promote", *given)
        assert 7 == code
    assert "simulated" in document["message"]
    assert not (place.root / "ledger.jsonl").exists()
