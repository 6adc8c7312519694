"""From a Hugging Face checkpoint to a GGUF file that is not quantized, by llama.cpp's own converter.

Runs in the toolchain `llama_cpp`, whose build puts the converter beside the package (requirements/llama_cpp.cmake).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import deque
from pathlib import Path

from pipelines.errors import EnvironmentProblem, StageFailed, TransientFailure

LAST_LINES = 8


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
    kind = json.loads((checkpoint / "config.json").read_text()).get("model_type", "model")
    argv = [
        sys.executable, "-B", str(part("convert/convert_hf_to_gguf.py")), str(checkpoint), "--outfile", str(out),
        "--outtype", dtype, "--model-name", str(kind),
    ]  # fmt: skip
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
