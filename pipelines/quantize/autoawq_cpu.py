"""What AutoAWQ needs where there is no accelerator; with one, nothing here happens.

Each adaptation is small, made only for releases it was tested with, and named in the variant's facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pipelines.quantize.clipping import best_ranges

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

TESTED = ("0.2.9",)
"""Releases that back weights up with `.cpu()`, which on a CPU is the weights themselves, and then scale in place."""
ON_CPU = (
    "autoawq: weights are copied before scales are tried on them, as its backup is no copy on a CPU, and errors of "
    "clipping ranges are taken from the inputs' second moments"
)
FLOAT32 = "autoawq: computed in float32, as there is no accelerator; stored as the base is"


@contextmanager
def without_accelerator() -> Iterator[str]:
    """On a CPU, search for scales with a backup of the weights that is a copy, and for ranges with less work.

    Without the copy every scale tried is left in the weights, and what is saved is noise.

    Yields:
        What was adapted, "" where nothing was.
    """
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.utils import get_best_device

    if get_best_device() != "cpu" or version("autoawq") not in TESTED:
        yield ""
        return
    scales, ranges = AwqQuantizer._compute_best_scale, AwqQuantizer._compute_best_clip

    def on_a_copy(
        quantizer: Any, x: Tensor, w_mean: Tensor, x_mean: Tensor, module: Module, *more: Any, **named: Any
    ) -> Tensor:
        held = module.state_dict

        def copied() -> dict[str, Tensor]:
            return {name: tensor.clone() for name, tensor in held().items()}

        module.state_dict = copied  # type: ignore[assignment]
        try:
            found: Tensor = scales(quantizer, x, w_mean, x_mean, module, *more, **named)
            return found
        finally:
            del module.state_dict

    AwqQuantizer._compute_best_scale, AwqQuantizer._compute_best_clip = on_a_copy, best_clip
    try:
        yield ON_CPU
    finally:
        AwqQuantizer._compute_best_scale, AwqQuantizer._compute_best_clip = scales, ranges


def best_clip(self: Any, w: Tensor, input_feat: Tensor, **grid: Any) -> Tensor:
    """Stand in for a method of the library: weights [out, in], inputs [..., in] to ranges [out, groups, 1]."""

    def rounded(weight: Tensor) -> Tensor:
        found: Tensor = self.pseudo_quantize_tensor(weight)[0]
        return found

    return best_ranges(w, input_feat, self.group_size, rounded, **grid)
