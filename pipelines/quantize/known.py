"""The model types a library's release can quantize, as that library's own table has them, so that a plan can say no.

What a release lists but cannot load (types whose code comes with the checkpoint, types its own transformers has since
moved) is left out: only types of which a small model was quantized and read back with that release are recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.errors import Problem, closest


@dataclass(frozen=True, slots=True)
class Known:
    """A release of a library, and the `model_type`s it quantizes."""

    library: str
    version: str
    model_types: tuple[str, ...]

    def problems(self, quantizer: str, model_type: str) -> list[Problem]:
        """Say that the base's model type is none of these, where it is none."""
        if model_type in self.model_types:
            return []
        message = f"{self.library} {self.version} quantizes no model of type {model_type!r}"
        return [Problem("quantizer", quantizer, message, closest(model_type, self.model_types))]
