"""Convert a checkpoint and have llama.cpp quantize it; what the file then holds is read from the file."""

from __future__ import annotations

import ctypes
import json
import os
from importlib.metadata import version
from pathlib import Path

from pipelines.errors import StageFailed
from pipelines.flow.progress import report
from pipelines.flow.store import Fact
from pipelines.quantize.carry import carry_over
from pipelines.quantize.gguf import FILE, METHOD, GgufConfig
from pipelines.quantize.gguf_convert import convert
from pipelines.quantize.gguf_saved import account

LIBRARY = "llama.cpp, by llama_cpp_python"
STEPS = 3


def run(config: GgufConfig, out: Path, *, checkpoint: Path, calibration: Path | None = None) -> dict[str, Fact]:
    """Quantize a checkpoint into a directory that llama.cpp serves and transformers reads back.

    Raises:
        StageFailed: converter or library gave up, or the file is not what was asked for.
    """
    del calibration  # nothing is looked at
    report(0, STEPS, "converting")
    whole = out / "converted.gguf"
    convert(checkpoint, whole, config.converted)
    report(1, STEPS, "quantizing")
    _quantize(config, whole, out / FILE)
    whole.unlink()
    report(2, STEPS, "reading what was saved")
    about = json.loads((checkpoint / "config.json").read_text())
    declared = {"quant_method": METHOD, "file": FILE, "file_type": config.scheme}
    (out / "config.json").write_text(json.dumps(about | {"quantization_config": declared}, indent=2) + "\n")
    carry_over(checkpoint, out)
    facts = account(out, checkpoint, config)
    report(STEPS, STEPS, "reading what was saved")
    return {
        "scheme": config.scheme,
        "quantizer": config.quantizer,
        "library": LIBRARY,
        "library_version": version("llama_cpp_python"),
        "adaptations": "",
        **facts,
    }


def _quantize(config: GgufConfig, source: Path, target: Path) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{config.scheme}")
    params.nthread = int(os.environ.get("QUANTGATE_THREADS", "0")) or len(os.sched_getaffinity(0))
    params.pure = config.options.pure
    params.quantize_output_tensor = config.options.quantize_output_tensor
    code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    if code or not target.is_file():
        raise StageFailed(f"llama.cpp could not quantize to {config.scheme}: code {code}; the log has its words")
