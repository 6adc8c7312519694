"""Two predictions of the same tokens compared at every position, by what is known of them. Pure arithmetic.

Log-probabilities and divergences are natural: nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ROWS_AT_ONCE = 64
LEAST_REST = 1e-7
"""What float32 log-probabilities leave uncertain of the mass outside the ranked tokens."""


@dataclass(frozen=True, slots=True)
class Positions:
    """One entry for each predicted token: KL(reference || other), whether both find the same token most probable
    (None where that is not known), the true token's log-probability in both, and the window it lies in."""

    kl: Floats
    same_top: NDArray[np.bool_] | None
    reference: Floats
    other: Floats
    window: NDArray[np.int64]


def exact(
    reference: NDArray[np.floating], other: NDArray[np.floating], true: NDArray[np.integer], window: Sequence[int]
) -> Positions:
    """Compare full logits [positions, vocabulary]; a few rows at a time are widened, so either may be a memory map.

    Raises:
        ValueError: the shapes differ.
    """
    import numpy as np

    if reference.shape != other.shape:
        raise ValueError(f"logits have shape {other.shape}, those compared with {reference.shape}")
    parts = []
    for start in range(0, len(reference), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        p, q = log_softmax(reference[rows]), log_softmax(other[rows])
        at = np.arange(len(p)), true[rows]
        divergence = (np.exp(p) * (p - q)).sum(axis=1)
        parts.append((np.maximum(divergence, 0.0), p.argmax(axis=1) == q.argmax(axis=1), p[at], q[at]))
    kl, same, before, after = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Positions(kl, same, before, after, np.asarray(window, np.int64))


def together(parts: Sequence[Positions]) -> Positions:
    """Put comparisons end to end; windows keep their numbers."""
    import numpy as np

    known = [p.same_top for p in parts if p.same_top is not None]
    return Positions(
        kl=np.concatenate([p.kl for p in parts]),
        same_top=np.concatenate(known) if len(known) == len(parts) else None,
        reference=np.concatenate([p.reference for p in parts]),
        other=np.concatenate([p.other for p in parts]),
        window=np.concatenate([p.window for p in parts]),
    )


def first(found: Positions, count: int) -> Positions:
    """The first positions of a comparison."""
    same = None if found.same_top is None else found.same_top[:count]
    return Positions(found.kl[:count], same, found.reference[:count], found.other[:count], found.window[:count])


def log_softmax(logits: NDArray[np.floating]) -> Floats:
    """Log-probabilities of logits [positions, vocabulary], in float64."""
    import numpy as np

    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def partition_kl(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL(reference || other) over the tokens both give a log-probability of, and all others as one.

    Merging outcomes never adds divergence (the data-processing inequality), so this bounds the KL over the whole
    vocabulary from below; equal where the other tokens keep their proportions.
    """
    import math

    known = reference.keys() & other.keys()
    found = math.fsum(math.exp(reference[t]) * (reference[t] - other[t]) for t in known)
    rest = max(0.0, 1.0 - math.fsum(math.exp(reference[t]) for t in known))
    left = max(LEAST_REST, 1.0 - math.fsum(math.exp(other[t]) for t in known))
    return max(0.0, found + (rest * math.log(rest / left) if rest > 0.0 else 0.0))
