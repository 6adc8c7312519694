"""One prepared script for a machine with an NVIDIA GPU: `python tests/device/gpu_check.py [--seconds 600]`.

It makes a random-weight model and runs on it what no machine without a GPU can show: decoding eager and compiled,
llm-compressor's FP8 and AWQ without any adaptation, decoding what they wrote, and, where TensorRT-LLM is installed, a
bundle and an engine of it. Each check is a process of its own, ends in time, and may fail without ending the others.
It prints a table, what it could not run and why, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.device import nvml  # noqa: E402 - the script is run by its path

FIGURES = "figures.json"


@dataclass(frozen=True)
class Setting:
    """What every check is told."""

    work: Path
    device: str = "cuda"
    backend: str = "inductor"
    shape: Mapping[str, int] = field(default_factory=dict)
    tokens: int = 128
    turns: int = 3
    samples: int = 16


@dataclass(frozen=True)
class Check:
    """Something to run: what it needs installed and made before, and the least seconds it is worth starting with."""

    name: str
    what: str
    run: Callable[[Setting], dict[str, Any]]
    modules: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    least_s: float = 30.0


@dataclass
class Result:
    """What became of a check: figures, or why there are none."""

    name: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    not_run: str = ""
    failed: str = ""


def model(setting: Setting) -> dict[str, Any]:
    """Write the random model."""
    from tests.device.decoding import Shape, write_model

    out = write_model(setting.work / "base", Shape(**setting.shape), setting.device)
    return {"weight_bytes": sum(p.stat().st_size for p in out.glob("*.safetensors"))}


def decoded(name: str, *, compile_it: bool = False) -> Callable[[Setting], dict[str, Any]]:
    """A check that decodes a checkpoint in the work directory."""

    def run(setting: Setting) -> dict[str, Any]:
        from tests.device.decoding import figures, speed

        backend = setting.backend if compile_it else None
        return figures(speed(setting.work / name, setting.device, setting.tokens, setting.turns, backend))

    return run


def quantized(name: str, quantizer: str, scheme: str) -> Callable[[Setting], dict[str, Any]]:
    """A check that quantizes the model by a row of the table, as the pipeline does; no adaptation may be needed."""

    def run(setting: Setting) -> dict[str, Any]:
        from pipelines.flow.stage import resolve
        from pipelines.quantize.table import QUANTIZERS

        row, out = QUANTIZERS[quantizer], setting.work / name
        out.mkdir()
        config = resolve(row.config_type)(quantizer=quantizer, scheme=scheme)
        inputs = {"checkpoint": setting.work / "base"}
        if row.needs_calibration(config):
            inputs["calibration"] = _calibration(setting)
        began = time.monotonic()
        facts = resolve(row.function)(config, out, **inputs)
        size = sum(p.stat().st_size for p in out.glob("*.safetensors"))
        return {
            "quantize_s": time.monotonic() - began,
            "adaptations": facts["adaptations"],
            "weight_bytes": size,
            "size_ratio": size / sum(p.stat().st_size for p in (setting.work / "base").glob("*.safetensors")),
        }

    return run


def _calibration(setting: Setting) -> Path:
    """Random token ids; what they say does not matter to time and memory."""
    import random

    from pipelines.intake.calibration import SAMPLES

    out, source = setting.work / "calibration", random.Random(0)
    out.mkdir(exist_ok=True)
    rows = [{"ids": [source.randrange(1, 257) for _ in range(256)]} for _ in range(setting.samples)]
    (out / SAMPLES).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def trtllm(target: str, **more: Any) -> Callable[[Setting], dict[str, Any]]:
    """A check that takes the model through a TensorRT-LLM target to a server that answers, as the pipeline does."""

    def run(setting: Setting) -> dict[str, Any]:
        import numpy as np

        from pipelines.engine.table import TARGETS
        from pipelines.flow.stage import resolve

        row = TARGETS[target]
        variant, reference = setting.work / "base", setting.work / "reference"
        reference.mkdir(exist_ok=True)
        ids = np.random.default_rng(0).integers(1, 257, (2, 128), dtype=np.int32)
        np.savez(reference / "tokens.npz", ids=ids, logprobs=np.zeros((2, 127), np.float32))
        _artifact(variant, "variant", {"quantizer": "baseline", "scheme": "BF16"})
        _artifact(reference, "reference", {"perplexity": 1.0, "base_perplexity": 1.0})
        out = setting.work / target
        out.mkdir()
        given = {"target": target, "max_batch_size": 8, "max_seq_len": 2048, "max_num_tokens": 2048, **more}
        facts = resolve(row.build)(resolve(row.config_type)(**given), out, variant=variant, reference=reference)
        return {
            name: facts.get(name) for name in ("ready_s", "smoke_answers", "build_seconds", "simulated", "gpu_name")
        }

    return run


def _artifact(where: Path, kind: str, facts: dict[str, Any]) -> None:
    """Give a directory the manifest that stages read."""
    from pipelines.flow.store import Manifest

    record = Manifest(
        kind=kind, stage=kind, version=1, key="0" * 64, config={}, inputs={}, toolchain={}, device=None, facts=facts,
        files={}, started="", seconds=0.0, peak_rss=0,
    )  # fmt: skip
    (where / "manifest.json").write_text(record.model_dump_json())


_TORCH = ("torch", "transformers")
_COMPRESSOR = (*_TORCH, "llmcompressor", "compressed_tensors")
CHECKS = (
    Check("model", "write the random-weight model", model, _TORCH, least_s=20),
    Check("eager", "decode in bfloat16, eager", decoded("base"), _TORCH, after=("model",)),
    Check("compiled", "decode in bfloat16, torch.compile with CUDA graphs", decoded("base", compile_it=True), _TORCH,
          after=("model",), least_s=60),
    Check("fp8", "llm-compressor FP8, dynamic", quantized("fp8", "llmcompressor_fp8", "W8A8_FP8_DYNAMIC"), _COMPRESSOR,
          after=("model",)),
    Check("awq", "llm-compressor AWQ, W4A16 in groups of 128", quantized("awq", "llmcompressor_awq", "W4A16_G128"),
          _COMPRESSOR, after=("model",), least_s=90),
    Check("fp8_decoded", "decode the FP8 checkpoint, as transformers loads it", decoded("fp8"), _COMPRESSOR,
          after=("fp8",)),
    Check("awq_decoded", "decode the AWQ checkpoint, as transformers loads it", decoded("awq"), _COMPRESSOR,
          after=("awq",)),
    Check("trtllm_pytorch", "a bundle of TensorRT-LLM's PyTorch backend, served and asked", trtllm("trtllm_pytorch"),
          ("tensorrt_llm",), ("trtllm-serve",), ("model",), least_s=90),
    Check("trtllm_engine", "an engine of TensorRT-LLM, built, served and asked", trtllm("trtllm_engine"),
          ("tensorrt_llm", "tensorrt"), ("trtllm-build", "trtllm-serve"), ("model",), least_s=90),
)  # fmt: skip


def lacking(check: Check, device: str, done: Mapping[str, Result], left_s: float) -> str:
    """Why a check is not run, "" where it is."""
    if device == "cuda" and not has_gpu():
        return "needs an NVIDIA GPU with its driver"
    lost = [m for m in check.modules if importlib.util.find_spec(m) is None]
    lost += [c for c in check.commands if shutil.which(c) is None]
    if lost:
        return f"needs {', '.join(lost)}, not installed here"
    unmade = [name for name in check.after if name not in done or done[name].not_run or done[name].failed]
    if unmade:
        return f"needs {', '.join(unmade)}, which did not come out"
    if left_s < check.least_s:
        return f"{left_s:.0f} s were left, and it is not begun with less than {check.least_s:.0f}"
    return ""


def has_gpu() -> bool:
    """Whether nvidia-smi sees a GPU."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def run_all(setting: Setting, seconds: float, checks: Sequence[Check] = CHECKS) -> list[Result]:
    """Run each check in a process of its own until the time is up."""
    end, done = time.monotonic() + seconds, {}
    for check in checks:
        left = end - time.monotonic()
        why = lacking(check, setting.device, done, left)
        print(f"{check.name}: {'not run: ' + why if why else check.what}", flush=True)
        done[check.name] = Result(check.name, not_run=why) if why else run_one(check, setting, left)
        if done[check.name].failed:
            print(f"  failed: {done[check.name].failed}", flush=True)
    return list(done.values())


def run_one(check: Check, setting: Setting, limit_s: float) -> Result:
    """Run a check as a child, watched by NVML where there is a GPU."""
    place = setting.work / f".{check.name}"
    place.mkdir(parents=True, exist_ok=True)
    given = {"work": str(setting.work), **{n: getattr(setting, n) for n in
             ("device", "backend", "shape", "tokens", "turns", "samples")}}  # fmt: skip
    argv = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--only",
        check.name,
        "--setting",
        json.dumps(given, default=dict),
    ]
    began = time.monotonic()
    watch = nvml.Watch(nvml.looking()) if setting.device == "cuda" and importlib.util.find_spec("pynvml") else None
    with (place / "log").open("wb") as log, watch or nullcontext():
        child = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            return Result(check.name, time.monotonic() - began, failed=f"was ended after {limit_s:.0f} s")
    took = time.monotonic() - began
    if code:
        said = (place / "log").read_text(errors="replace").strip().splitlines()
        return Result(check.name, took, failed=said[-1][:500] if said else f"exit code {code}")
    figures = json.loads((place / FIGURES).read_text())
    return Result(check.name, took, figures | ({"nvml": nvml.summary(watch.looks)} if watch else {}))


def report(results: Sequence[Result], conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as one object: figures, targets and whether each was met, and what was not run."""
    found = {r.name: r.figures | {"seconds": round(r.seconds, 1)} for r in results if not (r.not_run or r.failed)}
    targets = {name: value for name, value in targets_of(found).items() if value is not None}
    return {
        "name": "gpu_check",
        "conditions": dict(conditions),
        "figures": found,
        "targets": targets,
        "not_run": {r.name: r.not_run for r in results if r.not_run},
        "failed": {r.name: r.failed for r in results if r.failed},
        "met": bool(targets) and all(t["met"] for t in targets.values()) and not any(r.failed for r in results),
    }


def targets_of(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """What the figures are held to, None where there are none to hold."""

    def ratio(name: str, over: str, field_: str, least: float) -> dict[str, Any] | None:
        if name not in found or over not in found:
            return None
        value = found[name][field_] / found[over][field_]
        return {"value": value, "least": least, "met": value >= least}

    def least(name: str, field_: str, most: float) -> dict[str, Any] | None:
        if name not in found:
            return None
        value = found[name][field_]
        return {"value": value, "most": most, "met": value <= most}

    def none(name: str) -> dict[str, Any] | None:
        return (
            None if name not in found else {"value": found[name]["adaptations"], "met": not found[name]["adaptations"]}
        )

    return {
        "compiled over eager, tokens/s": ratio("compiled", "eager", "tokens_per_s", 1.0),
        "FP8 size over bfloat16": least("fp8", "size_ratio", 0.6),
        "AWQ size over bfloat16": least("awq", "size_ratio", 0.4),
        "adaptations of FP8 on a GPU": none("fp8"),
        "adaptations of AWQ on a GPU": none("awq"),
    }


def conditions_of(setting: Setting) -> dict[str, Any]:
    """The machine and the versions."""
    from importlib import metadata

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "absent"

    asked = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    gpu = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() if has_gpu() else "none"
    names = ("torch", "transformers", "llmcompressor", "compressed-tensors", "tensorrt_llm", "nvidia-ml-py")
    return {
        "gpu": gpu, "device": setting.device, "python": platform.python_version(), "shape": dict(setting.shape),
        "tokens": setting.tokens, "turns": setting.turns, **{name: version(name) for name in names},
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything, or, as the child of such a run, one check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="time for everything together")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the script, nothing else")
    parser.add_argument(
        "--shape", type=json.loads, default={}, help='sizes of the model: {"hidden": 4096, "layers": 32}'
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--setting", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.only:
        setting = Setting(**{**given.setting, "work": Path(given.setting["work"])})
        figures = next(c for c in CHECKS if c.name == given.only).run(setting)
        (setting.work / f".{given.only}" / FIGURES).write_text(json.dumps(figures))
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        setting = Setting(Path(work), given.device, "inductor" if given.device == "cuda" else "eager", given.shape)
        found = report(run_all(setting, given.seconds), conditions_of(setting))
    show(found)
    print(json.dumps(found))
    return 1 if found["failed"] else 0


def show(found: Mapping[str, Any]) -> None:
    """A table for people."""
    print(f"\n{'check':16}{'s':>7}{'tokens/s':>10}{'peak GPU GB':>13}{'weights GB':>12}")
    for name, row in found["figures"].items():
        peak, rate = row.get("peak_gpu_bytes"), row.get("tokens_per_s")
        cells = (
            f"{row['seconds']:7.0f}",
            f"{rate:10.1f}" if rate else " " * 10,
            f"{peak / 1e9:13.2f}" if peak else " " * 13,
            f"{row['weight_bytes'] / 1e9:12.2f}" if row.get("weight_bytes") else "",
        )
        print(f"{name:16}{''.join(cells)}")
    for name, why in {**found["not_run"], **found["failed"]}.items():
        print(f"{name:16} {'failed: ' if name in found['failed'] else 'not run: '}{why}")


if __name__ == "__main__":
    sys.exit(main())
