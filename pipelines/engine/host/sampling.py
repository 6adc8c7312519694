"""From a row of logits to a token and its log-probabilities. A seed gives the same draws at any load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.engine.host.decoder import Ranked, Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

BLOCK_ROWS = 16


def choose(logits: Floats, sampling: Sampling, random: np.random.Generator) -> int:
    """Pick the next token from one row (V,) of logits.

    Top-k first, then the smallest set whose probability reaches top_p, as vLLM and transformers order them.
    """
    import numpy as np

    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scaled = (logits.astype(np.float64) - float(logits.max())) / sampling.temperature
    filtered = sampling.top_p < 1.0 or 0 < sampling.top_k < len(scaled)
    order = np.argsort(-scaled, kind="stable") if filtered else np.arange(len(scaled))
    if 0 < sampling.top_k < len(order):
        order = order[: sampling.top_k]
    weights = np.exp(scaled[order])
    cumulative = np.cumsum(weights / weights.sum())
    if sampling.top_p < 1.0:
        kept = int(np.searchsorted(cumulative, sampling.top_p)) + 1
        order, cumulative = order[:kept], cumulative[:kept]
    drawn = random.random() * cumulative[-1]
    return int(order[min(int(np.searchsorted(cumulative, drawn, side="right")), len(order) - 1)])


def log_normalizers(logits: Floats) -> Floats:
    """Log of the sum of exponentials of each row of (S, V), in blocks that stay in cache; no (S, V) copy is made."""
    import numpy as np

    out = np.empty(len(logits), np.float32)
    scratch = np.empty((min(BLOCK_ROWS, len(logits)), logits.shape[1]), np.float32)
    for start in range(0, len(logits), BLOCK_ROWS):
        rows = logits[start : start + BLOCK_ROWS]
        work = scratch[: len(rows)]
        peak = rows.max(axis=1)
        np.subtract(rows, peak[:, None], out=work)
        np.exp(work, out=work)
        out[start : start + len(rows)] = np.log(work.sum(axis=1)) + peak
    return out


def rank(logits: Floats, normalizers: Floats, count: int) -> list[Ranked]:
    """Give the `count` most probable tokens of each row of (S, V) with their log-probabilities, best first."""
    import numpy as np

    if count == 0:
        return [()] * len(logits)
    if count == 1:
        best = logits.argmax(axis=1)[:, None]
    else:
        part = np.argpartition(logits, -count, axis=1)[:, -count:]
        values = np.take_along_axis(logits, part, axis=1)
        best = np.take_along_axis(part, np.argsort(-values, axis=1, kind="stable"), axis=1)
    values = np.take_along_axis(logits, best, axis=1) - normalizers[:, None]
    return [tuple(zip(ids, row, strict=True)) for ids, row in zip(best.tolist(), values.tolist(), strict=True)]
