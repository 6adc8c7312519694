"""task.yaml: lm-eval's own task format. `!function module.name` is kept as a name until the task is run."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import yaml

from pipelines.errors import InputError, closest
from pipelines.evaluate.card import Loader, read_yaml

NAME = "task.yaml"
OUTPUT_TYPES = ("multiple_choice", "generate_until", "loglikelihood", "loglikelihood_rolling")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a task file names by `!function module.name`; nothing is imported to read it."""

    name: str

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


class _Loader(Loader):  # type: ignore[valid-type,misc]
    """Reads `!function` tags."""


def _construct(_: yaml.SafeLoader, node: yaml.Node) -> Function:
    return Function(str(node.value))


_Loader.add_constructor("!function", _construct)


def read(directory: Path, problems: list[str]) -> dict[str, object] | None:
    """Read and check a directory's task file; what is wrong is added to `problems`, one line for each."""
    path = directory / NAME
    task = read_yaml(path, problems, _Loader)
    if task is not None:
        problems += [f"{path}: {problem}" for problem in _problems(task, directory)]
    return task


def metrics(task: Mapping[str, object]) -> tuple[str, ...]:
    """The names that a task's metric_list gives its scores; empty where it leaves them to its type."""
    listed = task.get("metric_list")
    entries = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    return tuple(str(entry["metric"]) for entry in entries if "metric" in entry)


def code(task: Mapping[str, object]) -> Iterator[tuple[str, Path]]:
    """The installed modules whose functions a task names, with their source files."""
    for module in sorted({function.module for function in _functions(task)}):
        spec = find_spec(module) if _importable(module) else None
        if spec is not None and spec.origin is not None:
            yield module, Path(spec.origin)


def resolved(task: Mapping[str, object], directory: Path) -> dict[str, object]:
    """The task with functions in place of their names.

    Raises:
        InputError: a module that has no such function.
    """
    return {key: _resolved(value, directory) for key, value in task.items()}


def _problems(task: Mapping[str, object], directory: Path) -> Iterator[str]:
    if "include" in task:
        yield "include: is not read here; write the keys of the included file out"
    kind = str(task.get("output_type", ""))
    if kind not in OUTPUT_TYPES:
        yield f"output_type: {kind!r}: no such type ({closest(kind, OUTPUT_TYPES)})"
    for function in _functions(task):
        if not _beside(function, directory).is_file() and not _importable(function.module):
            yield f"!function {function.name}: there is no module {function.module!r} beside the file or installed"


def _functions(value: object) -> Iterator[Function]:
    if isinstance(value, Function):
        yield value
    elif isinstance(value, Mapping):
        yield from (f for inner in value.values() for f in _functions(inner))
    elif isinstance(value, list):
        yield from (f for inner in value for f in _functions(inner))


def _beside(function: Function, directory: Path) -> Path:
    return directory / f"{function.module}.py"


def _importable(module: str) -> bool:
    try:
        return bool(module) and find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _resolved(value: object, directory: Path) -> object:
    if isinstance(value, Mapping):
        return {key: _resolved(inner, directory) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, directory) for inner in value]
    if not isinstance(value, Function):
        return value
    beside = _beside(value, directory)
    module = _imported(beside) if beside.is_file() else importlib.import_module(value.module)
    name = value.name.rpartition(".")[2]
    if not hasattr(module, name):
        raise InputError(f"{directory / NAME}: !function {value.name}: the module has no function {name!r}")
    return getattr(module, name)


def _imported(file: Path) -> object:
    """Import a file under a name made from its place, so that two eval sets may both have a `scoring.py`."""
    name = "evalset_" + hashlib.sha256(str(file).encode()).hexdigest()[:16]
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{file}: cannot be imported")
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
