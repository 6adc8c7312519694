"""The only door from Hydra and OmegaConf: conf/ and overrides become plain data here, and nothing else imports them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.config import CONF_DIR
from pipelines.errors import ConfigError, Problem, closest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """Compose conf/config.yaml with Hydra overrides into plain data, interpolations resolved.

    Raises:
        ConfigError: an override that names no group, option or key, with the closest match, or chooses none of a group.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
    from yaml import YAMLError

    directory = config_dir or CONF_DIR
    if not (directory / "config.yaml").is_file():
        raise ConfigError(f"--config-dir={str(directory)!r}: holds no config.yaml")
    _parsed(overrides)
    try:
        found = _composed(overrides, directory)
    except YAMLError as error:
        raise ConfigError(f"{directory}: a file there is not YAML: {' '.join(str(error).split())}") from None
    except MissingMandatoryValue as error:
        raise ConfigError(f"{getattr(error, 'full_key', None) or 'a key'}: must be given, it has no default") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides, directory)) from None
    if empty := list(_emptied(found, overrides, directory)):
        raise ConfigError(empty)
    return found


def _emptied(found: Mapping[str, Any], overrides: Sequence[str], directory: Path) -> Iterator[Problem]:
    """Groups of which an override chooses nothing (variant=[]), and nothing else puts anything there."""
    groups = _groups(directory)
    for override in overrides:
        name, _, value = override.lstrip("+").partition("=")
        if name in groups and "".join(value.split()) == "[]" and not found.get(name):
            yield Problem(name, [], "none is chosen; choose at least one", closest("", groups[name]))


def of_now(overrides: Sequence[str], parts: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """The overrides that choose an option of a group, name a campaign, or are about one of these parts."""
    heads = {*_groups(config_dir or CONF_DIR), "experiment", "campaign"}

    def of_these(o: Override) -> bool:
        return not o.is_delete() and (o.key_or_group in heads or o.key_or_group.partition(".")[0] in parts)

    return [o.input_line or "" for o in _parsed(overrides) if of_these(o)]


def amend(
    recorded: Mapping[str, Any],
    fresh: Mapping[str, Any],
    overrides: Sequence[str],
    parts: Sequence[str],
    config_dir: Path | None = None,
) -> dict[str, Any]:
    """Put overrides on top of a configuration that was composed before: options of groups are those of conf/ now.

    These `parts` are taken from what is composed now, `fresh`. `campaign` stays what it was, and `experiment` says no
    more than which campaign is meant.

    Raises:
        ConfigError: an override that names no option or key, or several values of one.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    parsed, groups = _parsed(overrides), _groups(config_dir or CONF_DIR)
    if unfit := next((o.input_line for o in parsed if o.is_sweep_override() or o.is_delete()), None):
        raise ConfigError(
            f"{unfit}: a campaign that was made before is amended by single values, and nothing is removed"
        )
    chosen = [o for o in parsed if o.key_or_group in groups and o.key_or_group != "experiment"]
    options = compose([o.input_line or "" for o in chosen], config_dir) if chosen else {}
    data = dict(recorded) | {name: fresh[name] for name in parts if name in fresh}
    data |= {o.key_or_group: options[o.key_or_group] for o in chosen if o.key_or_group not in parts}
    amended = OmegaConf.create(data)
    OmegaConf.set_struct(amended, True)
    for o in parsed:
        if o in chosen or o.key_or_group.partition(".")[0] in (*parts, "campaign", "experiment"):
            continue
        try:
            OmegaConf.update(amended, o.key_or_group, o.value(), force_add=o.is_add() or o.is_force_add())
        except OmegaConfBaseException:
            near = _near(o.key_or_group, data)
            raise ConfigError(f"{o.input_line}: the campaign made then has no such key; {near}") from None
    found = OmegaConf.to_container(amended, resolve=True)
    return {str(k): v for k, v in found.items()} if isinstance(found, dict) else {}


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
    groups = _groups(directory)
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


def _groups(directory: Path) -> dict[str, list[str]]:
    """The options of each group."""
    return {p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in directory.iterdir() if p.is_dir()}


def _nearest(key: str, overrides: Sequence[str], directory: Path) -> str:
    """The keys that stand where an unknown one was looked for, among what the chosen groups compose to."""
    groups = {p.name for p in directory.iterdir() if p.is_dir()}
    return _near(key, _composed([o for o in overrides if o.partition("=")[0] in groups], directory))


def _near(key: str, at: Any) -> str:
    """The keys that stand where an unknown one was looked for."""
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(at, Mapping) or parent not in at:
            return closest(parent, at) if isinstance(at, Mapping) and at else ""
        at = at[parent]
    return closest(last, at) if isinstance(at, Mapping) and at else ""
