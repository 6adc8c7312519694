"""Power, memory and load of the GPUs while something runs, read from NVML ten times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

INTERVAL_S = 0.1


@dataclass(frozen=True)
class Look:
    """One look at all GPUs together."""

    at_s: float
    power_w: float
    memory_bytes: int
    busy_percent: float


def summary(looks: Sequence[Look]) -> dict[str, Any]:
    """Peaks, means, and the energy between the first look and the last, by the trapezoid rule."""
    if not looks:
        return {"looks": 0}
    energy = sum((b.at_s - a.at_s) * (a.power_w + b.power_w) / 2 for a, b in pairwise(looks))
    return {
        "looks": len(looks),
        "peak_memory_bytes": max(look.memory_bytes for look in looks),
        "peak_power_w": max(look.power_w for look in looks),
        "mean_busy_percent": sum(look.busy_percent for look in looks) / len(looks),
        "energy_j": energy,
    }


class Watch:
    """Looks from a thread of its own while the `with` block lasts."""

    def __init__(self, look: Callable[[], Look]) -> None:
        self._look, self._end = look, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.looks: list[Look] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            self.looks.append(self._look())
            self._end.wait(INTERVAL_S)


def looking() -> Callable[[], Look]:
    """How to look at the GPUs of this machine.

    Raises:
        pynvml.NVMLError: there is no driver.
    """
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def look() -> Look:
        return Look(
            time.monotonic(),
            sum(pynvml.nvmlDeviceGetPowerUsage(h) for h in handles) / 1000,
            sum(int(pynvml.nvmlDeviceGetMemoryInfo(h).used) for h in handles),
            sum(float(pynvml.nvmlDeviceGetUtilizationRates(h).gpu) for h in handles) / len(handles),
        )

    return look
