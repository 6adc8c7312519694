"""A stand-in for docker: keeps every command line it is given, and runs a container's command here, with what the
mounts and --env say and nothing else. What it runs is told that it is simulated; only a stand-in ever says that.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

VALUED = {"--name", "--pull", "--network", "--ipc", "--ulimit", "--gpus", "--user", "--workdir", "--mount", "--env",
          "--entrypoint", "--device", "--userns", "--shm-size"}  # fmt: skip


def install(directory: Path, name: str = "docker") -> Path:
    """Put an executable stand-in into a directory, for the front of PATH; its command lines go to `calls.jsonl`."""
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / name
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -P {Path(__file__).resolve()} {directory} {name} "$@"\n')
    script.chmod(0o755)
    return script


def calls(directory: Path) -> list[list[str]]:
    """Every command line so far, without the program's name."""
    log = directory / "calls.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def parsed(argv: list[str]) -> tuple[dict[str, list[str]], str, list[str]]:
    """The options of a `run` command line, its image, and the words after it."""
    options: dict[str, list[str]] = {}
    rest = list(argv[1:])
    while rest and rest[0].startswith("--"):
        word = rest.pop(0)
        options.setdefault(word, []).append(rest.pop(0) if word in VALUED else "")
    return options, rest[0], rest[1:]


def mounts(options: dict[str, list[str]]) -> dict[str, str]:
    """Target -> source of each --mount."""
    fields = [dict(part.partition("=")[::2] for part in mount.split(",")) for mount in options.get("--mount", [])]
    return {f["dst"]: f["src"] for f in fields}


def _run(argv: list[str]) -> None:
    options, _, command = parsed(argv)
    at = mounts(options)
    env = dict(word.partition("=")[::2] for word in options.get("--env", []) if "=" in word)
    env |= {word: os.environ[word] for word in options.get("--env", []) if "=" not in word and word in os.environ}
    if "pipelines.flow.worker" not in command:
        words = [_outside(w, at) if any(w.startswith(t) for t in at) else w for w in command]
        program = options["--entrypoint"][0]
        os.execvpe(program, [program, *words], env | {"PATH": os.environ["PATH"], "QUANTGATE_SIMULATED": "1"})
    inside = tempfile.mkdtemp(prefix="fake-docker-")
    package = next(target for target in at if target.startswith("/quantgate/packages/"))
    Path(inside, Path(package).name).symlink_to(at[package])
    request = Path(_outside(command[-1], at))
    here = json.loads(request.read_text())
    here["store"] = _outside(here["store"], at)
    local = Path(inside, request.name)
    local.write_text(json.dumps(here))
    env |= {"PYTHONPATH": inside, "PATH": os.environ["PATH"], "QUANTGATE_SIMULATED": "1"}
    os.chdir(_outside(options["--workdir"][0], at))
    os.execve(sys.executable, [sys.executable, *command[:-1], str(local)], env)


def _outside(path: str, at: dict[str, str]) -> str:
    """A path in the container as it is here."""
    target = max((t for t in at if path == t or path.startswith(f"{t}/")), key=len)
    return at[target] + path[len(target) :]


def main(directory: Path, argv: list[str]) -> int:
    """Keep the command line, then do what it says as far as a stand-in can."""
    with (directory / "calls.jsonl").open("a") as log:
        log.write(json.dumps(argv) + "\n")
    match argv[:2]:
        case ["run", *_]:
            _run(argv)
        case ["image", "inspect"]:
            if (directory / "no-image").exists():
                return 1
            print(123456789)
        case ["pull", _]:
            if (directory / "no-registry").exists():
                print("manifest unknown", file=sys.stderr)
                return 1
            (directory / "no-image").unlink(missing_ok=True)
        case ["info", *_]:
            if (directory / "no-daemon").exists():
                return 1
            print("fake")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[3:]))
