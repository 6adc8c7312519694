"""A first guess of how long a probe takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipelines.config import CONF_DIR, parse
from pipelines.probe.config import ProbeConfig
from pipelines.probe.duration import expected_s
from pipelines.workload import pinned, probe_seconds

from .probe_configs import probe_config


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({"mode": "open", "rate": 2.0, "requests": 30}, 15.0),
        ({"mode": "steps", "steps": [{"rate": 1, "seconds": 4}, {"rate": 9, "seconds": 3}]}, 7.0),
        ({"mode": "closed", "concurrency": 3, "requests": 10, "max_tokens": 50}, 10.0),
        ({"mode": "spike", "base": 1, "peak": 4, "requests": 10, "max_tokens": 50}, 30.0),
        ({"mode": "replay", "trace": "t", "speed": 0.5}, 80.0),
        ({"mode": "search", "low": 1, "high": 4, "requests": 6, "resolution": 1, "slo": {"e2e_ms": 9}}, 6.0),
    ],
    ids=lambda given: str(given["mode"]) if isinstance(given, dict) else "",
)
def test_loads_last_as_long_as_their_schedules(given: dict[str, object], seconds: float) -> None:
    """Three rounds of one profile take three times as long, and as many server starts."""
    config = probe_config(profiles=[{"name": "p"} | given], rounds=3)
    assert expected_s(config, {"p": 40.0}) == pytest.approx(3 * (5 + seconds))


@pytest.mark.parametrize("path", sorted((CONF_DIR / "probe").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_probe_takes_less_than_half_an_hour_an_engine(path: Path) -> None:
    """And two engines take twice as long as one."""
    config = pinned(parse(ProbeConfig, yaml.safe_load(path.read_text())), [])
    assert 10 < probe_seconds(config, 1) < 1800
    assert probe_seconds(config, 2) == 2 * probe_seconds(config, 1)
