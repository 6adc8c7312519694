"""Memory bandwidth right now: a STREAM-like read of an array far larger than the caches, beside every block of load.

Decoding reads all weights for each token, so on a CPU a latency means little without the limit at that moment.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt

ARRAY_BYTES = 256 * 2**20


class BandwidthProbe:
    """Holds the array and its threads between measurements, for allocating it takes longer than reading it."""

    def __init__(self, threads: int, array_bytes: int = ARRAY_BYTES) -> None:
        import numpy as np

        per_thread = max(1, array_bytes // 8 // threads)
        self._parts: list[npt.NDArray[np.int64]] = [np.full(per_thread, k, dtype=np.int64) for k in range(threads)]
        self._pool = ThreadPoolExecutor(threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()

    def measure_gb_s(self, passes: int = 5) -> float:
        """Return the fastest of `passes` parallel reads of the whole array, in 1e9 bytes per second."""
        size = sum(part.nbytes for part in self._parts)
        best_s = float("inf")
        for _ in range(passes):
            started = time.perf_counter()
            for _ in self._pool.map(_read, self._parts):
                pass
            best_s = min(best_s, time.perf_counter() - started)
        return size / best_s / 1e9


def _read(part: npt.NDArray[np.int64]) -> int:
    """Read every element once; numpy's reductions are vectorized and release the interpreter's lock."""
    return int(part.max())
