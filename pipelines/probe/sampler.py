"""What an engine's server uses under load: memory and CPU of its process group, GPUs, and its own metrics; and how busy
the machine is besides.

Run as a program it is the sampling process, apart from the client: `python -m pipelines.probe.sampler SUBJECT`, with a
`Subject` as JSON, prints a JSON sample about ten times a second, on the clock of `time.monotonic`, until its standard
input closes; the last line holds its notes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Self

from pipelines.probe import gpu
from pipelines.probe.samples import INTERVAL_S, Sample
from pipelines.probe.scraper import Scraper

if TYPE_CHECKING:
    from types import TracebackType

    import psutil

GROUP_REFRESH_S = 1.0
STOP_TIMEOUT_S = 5.0
FIRST_TIMEOUT_S = 5.0
CUT_SHORT = "the sampling process ended early"


@dataclass(frozen=True, slots=True)
class Subject:
    """What to sample: the leader of the server's process group, None where it is not ours; the client's process; where
    the server's metrics are, "" where it has none."""

    server_pid: int | None
    client_pid: int
    metrics_url: str = ""


@dataclass(frozen=True, slots=True)
class Notes:
    """Why something was not sampled, "" where it was."""

    gpu: str = ""
    metrics: str = ""


class Sampler:
    """Samples a server from a process of its own while the `with` block lasts; read `samples` and `notes` after it."""

    def __init__(self, server_pid: int | None, metrics_url: str = "") -> None:
        self._subject = Subject(server_pid, os.getpid(), metrics_url)
        self.samples: tuple[Sample, ...] = ()
        self.notes = Notes(CUT_SHORT, CUT_SHORT)

    def __enter__(self) -> Self:
        self._written: IO[bytes] = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "pipelines.probe.sampler", json.dumps(asdict(self._subject))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._written)
        return self

    def seen(self) -> int:
        """Count the samples taken so far."""
        return os.pread(self._written.fileno(), os.fstat(self._written.fileno()).st_size, 0).count(b"\n")

    def wait(self) -> None:
        """Return once there is a sample, so that the server is seen before it is asked anything."""
        deadline_s = time.monotonic() + FIRST_TIMEOUT_S
        while not self.seen() and time.monotonic() < deadline_s and self._process.poll() is None:
            time.sleep(0.01)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._written, self._process:
            if self._process.stdin is not None:
                self._process.stdin.close()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._written.seek(0)
            lines = [json.loads(line) for line in self._written if line.endswith(b"\n")]
        self.samples = tuple(Sample(**line) for line in lines if "at_s" in line)
        self.notes = next((Notes(**line) for line in lines if "at_s" not in line), self.notes)


class _Group:
    """CPU and memory of all processes of a group; what ended members used stays counted."""

    def __init__(self, leader_pid: int) -> None:
        self._leader_pid = leader_pid
        self._members: list[psutil.Process] = []
        self._cpu_s: dict[int, float] = {}
        self._refreshed_s = float("-inf")

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._members]

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
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getpgid(pid) == group:
                found.append(psutil.Process(pid))
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


class _Watch:
    """Everything that is looked at, in one look."""

    def __init__(self, subject: Subject) -> None:
        self._client_pid = subject.client_pid
        self._group = None if subject.server_pid is None else _Group(subject.server_pid)
        self._gpus, self.gpu_note = gpu.find()
        self.scraper = Scraper(subject.metrics_url)

    def look(self) -> dict[str, object]:
        """A sample, as it is printed."""
        rss, cpu_s = (None, None) if self._group is None else self._group.measure()
        gpus = None if self._gpus is None else self._gpus.look(self._group.pids if self._group else ())
        scraped = self.scraper.take()
        sample = Sample(
            at_s=time.monotonic(),
            rss_bytes=rss,
            server_cpu_s=cpu_s,
            client_cpu_s=_own_cpu_s(self._client_pid),
            busy_cpu_s=_busy_cpu_s(),
            load_average=os.getloadavg()[0],
        )
        seen = {f"gpu_{name}": value for name, value in asdict(gpus).items()} if gpus else {}
        return asdict(sample) | seen | (asdict(scraped) if scraped else {})


def main(subject: Subject) -> None:
    """Print samples until standard input closes, which it also does when the client is gone; then the notes.

    Whoever ends the client's process group lets the client finish, and so do we.
    """
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, signal.SIG_IGN)
    watch = _Watch(subject)
    due_s = time.monotonic()
    with watch.scraper as scraper:
        while True:
            print(json.dumps(watch.look()), flush=True)
            due_s = max(due_s + INTERVAL_S, time.monotonic())
            if select.select([sys.stdin], [], [], max(0.0, due_s - time.monotonic()))[0]:
                break
        scraper.again()
        print(json.dumps(watch.look()), flush=True)
    print(json.dumps(asdict(Notes(watch.gpu_note, scraper.note))), flush=True)


if __name__ == "__main__":
    main(Subject(**json.loads(sys.argv[1])))
