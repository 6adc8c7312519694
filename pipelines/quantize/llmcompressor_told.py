"""What llm-compressor finds out about each layer and only logs: GPTQ's and AWQ's errors, and layers GPTQ gave up on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

ROUNDED = "rounded to nearest, as its Hessian could not be inverted; raise options.dampening_frac or calibrate on more"


@dataclass(slots=True)
class Told:
    """By module name: the library's error, and what is special.

    GPTQ's error is the sum over the layer of squared rounding errors, each over twice the square of its column's entry
    in the inverse Hessian's factor. AWQ's is the mean squared change of the output of the block that the layer is in,
    the same for all layers that share a scale.
    """

    errors: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


@contextmanager
def gptq_told(told: Told, names: dict[Module, str]) -> Iterator[None]:
    """Listen to the losses that GPTQ reports of its modules."""
    from llmcompressor.modifiers.gptq import base

    logger = base.CompressionLogger

    class Listening(logger):  # type: ignore[misc, valid-type]
        def set_results(self, name: str | None = None, loss: float | None = None) -> None:
            super().set_results(name, loss)
            if loss is not None and self.module in names:
                told.errors[names[self.module]] = float(loss)

    base.CompressionLogger = Listening
    try:
        yield
    finally:
        base.CompressionLogger = logger


def gptq(told: Told, settings: dict[str, Any]) -> Any:
    """A GPTQ modifier that tells which layers it only rounded."""
    from llmcompressor.modifiers.gptq import GPTQModifier

    class Telling(GPTQModifier):  # type: ignore[misc]
        def _log_rtn_fallback_summary(self) -> None:
            told.notes.update(dict.fromkeys(self._rtn_fallback_module_names, ROUNDED))
            super()._log_rtn_fallback_summary()

    return Telling(**settings)


def awq(told: Told, settings: dict[str, Any]) -> Any:
    """An AWQ modifier that tells the error each scale was chosen with."""
    from llmcompressor.modifiers.transform.awq import AWQModifier

    class Telling(AWQModifier):  # type: ignore[misc]
        def _log_error_metrics(self) -> None:
            errors = {metric["layer_name"]: metric["best_error"] for metric in self._error_metrics}
            for mapping in self._resolved_mappings:
                if mapping.smooth_name in errors:
                    told.errors.update(dict.fromkeys(mapping.balance_names, float(errors[mapping.smooth_name])))
            super()._log_error_metrics()

    return Telling(**settings)
