"""Engine loss: how far an engine may be from its own checkpoint before that is a fault of the engine. Pure.

Two correct implementations of one checkpoint differ too, by how they multiply: that is the floor, and it is not zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field, model_validator

from pipelines.config import Strict
from pipelines.divergence.figures import Arithmetic, Row

RESOLUTION = 1e-6
"""The least mean KL that log-probabilities sent as float32 can tell from 0, with room: up to 5e-9 was seen."""


class Floor(Strict):
    """Mean KL to the checkpoint, in nats: `floor` is what correct engines were measured at, above `limit` is a veto."""

    floor: float = Field(ge=0)
    limit: float = Field(gt=0)
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _above_the_floor(self) -> Floor:
        if self.limit <= self.floor:
            raise ValueError(f"limit: {self.limit:g} must be above the floor, {self.floor:g}, or correct engines fail")
        return self


class EngineLoss(Strict):
    """By arithmetic: products of float32, of 16-bit floats, of activations rounded to int8 by the engine alone, and of
    activations that the scheme itself rounds to 8 bits while running."""

    float32: Floor = Floor(
        floor=4e-11, limit=1e-7, source="ONNX Runtime against transformers, 512 tokens of a 135M model, 1e-11 to 4e-11"
    )
    half: Floor = Floor(
        floor=9e-4, limit=5e-3, source="bfloat16 against float32 of one runtime, the same model: 8.4e-4; float16 4e-6"
    )
    int8_activations: Floor = Floor(
        floor=7e-3, limit=2e-2, source="MatMulNBits accuracy level 4 against level 1, the same model: 1.4e-3 to 6.7e-3"
    )
    rounded_activations: Floor = Floor(
        floor=2e-2, limit=5e-2, source="two attention implementations of one FP8 W8A8 checkpoint: 1.8e-2 to 2.4e-2"
    )

    def of(self, arithmetic: Arithmetic | None) -> Floor:
        """The floor that holds for an engine; where nothing tells how it multiplies, that of 16-bit floats."""
        found: Floor = getattr(self, arithmetic or "half")
        return found


def exceeded(rows: Sequence[Row], rules: EngineLoss) -> Iterator[str]:
    """Say of each text on which an engine is further from its checkpoint than correct engines are."""
    for row in rows:
        rule, figures = rules.of(row.arithmetic), row.figures
        limit = rule.limit if figures.exact else max(rule.limit, RESOLUTION)
        if row.loss == "engine" and figures.kl_mean > limit:
            least = "" if figures.exact else "at least "
            yield (
                f"engine loss: mean KL of {least}{figures.kl_mean:.2g} to its own checkpoint on {words(row.text)}, "
                f"allowed {limit:g} with {words(row.arithmetic or 'half')} (correct engines: {rule.floor:g})"
            )


def words(name: str) -> str:
    """A name as people write it."""
    return {"held_out": "held-out text", "prompts": "eval prompts"}.get(name, name.replace("_", " "))
