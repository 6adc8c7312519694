"""The configuration door: strict models, every problem at once, closest matches."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from pipelines.compose import compose, sweep
from pipelines.config import Strict, parse
from pipelines.errors import ConfigError, closest


class Inner(Strict):
    rate: float = Field(gt=0)


class Outer(Strict):
    name: str
    inner: Inner
    many: dict[str, Inner] = Field(default_factory=dict)


def problems(data: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, data, "top")
    return [str(p) for p in caught.value.problems]


def test_every_problem_is_told_at_once_with_its_key() -> None:
    """Three mistakes give three problems, each with the override path to change."""
    found = problems({"nam": "x", "inner": {"rate": -1}})
    assert 3 == len(found)
    assert any(p.startswith("top.nam='x': unknown key (did you mean 'name'?") for p in found)
    assert any(p.startswith("top.name=None: missing") for p in found)
    assert any(p.startswith("top.inner.rate=-1") for p in found)


def test_unknown_keys_inside_are_matched_against_that_place() -> None:
    """The closest match for a nested key comes from the nested model."""
    (found,) = problems({"name": "x", "inner": {"rate": 1, "raet": 2}})
    assert "did you mean 'rate'" in found


def test_values_that_are_too_long_are_cut() -> None:
    """One bad value does not fill the screen."""
    (found,) = problems({"name": "x", "inner": "y" * 5000})
    assert len(found) < 400


def test_closest_puts_the_nearest_first() -> None:
    """The nearest name is offered, then what there is."""
    assert "did you mean 'awq'? allowed: awq, gptq" == closest("aqw", ["gptq", "awq"])
    assert "allowed: awq, gptq" == closest("zzzzzz", ["gptq", "awq"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("variant=[baselin]", "did you mean 'baseline'"),
        ("evalset=[support_intents]", "did you mean 'support_intent'"),
        ("experiment=dmo", "did you mean 'demo'"),
        ("evalsets=[support_intent]", "did you mean 'evalset'"),
        ("vairant.baseline.scheme=x", "did you mean 'variant'"),
        ("gate.aplha=0.1", "did you mean 'alpha'"),
        ("variant=[", "variant=["),
        ("variant.rtn_w4a16_g64.quantiser=x", "did you mean 'quantizer'"),
        ("experiment.demo=1", "experiment.demo"),
        ("checkpoint=smollm2_135m_hub", "checkpoint.revision: must be given"),
    ],
)
def test_a_wrong_override_offers_the_closest(override: str, said: str) -> None:
    """Groups, options and keys that do not exist are named, nearest match first."""
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert said in str(caught.value)


def test_choosing_nothing_of_a_group_is_one_problem_each() -> None:
    """The key, the empty choice and what there is to choose from; what is written in place is a choice too."""
    with pytest.raises(ConfigError) as caught:
        compose(["variant=[]", "evalset=[ ]"])
    assert [("variant", []), ("evalset", [])] == [(p.key, p.value) for p in caught.value.problems]
    told = str(caught.value.problems[0])
    assert (
        told.startswith("variant=[]: none is chosen; choose at least one (allowed: awq_w4a16_g64,")
        and told.count("\n") == 0
    )
    assert ["mine"] == list(compose(["variant=[]", "+variant.mine={quantizer: baseline}"])["variant"])


def test_a_sweep_is_every_combination() -> None:
    """Two choices times two choices are four jobs; a list is one value."""
    jobs = sweep(["a=1,2", "b=x,y", "c=[p,q]"])
    assert 4 == len(jobs)
    assert ["a=2", "b=x", "c=[p,q]"] in jobs


def test_a_config_directory_of_ones_own_is_used(tmp_path: Path) -> None:
    """compose reads the directory it is given."""
    (tmp_path / "config.yaml").write_text("answer: 42\n")
    assert {"answer": 42} == compose([], tmp_path)


def test_a_value_that_fits_none_of_several_types_is_one_problem() -> None:
    """A union's branches are no keys, and what each of them wants is told together."""

    class Either(Strict):
        many: int | float | None

    with pytest.raises(ConfigError) as caught:
        parse(Either, {"many": "few"})
    assert ["many"] == [p.key for p in caught.value.problems]


def test_a_configuration_that_is_not_yaml_is_said(tmp_path: Path) -> None:
    """A syntax error in one's own conf/ names the place."""
    (tmp_path / "config.yaml").write_text("a: [b\n")
    with pytest.raises(ConfigError, match="is not YAML"):
        compose([], tmp_path)
