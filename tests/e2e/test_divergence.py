"""Divergence on the real small model: what a quantized head and broken scales show, in checkpoint and engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines.decide.engineloss import EngineLoss, exceeded
from pipelines.divergence import figures
from pipelines.divergence.figures import Row
from pipelines.engine.ort_genai import OrtGenaiConfig, build
from pipelines.evaluate import divergence as stage
from pipelines.evaluate import harness
from pipelines.quantize.asked import AskedConfig, run_asked
from pipelines.quantize.reference import ReferenceConfig, run_reference
from tests.decisions import artifact, key_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("default"),  # the libraries' own
]
TEXT = Path(__file__).resolve().parents[2] / "evalsets" / "heldout_text" / "items.jsonl"
PROMPTS = ("Question: What is the capital of France?\nAnswer: Paris", "Message: My parcel is late.\nKeyword: dispatch")
DAMAGED = "model.layers.10.mlp.down_proj.weight_scale"


@dataclass
class Lab:
    """Checkpoints, what they predict, and engines of them, each made once."""

    root: Path

    def _closed(self, kind: str, name: str, facts: dict[str, object]) -> Path:
        return artifact(self.root / kind / name, kind, key_of(kind, name), facts)

    def reference(self, name: str, variant: Path, base: Path | None = None, bound: float = 5.0) -> Path:
        out = self.root / "reference" / name
        out.mkdir(parents=True)
        digest = hashlib.sha256(TEXT.read_bytes()).hexdigest()
        config = ReferenceConfig(text_path=str(TEXT), text_sha256=digest, windows=3, length=96, max_ratio=bound)
        return self._closed("reference", name, dict(run_reference(config, out, variant=variant, base=base)))

    def asked(self, name: str, variant: Path, base: Path | None = None) -> Path:
        out = self.root / "asked" / name
        out.mkdir(parents=True)
        config = AskedConfig(prompts=PROMPTS, tail=8, length=96)
        return self._closed("asked", name, dict(run_asked(config, out, variant=variant, base=base)))

    def engine(self, name: str, variant: Path, reference: Path, bound: float = 5.0) -> Path:
        out = self.root / "engine" / name
        out.mkdir(parents=True)
        config = OrtGenaiConfig(check_tokens=96, max_ppl_ratio=bound)
        facts = build(config, out, variant=variant, reference=reference)
        return self._closed("engine", name, dict(facts))

    def divergence(self, name: str, engine: Path, **inputs: Path) -> Path:
        out = self.root / "divergence" / name
        out.mkdir(parents=True)
        return self._closed("divergence", name, dict(stage.run(stage.ReadingConfig(), out, engine=engine, **inputs)))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    yield Lab(tmp_path_factory.mktemp("lab"))
    harness._server._open.close()


@pytest.fixture(scope="module")
def base(lab: Lab, base_checkpoint: Path) -> Path:
    return lab.reference("base", base_checkpoint)


def rounded(base_checkpoint: Path, out: Path, ignore: list[str]) -> Path:
    """The small model in W4A16_G64, rounded to nearest by llm-compressor."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base_checkpoint, dtype="bfloat16")
    weights = QuantizationArgs(num_bits=4, symmetric=True, group_size=64, strategy="group")
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    oneshot(model=model, recipe=QuantizationModifier(config_groups=groups, ignore=ignore))
    model.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(base_checkpoint).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def w4(lab: Lab, base_checkpoint: Path) -> Path:
    return rounded(base_checkpoint, lab.root / "w4", ["lm_head"])


@pytest.fixture(scope="module")
def plain(lab: Lab, base: Path, w4: Path) -> Path:
    return lab.reference("w4", w4, base)


def one(artifact_dir: Path, loss: str, text: str = "held_out") -> Row:
    (found,) = [row for row in figures.read(artifact_dir) if (row.loss, row.text) == (loss, text)]
    return found


def test_the_base_is_no_distance_from_itself(lab: Lab, base: Path, base_checkpoint: Path) -> None:
    """The same weights reloaded: nothing moves, on whichever text; and their perplexity is the base's."""
    found = one(lab.reference("copy", base_checkpoint, base), "quantization").figures
    assert (1.0, 285, 3) == (found.same_top, found.positions, found.windows)
    assert found.kl_mean < 1e-12
    assert found.log_ratio == pytest.approx(0, abs=1e-9)


def test_a_quantized_head_shows(lab: Lab, base: Path, plain: Path, base_checkpoint: Path) -> None:
    """The same rounding with the head included moves predictions further, on every figure."""
    head = lab.reference("head", rounded(base_checkpoint, lab.root / "head", []), base)
    without, included = (one(a, "quantization").figures for a in (plain, head))
    assert 0.01 < without.kl_mean < included.kl_mean
    assert without.dp_rms < included.dp_rms
    assert (without.same_top or 0) > (included.same_top or 1)
    assert without.kl_median < without.kl_mean < (without.kl_p99 or 0)


def test_broken_scales_are_quantization_loss_and_no_engine_loss(
    lab: Lab, base: Path, w4: Path, plain: Path, base_checkpoint: Path
) -> None:
    """One layer's scales times 1.5: the checkpoint moves, its engine follows it to 1e-7, and what a user gets is the
    checkpoint's loss, bounded from below."""
    damaged = lab.root / "damaged"
    damaged.mkdir()
    for file in w4.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    _multiply(damaged, DAMAGED, 1.5)
    checked = lab.reference("damaged", damaged, base)
    lost = one(checked, "quantization").figures
    assert lost.kl_mean > 1.02 * one(plain, "quantization").figures.kl_mean
    asked_base = lab.asked("base", base_checkpoint)
    asked = lab.asked("damaged", damaged, asked_base)
    ours = lab.divergence("base", lab.engine("base", base_checkpoint, base), checked=base, asked=asked_base)
    engine = lab.engine("damaged", damaged, checked)
    found = lab.divergence("damaged", engine, checked=checked, asked=asked, against=ours)
    built = one(found, "engine").figures
    assert built.exact
    assert built.kl_mean < 1e-8
    read = one(found, "engine", "prompts").figures
    assert (False, True) == (read.exact, read.kl_mean < 1e-6)
    assert [] == list(exceeded(figures.read(found), EngineLoss()))
    total = one(found, "total").figures
    assert 0.2 * lost.kl_mean < total.kl_mean <= lost.kl_mean * 1.001
    assert total.log_ratio == pytest.approx(lost.log_ratio, abs=1e-4)
    assert total.same_top == pytest.approx(lost.same_top, abs=1e-9)
    assert math.isfinite(one(found, "total", "prompts").figures.dp_rms)


def _multiply(checkpoint: Path, tensor: str, factor: float) -> None:
    """Multiply one tensor of a checkpoint of one file."""
    from safetensors.torch import load_file, save_file

    (path,) = checkpoint.glob("*.safetensors")
    tensors = load_file(path)
    tensors[tensor] = tensors[tensor] * factor
    save_file(tensors, path, metadata={"format": "pt"})
