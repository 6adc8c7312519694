"""What makes a TensorRT-LLM build reproducible and deployable, beyond what every manifest holds.

The manifest's toolchain has the versions of TensorRT-LLM, TensorRT, torch, transformers and ModelOpt and the image's
digest, its files have sizes and hashes, its inputs the variant's key. Here is the rest.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.engine.trtllm.running import Spent, recorded_env
from pipelines.errors import StageFailed
from pipelines.flow.device import gpus
from pipelines.flow.store import Fact, manifest, sha256_of
from pipelines.flow.toolchain import version_of

DISTRIBUTION = "tensorrt_llm"
CUDA_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12")


def simulated() -> bool:
    """Whether what answered to the library's commands was not the library: it is not installed here."""
    return version_of(DISTRIBUTION) == "absent"


def check_release(release: str) -> None:
    """The installed library is the release whose flags and rules were used.

    Raises:
        StageFailed: it is another one.
    """
    found = version_of(DISTRIBUTION)
    if found not in ("absent", release):
        raise StageFailed(f"TensorRT-LLM {found} is installed here, and engine.release={release}; give the image's own")


def facts_of(variant: Path, argvs: Mapping[str, Sequence[str]], spent: Mapping[str, Spent | None]) -> dict[str, Fact]:
    """Machine, commands, what they took, and hashes of what went in; `argvs` and `spent` are by name of the step."""
    known, here = manifest(variant), gpus()
    calibration = known.inputs.get("calibration")
    tokenizer = variant / "tokenizer.json"
    told: dict[str, Fact] = {
        "simulated": simulated(),
        "cuda": _cuda(),
        "driver": here[0].driver if here else "",
        "gpu_name": here[0].name if here else "",
        "gpu_sm": here[0].sm if here else None,
        "gpu_count": len(here),
        "tokenizer_sha256": sha256_of(tokenizer) if tokenizer.is_file() else "",
        "calibration_key": calibration if isinstance(calibration, str) else "",
        "env": " ".join(shlex.quote(f"{name}={value}") for name, value in recorded_env().items()),
    }
    for name, argv in argvs.items():
        told[f"{name}_argv"] = shlex.join(argv)
    for name, took in spent.items():
        told[f"{name}_seconds"] = None if took is None else took.seconds
    ran = [took for took in spent.values() if took is not None]
    gpu = [took.peak_gpu_mib for took in ran if took.peak_gpu_mib is not None]
    told["peak_host_bytes"] = max((took.peak_host_bytes for took in ran), default=None)
    return told | {"peak_gpu_mib": max(gpu, default=None)}


def native_note() -> str:
    """Why latency of what was built here is no evidence, "" where it is."""
    return "simulated: TensorRT-LLM is not installed where this was built" if simulated() else ""


def _cuda() -> str:
    """The CUDA version of the toolchain: images say it, wheels are it."""
    said = os.environ.get("CUDA_VERSION", "")
    return said or next((found for name in CUDA_RUNTIMES if (found := version_of(name)) != "absent"), "")
