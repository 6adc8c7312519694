"""Every row of the quantizer table, and every shipped variant, keeps the contract."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from pipelines.compose import compose
from pipelines.config import CONF_DIR, keyed
from pipelines.flow.stage import resolve
from pipelines.intake.calibration import CalibrationConfig
from pipelines.quantize.scheme import parse, supported
from pipelines.quantize.table import QUANTIZERS, Quantizer

ROWS = list(QUANTIZERS.values())
EXAMPLES = [
    "W4A16_G64", "W4A16_G64_ASYM", "W8A16_G64", "W8A8_FP8_DYNAMIC", "W8A8_FP8_STATIC_TENSOR", "W8A8_INT8",
    "W8A8_INT8_STATIC", "W4A4_NVFP4", "W4A16_MXFP4", "W8A8_FP8_DYNAMIC_KVFP8", "Q8_0",
    "Q4_K_M",
]  # fmt: skip
VARIANTS = sorted((CONF_DIR / "variant").glob("*.yaml"))
CALIBRATIONS = sorted((CONF_DIR / "calibration").glob("*.yaml"))


def config_type(row: Quantizer) -> type[BaseModel]:
    found: Any = resolve(row.config_type)
    assert issubclass(found, BaseModel)
    return found


def allowed(row: Quantizer) -> list[str]:
    return [name for name in EXAMPLES if supported(parse(name), row.schemes)] or ["BASE"]


def named(row: Quantizer) -> str:
    return row.name


def config_of(row: Quantizer, scheme: str) -> BaseModel:
    return config_type(row).model_validate({"quantizer": row.name, "scheme": scheme})


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_row_resolves(row: Quantizer) -> None:
    """The config is a strict model of its row, and the function takes a stage's arguments."""
    assert row.name == config_type(row).model_fields["quantizer"].default
    parameters = inspect.signature(resolve(row.function)).parameters
    assert ["config", "out", "checkpoint", "calibration"] == list(parameters)
    assert None is parameters["calibration"].default


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_defaults_make_a_config(row: Quantizer) -> None:
    """A scheme is all one has to say, and a config survives being written and read."""
    for scheme in allowed(row):
        config = config_of(row, scheme)
        assert config == type(config).model_validate_json(config.model_dump_json())
        assert isinstance(row.needs_calibration(config), bool)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_every_option_is_documented(row: Quantizer) -> None:
    """Each leaf of a config says what it does."""
    silent = []
    waiting: list[tuple[str, type[BaseModel]]] = [("", config_type(row))]
    while waiting:
        path, model = waiting.pop()
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                waiting.append((f"{path}{name}.", field.annotation))
            elif (
                not field.description
                and name not in ("quantizer", "scheme")
                and not isinstance(field.default, BaseModel)
            ):
                silent.append(path + name)
    assert [] == silent


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_an_unknown_scheme_is_refused(row: Quantizer) -> None:
    """A scheme a quantizer does not have is refused with those it has."""
    foreign = next(name for name in [*EXAMPLES, "W2A16"] if name not in allowed(row))
    with pytest.raises(ValidationError, match=r"it has|Input should be"):
        config_of(row, foreign)


def test_equal_schemes_have_equal_keys() -> None:
    """Short and long names of a scheme are one config, so one artifact."""
    row = QUANTIZERS["llmcompressor_fp8"]
    assert keyed(config_of(row, "w8a8_fp8")) == keyed(config_of(row, "W8A8_FP8_DYNAMIC"))


@pytest.mark.parametrize(
    ("quantizer", "scheme", "needed"),
    [
        ("baseline", "BASE", False),
        ("llmcompressor_rtn", "W4A16_G64", False),
        ("llmcompressor_rtn", "W8A8_INT8", False),
        ("llmcompressor_awq", "W4A16_G64", True),
        ("llmcompressor_gptq", "W4A16_G64", True),
        ("llmcompressor_fp8", "W8A8_FP8_DYNAMIC", False),
        ("llmcompressor_fp8", "W8A8_FP8_STATIC_TENSOR", True),
        ("llmcompressor_fp8", "W8A8_FP8_DYNAMIC_KVFP8", True),
        ("llmcompressor_rtn", "W4A16_G64_KVFP8", True),
        ("llmcompressor_smoothquant", "W8A8_INT8", True),
        ("llmcompressor_fp4", "W4A4_NVFP4", True),
        ("llmcompressor_fp4", "W4A16_NVFP4", False),
        ("llmcompressor_fp4", "W4A4_MXFP4", False),
        ("gptqmodel_gptq", "W4A16_G64", True),
        ("gptqmodel_awq", "W4A16_G64_ASYM", True),
        ("optimum_gptq", "W4A16_G64", True),
        ("modelopt_awq", "W4A16_G64", True),
        ("modelopt_fp8", "W8A8_FP8_STATIC_TENSOR", True),
        ("modelopt_fp8", "W8A8_FP8_DYNAMIC", False),
        ("modelopt_fp8", "W8A8_FP8_DYNAMIC_KVFP8", True),
        ("modelopt_nvfp4", "W4A16_NVFP4", False),
        ("modelopt_nvfp4", "W4A4_NVFP4", True),
        ("modelopt_smoothquant", "W8A8_INT8_STATIC", True),
        ("autoawq", "W4A16_G64_ASYM", True),
        ("autogptq", "W4A16_G64", True),
        ("gguf", "Q4_K_M", False),
    ],
)
def test_who_needs_a_calibration_set(quantizer: str, scheme: str, needed: bool) -> None:
    """Only methods that look at activations are made to depend on a calibration set."""
    row = QUANTIZERS[quantizer]
    assert needed == row.needs_calibration(config_of(row, scheme))


@pytest.mark.parametrize("path", VARIANTS, ids=lambda p: p.stem)
def test_shipped_variants_are_valid(path: Path) -> None:
    """Each conf/variant file composes to a variant of its own name, which validates against its row."""
    composed = compose([f"variant=[{path.stem}]"])["variant"]
    data = {key: value for key, value in composed[path.stem].items() if key != "engines"}  # the campaign's own
    config_type(QUANTIZERS[data["quantizer"]]).model_validate(data)


@pytest.mark.parametrize("path", CALIBRATIONS, ids=lambda p: p.stem)
def test_shipped_calibrations_are_valid(path: Path) -> None:
    """Each conf/calibration file validates."""
    CalibrationConfig.model_validate(yaml.safe_load(path.read_text()))


def test_the_table_loads_no_vendor() -> None:
    """Planning reads the table; it must not wait for torch."""
    code = (
        "import sys; from pipelines.quantize.table import QUANTIZERS; from pipelines.flow.stage import resolve;"
        "[resolve(r.config_type) for r in QUANTIZERS.values()];"
        "print([m for m in ('torch', 'transformers', 'llmcompressor', 'gptqmodel', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CONF_DIR.parent)
    assert "[]" == done.stdout.strip()
