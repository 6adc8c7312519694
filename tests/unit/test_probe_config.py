"""Probe configurations: what is refused, and that every shipped one is valid."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipelines.config import CONF_DIR, keyed, parse
from pipelines.errors import ConfigError
from pipelines.evaluate.evalset import EvalsetConfig, load
from pipelines.probe import profiles, sources
from pipelines.probe.config import ProbeConfig
from pipelines.workload import pinned

from .probe_configs import probe_config

EVALSETS = CONF_DIR.parent / "evalsets"
SHIPPED = sorted((CONF_DIR / "probe").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path: Path) -> None:
    """Every file of conf/probe has its package header and parses; its prompts and traces are there."""
    text = path.read_text()
    config = parse(ProbeConfig, yaml.safe_load(text))
    assert text.startswith("# @package probe\n")
    assert config.rounds >= 3
    assert sources.read(pinned(config, [load(EvalsetConfig(path=str(EVALSETS / "ticket_json")))])).wanted


@pytest.mark.parametrize("path", sorted((CONF_DIR / "gate").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_probe_goes_with_every_shipped_gate(path: Path) -> None:
    """Each sends the profiles by which the gate compares, so that one can be changed without the other."""
    gate = yaml.safe_load(path.read_text())
    named = {gate[part]["profile"] for part in ("speed", "latency") if "profile" in gate.get(part, {})}
    for probe in SHIPPED:
        assert named <= {profile["name"] for profile in yaml.safe_load(probe.read_text())["profiles"]}


@pytest.mark.parametrize("name", ["default", "quick"])
def test_the_usual_probes_have_both_kinds_of_loop(name: str) -> None:
    """Latency under a fixed number in flight says nothing about arrivals that do not wait."""
    config = parse(ProbeConfig, yaml.safe_load((CONF_DIR / "probe" / f"{name}.yaml").read_text()))
    assert {profile.mode for profile in config.profiles} == {"closed", "open"}


CLOSED = {"mode": "closed", "requests": 4, "concurrency": 2}
OPEN = {"mode": "open", "requests": 4, "rate": 1.0}
SEARCH = {"mode": "search", "low": 1, "high": 2, "requests": 4, "slo": {"ttft_ms": 5}}
SPIKE = {"mode": "spike", "base": 2, "peak": 8, "requests": 8}
REPLAY = {"mode": "replay", "trace": "t.jsonl"}
STEPS = {"mode": "steps", "steps": [{"rate": 1, "seconds": 2}]}


@pytest.mark.parametrize("given", [CLOSED, OPEN, SEARCH, SPIKE, REPLAY, STEPS], ids=lambda given: str(given["mode"]))
def test_every_mode_has_a_profile(given: dict[str, object]) -> None:
    """With nothing but its own keys each mode is valid, and comes back from JSON as it was."""
    config = ProbeConfig.model_validate(probe_config().model_dump() | {"profiles": [{"name": "p"} | given]})
    assert config.profiles[0].mode == given["mode"]
    assert ProbeConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("given", "opened", "in_flight", "rates", "most"),
    [
        (CLOSED, False, [2], [None], 2),
        (OPEN, True, [None], [1.0], 1),
        (REPLAY, True, [None], [None], 1),
        (STEPS | {"steps": [{"rate": 1, "seconds": 2}, {"rate": 3, "seconds": 1}]}, True, [None] * 2, [1.0, 3.0], 1),
        (SPIKE, False, [2, 8, 2], [None] * 3, 8),
        (SEARCH | {"resolution": 1}, True, [None] * 2, [1.0, 2.0], 1),
    ],
    ids=lambda given: str(given["mode"]) if isinstance(given, dict) else "",
)
def test_each_phase_says_how_it_loads(
    given: dict[str, object], opened: bool, in_flight: list[int | None], rates: list[float | None], most: int
) -> None:
    """A closed loop by what is in flight, an open one by its rate; a trace has no rate but its own times."""
    one = probe_config(profiles=[{"name": "p"} | given]).profiles[0]
    assert profiles.is_open(one) is opened
    assert [profiles.concurrency_of(one, phase) for phase in range(len(in_flight))] == in_flight
    assert [profiles.rate_of(one, phase) for phase in range(len(rates))] == rates
    assert profiles.widest(one) == most


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({}, r"probe\.profiles\.0\.mode=None: missing"),
        ({"mode": "clsoed"}, r"probe\.profiles\.0\.mode='clsoed': .*did you mean 'closed'\? allowed: closed, open"),
        ({"mode": "closed", "requests": 4}, r"probe\.profiles\.0\.concurrency=None: missing"),
        (CLOSED | {"rate": 1.0}, r"probe\.profiles\.0\.rate=1\.0: unknown key .*allowed: bucket, concurrency"),
        (OPEN | {"concurency": 2}, r"profiles\.0\.concurency=2: unknown key"),
        (OPEN | {"rate": 0.0}, r"probe\.profiles\.0\.rate=0\.0: .*greater than 0"),
        (OPEN | {"arrivals": "gama"}, "'constant', 'poisson' or 'gamma'"),
        (OPEN | {"arrivals": "gamma"}, "arrivals gamma takes burstiness"),
        (OPEN | {"burstiness": 0.5}, "no other arrivals do"),
        (CLOSED | {"requests": 0}, r"probe\.profiles\.0\.requests=0"),
        (STEPS | {"steps": []}, r"probe\.profiles\.0\.steps=\[\]"),
        (STEPS | {"steps": [{"rate": 0, "seconds": 2}]}, r"probe\.profiles\.0\.steps\.0\.rate=0"),
        (SPIKE | {"peak": 2}, r"peak=2 must be above base=2"),
        (SPIKE | {"requests": 7}, r"requests=7 a phase never reach peak=8"),
        (REPLAY | {"speed": 3}, r"probe\.profiles\.0\.speed=3"),
        (SEARCH | {"high": 1}, r"high=1 must be above low=1"),
        (SEARCH | {"slo": {}}, r"probe\.profiles\.0\.slo=\{\}: give at least one of ttft_ms"),
        (SEARCH | {"slo": {"ttft": 5}}, r"slo\.ttft=5: unknown key \(did you mean 'ttft_ms'"),
        (CLOSED | {"prefix": "shared"}, "prefix shared takes shared_tokens"),
        (CLOSED | {"shared_tokens": 5}, "unique takes none"),
        (CLOSED | {"bucket": "<=128", "input_tokens": 9}, "give bucket or input_tokens, not both"),
        (CLOSED | {"bucket": "long"}, r"probe\.profiles\.0\.bucket='long': .*'<=128'"),
        (CLOSED | {"prefix": "shared", "shared_tokens": 9, "input_tokens": 10}, "leaves no room for a prompt"),
    ],
)
def test_bad_profiles_say_what_they_take(profile: dict[str, object], said: str) -> None:
    """A profile without its own setting, or with another mode's, is refused with the key to change."""
    data = probe_config().model_dump(mode="json") | {"profiles": [{"name": "p"} | profile]}
    with pytest.raises(ConfigError, match=said):
        parse(ProbeConfig, data, "probe")


def test_where_a_file_lies_is_not_what_it_holds() -> None:
    """Keys take the hash of prompts and trace, not their paths."""
    made = [
        keyed(probe_config(prompts=f"/{d}/p", profiles=[{"name": "p", "mode": "replay", "trace": f"/{d}/t"}]))
        for d in "ab"
    ]
    assert made[0] == made[1]
    assert "trace_sha256" in str(made[0])


def test_profile_names_are_unique() -> None:
    """Rows are told apart by their profile's name, so no two may share one."""
    profile = {"name": "twin", "mode": "closed", "requests": 1, "concurrency": 1}
    data = probe_config().model_dump(mode="json") | {"profiles": [profile, profile]}
    with pytest.raises(ConfigError, match="given twice: twin"):
        parse(ProbeConfig, data)
