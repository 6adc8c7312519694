"""The GPUs under a server, looked at through NVML. What a GPU does not tell is None; without NVML, a note says why."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# Bits of NVML's clock event reasons that slow a GPU for its own protection. A power cap or set clocks are conditions.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
NOT_INSTALLED = "NVML's bindings are not installed (pip install 'quantgate[gpu]')"


@dataclass(frozen=True, slots=True)
class GpuLook:
    """One look at all GPUs together: sums, but the mean utilisation, the highest temperature and the lowest SM clock.

    memory_bytes: of the server's processes; of everything on the GPUs where NVML does not know the server's. others:
    further processes that compute there, None where it cannot be told whose they are. energy_j counts from some start.
    """

    memory_bytes: int | None
    utilisation_percent: float | None
    power_w: float | None
    energy_j: float | None
    temperature_c: float | None
    clock_mhz: float | None
    throttled: str
    others: int | None


class Gpus:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, or all."""

    def __init__(self, nvml: ModuleType, handles: Collection[Any]) -> None:
        self._nvml, self._handles = nvml, tuple(handles)

    def look(self, server_pids: Collection[int]) -> GpuLook:
        """Look at them now."""
        nvml = self._nvml
        read = {
            "utilisation": self._each(lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu),
            "power": self._each(nvml.nvmlDeviceGetPowerUsage),
            "energy": self._each(nvml.nvmlDeviceGetTotalEnergyConsumption),
            "temperature": self._each(lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)),
            "clock": self._each(lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM)),
            "reasons": self._each(nvml.nvmlDeviceGetCurrentClocksEventReasons),
        }
        memory, others = self._shared(server_pids)
        power, energy, reasons = read["power"], read["energy"], read["reasons"] or []
        return GpuLook(
            memory_bytes=memory,
            utilisation_percent=sum(read["utilisation"]) / len(self._handles) if read["utilisation"] else None,
            power_w=sum(power) / 1e3 if power else None,
            energy_j=sum(energy) / 1e3 if energy else None,
            temperature_c=max(read["temperature"]) if read["temperature"] else None,
            clock_mhz=min(read["clock"]) if read["clock"] else None,
            throttled=", ".join(what for bit, what in SLOWDOWNS.items() if any(int(r) & bit for r in reasons)),
            others=others,
        )

    def _each(self, ask: Callable[[Any], float]) -> list[float]:
        """The answer for each GPU; none at all where one does not tell, for a sum of some would pass for the whole."""
        try:
            return [float(ask(handle)) for handle in self._handles]
        except self._nvml.NVMLError:
            return []

    def _shared(self, server_pids: Collection[int]) -> tuple[int | None, int | None]:
        """Memory the server holds, and how many others compute beside it."""
        try:
            running = [one for h in self._handles for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(h)]
        except self._nvml.NVMLError:
            running = []
        used = self._each(lambda h: self._nvml.nvmlDeviceGetMemoryInfo(h).used)
        whole = int(sum(used)) if used else None
        ours = [one for one in running if one.pid in server_pids]
        if not ours:
            return whole, None
        told = [one.usedGpuMemory for one in ours]
        memory = sum(told) if all(isinstance(bytes_, int) for bytes_ in told) else whole
        return memory, len({one.pid for one in running} - set(server_pids))


def find(env: Mapping[str, str] = os.environ) -> tuple[Gpus | None, str]:
    """The GPUs of this machine, or why there are none to look at."""
    try:
        import pynvml
    except ImportError:
        return None, NOT_INSTALLED
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(k) for k in range(pynvml.nvmlDeviceGetCount())]
        names = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError as error:
        return None, f"NVML does not answer: {error}"
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [name.strip() for name in visible.split(",")]
        handles = [h for k, (h, name) in enumerate(zip(handles, names, strict=True)) if _named(k, name, wanted)]
    return (Gpus(pynvml, handles), "") if handles else (None, "no GPU is visible here")


def _named(index: int, uuid: str, wanted: Collection[str]) -> bool:
    """CUDA takes an index, or the beginning of a UUID."""
    return str(index) in wanted or any(one.startswith("GPU-") and uuid.startswith(one) for one in wanted)
