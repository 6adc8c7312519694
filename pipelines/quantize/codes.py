"""A quantized linear layer's weight as it is stored, and its one dequantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Codes:
    """A linear layer's weight as unsigned codes: weight[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g].

    codes uint8 [out, in]; scales float32 and zeros uint8 [out, groups]; g is i // group_size, or g_idx[i] (int32
    [in]) where the quantizer reordered columns. Without zeros the zero point is the middle code, 2 ** (bits - 1).
    pre_scale float32 [in] is what the layer multiplies its input by first (AWQ and SmoothQuant of some libraries), so
    that each column of the weight it stands for has that factor too.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8] | None
    bits: int
    group_size: int
    g_idx: NDArray[np.int32] | None = None
    pre_scale: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Scaled:
    """A linear layer's weight as 8-bit or 4-bit floats: weight = values * scales, both float32.

    values [out, in]; scales broadcasts to it: [out, 1] per channel, [1, 1] per tensor. pre_scale as in `Codes`.
    """

    values: NDArray[np.float32]
    scales: NDArray[np.float32]
    pre_scale: NDArray[np.float32] | None = None


Quantized = Codes | Scaled


def dequantize(layer: Quantized) -> NDArray[np.float32]:
    """The layer's weight, float32 [out, in]: one subtraction and one multiplication per weight, in float32.

    Where inputs are multiplied first, a second multiplication by that factor follows.
    """
    weight = layer.values * layer.scales if isinstance(layer, Scaled) else _decoded(layer)
    return weight if layer.pre_scale is None else weight * layer.pre_scale


def _decoded(layer: Codes) -> NDArray[np.float32]:
    import numpy as np

    out, columns = layer.codes.shape
    middle = np.float32(1 << (layer.bits - 1))
    if layer.g_idx is not None:
        zeros = middle if layer.zeros is None else layer.zeros[:, layer.g_idx].astype(np.float32)
        return (layer.codes.astype(np.float32) - zeros) * layer.scales[:, layer.g_idx]
    if columns == layer.scales.shape[1] * layer.group_size:
        grouped = layer.codes.reshape(out, -1, layer.group_size).astype(np.float32)
        grouped -= middle if layer.zeros is None else layer.zeros[:, :, None].astype(np.float32)
        grouped *= layer.scales[:, :, None]
        return grouped.reshape(out, columns)
    group = (np.arange(columns) // layer.group_size).astype(np.int32)
    return _decoded(Codes(layer.codes, layer.scales, layer.zeros, layer.bits, layer.group_size, group))
