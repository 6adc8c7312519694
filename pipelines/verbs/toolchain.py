"""`quantgate toolchain list|sync|check`: the interpreters stages can run in, as they are here, made, or compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines import terminal
from pipelines.campaign import CampaignConfig
from pipelines.cli import Answer
from pipelines.compose import compose
from pipelines.config import parse
from pipelines.errors import ConfigError, EnvironmentProblem, Problem, closest
from pipelines.flow import containers, venvs
from pipelines.flow.inspection import Found, look, size_of
from pipelines.flow.toolchain import ContainerConfig, Toolchain, VenvConfig, toolchains, unpinned


def toolchain(args: argparse.Namespace) -> Answer:
    """Do what was asked with the toolchains named, or all; an argument with `=` is an override."""
    overrides = [word for word in args.names if "=" in word]
    names = [word for word in args.names if "=" not in word]
    directory = Path(args.config_dir).resolve() if args.config_dir else None
    config = parse(CampaignConfig, compose(overrides, directory))
    problems: list[Problem] = []
    known = toolchains(config.toolchain, config.paths.toolchains_home, problems)
    problems += [Problem("toolchain", n, "no such toolchain", closest(n, known)) for n in names if n not in known]
    if problems:
        raise ConfigError(problems)
    wanted = [known[name] for name in names or known]
    match args.action:
        case "sync":
            return _sync(wanted, named=bool(names))
        case "check":
            return _check(wanted, named=bool(names))
    return _list(wanted, known.values(), config.paths.toolchains_home)


def _list(wanted: Sequence[Toolchain], known: Iterable[Toolchain], home: Path) -> Answer:
    found = [look(t, measure=True) for t in wanted]
    _show(found)
    left = _left_over(known, home)
    for path, size in left.items():
        print(
            f"no toolchain has this lock any more: {path} ({terminal.size(size)}); remove it if no other store uses it"
        )
    return Answer(0, {"toolchains": _documents(found), "left_over": [str(path) for path in left]})


def _check(wanted: Sequence[Toolchain], *, named: bool) -> Answer:
    """Compare with the locks. What is only missing is an error where it was named."""
    found = [look(t, measure=True) for t in wanted]
    _show(found)
    wrong = [f for f in found if f.state == "drifted" or (named and f.state != "ready")]
    for f in wrong:
        print(f"toolchain {f.name}: {f.what}; {f.to_do}", file=sys.stderr)
    return Answer(EnvironmentProblem.exit_code if wrong else 0, {"toolchains": _documents(found)})


def _sync(wanted: Sequence[Toolchain], *, named: bool) -> Answer:
    """Make what is missing, and anew what drifted. An image, often tens of gigabytes, is fetched only when named."""
    done: dict[str, str] = {}
    for each in wanted:
        spec = each.spec
        with terminal.Steps(f"toolchain {each.name}") as tell:
            if isinstance(spec, VenvConfig):
                done[each.name] = venvs.make(venvs.venv(each, spec), tell, repair=True)
            elif isinstance(spec, ContainerConfig) and named:
                if spec.digest is None:
                    raise ConfigError([unpinned(each.name, spec)])
                tell(0, 1, f"fetching {containers.reference(spec)}")
                containers.pull(each, spec)
                done[each.name] = "fetched"
    found = [look(t, measure=True) for t in wanted if t.name in done]
    _show(found)
    return Answer(0, {"toolchains": [{**d, "done": done[d["name"]]} for d in _documents(found)]})


def _show(found: Sequence[Found]) -> None:
    terminal.table(
        "Toolchains",
        ("toolchain", "kind", "state", "what there is", "disk", "where", "what to do"),
        (
            (f.name, f.kind, f.state, f.what, terminal.size(f.size_bytes) if f.size_bytes else "", f.where, f.to_do)
            for f in found
        ),
    )


def _documents(found: Sequence[Found]) -> list[dict[str, Any]]:
    return [asdict(f) for f in found]


def _left_over(known: Iterable[Toolchain], home: Path) -> dict[Path, int]:
    """Environments made from locks that no toolchain has any more."""
    current = {venvs.venv(t, t.spec).path for t in known if isinstance(t.spec, VenvConfig)}
    made = sorted(note.parent for note in home.glob(f"*/{venvs.NOTE}"))
    return {path: size_of(path) for path in made if path not in current}
