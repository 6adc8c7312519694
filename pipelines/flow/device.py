"""What this machine is, as far as a measurement depends on it."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path


@functools.cache
def describe() -> dict[str, str]:
    """Name the processor, cores, memory and GPUs; the values enter the keys of device-bound stages."""
    return {"cpu": _cpu_name(), "cores": str(len(os.sched_getaffinity(0))), "memory_gib": _memory_gib(), "gpu": _gpus()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_gib() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f}"


def _gpus() -> str:
    """Names and driver of the NVIDIA GPUs, or "none"."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return "; ".join(done.stdout.split("\n")).strip("; ") if done.returncode == 0 and done.stdout.strip() else "none"
