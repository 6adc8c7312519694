"""What a variant predicts on held-out text, by transformers in float32: the yardstick its engine is held to.

The same windows of token ids are scored for the base and for every variant, so perplexities compare; how far a
variant's predictions are from the base's, both run here, is what quantization lost.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from pipelines.config import Strict
from pipelines.divergence import figures, reading
from pipelines.divergence.reading import Window
from pipelines.errors import InputError, StageFailed
from pipelines.flow.store import Fact, facts
from pipelines.intake.lean import without_unused
from pipelines.quantize.shards import quantization_config
from pipelines.quantize.stored import rounds_inputs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOKENS = "tokens.npz"


class ReferenceConfig(Strict):
    """Held-out text and how much of it, and how far a variant may fall behind the base before it counts as noise."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"text_path"})

    text_path: str
    text_sha256: str
    windows: int = Field(8, ge=1)
    length: int = Field(512, ge=2)
    max_ratio: float = Field(5.0, gt=1)


@without_unused()
def run_reference(config: ReferenceConfig, out: Path, *, variant: Path, base: Path | None = None) -> dict[str, Fact]:
    """Score held-out windows on the reloaded variant, and how far it diverges from the base on them.

    Without `base` the variant is the base, and all its logits are kept for the comparisons to come.

    Raises:
        StageFailed: the checkpoint does not load cleanly, tokenizes the text differently from the base, or its
            perplexity is beyond max_ratio times the base's.
    """
    import numpy as np

    from pipelines.quantize import predictions
    from pipelines.quantize.reload import perplexity

    ids = windows_of(config, variant)
    if base is not None and not np.array_equal(ids, load_tokens(base)[0]):
        raise StageFailed(
            f"{variant}: its tokenizer gives other ids for {config.text_path} than the base's; copy the base's"
        )
    windows, loaded = [Window("held_out", tuple(int(i) for i in row), 1) for row in ids], predictions.borrow(variant)
    scored = predictions.keep(loaded, windows, out) if base is None else predictions.against(loaded, windows, base)
    logprobs = np.stack(scored.reading.logprobs).astype(np.float32)
    found = perplexity(logprobs)
    baseline = float(facts(base)["perplexity"] or 0) if base is not None else found
    if not found <= config.max_ratio * baseline:
        raise StageFailed(
            f"{variant}: perplexity {found:.4g} on held-out text is more than {config.max_ratio:g} times the base's "
            f"{baseline:.4g}: the checkpoint loads as noise (bound: held_out.max_ratio)"
        )
    np.savez(out / TOKENS, ids=ids, logprobs=logprobs)
    predictions.leave(variant, loaded)
    reading.write(out, scored.reading)
    rows = predictions.rows(scored, loaded.implementation)
    figures.write(out, rows)
    return {
        "perplexity": found,
        "base_perplexity": baseline,
        "tokens": int(logprobs.size),
        "implementation": loaded.implementation,
        "rounds_inputs": rounds_inputs(quantization_config(variant)),
        "kl_mean": rows[0].figures.kl_mean if rows else None,
    }


def load_tokens(reference: Path) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Read a reference: ids int32 [windows, length] and the next tokens' logprobs float32 [windows, length - 1]."""
    import numpy as np

    with np.load(reference / TOKENS) as held:
        return held["ids"], held["logprobs"]


def windows_of(config: ReferenceConfig, checkpoint: Path) -> NDArray[np.int32]:
    """Tokenize the held-out text and cut evenly spaced windows, each begun as the tokenizer begins a text.

    Raises:
        InputError: the text is not what it was when it was pinned, has a broken line, or is too short.
    """
    import numpy as np
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    start = list(tokenizer("").input_ids)
    ids = [i for text in _texts(config) for i in tokenizer(text, add_special_tokens=False).input_ids]
    body = config.length - len(start)
    if len(ids) < config.windows * body:
        raise InputError(
            f"{config.text_path}: {len(ids)} tokens are too few for {config.windows} windows of {config.length} "
            "(lower held_out.windows or held_out.length, or give more text)"
        )
    starts = np.linspace(0, len(ids) - body, config.windows).astype(int)
    return np.array([start + ids[s : s + body] for s in starts], dtype=np.int32)


def _texts(config: ReferenceConfig) -> list[str]:
    path = Path(config.text_path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: held-out text cannot be read ({error.strerror})") from None
    if hashlib.sha256(raw).hexdigest() != config.text_sha256:
        raise InputError(f"{path}: its sha256 is not the pinned {config.text_sha256[:16]}...; the text has changed")
    texts = []
    for number, line in enumerate(raw.decode().splitlines(), start=1):
        if line.strip():
            try:
                texts.append(str(json.loads(line)["text"]))
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path}:{number}: not a JSON object with a text ({error})") from None
    return texts
