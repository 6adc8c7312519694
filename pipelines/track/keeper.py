"""A small process that holds a campaign's run open beside its work: `python -m pipelines.track.keeper keep CONFIG`.

It imports no MLflow itself: a child of its own opens the run, another ends it. It learns from its standard input how
the campaign ended; where that closes without a word, the campaign was killed. So a run is ended even then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import QuantgateError
from pipelines.flow import surroundings
from pipelines.flow.locks import Held, locked
from pipelines.flow.store import Store
from pipelines.flow.tether import die_with_parent
from pipelines.track.config import TrackingConfig
from pipelines.track.masking import masked_text

if TYPE_CHECKING:
    from pipelines.track.parent import End

TALK_S = 180.0
OTHER_S = 30.0
"""How long another keeper of the same campaign may take to end the run before its campaign is taken to be alive."""


class Keeper:
    """Our side of the process."""

    def __init__(self, config: TrackingConfig, store: Store) -> None:
        path = store.root / ".requests" / f"parent-{config.plan_key}.json"
        path.write_text(config.model_dump_json(indent=1))
        with (store.root / ".logs" / f"parent-{config.plan_key}.log").open("wb") as log:
            self._process = subprocess.Popen(
                _command("keep", str(path)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=surroundings.environment({}),
                cwd=store.root / ".tmp",
                start_new_session=True,  # Ctrl-C is for the campaign; the run's end is told to us
                text=True,
            )
        self._answer: dict[str, str] | None = None

    @property
    def problem(self) -> str:
        """Why no run is open; "" where one is, or nobody waited for it yet."""
        return (self._answer or {}).get("problem", "")

    def wait(self) -> None:
        """Wait until the run is open, or it is known why it cannot be."""
        if self._answer is None and self._process.stdout is not None:
            self._answer = _last(self._process.stdout.readline())

    def leave(self, how: End | None, reason: str = "", *, wait: bool) -> None:
        """Say how the campaign ended, None where its decision has the run; `wait` until the run says so too."""
        if self._process.stdin is None or self._process.stdout is None:
            return
        try:
            self._process.stdin.write(json.dumps({"how": how, "reason": masked_text(reason)}) + "\n")
            self._process.stdin.close()
        except BrokenPipeError:  # it could not open the run and is gone
            pass
        if wait:
            self._process.stdout.read()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def kept_open(config: TrackingConfig, store: Store) -> Iterator[Keeper]:
    """Hold the campaign's run open in the block; one that an exception leaves is ended as killed or failed.

    Whoever leaves the block otherwise says before how it ended.
    """
    keeper = Keeper(config, store)
    try:
        yield keeper
    except (KeyboardInterrupt, SystemExit):
        keeper.leave("KILLED", "interrupted; the same command goes on with this run", wait=False)
        raise
    except QuantgateError as error:
        keeper.leave("FAILED", str(error), wait=True)
        raise
    except BaseException as error:
        keeper.leave("FAILED", f"{type(error).__name__}: {error}", wait=True)
        raise


def main(argv: list[str]) -> int:
    """keep CONFIG; or, as its children: open CONFIG, end CONFIG RUN HOW REASON."""
    what, path = argv[0], Path(argv[1])
    if what == "keep":
        return _keep(path)
    die_with_parent()
    print(json.dumps(_talk(what, path, argv[2:])), flush=True)
    return 0


def _keep(path: Path) -> int:
    try:
        with locked(path.parents[1] / ".locks" / f"{path.stem}.lock", wait_s=OTHER_S):
            opened = _child("open", str(path))
            _tell(opened)
            told = _last(sys.stdin.readline())
            how = told.get("how", "KILLED")
            if how and "run_id" in opened:
                reason = told.get("reason") or "its process was killed; the same command goes on with this run"
                _child("end", str(path), opened["run_id"], how, reason)
    except Held:
        _tell({})  # the same campaign is at work elsewhere, and its run is open
    return 0


def _tell(answer: dict[str, str]) -> None:
    try:
        print(json.dumps(answer), flush=True)
    except BrokenPipeError:  # nobody is there to hear; how it ended is still to be told to MLflow
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _child(*words: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            _command(*words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=TALK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"MLflow did not answer within {TALK_S:g} s"}
    return _last(done.stdout) or {"problem": f"the process that talks to MLflow ended with {done.returncode}"}


def _talk(what: str, path: Path, more: list[str]) -> dict[str, str]:
    """Open or end the run; what MLflow prints meanwhile goes to the log."""
    from pipelines.track import connection, parent

    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        config = TrackingConfig.model_validate_json(path.read_bytes())
        with connection.session(connection.whole(config.tracking_uri), timeout_s=config.timeout_s) as client:
            if what == "open":
                return {"run_id": parent.begin(client, config, str(config.campaign_config.get("campaign", "")))}
            run_id, how, reason = more
            parent.end(client, run_id, how, reason)  # type: ignore[arg-type]
            return {}
    except QuantgateError as error:
        return {"problem": masked_text(str(error))}
    finally:
        sys.stdout.flush()
        os.dup2(answers, 1)
        os.close(answers)


def _last(text: str) -> dict[str, Any]:
    lines = text.strip().splitlines()
    found = json.loads(lines[-1]) if lines else {}
    return found if isinstance(found, dict) else {}


def _command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pipelines.track.keeper", *words]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
