"""The search for clipping ranges against its definition: the range whose rounded weights change outputs least."""

from __future__ import annotations

import torch

from pipelines.quantize.clipping import best_ranges


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Four bits with zero points, a scale for each group of the last axis."""
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-5) / 15
    zero = (-low / scale).round().clamp(0, 15)
    return ((weight / scale).round() + zero).clamp(0, 15).sub(zero) * scale


def by_definition(weight: torch.Tensor, inputs: torch.Tensor, size: int) -> torch.Tensor:
    """Every input times every weight of a group, for each range; the first range with the least mean squared change."""
    grouped, rows = weight.reshape(len(weight), -1, size), inputs.reshape(len(inputs), -1, size)
    top = grouped.abs().amax(-1, keepdim=True)
    found = []
    for step in range(10):
        bound = top * (1 - step / 20)
        change = rounded(grouped.clamp(-bound, bound)) - grouped
        found.append((torch.einsum("tgk,ogk->tog", rows, change).square().mean(0), bound[..., 0]))
    errors, bounds = torch.stack([e for e, _ in found]), torch.stack([b for _, b in found])
    return bounds.gather(0, errors.argmin(0)[None])[0][..., None]


def test_ranges_are_those_of_the_definition() -> None:
    """Inputs that go together make clipping matter; 64-bit floats leave no ties to chance."""
    torch.manual_seed(0)
    inputs = torch.randn(40, 24, dtype=torch.float64) @ torch.randn(24, 24, dtype=torch.float64)
    weight = torch.distributions.StudentT(3.0).sample((16, 24)).double()
    wanted = by_definition(weight, inputs, 8)
    assert torch.equal(wanted, best_ranges(weight, inputs, 8, rounded))
    assert 1 < len(wanted.div(weight.reshape(16, 3, 8).abs().amax(-1, keepdim=True)).round(decimals=6).unique())


def test_a_group_may_be_the_whole_row_and_inputs_are_thinned() -> None:
    """Of more inputs than asked for, every so many are looked at; without groups a range is for all of a row."""
    torch.manual_seed(1)
    inputs, weight = torch.randn(2, 30, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    thinned = inputs.reshape(-1, 8)[::4]
    wanted = by_definition(weight, thinned, 8)
    assert torch.equal(wanted, best_ranges(weight, inputs, -1, rounded, n_sample_token=15))
    assert (4, 1, 1) == wanted.shape
