"""Stands in for NVML's bindings: two GPUs whose readings a test sets. Units are NVML's: milliwatts, millijoules."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1

# In a process of its own, what a test wants is told by the environment.
GPUS: list[dict[str, Any]] = [
    {
        "uuid": f"GPU-{k}abc",
        "used": 2_000_000_000 * (k + 1),
        "utilisation": 80 - 20 * k,
        "power": 300_000 + 100_000 * k,
        "energy": 5_000_000,
        "temperature": 60 + k,
        "clock": 1980 - 100 * k,
        "reasons": int(os.environ.get("FAKE_NVML_REASONS", "0"), 16) if k else 0,
        "running": [SimpleNamespace(pid=int(pid), usedGpuMemory=1_500_000_000) for pid in _pids.split()]
        if not k
        else [],
    }
    for _pids in (os.environ.get("FAKE_NVML_PIDS", ""),)
    for k in range(2)
]
BROKEN: set[str] = set(os.environ.get("FAKE_NVML_BROKEN", "").split())


class NVMLError(Exception):
    """What every call raises that a GPU or a driver cannot answer."""


def _read(handle: int, name: str) -> Any:
    if name in BROKEN:
        raise NVMLError("Not Supported")
    return GPUS[handle][name]


def nvmlInit() -> None:
    if "init" in BROKEN:
        raise NVMLError("NVML Shared Library Not Found")


def nvmlDeviceGetCount() -> int:
    return len(GPUS)


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return str(_read(handle, "uuid"))


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(used=_read(handle, "used"))


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=_read(handle, "utilisation"))


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return int(_read(handle, "power"))


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:
    reading = int(_read(handle, "energy"))
    GPUS[handle]["energy"] += 10_000
    return reading


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    assert sensor == NVML_TEMPERATURE_GPU
    return int(_read(handle, "temperature"))


def nvmlDeviceGetClockInfo(handle: int, clock: int) -> int:
    assert clock == NVML_CLOCK_SM
    return int(_read(handle, "clock"))


def nvmlDeviceGetCurrentClocksEventReasons(handle: int) -> int:
    return int(_read(handle, "reasons"))


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    return list(_read(handle, "running"))
