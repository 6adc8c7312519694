"""`quantgate doctor`: what this machine can do, each finding with what to do about it. It only looks."""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipelines import terminal
from pipelines.campaign import CampaignConfig
from pipelines.cli import UI_PORT, Answer
from pipelines.compose import compose
from pipelines.config import parse
from pipelines.errors import EnvironmentProblem, Problem
from pipelines.flow import containers
from pipelines.flow.device import Gpu, cuda_of_driver, describe, free_bytes, gpus
from pipelines.flow.inspection import look
from pipelines.flow.toolchain import toolchains, version_of
from pipelines.track.connection import absolute_uri

PACKAGES = (
    "torch",
    "transformers",
    "llmcompressor",
    "compressed-tensors",
    "gptqmodel",
    "onnxruntime-genai",
    "onnxruntime",
    "lm-eval",
    "mlflow",
)
LITTLE_DISK = 10 * 2**30
LITTLE_MEMORY = 8 * 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing there is or is missing; `to_do` is empty where nothing hinders."""

    about: str
    what: str
    found: str
    to_do: str = ""


def doctor(args: argparse.Namespace) -> Answer:
    """Say what this machine can do; each finding that hinders says what to do."""
    directory = Path(args.config_dir).resolve() if args.config_dir else None
    config = parse(CampaignConfig, compose(args.overrides, directory))
    findings = [
        *_machine(),
        *_gpu(gpus()),
        *_disk(config),
        *_runtimes(),
        *_toolchains(config),
        *(Finding("package", name, version_of(name), _missing(name)) for name in PACKAGES),
        *_network(config),
    ]
    terminal.table(
        "This machine",
        ("about", "what", "found", "what to do"),
        ((f.about, f.what, f.found, f.to_do) for f in findings),
    )
    return Answer(0, {"findings": [asdict(f) for f in findings]})


def _machine() -> Iterator[Finding]:
    device = describe()
    yield Finding("machine", "processor", f"{device['cpu']}, {device['cores']} cores")
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    little = "quantizing takes about three times the base's size; close what else runs" if total < LITTLE_MEMORY else ""
    yield Finding("machine", "memory", f"{terminal.size(total)}, {terminal.size(available)} unused", little)
    compiler = shutil.which("g++")
    to_do = "" if compiler else "GPTQModel falls back to slower packing; install g++"
    yield Finding("machine", "compiler", compiler or "none", to_do)


def _gpu(found: Sequence[Gpu]) -> Iterator[Finding]:
    """GPUs, driver, CUDA and the torch build must fit each other."""
    build = version_of("torch").partition("+")[2]
    if not found:
        yield Finding("GPU", "device", *_no_gpu())
        yield Finding("GPU", "torch build", build or "as the index had it", "")
        return
    for number, gpu in enumerate(found):
        memory = f", {gpu.memory_mib} MiB" if gpu.memory_mib else ""
        yield Finding("GPU", f"device {number}", f"{gpu.name}, SM {gpu.sm or 'unknown'}{memory}", _fp8(gpu))
    yield Finding("GPU", "driver", f"{found[0].driver}, CUDA up to {cuda_of_driver() or 'unknown'}")
    nvcc = shutil.which("nvcc")
    yield Finding("GPU", "CUDA toolkit", nvcc or "none", "" if nvcc else "only kernels compiled on the spot need nvcc")
    cpu_only = "this torch cannot use the GPU; install a CUDA build of the same version" if build == "cpu" else ""
    yield Finding("GPU", "torch build", build or "as the index had it", cpu_only)


def _no_gpu() -> tuple[str, str]:
    """Absent, or there and out of reach: a driver's library or device file without nvidia-smi, or the reverse."""
    absent = "FP8 engines are emulated here, and TensorRT-LLM needs an NVIDIA GPU with its driver"
    if shutil.which("nvidia-smi") is not None:
        return "none (nvidia-smi is there and lists none)", f"is the driver loaded? {absent}"
    if _nvml() or Path("/dev/nvidia0").exists():
        hint = "put it on PATH; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return "out of reach (NVML or a device file is here, nvidia-smi is not)", hint
    return "none (neither nvidia-smi nor NVML is here)", absent


def _nvml() -> bool:
    """Whether the driver's management library can be loaded."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _fp8(gpu: Gpu) -> str:
    return "no FP8 kernels below SM 89; AWQ and GPTQ run" if gpu.sm is not None and gpu.sm < 89 else ""


def _disk(config: CampaignConfig) -> Iterator[Finding]:
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    places = {
        "store": (Path(config.paths.store).resolve(), "paths.store"),
        "toolchains": (config.paths.toolchains_home, "paths.toolchains"),
        "model cache": (cache, "HF_HOME"),
    }
    for what, (path, key) in places.items():
        free = free_bytes(path)
        to_do = f"free some space, run `quantgate gc`, or set {key}" if free < LITTLE_DISK else ""
        yield Finding("disk", what, f"{terminal.size(free)} free at {path}", to_do)


def _runtimes() -> Iterator[Finding]:
    """One of the two is enough, and none is needed unless a toolchain is a container."""
    problems = {runtime: containers.runtime_problem(runtime) for runtime in ("docker", "podman")}
    one_answers = "" in problems.values()
    for runtime, problem in problems.items():
        what, _, to_do = problem.partition("; ")
        yield Finding("container", runtime, what or "answers", "" if one_answers else to_do)
    if gpus() and not problems["docker"]:
        yield Finding("container", "GPUs in docker", *_gpus_in_docker())


def _gpus_in_docker() -> tuple[str, str]:
    if "nvidia" in containers.runtimes_of_docker():
        return "the NVIDIA runtime is there", ""
    return "no NVIDIA runtime", "install nvidia-container-toolkit and run `nvidia-ctk runtime configure`"


def _toolchains(config: CampaignConfig) -> Iterator[Finding]:
    problems: list[Problem] = []
    for toolchain in toolchains(config.toolchain, config.paths.toolchains_home, problems).values():
        seen = look(toolchain)
        yield Finding("toolchain", seen.name, f"{seen.state}: {seen.what}", seen.to_do)
    for problem in problems:
        yield Finding("toolchain", problem.key, str(problem.value), f"{problem.message} {problem.allowed}".strip())


def _missing(package: str) -> str:
    return "" if version_of(package) != "absent" else "pip install 'quantgate[quantize,ort]', or `make install`"


def _network(config: CampaignConfig) -> Iterator[Finding]:
    taken = _taken(UI_PORT)
    to_do = "`quantgate ui --port N` takes another" if taken else ""
    yield Finding("port", f"127.0.0.1:{UI_PORT} (MLflow)", "taken" if taken else "free", to_do)
    free = _taken(0)
    yield Finding("port", "any on 127.0.0.1 (engines)", "none to be had" if free else "free",
                  "servers of engines need a loopback port; is loopback up?" if free else "")  # fmt: skip
    uri = absolute_uri(config.tracking.uri)
    yield Finding("MLflow", *_tracking(uri))


def _tracking(uri: str) -> tuple[str, str, str]:
    from pipelines.track.connection import reachable
    from pipelines.track.masking import masked_text

    try:
        return masked_text(uri), reachable(uri), ""
    except EnvironmentProblem as error:
        what, _, to_do = str(error).partition("; ")
        return masked_text(uri), what, to_do


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
