"""A tethered command: it ends with whoever started it, and takes along what it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.flow.tether import tethered

# An installer that hands its work to another process and waits for it.
COMMAND = "sh -c 'echo $$ > {where}/inner; exec sleep 600' & echo $$ > {where}/outer; wait"


def appeared(path: Path) -> int:
    """The process id in a file, once it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text().strip()):
            return int(text)
        time.sleep(0.02)
    raise AssertionError(f"{path} did not appear")


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped, within some seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_starter_and_takes_all_along(tmp_path: Path, how: signal.Signals) -> None:
    """kill -9 of the starter, or ending the tether itself, leaves neither the command nor what that started."""
    argv = tethered(["sh", "-c", COMMAND.format(where=tmp_path)])
    code = f"import subprocess; p = subprocess.Popen({argv!r}); print(p.pid, flush=True); p.wait()"
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    tether = int(starter.stdout.readline())
    pids = [appeared(tmp_path / name) for name in ("inner", "outer")]
    os.kill(starter.pid if how == signal.SIGKILL else tether, how)
    assert [True, True] == [ended(pid) for pid in pids]
    starter.kill()
    starter.wait()
    starter.stdout.close()


@pytest.mark.parametrize(("argv", "code"), [(["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -9 $$"], 137)])
def test_its_exit_code_is_the_commands(argv: list[str], code: int) -> None:
    """As a shell would tell it."""
    assert code == subprocess.run(tethered(argv), check=False).returncode


def test_a_command_that_is_not_there_is_said() -> None:
    """Exit code 127 and a line, no traceback."""
    done = subprocess.run(tethered(["/no/such/command"]), capture_output=True, text=True, check=False)
    assert (127, "/no/such/command: No such file or directory\n") == (done.returncode, done.stderr)
