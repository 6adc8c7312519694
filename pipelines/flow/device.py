"""What this machine is, as far as a measurement or an engine depends on it."""

from __future__ import annotations

import csv
import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_QUERY = ("name", "compute_cap", "memory.total", "driver_version")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU. `sm` is its compute capability without the dot: 89 is an RTX 4090, 90 an H100."""

    name: str
    sm: int | None
    memory_mib: int | None
    driver: str


@functools.cache
def describe() -> dict[str, str]:
    """Name the processor, cores, memory and GPUs; the values enter the keys of device-bound stages.

    Where there are GPUs, gpu_count, gpu_sm, gpu_memory_gib (of the smallest) and driver are told too; GPUs of unlike
    compute capability have theirs listed: "80,90".
    """
    found = {
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory_gib": _memory_gib(),
        "gpu": "; ".join(f"{gpu.name}, {gpu.driver}" for gpu in gpus()) or "none",
    }
    return found | _of_gpus(gpus())


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that this process may use, by nvidia-smi; none where it is missing or fails."""
    argv = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return read_gpus(done.stdout) if done.returncode == 0 else ()


@functools.cache
def cuda_of_driver() -> str:
    """The newest CUDA version the driver can run, as nvidia-smi's heading says it; "" where there is none."""
    try:
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    said = re.search(r"CUDA(?: \w+)? Version:\s*([\d.]+)", done.stdout)
    return said[1] if said else ""


def read_gpus(listed: str) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's answer, a line each: name, compute capability, memory in MiB, driver."""
    rows = [[field.strip() for field in row] for row in csv.reader(listed.splitlines()) if len(row) == len(_QUERY)]
    return tuple(Gpu(name, _whole(sm.replace(".", "")), _whole(memory), driver) for name, sm, memory, driver in rows)


def _of_gpus(found: tuple[Gpu, ...]) -> dict[str, str]:
    if not found:
        return {}
    told = {"gpu_count": str(len(found)), "driver": found[0].driver}
    sms = sorted({gpu.sm for gpu in found if gpu.sm is not None})
    memory = [gpu.memory_mib for gpu in found if gpu.memory_mib is not None]
    told |= {"gpu_sm": ",".join(map(str, sms))} if sms else {}
    return told | ({"gpu_memory_gib": f"{min(memory) / 1024:.1f}"} if memory else {})


def _whole(text: str) -> int | None:
    """A whole number, None where nvidia-smi says [N/A]."""
    return int(text) if text.isdigit() else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@functools.cache
def vectors() -> str:
    """The widest vector instructions of the processor that engines choose kernels by: amx, avx512 or avx2; "" for none
    of them, and where nothing tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return widest_of(next((line for line in lines if line.startswith("flags")), ""))


def widest_of(flags: str) -> str:
    """The same of the flags that the kernel lists."""
    told = set(flags.split())
    widest = (("amx", "amx_tile"), ("avx512", "avx512f"), ("avx2", "avx2"))
    return next((name for name, flag in widest if flag in told), "")


def _memory_gib() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f}"


def free_memory() -> int:
    """Bytes of memory that a process may still take here, within the limits of its control groups; 0 where nothing
    tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        member = Path("/proc/self/cgroup").read_text()
    except OSError:
        return 0
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    return min([available, *group_room(member, Path("/sys/fs/cgroup"))])


def group_room(member: str, root: Path) -> Iterator[int]:
    """What each limit on the control groups that /proc/self/cgroup names, and on those around them, leaves.

    Files that the kernel keeps in memory and can let go do not count.
    """
    for line in member.splitlines():
        hierarchy, controllers, own = line.split(":", 2)
        names = _V2 if hierarchy == "0" else _V1 if "memory" in controllers.split(",") else None
        if names is None:
            continue
        top = root / names.under
        at = top / own.strip("/")
        for place in (at, *(up for up in at.parents if up.is_relative_to(top))):
            try:
                most, used = (int((place / name).read_text()) for name in (names.most, names.used))
                stat = dict(row.split() for row in (place / "memory.stat").read_text().splitlines())
                yield max(0, most - used + int(stat[names.cached]))
            except (OSError, ValueError, KeyError):  # no limit, said as "max", or no such file
                continue


@dataclass(frozen=True, slots=True)
class _Names:
    """Where a version of control groups lies, and what its files are called."""

    under: str
    most: str
    used: str
    cached: str


_V1 = _Names("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("", "memory.max", "memory.current", "inactive_file")


def free_bytes(place: Path) -> int:
    """Space left where a directory is, or will be."""
    at = place
    while not at.exists():
        at = at.parent
    return shutil.disk_usage(at).free
