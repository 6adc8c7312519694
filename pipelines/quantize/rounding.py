"""How a checkpoint has its layers round their inputs, done on float32: what a kernel for 8 or 4 bits would see.

Only for measuring how well a variant predicts; nothing here is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipelines.quantize.scheme import Scheme
from pipelines.quantize.shards import Shards, float4_values

if TYPE_CHECKING:
    import torch

E4M3_MAX, E4M3_MIN = 448.0, 2.0**-9
E2M1_MAX = 6.0


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a layer's input is rounded to, and the scale found in calibration: of the whole tensor.

    float4 also has a scale of its own for every `group` inputs of a token, an E4M3 number times the tensor's.
    """

    kind: Literal["float8", "int8", "float4"]
    scale: float
    group: int = 0


def rounding_of(shards: Shards, module: str, scheme: Scheme) -> Rounding | None:
    """Find a layer's rounding, None where its inputs stay as they are or are scaled while running."""
    name = f"{module}.input_scale"
    if scheme.activation_bits is None or name not in shards:
        return None
    scale = float(shards[name])
    if scheme.activation_bits == 4:
        return Rounding("float4", scale, scheme.group_size or 0)
    return Rounding("int8" if scheme.activation_type == "int" else "float8", scale)


def rounded(x: torch.Tensor, how: Rounding) -> torch.Tensor:
    """Round float32 inputs [..., in] and multiply them out again."""
    import torch

    if how.kind == "int8":
        return torch.clamp(torch.round(x / how.scale), -128, 127) * how.scale
    if how.kind == "float8":
        return _float8(x / how.scale) * how.scale
    blocks = x.reshape(*x.shape[:-1], -1, how.group)
    of_blocks = blocks.abs().amax(-1, keepdim=True) / (E2M1_MAX * how.scale)
    scales = _float8(of_blocks.clamp(min=E4M3_MIN)) * how.scale
    return (_float4(blocks / scales) * scales).flatten(-2)


def _float8(x: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.clamp(x, -E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def _float4(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 number; of two as near, the one with an even last bit."""
    import torch

    values = torch.from_numpy(float4_values()[:8])
    between = (values[:-1] + values[1:]) / 2
    magnitude = x.abs()
    below = torch.searchsorted(between, magnitude.contiguous())  # a tie goes down
    tie_to_odd = (below < 7) & (below % 2 == 1) & (magnitude == between[below.clamp(max=6)])
    return torch.copysign(values[below + tie_to_odd.long()], x)
