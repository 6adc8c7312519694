"""Strict, frozen pydantic models of everything configured, read or written.

`parse` gives a model or one ConfigError that lists every problem; `keyed` what of a config enters an artifact's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.errors import ConfigError, Problem, closest

_HERE = Path(__file__).resolve().parent
# Beside the package in a checkout, inside it in a wheel.
CONF_DIR = _HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf"


class Strict(BaseModel):
    """What is read from or written to a file: no unknown keys, no changes after construction.

    `unkeyed` names fields that say where or how to run, not what comes out (paths, labels, thread counts); they
    travel to the stage but do not enter an artifact's key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
    unkeyed: ClassVar[frozenset[str]] = frozenset()


def keyed(value: object) -> object:
    """The plain data of a config that enters a key: everything but `unkeyed` fields, at any depth."""
    if isinstance(value, BaseModel):
        hidden: frozenset[str] = getattr(value, "unkeyed", frozenset())
        return {name: keyed(getattr(value, name)) for name in type(value).model_fields if name not in hidden}
    if isinstance(value, dict):
        return {str(k): keyed(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [keyed(v) for v in value]
    return value


M = TypeVar("M", bound=BaseModel)


def find(path: str) -> Path:
    """Resolve a path from the config: against the working directory, else beside the shipped conf/."""
    here = Path(path).expanduser()
    if not here.is_absolute() and not here.exists():
        shipped = CONF_DIR.parent / here
        if shipped.exists():
            return shipped.resolve()
    return here.resolve()


def parse(model: type[M], data: object, prefix: str = "") -> M:
    """Validate plain data into a model.

    Raises:
        ConfigError: every problem, each with the key to change, the value and what is allowed.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems_of(error, model, prefix)) from None


def problems_of(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[Problem]:
    """Turn pydantic's errors into problems whose keys are Hydra override paths."""
    found = []
    for e in error.errors():
        path = [str(part) for part in e["loc"] if not _is_branch(part)]
        key = ".".join([prefix, *path] if prefix else path)
        if e["type"] == "extra_forbidden":
            allowed = closest(path[-1], _fields_at(model, path[:-1]))
            found.append(Problem(key, e["input"], "unknown key", allowed))
        elif e["type"] == "missing":
            found.append(Problem(key, None, "missing, and it has no default"))
        else:
            ctx = e.get("ctx", {})
            allowed = f"allowed: {ctx['expected']}" if "expected" in ctx else ""
            found.append(Problem(key, e["input"], e["msg"].removeprefix("Value error, "), allowed))
    return _merged(found)


def _merged(found: list[Problem]) -> list[Problem]:
    """One problem a key: where a value fits none of several types, each says what it wants."""
    by_key: dict[str, Problem] = {}
    for p in found:
        known = by_key.get(p.key)
        by_key[p.key] = (
            p if known is None else Problem(p.key, p.value, f"{known.message}, or: {p.message}", known.allowed)
        )
    return list(by_key.values())


_PLAIN = frozenset({"int", "float", "str", "bool"})


def _is_branch(part: object) -> bool:
    """pydantic names the branches of a union in a location; they are no keys."""
    return isinstance(part, str) and (part in _PLAIN or "[" in part or part.startswith("constrained-"))


def _fields_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The field names allowed at a path, as far as the annotations tell."""
    at: Any = model
    for part in path:
        field = getattr(at, "model_fields", {}).get(part)
        if field is None:
            continue
        at = next((a for a in _types_in(field.annotation) if hasattr(a, "model_fields")), None)
        if at is None:
            return []
    return list(getattr(at, "model_fields", {}))


def _types_in(annotation: Any) -> list[Any]:
    inner = [t for a in getattr(annotation, "__args__", ()) for t in _types_in(a)]
    return [annotation, *inner]
