"""A tool run once and measured: its output kept, host memory by the kernel's account, GPU memory by nvidia-smi."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.engine.smoke import last_words
from pipelines.errors import EnvironmentProblem, StageFailed, TransientFailure

SAMPLE_S = 1.0
RECORDED = ("TLLM_", "TRTLLM_", "TRT_", "CUDA_VISIBLE", "NCCL_", "BUILDER_FORCE_")
"""Beginnings of the variables that change what these tools do; the others are not recorded."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run took. Peak host memory is that of its largest process; GPU memory is that of the machine, sampled."""

    seconds: float
    peak_host_bytes: int
    peak_gpu_mib: int | None


@dataclass(slots=True)
class _Peak:
    """The most GPU memory in use on all GPUs together, None before the first look."""

    mib: int | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while True:
            used = _gpu_memory_used()
            if used is None:
                return
            self.mib = max(used, self.mib or 0)
            if self._stop.wait(SAMPLE_S):
                return

    def stop(self) -> None:
        self._stop.set()


def run(argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Spent:
    """Run a command to its end; all it says goes to `log`.

    Raises:
        EnvironmentProblem: it cannot be started.
        StageFailed: it failed, with its last words. TransientFailure: it was killed.
    """
    began = time.monotonic()
    with log.open("wb") as out, _watched() as peak:
        try:
            child = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        except OSError as error:
            raise EnvironmentProblem(
                f"{argv[0]}: cannot be started ({error.strerror}); it comes with TensorRT-LLM, in the toolchain's image"
            ) from None
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    _refuse_failure(argv[0], child.returncode, log)
    return Spent(round(seconds, 3), usage.ru_maxrss * 1024, peak.mib)


def _refuse_failure(command: str, code: int, log: Path) -> None:
    if code == 0:
        return
    name = Path(command).name
    if code < 0:
        raise TransientFailure(f"{name} was ended by {signal.Signals(-code).name}{last_words(log)}")
    raise StageFailed(f"{name} ended with exit code {code}{last_words(log)}")


@contextmanager
def _watched() -> Iterator[_Peak]:
    peak = _Peak()
    thread = threading.Thread(target=peak.watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        peak.stop()
        thread.join()


def _gpu_memory_used() -> int | None:
    argv = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    used = [int(line) for line in done.stdout.split() if line.isdigit()]
    return sum(used) if done.returncode == 0 and used else None


def recorded_env() -> dict[str, str]:
    """The variables that change what the tools do, as they are."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(RECORDED)}
