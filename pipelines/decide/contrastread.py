"""The difference between two engines token by token, on texts that both predicted; and of what is exact. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from pipelines.decide import stats
from pipelines.decide.compared import Delta, Refusal
from pipelines.decide.contrast import Asked
from pipelines.decide.engineloss import words
from pipelines.decide.interval import Interval, exp
from pipelines.divergence.figures import Figures, summarize
from pipelines.divergence.reading import TEXTS, Reading, positions

FORMULAS = {
    "perplexity": "of the same tokens through both servers; the ratio is exp of the mean of ln p(base) - ln p(other) "
    "of the true token, its interval by t over whole windows of text",
    "KL from the base": "sum of p ln(p / q), p the base's: over the tokens that both rank, with all others as one, so "
    "it is a lower bound. It says how far apart the two are, not which is better",
}


def predictions(base: Reading, other: Reading, asked: Asked) -> list[Delta | Refusal]:
    """Compare two readings on each text, over the windows that both have."""
    found: list[Delta | Refusal] = []
    for text in TEXTS:
        mine, theirs = ([w for w in side.windows if w.text == text] for side in (base, other))
        both = [w for w in theirs if w in mine]
        if both:
            compared = positions(base.only(both), other.only(both))
            lost = max(len(mine), len(theirs)) - len(both)
            found += _of_text(words(text), summarize(compared, exact=False), asked, lost)
        elif mine or theirs:
            told = "they were asked to predict other texts" if mine and theirs else "only one of them predicted it"
            found.append(asked.refuse("perplexity", words(text), [told], missing=True))
    return found


def _of_text(text: str, f: Figures, asked: Asked, lost: int) -> Iterator[Delta]:
    note = f"{lost} windows that only one of them predicted are left out" if lost else ""
    yield Delta(
        side=asked.other, kind="perplexity", name=text, higher_is_better=False, base=f.perplexity_reference,
        other=f.perplexity, difference=f.perplexity - f.perplexity_reference, ratio=math.exp(f.log_ratio),
        ratio_interval=_ratio_interval(f, asked.confidence), count=f.windows,
        method=f"paired over {f.positions} tokens, t over {f.windows} windows", note=note,
    )  # fmt: skip
    method = f"{f.positions} tokens; no interval"
    yield Delta(
        side=asked.other, kind="divergence", name=text, part="mean KL from the base, at least", unit="nats",
        higher_is_better=False, other=f.kl_mean, count=f.windows, method=method, note=note,
    )  # fmt: skip
    if f.same_top is not None:
        yield Delta(
            side=asked.other, kind="divergence", name=text, part="same top token as the base", unit="share",
            higher_is_better=True, other=f.same_top, count=f.windows, method=method, note=note,
        )  # fmt: skip


def _ratio_interval(f: Figures, confidence: float) -> Interval | None:
    if f.log_ratio_se is None:
        return None
    half = stats.critical(confidence, f.windows - 1) * f.log_ratio_se
    low, high = (exp(f.log_ratio + side * half) for side in (-1.0, 1.0))
    return Interval(lower=low, upper=high, confidence=confidence)


def sizes(base: Mapping[str, float | None], other: Mapping[str, float | None], asked: Asked) -> Iterator[Delta]:
    """Compare what is counted and not sampled, in bytes."""
    for name, ours in base.items():
        theirs = other.get(name)
        if ours and theirs:
            yield Delta(
                side=asked.other, kind="size", name=name, unit="bytes", higher_is_better=False, base=ours, other=theirs,
                difference=theirs - ours, ratio=theirs / ours, method="counted", exact=True,
            )  # fmt: skip
