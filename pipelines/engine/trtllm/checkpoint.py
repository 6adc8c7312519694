"""The TensorRT-LLM checkpoint of an engine: brought along by the variant, or converted; and held to the variant."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engine.trtllm import commands, flags, rules
from pipelines.engine.trtllm.case import algorithm
from pipelines.engine.trtllm.compare import Asked, differences
from pipelines.engine.trtllm.running import Spent, run
from pipelines.errors import ConfigError, InputError, StageFailed, closest
from pipelines.flow.store import Fact, sha256_of
from pipelines.intake.shards import read_headers
from pipelines.quantize.scheme import parse
from pipelines.quantize.shards import quantization_config
from pipelines.quantize.transformers4 import staged

if TYPE_CHECKING:
    from pipelines.engine.trtllm_engine import TrtllmEngineConfig

EXPORTS = "trtllm"
"""Where a ModelOpt variant keeps its TensorRT-LLM checkpoints, one directory for each way it is split."""
SWALLOWED = ("AutoConfig cannot load the huggingface config",)
"""What the converter says, with exit code 0, after it caught an error that it should not have."""


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint directory, its config.json, how it was made ("" where it was there), and what that took."""

    path: Path
    config: Mapping[str, Any]
    argv: list[str]
    spent: Spent | None


def provide(config: TrtllmEngineConfig, variant: Path, scratch: Path, logs: Path, known: Mapping[str, Fact]) -> Made:
    """Find or convert the checkpoint, and compare what it says of itself with what the variant is.

    Raises:
        StageFailed: there is none for this split, the conversion failed, or its config differs, with every difference.
    """
    about = json.loads((variant / "config.json").read_text())
    method = str(known.get("quant_method") or "")
    if method not in rules.CONVERTED:
        path = _exported(variant, config.tp, config.pp)
        made = Made(path, _config(path), [], None)
    else:
        made = _converted(config, variant, about, scratch, logs, known)
    _refuse_differences(made, commands.asked_of_checkpoint(config, about, _quantization(variant, known)))
    _refuse_missing_ranks(made.path, config.tp * config.pp)
    return made


def digest(checkpoint: Path) -> str:
    """One sha256 over the names and contents of a checkpoint's files."""
    whole = hashlib.sha256()
    for file in sorted(p for p in checkpoint.rglob("*") if p.is_file()):
        whole.update(f"{file.relative_to(checkpoint).as_posix()} {sha256_of(file)}\n".encode())
    return whole.hexdigest()


def _exported(variant: Path, tp: int, pp: int) -> Path:
    """The export of a variant that is split as asked; its own config.json says how, not its name."""
    splits = {}
    for file in sorted((variant / EXPORTS).glob("*/config.json")):
        mapping = _config(file.parent).get("mapping", {})
        splits[(mapping.get("tp_size"), mapping.get("pp_size"))] = file.parent
    if (tp, pp) not in splits:
        there = [f"tp {t} pp {p}" for t, p in splits]
        raise StageFailed(
            f"{variant}: holds no TensorRT-LLM checkpoint for tp {tp} pp {pp} ({closest(f'tp {tp} pp {pp}', there)})"
        )
    return splits[(tp, pp)]


def _converted(
    config: TrtllmEngineConfig,
    variant: Path,
    about: Mapping[str, Any],
    scratch: Path,
    logs: Path,
    known: Mapping[str, Fact],
) -> Made:
    architecture = (about.get("architectures") or ["?"])[0]
    if architecture not in rules.CONVERTERS:
        raise InputError(f"{variant}: no convert_checkpoint.py is known for {architecture}")
    script = Path(config.examples) / "models" / "core" / rules.CONVERTERS[architecture] / "convert_checkpoint.py"
    out, log = scratch / "checkpoint", logs / "convert.log"
    with staged(variant) as model:
        weights = _gptq_file(variant) if known.get("quant_method") == "gptq" else None
        options = commands.convert_argv(config, model, out, _algo(known), weights)
        problems = flags.argv_problems(flags.load(config.release, config.flags), "convert_checkpoint.py", options)
        if problems:
            raise ConfigError(problems)
        argv = [sys.executable, str(script), *options]
        spent = run(argv, log)
    said = log.read_text(errors="replace")
    swallowed = [line for line in said.splitlines() if any(mark in line for mark in SWALLOWED)]
    if swallowed:
        raise StageFailed(f"convert_checkpoint.py went on after an error it caught: {swallowed[0].strip()} (see {log})")
    return Made(out, _config(out), argv, spent)


def _gptq_file(variant: Path) -> Path:
    """The converter reads GPTQ codes from one file."""
    files = sorted(variant.glob("*.safetensors"))
    if len(files) != 1:
        raise InputError(
            f"{variant}: the converter reads GPTQ codes from one safetensors file, and there are {len(files)}"
        )
    return files[0].resolve()


def _algo(known: Mapping[str, Fact]) -> str:
    if isinstance(promised := known.get("quant_algo"), str):
        return promised
    named = str(known.get("scheme") or "BF16").partition(",")[0]
    return algorithm(parse(named), str(known.get("quant_method") or "")) or rules.PLAIN


def _quantization(variant: Path, known: Mapping[str, Fact]) -> Asked:
    scheme = parse(str(known.get("scheme") or "BF16").partition(",")[0])
    declared = quantization_config(variant).get("group_size")
    size = int(declared) if isinstance(declared, int) else scheme.group_size
    return commands.asked_quantization(_algo(known), size, scheme.kv)


def _config(checkpoint: Path) -> Mapping[str, Any]:
    path = checkpoint / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StageFailed(f"{path}: no readable config.json was written ({error})") from None
    if not isinstance(found, dict):
        raise StageFailed(f"{path}: holds {type(found).__name__}, not the keys of a checkpoint")
    return found


def _refuse_differences(made: Made, asked: Asked) -> None:
    found = differences(asked, made.config)
    if found:
        listed = "\n  ".join(found)
        raise StageFailed(f"{made.path}: config.json is not what was asked, {len(found)} keys differ:\n  {listed}")


def _refuse_missing_ranks(checkpoint: Path, ranks: int) -> None:
    """Every rank has its weights, whole by their headers."""
    names = [f"rank{k}.safetensors" for k in range(ranks)]
    lost = [name for name in names if not (checkpoint / name).is_file()]
    if lost:
        raise StageFailed(f"{checkpoint}: weights of {len(lost)} of {ranks} ranks are missing: {', '.join(lost[:5])}")
    read_headers(checkpoint)
