"""The only door from Hydra and OmegaConf: conf/ and overrides become plain data here, and nothing else imports them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.config import CONF_DIR
from pipelines.errors import ConfigError, closest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """Compose conf/config.yaml with Hydra overrides into plain data, interpolations resolved.

    Raises:
        ConfigError: an override that names no group, option or key, with the closest match.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
    from yaml import YAMLError

    directory = config_dir or CONF_DIR
    if not (directory / "config.yaml").is_file():
        raise ConfigError(f"--config-dir={str(directory)!r}: holds no config.yaml")
    _parsed(overrides)
    try:
        return _composed(overrides, directory)
    except YAMLError as error:
        raise ConfigError(f"{directory}: a file there is not YAML: {' '.join(str(error).split())}") from None
    except MissingMandatoryValue as error:
        raise ConfigError(f"{getattr(error, 'full_key', None) or 'a key'}: must be given, it has no default") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides, directory)) from None


def sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of comma-separated overrides (a=1,2 b=3,4 gives four lists), by Hydra's own grammar.

    Raises:
        ConfigError: an override that Hydra cannot parse.
    """
    choices = [
        [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [o.input_line or ""]
        for o in _parsed(overrides)
    ]
    return [list(job) for job in itertools.product(*choices)]


def _parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides one by one, so that the one Hydra cannot read is named."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, found = OverridesParser.create(), []
    for override in overrides:
        try:
            found.append(parser.parse_override(override))
        except HydraException as error:
            reason = str(error).split("See https")[0]
            raise ConfigError(f"{override}: not an override Hydra can read ({' '.join(reason.split())})") from None
    return found


def _composed(overrides: Sequence[str], directory: Path) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(directory), version_base="1.3", job_name="quantgate"):
        composed = hydra_compose("config", list(overrides))
    data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return {str(k): v for k, v in data.items()} if isinstance(data, dict) else {}


def _explain(error: Exception, overrides: Sequence[str], directory: Path) -> str:
    """Say which override is wrong and what there is, nearest first; failing that, Hydra's own words in one line."""
    groups = {p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in directory.iterdir() if p.is_dir()}
    text = " ".join(str(error).split())
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        if name in groups:
            wrong = [v for v in re.findall(r"[\w.-]+", value) if v not in groups[name] and v != "null"]
            if wrong:
                return f"{name}={value}: there is no {name} {wrong[0]!r}; {closest(wrong[0], groups[name])}"
        elif f"'{name}'" in text:
            near = _nearest(name, overrides, directory)
            return f"{override}: there is no key {name!r}; {near or f'write +{override} to add it'}"
    return text.split(" Full list")[0]


def _nearest(key: str, overrides: Sequence[str], directory: Path) -> str:
    """The keys that stand where an unknown one was looked for, among what the chosen groups compose to."""
    groups = {p.name for p in directory.iterdir() if p.is_dir()}
    at: Any = _composed([o for o in overrides if o.partition("=")[0] in groups], directory)
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(at, Mapping) or parent not in at:
            return closest(parent, at) if isinstance(at, Mapping) and at else ""
        at = at[parent]
    return closest(last, at) if isinstance(at, Mapping) and at else ""
