"""What the stage adds to a quantizer: its process beside a bare library script with the same recipe, in turns."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outcome import conclude, conditions

from pipelines.assembly import assemble
from pipelines.campaign import open_campaign
from pipelines.compose import compose
from pipelines.conduct import environment
from pipelines.flow.executor import execute
from pipelines.flow.plan import plan
from pipelines.flow.stage import Step
from pipelines.flow.store import Store
from pipelines.flow.surroundings import environment as surroundings
from pipelines.intake.calibration import SAMPLES

BARE = """
import json, sys
base, out, samples, modifier = sys.argv[1:5]
import torch
from llmcompressor import oneshot
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(base)
weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True, "dynamic": False}
shared = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
data, options = None, json.loads(modifier)
if options is None:
    from llmcompressor.modifiers.quantization import QuantizationModifier as Modifier
else:
    from llmcompressor.modifiers.gptq import GPTQModifier as Modifier
    ids = [json.loads(line)["ids"] for line in open(samples)][: options.pop("samples")]
    data = DataLoader(
        [{"input_ids": torch.tensor(i), "attention_mask": torch.ones(len(i), dtype=torch.long)} for i in ids],
        batch_size=options.pop("batch_size"),
    )
oneshot(
    model=model, processor=tokenizer, recipe=[Modifier(**shared, **(options or {}))], dataset=data,
    num_calibration_samples=len(data.dataset) if data else 0, shuffle_calibration_samples=False,
)
model.save_pretrained(out, save_compressed=True)
tokenizer.save_pretrained(out)
"""
GPTQ = {"samples": 5, "batch_size": 8, "block_size": 32, "batched_quantization": 4}
RECIPES = {"rtn_w4a16_g64": None, "gptq_w4a16_g64_quick": GPTQ}


@dataclass(frozen=True, slots=True)
class Bench:
    """A campaign on the base in float32, so that neither side casts anything, and what its processes are told."""

    steps: dict[str, Step]
    store: Store
    env: dict[str, str]
    base: Path
    samples: Path


def main() -> None:
    """Time stage and script in turns; the ratio is the median of pairs, after the interpreter's own start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one pair, rounding to nearest alone: a smaller sample")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides, as quantgate takes them")
    given = parser.parse_args()
    names = list(RECIPES)[:1] if given.quick else list(RECIPES)
    pairs = 1 if given.quick else 3
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        bench = _prepare(Path(scratch), names, given.set)
        start = min(_run([sys.executable, "-c", "pass"], bench.env) for _ in range(3))
        print(f"{'recipe':<22} {'script s':>9} {'stage s':>9} {'ratio':>7}")
        for name in names:
            timed = [_pair(bench, name, Path(scratch) / "bare", first=k % 2 == 0) for k in range(pairs)]
            ratios = [(stage - start) / (script - start) for script, stage in timed]
            for (script, stage), ratio in zip(timed, ratios, strict=True):
                print(f"{name:<22} {script - start:>9.2f} {stage - start:>9.2f} {ratio:>7.3f}")
            figures[f"{name}_script_s"] = statistics.median(script - start for script, _ in timed)
            figures[f"{name}_ratio"] = statistics.median(ratios)
    conclude(
        "quantize_overhead",
        conditions(("llmcompressor", "torch", "transformers"), pairs=pairs, interpreter_start_s=round(start, 3)),
        figures,
        {f"stage over script, {name}": (figures[f"{name}_ratio"], "<=", 1.05) for name in names},
    )


def _prepare(scratch: Path, names: Sequence[str], overrides: Sequence[str]) -> Bench:
    """Cast the base to float32 and make what the stages read."""
    variants = f"variant=[baseline,{','.join(names)}]"
    data = compose(["calibration=quick", "evalset=[heldout_text]", variants, *overrides])
    campaign = open_campaign(data | {"paths": data["paths"] | {"store": str(scratch / "first")}})
    stored, first = assemble(campaign, {}, {}).base, Store(scratch / "first")
    _make([stored], first, environment(campaign))
    _float32(first.path("checkpoint", stored.key), scratch / "base")
    changed = {
        "checkpoint": {"source": str(scratch / "base")},
        "paths": data["paths"] | {"store": str(scratch / "store")},
    }
    campaign = open_campaign(data | changed)
    store, env = Store(scratch / "store"), environment(campaign)
    steps = {c.variant.name: c.quantized for c in assemble(campaign, {}, {}).candidates}
    inputs = [up for step in steps.values() for up in step.upstream()]
    _make(inputs, store, env)
    shown = [store.path("calibration", up.key) / SAMPLES for up in inputs if up.stage.kind == "calibration"]
    return Bench(steps, store, env, scratch / "base", shown[0] if shown else Path(SAMPLES))


def _float32(source: Path, out: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    out.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "manifest.json":
            shutil.copyfile(file, out / file.name)
    tensors = {n: t.float() for shard in source.glob("*.safetensors") for n, t in load_file(shard).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": str(torch.float32).removeprefix("torch.")}))
    (out / "model.safetensors.index.json").unlink(missing_ok=True)


def _make(steps: Sequence[Step], store: Store, env: dict[str, str]) -> None:
    store.prepare()
    for outcome in execute(plan(steps, store), store, lambda _: None, env).values():
        if outcome.state in ("failed", "skipped"):
            raise SystemExit(f"{outcome.step.label}: {outcome.message}\n{outcome.command}")


def _pair(bench: Bench, name: str, out: Path, *, first: bool) -> tuple[float, float]:
    """Seconds of the bare script and of the stage, one after the other, `first` saying which begins."""
    step = bench.steps[name]
    made = bench.store.path(step.stage.kind, step.key)

    def script() -> float:
        shutil.rmtree(out, ignore_errors=True)
        argv = [sys.executable, "-c", BARE, str(bench.base), str(out), str(bench.samples), json.dumps(RECIPES[name])]
        return _run(argv, bench.env)

    def stage() -> float:
        shutil.rmtree(made, ignore_errors=True)
        began = time.perf_counter()
        _make([step], bench.store, bench.env)
        return time.perf_counter() - began

    seconds = (script(), stage()) if first else tuple(reversed((stage(), script())))
    if (out / "model.safetensors").read_bytes() != (made / "model.safetensors").read_bytes():
        raise SystemExit(f"{name}: script and stage saved different tensors, so their times do not compare")
    return seconds[0], seconds[1]


def _run(argv: Sequence[str], env: dict[str, str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(argv, env=surroundings(env), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv[:2])} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
