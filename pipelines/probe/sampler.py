"""What an engine's server uses under load: memory and CPU of its process group; and how busy the machine is besides.

Run as a program it is the sampling process, apart from the client: `python -m pipelines.probe.sampler PID CLIENT_PID`
prints a JSON sample about ten times a second, on the clock of `time.monotonic`, until its standard input closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    import psutil

INTERVAL_S = 0.1
GROUP_REFRESH_S = 1.0
STOP_TIMEOUT_S = 5.0
NOBODY = -1  # the server runs elsewhere: no process has this id


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the machine. CPU times are seconds since some start, so only differences mean something.

    client_cpu_s includes the sampler; busy_cpu_s is the whole machine's, with what a hypervisor stole.
    """

    at_s: float
    rss_bytes: int
    server_cpu_s: float
    client_cpu_s: float
    busy_cpu_s: float
    load_average: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Samples of a stretch of time in a few figures; None where too few samples fell into it.

    cpu_percent: of one CPU, so 200 is two CPUs in full. foreign_cpu_percent: share of the whole machine that was
    taken by neither server nor client. load_average: the highest one-minute average seen.
    """

    peak_rss_bytes: int | None
    cpu_percent: float | None
    foreign_cpu_percent: float | None
    load_average: float | None


def usage(samples: Sequence[Sample], start_s: float, end_s: float, cpus: int) -> Usage:
    """Summarize the samples from `start_s` to `end_s` (and one interval around, so that short loads have some)."""
    inside = [s for s in samples if start_s - INTERVAL_S <= s.at_s <= end_s + INTERVAL_S]
    if not inside:
        return Usage(None, None, None, None)
    peak = max(sample.rss_bytes for sample in inside)
    load = max(sample.load_average for sample in inside)
    first, last = inside[0], inside[-1]
    seconds = last.at_s - first.at_s
    if seconds <= 0:
        return Usage(peak, None, None, load)
    server = last.server_cpu_s - first.server_cpu_s
    client = last.client_cpu_s - first.client_cpu_s
    busy = last.busy_cpu_s - first.busy_cpu_s
    foreign = min(100.0, max(0.0, busy - server - client) / (seconds * cpus) * 100)
    return Usage(peak, max(0.0, server) / seconds * 100, foreign, load)


class Sampler:
    """Samples a server from a process of its own while the `with` block lasts; read `samples` after it."""

    def __init__(self, server_pid: int | None) -> None:
        self._server_pid = NOBODY if server_pid is None else server_pid
        self.samples: tuple[Sample, ...] = ()

    def __enter__(self) -> Self:
        self._written: IO[bytes] = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "pipelines.probe.sampler", str(self._server_pid), str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._written)
        return self

    def seen(self) -> int:
        """Count the samples taken so far."""
        return os.pread(self._written.fileno(), os.fstat(self._written.fileno()).st_size, 0).count(b"\n")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._written, self._process:
            if self._process.stdin is not None:
                self._process.stdin.close()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._written.seek(0)
            self.samples = tuple(Sample(**json.loads(line)) for line in self._written if line.endswith(b"\n"))


class _Group:
    """CPU and memory of all processes of a group; what ended members used stays counted."""

    def __init__(self, leader_pid: int) -> None:
        self._leader_pid = leader_pid
        self._members: list[psutil.Process] = []
        self._cpu_s: dict[int, float] = {}
        self._refreshed_s = float("-inf")

    def measure(self) -> tuple[int, float]:
        """Return (resident bytes now, CPU seconds so far)."""
        import psutil

        now_s = time.monotonic()
        if now_s - self._refreshed_s >= GROUP_REFRESH_S:
            self._members, self._refreshed_s = _members(self._leader_pid), now_s
        rss = 0
        for process in self._members:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._cpu_s[process.pid] = times.user + times.system
                rss += process.memory_info().rss
        return rss, sum(self._cpu_s.values())


def _members(leader_pid: int) -> list[psutil.Process]:
    """Processes in the group of `leader_pid`."""
    import psutil

    try:
        group = os.getpgid(leader_pid)
    except ProcessLookupError:
        return []
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group:
                found.append(process)
    return found


def _own_cpu_s(client_pid: int) -> float:
    """CPU seconds of the client and of this process."""
    import psutil

    seconds = sum(time_s for time_s in os.times()[:2])
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(client_pid).cpu_times()
        seconds += times.user + times.system
    return seconds


def _busy_cpu_s() -> float:
    import psutil

    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def main(server_pid: int, client_pid: int) -> None:
    """Print samples until standard input closes, which it also does when the client is gone."""
    group = _Group(server_pid)
    due_s = time.monotonic()
    while True:
        rss, cpu_s = group.measure()
        sample = Sample(
            at_s=time.monotonic(),
            rss_bytes=rss,
            server_cpu_s=cpu_s,
            client_cpu_s=_own_cpu_s(client_pid),
            busy_cpu_s=_busy_cpu_s(),
            load_average=os.getloadavg()[0],
        )
        print(json.dumps(asdict(sample)), flush=True)
        due_s = max(due_s + INTERVAL_S, time.monotonic())
        if select.select([sys.stdin], [], [], max(0.0, due_s - time.monotonic()))[0]:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
