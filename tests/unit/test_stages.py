"""Every stage can be run by what it is called: import strings are checked by nobody else until a worker reads them."""

from __future__ import annotations

import inspect

import pytest

from pipelines import stages
from pipelines.config import Strict
from pipelines.engine.table import TARGETS
from pipelines.flow.stage import Stage, resolve
from pipelines.quantize.table import QUANTIZERS
from pipelines.stages import quantizer_stage

STAGES = [one for one in vars(stages).values() if isinstance(one, Stage)]
STRINGS = [
    *((one.function, one.config_type) for one in STAGES),
    *((row.function, row.config_type) for row in QUANTIZERS.values()),
    *((row.build, row.config_type) for row in TARGETS.values()),
]


@pytest.mark.parametrize(("function", "config_type"), STRINGS, ids=lambda s: s)
def test_import_strings_name_a_function_and_its_config(function: str, config_type: str) -> None:
    """The function takes (config, out, *, inputs), the config is a strict model."""
    names = list(inspect.signature(resolve(function)).parameters.values())
    assert [p.name for p in names[:2]] == ["config", "out"]
    assert all(p.kind is p.KEYWORD_ONLY for p in names[2:])
    found = resolve(config_type)
    assert isinstance(found, type) and issubclass(found, Strict)


def test_only_what_measures_nothing_shares_the_machine() -> None:
    """Calibration sets and variants hold no time and no speed; scores, latency and what starts servers run alone."""
    assert ["calibration"] == [one.name for one in STAGES if one.shares_machine]
    assert all(quantizer_stage(row).shares_machine for row in QUANTIZERS.values())
    assert not any(one.device_bound or one.may_be_partial for one in STAGES if one.shares_machine)
