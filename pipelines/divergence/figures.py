"""What a comparison of predictions comes to, as it is kept with artifacts: divergence.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from pipelines.config import Strict
from pipelines.divergence.positions import Positions
from pipelines.errors import EvidenceError, StageFailed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FILE = "divergence.json"
Loss = Literal["quantization", "engine", "total"]
Text = Literal["held_out", "prompts"]
Arithmetic = Literal["float32", "half", "int8_activations", "rounded_activations"]
"""How an engine multiplies, which is what two correct implementations of a checkpoint may differ by."""


class Figures(Strict):
    """Over predicted tokens, reference against other.

    exact: kl_* are over the whole vocabulary; else lower bounds, over ranked tokens and the rest as one.
    kl_p99, kl_p999: None where fewer than 100 or 1,000 positions stand behind them.
    dp_mean, dp_rms: change of the true token's probability, other minus reference.
    log_ratio: mean of the reference's minus the other's log-probability of the true token, so that exp of it is the
    perplexity ratio; log_ratio_se: its standard error over whole windows, None where there is one window only.
    """

    positions: int = Field(ge=1)
    windows: int = Field(ge=1)
    exact: bool
    kl_mean: float = Field(ge=0)
    kl_median: float = Field(ge=0)
    kl_p99: float | None
    kl_p999: float | None
    same_top: float | None
    dp_mean: float
    dp_rms: float
    perplexity_reference: float
    perplexity: float
    log_ratio: float
    log_ratio_se: float | None


class Row(Strict):
    """One comparison: which loss it shows, on which text, between which two, and with which arithmetic (engines)."""

    loss: Loss
    text: Text
    between: str
    arithmetic: Arithmetic | None = None
    figures: Figures


def summarize(found: Positions, *, exact: bool) -> Figures:
    """Reduce positions to figures.

    Raises:
        StageFailed: something is not a finite number.
    """
    import numpy as np

    for name, values in (("divergences", found.kl), ("log-probabilities", found.other), ("", found.reference)):
        if not bool(np.isfinite(values).all()):
            raise StageFailed(f"{name or 'log-probabilities of the reference'} are not all finite numbers")
    change = np.exp(found.other) - np.exp(found.reference)
    lost = found.reference - found.other
    return Figures(
        positions=len(found.kl),
        windows=len(np.unique(found.window)),
        exact=exact,
        kl_mean=float(found.kl.mean()),
        kl_median=float(np.median(found.kl)),
        kl_p99=_quantile(found.kl, 0.99),
        kl_p999=_quantile(found.kl, 0.999),
        same_top=None if found.same_top is None else float(found.same_top.mean()),
        dp_mean=float(change.mean()),
        dp_rms=float(np.sqrt((change**2).mean())),
        perplexity_reference=float(np.exp(-found.reference.mean())),
        perplexity=float(np.exp(-found.other.mean())),
        log_ratio=float(lost.mean()),
        log_ratio_se=clustered_se(lost, found.window),
    )


def _quantile(values: NDArray[np.float64], share: float) -> float | None:
    import numpy as np

    enough = len(values) * (1.0 - share) >= 1.0 - 1e-9
    return float(np.quantile(values, share)) if enough else None


def clustered_se(values: NDArray[np.float64], window: NDArray[np.integer]) -> float | None:
    """Standard error of the mean with values correlated inside windows: sandwich variance times G / (G - 1)."""
    import numpy as np

    groups = np.unique(window, return_inverse=True)[1]
    count = int(groups.max()) + 1
    if count < 2:
        return None
    sums = np.bincount(groups, values - values.mean())
    return math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values)


def write(out: Path, rows: Sequence[Row]) -> None:
    """Keep comparisons with an artifact."""
    (out / FILE).write_text(json.dumps([row.model_dump(mode="json") for row in rows], indent=1) + "\n")


def read(artifact: Path) -> tuple[Row, ...]:
    """The comparisons kept with an artifact; none where it has no such file.

    Raises:
        EvidenceError: the file is not readable as such.
    """
    path = artifact / FILE
    try:
        return tuple(Row.model_validate(row) for row in json.loads(path.read_bytes()))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise EvidenceError(f"{path}: cannot be read ({error}); run `quantgate verify`") from None
