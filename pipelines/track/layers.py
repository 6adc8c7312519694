"""A variant's layers in MLflow: a table that its pages show, and a few figures to sort runs by; without MLflow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pipelines.flow.store import Fact
from pipelines.quantize import coverage
from pipelines.quantize.coverage import Layer
from pipelines.quantize.shards import quantization_config

FILE = "layers.json"
DECLARED = "quantization_config.json"
TABLES = "mlflow.loggedArtifacts"
"""The tag by which MLflow knows which of a run's files are tables."""
TAG = json.dumps([{"path": FILE, "type": "table"}])
FIGURES = {
    "quantized_modules": "layers/quantized",
    "kept_modules": "layers/kept",
    "bits_per_linear_weight": "size/bits_per_linear_weight",
    "bits_per_weight": "size/bits_per_weight",
}
"""Facts of a variant, and the metrics they become."""


def table(variant: Path) -> str:
    """The variant's layers as MLflow keeps tables: columns, then rows."""
    columns = list(Layer.model_fields)
    rows = [[getattr(layer, name) for name in columns] for layer in coverage.read(variant)]
    return json.dumps({"columns": columns, "data": rows})


def declared(variant: Path) -> str:
    """The checkpoint's own quantization_config, as a runtime reads it; "" where nothing is quantized."""
    found = quantization_config(variant)
    return json.dumps(found, indent=1) + "\n" if found else ""


def metrics(facts: Mapping[str, Fact]) -> dict[str, float]:
    """Those of a variant's facts that are figures of its layers."""
    found = {metric: facts.get(fact) for fact, metric in FIGURES.items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
