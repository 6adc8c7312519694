"""What a checkpoint predicts, window by window: the base's logits are kept, a variant's compared with them on the way.

A file of logits stands for a second model in memory: both give the same figures, and one window at a time is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.divergence import reading
from pipelines.divergence.figures import Row, summarize
from pipelines.divergence.positions import Positions, exact, together
from pipelines.divergence.reading import TEXTS, Reading, Window
from pipelines.errors import StageFailed
from pipelines.flow.progress import report

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipelines.quantize.reload import LoadedModel

LOGITS = "logits.npy"
SMALL = 2**30

_left: dict[Path, LoadedModel] = {}
"""At most one model, small, left by the step that loaded it for the step after it in the same process."""


def borrow(checkpoint: Path) -> LoadedModel:
    """Load a checkpoint, or take the one that the step before left; either way nothing is left any more."""
    from pipelines.quantize.reload import load

    found = _left.pop(checkpoint, None)
    _left.clear()
    return load(checkpoint) if found is None else found


def leave(checkpoint: Path, loaded: LoadedModel) -> None:
    """Leave a model for the next step, where keeping it costs less than loading it again."""
    weights = [file for kind in ("*.safetensors", "*.gguf") for file in checkpoint.glob(kind)]
    if sum(file.stat().st_size for file in weights) < SMALL:
        _left[checkpoint] = loaded


@dataclass(frozen=True, slots=True)
class Scored:
    """What the checkpoint predicts, and of each window how far that is from the base; () for the base itself."""

    reading: Reading
    positions: tuple[Positions, ...] = ()


def keep(loaded: LoadedModel, windows: Sequence[Window], out: Path) -> Scored:
    """Score the base; its logits go to a file as they come."""
    import numpy as np

    opened: Callable[..., Any] = np.lib.format.open_memmap
    parts, held, at = [], None, 0
    total = sum(len(w.true) for w in windows)
    for window, found in _each(loaded, windows):
        if held is None:
            shape = total, found.shape[1]
            held = opened(out / LOGITS, mode="w+", dtype=np.float32, shape=shape)
        held[at : at + len(found)] = found
        at += len(found)
        parts.append(reading.rank(found, window.true))
    if held is not None:
        held.flush()
    return Scored(reading.joined(windows, parts))


def against(loaded: LoadedModel, windows: Sequence[Window], base: Path) -> Scored:
    """Score a variant and compare it with the base's logits, window by window."""
    import numpy as np

    held, at, parts, compared = np.load(base / LOGITS, mmap_mode="r"), 0, [], []
    for place, (window, found) in enumerate(_each(loaded, windows)):
        parts.append(reading.rank(found, window.true))
        before, true = held[at : at + len(found)], np.asarray(window.true)
        try:
            compared.append(exact(before, found, true, [place] * len(found)))
        except ValueError as error:
            raise StageFailed(f"the variant's {error}: its vocabulary is not the base's") from None
        at += len(found)
    return Scored(reading.joined(windows, parts), tuple(compared))


def _each(loaded: LoadedModel, windows: Sequence[Window]) -> Iterator[tuple[Window, NDArray[np.float32]]]:
    """Each window with the logits [tokens, vocabulary] of its predicted tokens, one in memory at a time."""
    import numpy as np

    from pipelines.quantize.reload import logits

    for done, window in enumerate(windows):
        report(done, len(windows), "windows scored")
        yield window, logits(loaded, np.array(window.ids))[0][window.start - 1 : -1]
    report(len(windows), len(windows), "windows scored")


def rows(scored: Scored, implementation: str) -> list[Row]:
    """The quantization loss on each text."""
    made = []
    for text in TEXTS:
        some = [p for w, p in zip(scored.reading.windows, scored.positions, strict=False) if w.text == text]
        if some:
            between = f"base checkpoint and variant checkpoint, {implementation}"
            summary = summarize(together(some), exact=True)
            made.append(Row(loss="quantization", text=text, between=between, figures=summary))
    return made
