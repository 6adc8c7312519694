"""What a model or an engine predicts of given tokens: the true token's log-probability and the best ranked ones.

One kind of file, whoever did the reading, so that any two can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.divergence.figures import Text
from pipelines.divergence.positions import ROWS_AT_ONCE, Positions, log_softmax, partition_kl
from pipelines.errors import EvidenceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ranks = tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]

FILE = "reading.npz"
RANKED = 20
ABSENT = -1
TEXTS: tuple[Text, ...] = ("held_out", "prompts")


@dataclass(frozen=True, slots=True)
class Window:
    """Token ids of which those from `start` on (at least 1) are predicted, each from all before it."""

    text: Text
    ids: tuple[int, ...]
    start: int

    @property
    def true(self) -> tuple[int, ...]:
        """The predicted tokens."""
        return self.ids[self.start :]


@dataclass(frozen=True, slots=True)
class Reading:
    """Of each window's predicted tokens: the log-probability, and ranked tokens with theirs.

    ranked and their log-probabilities are [tokens, RANKED], best first, ABSENT where fewer were given.
    """

    windows: tuple[Window, ...]
    logprobs: tuple[NDArray[np.float64], ...]
    ranked: tuple[NDArray[np.int32], ...]
    ranked_logprobs: tuple[NDArray[np.float64], ...]

    def only(self, windows: Sequence[Window]) -> Reading:
        """The part about some of the windows, in their order."""
        at = [self.windows.index(window) for window in windows]
        return Reading(
            tuple(windows),
            tuple(self.logprobs[i] for i in at),
            tuple(self.ranked[i] for i in at),
            tuple(self.ranked_logprobs[i] for i in at),
        )


def rank(logits: NDArray[np.floating], true: Sequence[int]) -> Ranks:
    """Reduce a window's logits [tokens, vocabulary] to what a reading holds of it: log-probabilities, ids, theirs."""
    import numpy as np

    starts = range(0, len(true), ROWS_AT_ONCE)
    parts = [_rank(logits[s : s + ROWS_AT_ONCE], np.asarray(true[s : s + ROWS_AT_ONCE])) for s in starts]
    logprobs, ids, values = zip(*parts, strict=True)
    return np.concatenate(logprobs), np.concatenate(ids), np.concatenate(values)


def _rank(logits: NDArray[np.floating], true: NDArray[np.integer]) -> Ranks:
    import numpy as np

    logprobs = log_softmax(logits)
    count = min(RANKED, logprobs.shape[1])
    best = np.argpartition(logprobs, -count, axis=1)[:, -count:]
    order = np.argsort(-np.take_along_axis(logprobs, best, 1), axis=1, kind="stable")
    best = np.take_along_axis(best, order, 1)
    values = np.take_along_axis(logprobs, best, 1)
    missing = ((0, 0), (0, RANKED - count))
    ids = np.pad(best.astype(np.int32), missing, constant_values=ABSENT)
    return logprobs[np.arange(len(true)), true], ids, np.pad(values, missing)


def joined(windows: Sequence[Window], parts: Sequence[Ranks]) -> Reading:
    """Put windows and what `rank` (or a server) gave for each together."""
    return Reading(tuple(windows), tuple(p[0] for p in parts), tuple(p[1] for p in parts), tuple(p[2] for p in parts))


def merged(*readings: Reading) -> Reading:
    """Put readings of different windows together."""
    names = ("windows", "logprobs", "ranked", "ranked_logprobs")
    return Reading(*(tuple(one for reading in readings for one in getattr(reading, name)) for name in names))


def positions(reference: Reading, other: Reading) -> Positions:
    """Compare two readings of the same windows by the tokens that both know, and the rest as one.

    Raises:
        EvidenceError: they are not of the same token ids.
    """
    import numpy as np

    if reference.windows != other.windows:
        raise EvidenceError("two readings are of different token ids; run `quantgate verify`")
    counts = [len(window.true) for window in reference.windows]
    before, after = list(_known(reference)), list(_known(other))
    first, second = (np.concatenate([r[:, 0] for r in one.ranked]) for one in (reference, other))
    ranked = bool((first != ABSENT).all() and (second != ABSENT).all())
    return Positions(
        kl=np.array([partition_kl(p, q) for p, q in zip(before, after, strict=True)]),
        same_top=first == second if ranked else None,
        reference=np.concatenate(reference.logprobs),
        other=np.concatenate(other.logprobs),
        window=np.repeat(np.arange(len(counts)), counts),
    )


def _known(reading: Reading) -> Iterator[dict[int, float]]:
    """Of each predicted token's distribution, what is known: log-probabilities by token id."""
    for window, logprobs, ranked, values in zip(
        reading.windows, reading.logprobs, reading.ranked, reading.ranked_logprobs, strict=True
    ):
        for token, logprob, ids, its in zip(
            window.true, logprobs.tolist(), ranked.tolist(), values.tolist(), strict=True
        ):
            known = {i: v for i, v in zip(ids, its, strict=True) if i != ABSENT}
            yield known | {token: logprob}


def write(out: Path, reading: Reading) -> None:
    """Keep a reading with an artifact."""
    import numpy as np

    windows = reading.windows
    np.savez(
        out / FILE,
        texts=np.array([TEXTS.index(w.text) for w in windows], np.int8),
        starts=np.array([w.start for w in windows], np.int32),
        lengths=np.array([len(w.ids) for w in windows], np.int32),
        ids=np.array([i for w in windows for i in w.ids], np.int32),
        logprobs=np.concatenate([np.empty(0), *reading.logprobs]),
        ranked=np.concatenate([np.empty((0, RANKED), np.int32), *reading.ranked]),
        ranked_logprobs=np.concatenate([np.empty((0, RANKED)), *reading.ranked_logprobs]),
    )


def read(artifact: Path) -> Reading:
    """Read a reading back.

    Raises:
        EvidenceError: there is none, or it is not readable.
    """
    import numpy as np

    path = artifact / FILE
    try:
        with np.load(path) as held:
            data = {name: held[name] for name in held.files}
        ids = np.split(data["ids"], np.cumsum(data["lengths"])[:-1])
        windows = tuple(
            Window(TEXTS[int(text)], tuple(int(i) for i in row), int(start))
            for text, start, row in zip(data["texts"], data["starts"], ids, strict=False)
        )
        cuts = np.cumsum([len(w.true) for w in windows])[:-1]
        columns = (tuple(np.split(data[name], cuts)) for name in ("logprobs", "ranked", "ranked_logprobs"))
        return Reading(windows, *columns)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise EvidenceError(f"{path}: cannot be read ({error}); run `quantgate verify`") from None
