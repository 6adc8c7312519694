"""Log-probabilities of a prompt from its context logits, for servers that give those and nothing better.

Row i of the logits predicts token i + 1. TensorRT-LLM leaves rows out without a word when it reuses cached blocks, so
anything but one row for every token is refused, never filled in. The numbers come as JSON, some 19 bytes each, tokens
times vocabulary of them: they are cut out of the answer and read as one array.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

_FIELD = re.compile(rb'"context_logits"\s*:\s*(?P<value>null|\[(?=\s*\[)|\S)')
_END = re.compile(rb"\]\s*\]")
REQUEST = {"max_tokens": 1, "return_context_logits": True, "temperature": 0}


def read(body: bytes) -> tuple[dict[str, Any], NDArray[np.float64] | None]:
    """Split an answer about one prompt into the rest and its logits [tokens, vocabulary], None where it has none.

    Raises:
        ValueError: not an answer with one table of numbers.
    """
    import numpy as np

    named = _FIELD.search(body)
    if named is None or named["value"] == b"null":
        return json.loads(body), None
    end = _END.search(body, named.end())
    if named["value"] != b"[" or end is None:
        raise ValueError("context_logits is no table of numbers")
    table = body[named.end() : end.start()]
    rest = body[: named.start("value")] + b"null" + body[end.end() :]
    rows = table.count(b"[")
    numbers = np.fromstring(table.translate(None, b"[] \n\t").decode(), dtype=np.float64, sep=",")
    if rows < 1 or numbers.size % rows:
        raise ValueError(f"context_logits has {rows} rows of unequal length")
    return json.loads(rest), numbers.reshape(rows, -1)


def score(ids: Sequence[int], logits: NDArray[np.float64]) -> tuple[tuple[float | None, ...], tuple[bool | None, ...]]:
    """Each token's log-probability and whether it was the most probable; the first has no context, so None.

    Raises:
        ValueError: rows are missing, a token lies outside the vocabulary, or numbers are not finite.
    """
    import numpy as np

    if len(logits) != len(ids):
        raise ValueError(
            f"{len(ids)} prompt tokens were sent, context logits came for {len(logits)}: blocks of the cache were "
            "reused, or the prompt was cut (kv_cache.enable_block_reuse must be false)"
        )
    if max(ids) >= logits.shape[1]:
        raise ValueError(f"token {max(ids)} lies outside the {logits.shape[1]} words that logits came for")
    ahead = logits[:-1]
    if not bool(np.isfinite(ahead).all()):
        raise ValueError("context logits are not all finite")
    top = ahead.max(axis=1)
    norm = np.log(np.exp(ahead - top[:, None]).sum(axis=1)) + top
    chosen = ahead[np.arange(len(ahead)), np.asarray(ids[1:])]
    logprobs = tuple(float(value) for value in chosen - norm)
    greedy = tuple(bool(value) for value in chosen >= top)
    return (None, *logprobs), (None, *greedy)
