"""The only door from Hydra/OmegaConf YAML to strict, frozen pydantic models.

`compose` gives plain data, `parse` gives a model or one ConfigError that lists every problem.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipelines.errors import ConfigError, Problem, closest

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"


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


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """Compose conf/config.yaml with Hydra overrides into plain data, interpolations resolved.

    Raises:
        ConfigError: an override that names no group, option or key, with the closest match.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(config_dir or CONF_DIR), version_base="1.3", job_name="quantgate"):
            composed = hydra_compose("config", list(overrides))
        data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides, config_dir or CONF_DIR)) from None
    return {str(k): v for k, v in data.items()} if isinstance(data, dict) else {}


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
        path = [str(part) for part in e["loc"]]
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
    return found


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


def _explain(error: Exception, overrides: Sequence[str], config_dir: Path) -> str:
    """Hydra's own words in one line, and for an unknown group or option what there is, nearest first."""
    text = " ".join(str(error).split())
    groups = sorted(p.name for p in config_dir.iterdir() if p.is_dir())
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        if name in groups:
            options = [p.stem for p in (config_dir / name).glob("*.yaml")]
            wrong = [v for v in re.findall(r"[\w.-]+", value) if v not in options and v != "null"]
            if wrong:
                return f"{name}={value}: there is no {name} {wrong[0]!r}; {closest(wrong[0], options)}"
        elif f"'{name}'" in text or f"{name} " in text or name in text:
            top = groups if "." not in name else []
            hint = f"; {closest(name, top)}" if top else ""
            return f"{override}: {text.split(' Full list')[0]}{hint}"
    return text


def sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of comma-separated overrides (a=1,2 b=3,4 gives four lists), by Hydra's own grammar.

    Raises:
        ConfigError: an override that Hydra cannot parse.
    """
    import itertools

    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        choices = [
            [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
            if o.is_sweep_override()
            else [o.input_line or ""]
            for o in parsed
        ]
    except HydraException as error:
        raise ConfigError(" ".join(str(error).split())) from None
    return [list(job) for job in itertools.product(*choices)]
