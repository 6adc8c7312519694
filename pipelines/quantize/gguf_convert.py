"""From a Hugging Face checkpoint to a GGUF file that is not quantized, by llama.cpp's own converter.

Runs in the toolchain `llama_cpp`, whose build puts the converter beside the package (requirements/llama_cpp.cmake). It
guesses the kind of a tokenizer from single keys of its files, and after a wrong guess answers are garbled, so it is
shown a copy in which those keys say what the checkpoint means.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelines.errors import EnvironmentProblem, StageFailed, TransientFailure

LAST_LINES = 8
TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
Json = dict[str, Any]


def package() -> Path:
    """Where llama_cpp lies, and with it what our build put there.

    Raises:
        EnvironmentProblem: it is not in this environment.
    """
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise EnvironmentProblem("llama_cpp is not installed here; run this in the toolchain `llama_cpp`")
    return Path(found.origin).parent


def part(name: str) -> Path:
    """A file that our build put beside the package.

    Raises:
        EnvironmentProblem: the package was built without it.
    """
    path = package() / name
    if not path.is_file():
        raise EnvironmentProblem(
            f"{path}: missing, so llama_cpp_python was built without requirements/llama_cpp.cmake; make its toolchain "
            "anew: quantgate toolchain sync llama_cpp"
        )
    return path


def convert(checkpoint: Path, out: Path, dtype: str) -> None:
    """Write a checkpoint as one GGUF file, weight matrices in `dtype` (auto, f32, f16, bf16).

    Raises:
        StageFailed: the converter gave up, with its last words. TransientFailure: it was killed.
    """
    script = part("convert/convert_hf_to_gguf.py")
    kind = json.loads((checkpoint / "config.json").read_text()).get("model_type", "model")
    with tempfile.TemporaryDirectory(prefix="quantgate-") as scratch:
        staged = stage(checkpoint, Path(scratch))
        argv = [
            sys.executable, "-P", "-B", "-m", "pipelines.quantize.gguf_script", str(script.parent), str(staged),
            "--outfile", str(out), "--outtype", dtype, "--model-name", str(kind),
        ]  # fmt: skip
        _run(argv, checkpoint, out)


def stage(checkpoint: Path, staged: Path) -> Path:
    """Fill a directory with links to a checkpoint's files, and copies of its tokenizer's that leave nothing to guess.

    A tokenizer that works on bytes needs no `byte_fallback`, by which the converter takes it for one of words; and the
    end token is the one of generation_config.json and config.json, whatever the tokenizer calls its own.
    """
    for file in checkpoint.iterdir():
        if file.is_file() and file.name not in (TOKENIZER, SETTINGS, "manifest.json"):
            (staged / file.name).symlink_to(file.resolve())
    tokens = _mended(checkpoint / TOKENIZER, staged / TOKENIZER, _on_bytes)
    names = {entry["id"]: entry["content"] for entry in tokens.get("added_tokens") or ()}
    end = names.get(_end_token(checkpoint))
    _mended(checkpoint / SETTINGS, staged / SETTINGS, lambda found: found | ({"eos_token": end} if end else {}))
    return staged


def _end_token(checkpoint: Path) -> int | None:
    """The first end token, as transformers looks for it."""
    for name in ("generation_config.json", "config.json"):
        path = checkpoint / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return int(found[0] if isinstance(found, list) else found)
    return None


def _mended(source: Path, target: Path, mend: Callable[[Json], Json]) -> Json:
    if not source.is_file():
        return {}
    found = mend(json.loads(source.read_text()))
    target.write_text(json.dumps(found, ensure_ascii=False))
    return found


def _on_bytes(tokenizer: Json) -> Json:
    rules = tokenizer.get("pre_tokenizer") or {}
    kinds = {rules.get("type"), *(rule.get("type") for rule in rules.get("pretokenizers") or ())}
    return tokenizer | {"model": tokenizer["model"] | {"byte_fallback": False}} if "ByteLevel" in kinds else tokenizer


def _run(argv: list[str], checkpoint: Path, out: Path) -> None:
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as child:
        for line in child.stdout or ():
            print(line, end="")
            last.append(line.rstrip())
    if child.returncode < 0:
        raise TransientFailure(f"llama.cpp's converter was ended by signal {-child.returncode}; out of memory, perhaps")
    if child.returncode or not out.is_file():
        said = "\n  ".join(line for line in last if line)
        raise StageFailed(f"{checkpoint}: llama.cpp's converter ended with {child.returncode}:\n  {said}")
