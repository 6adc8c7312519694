"""What a variant predicts on eval prompts, token by token, by transformers, and how far that is from the base.

Apart from the held-out text, so that another choice of eval sets makes no engine again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from pipelines.config import Strict
from pipelines.divergence import figures, reading
from pipelines.divergence.reading import Window
from pipelines.errors import StageFailed
from pipelines.flow.store import Fact
from pipelines.intake.lean import without_unused


class AskedConfig(Strict):
    """Prompts with their answers; of each the last `tail` tokens are predicted, from the last `length` tokens."""

    prompts: tuple[str, ...] = Field(min_length=1)
    tail: int = Field(48, ge=1)
    length: int = Field(512, ge=2)


@without_unused()
def run_asked(config: AskedConfig, out: Path, *, variant: Path, base: Path | None = None) -> dict[str, Fact]:
    """Score eval prompts on the reloaded variant, and how far it diverges from the base on them.

    Without `base` the variant is the base, and its logits are kept for the comparisons to come.

    Raises:
        StageFailed: the checkpoint does not load cleanly, or tokenizes the prompts differently from the base.
    """
    from pipelines.quantize import predictions

    windows = list(_windows(config, variant))
    if base is not None and tuple(windows) != reading.read(base).windows:
        raise StageFailed(f"{variant}: its tokenizer gives other ids for the eval prompts than the base's; copy it")
    loaded = predictions.borrow(variant)
    scored = predictions.keep(loaded, windows, out) if base is None else predictions.against(loaded, windows, base)
    reading.write(out, scored.reading)
    rows = predictions.rows(scored, loaded.implementation)
    figures.write(out, rows)
    return {
        "prompts": len(windows),
        "tokens": sum(len(w.true) for w in windows),
        "implementation": loaded.implementation,
        "kl_mean": rows[0].figures.kl_mean if rows else None,
    }


def _windows(config: AskedConfig, checkpoint: Path) -> Iterator[Window]:
    """The prompts as the checkpoint's tokenizer has them; what has no second token predicts nothing."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for text in config.prompts:
        ids = tuple(int(i) for i in tokenizer(text).input_ids[-config.length :])
        if len(ids) > 1:
            yield Window("prompts", ids, max(1, len(ids) - config.tail))
