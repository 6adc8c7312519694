"""Strict, frozen pydantic models of everything configured, read or written.

`parse` gives a model or one ConfigError that lists every problem; `keyed` what of a config enters an artifact's key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.errors import ConfigError, InputError, Problem, closest

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
    return value.isoformat() if isinstance(value, date) else value


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


def read(model: type[M], path: Path, what: str) -> M:
    """Read a model from a JSON file; `what` says in the error what the file is not.

    Raises:
        InputError: there is no such file, or it is not JSON.
        ConfigError: it has other keys or types than the model.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {what} ({error})") from None
    return parse(model, data, str(path))


def problems_of(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[Problem]:
    """Turn pydantic's errors into problems whose keys are Hydra override paths."""
    found = []
    errors = error.errors()
    for e in errors:
        if e["type"] == "too_short" and any(_inside(other["loc"], e["loc"]) for other in errors):
            continue  # nothing is missing: what is there is wrong, which is told
        path, at = _walk(model, e["loc"])
        key = ".".join([prefix, *path] if prefix else path)
        ctx = e.get("ctx", {})
        if e["type"] == "extra_forbidden":
            allowed = closest(path[-1], dict.fromkeys(name for one in at for name in one.model_fields))
            found.append(Problem(key, e["input"], "unknown key", allowed))
        elif e["type"] == "missing":
            found.append(Problem(key, None, "missing, and it has no default"))
        elif e["type"] in ("union_tag_not_found", "union_tag_invalid"):
            found.append(_branch_unknown(key, ctx))
        else:
            allowed = f"allowed: {ctx['expected']}" if "expected" in ctx else ""
            found.append(Problem(key, e["input"], e["msg"].removeprefix("Value error, "), allowed))
    return _merged(found)


def _inside(inner: Sequence[int | str], outer: Sequence[int | str]) -> bool:
    return len(inner) > len(outer) and tuple(inner[: len(outer)]) == tuple(outer)


def _branch_unknown(key: str, ctx: Mapping[str, Any]) -> Problem:
    """A union is told apart by one of its keys, which is missing or says something unknown."""
    key = f"{key}.{str(ctx['discriminator']).strip(_QUOTES)}"
    if "tag" not in ctx:
        return Problem(key, None, "missing, and it has no default")
    known = [name.strip(f" {_QUOTES}") for name in str(ctx["expected_tags"]).split(",")]
    return Problem(key, ctx["tag"], "there is no such", closest(str(ctx["tag"]), known))


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
_QUOTES = "'\""


def _is_branch(part: str) -> bool:
    """pydantic names the branches of a union in a location; they are no keys."""
    return part in _PLAIN or "[" in part or part.startswith("constrained-")


def _walk(model: type[BaseModel], location: Sequence[int | str]) -> tuple[list[str], list[Any]]:
    """The keys of a location, and the models that its last key may be of, as far as the annotations tell."""
    keys: list[str] = []
    at: list[Any] = [model]
    inside: list[Any] = at
    for part in location:
        if isinstance(part, str) and _is_branch(part):
            continue
        if branch := [one for one in inside if _names(one, part, among=len(inside))]:
            inside = branch
            continue
        keys.append(str(part))
        at = inside
        fields = [one.model_fields[part] for one in at if part in one.model_fields]
        inside = [t for f in fields for t in _types_in(f.annotation) if hasattr(t, "model_fields")] if fields else at
    return keys, at


def _names(model: Any, part: int | str, among: int) -> bool:
    """Whether a part of a location is a branch's name: the model's own, or the value that tells it `among` others."""
    if among == 1:
        return part == model.__name__ and part not in model.model_fields
    told = (getattr(field.annotation, "__args__", ()) for field in model.model_fields.values() if _literal(field))
    return part == model.__name__ or (part,) in told


def _literal(field: Any) -> bool:
    return get_origin(field.annotation) is Literal


def _types_in(annotation: Any) -> list[Any]:
    inner = [t for a in getattr(annotation, "__args__", ()) for t in _types_in(a)]
    return [annotation, *inner]
