"""A run with several processes at once that is stopped: all of them end, and nothing half-made stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines.flow.store import Store
from tests.unit.test_together import run, step

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0


@dataclass(frozen=True)
class Running:
    """A run whose two steps hang, each with a child of its own, and the ids of those processes."""

    parent: subprocess.Popen[str]
    store: Store
    pids: tuple[int, ...]

    def alive(self) -> list[int]:
        return [pid for pid in self.pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    place, store = tmp_path / "place", Store(tmp_path / "store")
    place.mkdir()
    store.prepare()
    code = (
        "import signal, sys; from pathlib import Path; from tests.unit.test_together import Store, run, step\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"both = [step(n, {str(place)!r}, do='hang', others=1) for n in (1, 2)]\n"
        f"run(Store(Path({str(store.root)!r})), *both)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, text=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + WITHIN_S
    while len(pids := [p.read_text() for p in place.glob("*") if p.stat().st_size]) < 2:
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield Running(parent, store, tuple(map(int, pids)))
    parent.kill()
    parent.wait()


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_stopped_run_ends_every_process_and_leaves_nothing_half_made(
    running: Running, how: signal.Signals, code: int
) -> None:
    """Ctrl-C, SIGTERM and kill -9 of the run end both steps at once; the next run finds no lock and makes both."""
    began = time.monotonic()
    running.parent.send_signal(how)
    assert code == running.parent.wait(timeout=WITHIN_S)
    if how == signal.SIGKILL:  # nobody is left to wait for them: the kernel tells them that their parent died
        while running.alive() and time.monotonic() < began + WITHIN_S:
            time.sleep(0.05)
    assert [] == running.alive()
    assert time.monotonic() - began < 15, "each was waited for by itself"
    again = [step(n) for n in (1, 2)]
    assert not any(running.store.has("toy", s.key) for s in again)
    running.store.sweep()
    assert [] == list((running.store.root / ".tmp").iterdir())
    assert ["made", "made"] == [o.state for o in run(running.store, *again).values()]
    assert {".json"} == {p.suffix for p in (running.store.root / ".requests").iterdir()}
