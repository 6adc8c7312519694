"""Probe configurations: what is refused, and that every shipped one is valid."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipelines.config import CONF_DIR, parse
from pipelines.errors import ConfigError
from pipelines.probe.config import ProbeConfig

from .probe_configs import probe_config

SHIPPED = sorted((CONF_DIR / "probe").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path: Path) -> None:
    """Every file of conf/probe has its package header and parses, with at least three rounds and both kinds of loop."""
    text = path.read_text()
    config = parse(ProbeConfig, yaml.safe_load(text))
    assert text.startswith("# @package probe\n")
    assert config.rounds >= 3
    assert {profile.mode for profile in config.profiles} == {"closed", "open"}
    assert (CONF_DIR.parent / config.prompts).is_file()


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"mode": "closed", "requests": 4}, "takes concurrency"),
        ({"mode": "closed", "requests": 4, "concurrency": 2, "rate": 1.0}, "takes concurrency, and no rate"),
        ({"mode": "open", "requests": 4}, "takes rate"),
        ({"mode": "open", "requests": 4, "rate": 1.0, "concurrency": 2}, "takes rate .*and no concurrency"),
        ({"mode": "open", "requests": 4, "rate": 0.0}, "rate"),
        ({"mode": "open", "requests": 4, "rate": 1.0, "arrivals": "gamma"}, "'poisson' or 'constant'"),
        ({"mode": "closed", "requests": 0, "concurrency": 1}, "requests"),
    ],
)
def test_bad_profiles_say_what_they_take(profile: dict[str, object], said: str) -> None:
    """A profile without its own setting, or with the other mode's, is refused with what it takes."""
    data = probe_config().model_dump(mode="json") | {"profiles": [{"name": "p"} | profile]}
    with pytest.raises(ConfigError, match=said):
        parse(ProbeConfig, data, "probe")


def test_profile_names_are_unique() -> None:
    """Rows are told apart by their profile's name, so no two may share one."""
    profile = {"name": "twin", "mode": "closed", "requests": 1, "concurrency": 1}
    data = probe_config().model_dump(mode="json") | {"profiles": [profile, profile]}
    with pytest.raises(ConfigError, match="given twice: twin"):
        parse(ProbeConfig, data)
