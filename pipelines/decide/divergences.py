"""Divergences and the A/A run as text: one way to say them, for the decision document and for the report. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipelines.decide import stats
from pipelines.decide.engineloss import EngineLoss, words
from pipelines.decide.model import Candidate, Noise, Verdict
from pipelines.divergence.figures import Figures, Loss, Row
from pipelines.divergence.reading import TEXTS

CONFIDENCE = 0.95
LOSSES: Mapping[Loss, str] = {"quantization": "quantization loss", "engine": "engine loss", "total": "in all"}
SUMMARY = ("candidate", "text", *LOSSES.values(), "correct engines", "arithmetic")
DETAILS = ("candidate", "text", "loss", "mean KL", "median", "p99", "p99.9", "same top token", "change of p", "RMS",
           "perplexity ratio", "positions", "windows", "between")  # fmt: skip
FORMULAS = {
    "KL": "sum over the vocabulary of p ln(p / q), nats, at each predicted token of a given text; p is the reference",
    "KL with \u2265": "the same over the tokens that both sides rank (20 at most, and the true one) with all others as "
    "one: merging outcomes never adds divergence, so it bounds the KL from below",
    "change of p": "probability of the true token, candidate - reference: mean and root mean square",
    "perplexity ratio": "exp of the mean of ln p - ln q of the true token; interval at 95% by t over whole windows",
    "quantization loss": "variant checkpoint against base checkpoint, both run by transformers in float32",
    "engine loss": "engine against its own checkpoint; beyond the limit of its arithmetic it vetoes",
    "in all": "variant engine against reference engine, both through their servers: what a user gets",
    "A/A flips": "items whose score changed when the reference engine was scored again in another order and batch size",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A candidate on one text: its three losses, as far as they were measured."""

    label: str
    text: str
    rows: Mapping[Loss, Row]


def lines(candidates: Sequence[Candidate]) -> Iterator[Line]:
    """Each candidate on each text that it was compared on."""
    for one in candidates:
        for text in TEXTS:
            rows: dict[Loss, Row] = {row.loss: row for row in one.divergences if row.text == text}
            if rows:
                yield Line(one.label, words(text), rows)


def summary(line: Line, rules: EngineLoss) -> tuple[str, ...]:
    """A line of the table of losses, with what correct engines differ by from their checkpoints."""
    engine = line.rows.get("engine")
    floor = "" if engine is None else f"{rules.of(engine.arithmetic).floor:.2g}"
    how = "" if engine is None else words(engine.arithmetic or "half")
    return (line.label, line.text, *(kl(line.rows.get(loss)) for loss in LOSSES), floor, how)


def details(line: Line) -> Iterator[tuple[str, ...]]:
    """A line of the table of all figures for each loss."""
    for loss, name in LOSSES.items():
        row = line.rows.get(loss)
        if row is not None:
            f = row.figures
            yield (
                line.label, line.text, name, kl(row), *(_short(v) for v in (f.kl_median, f.kl_p99, f.kl_p999)),
                "\u2013" if f.same_top is None else f"{f.same_top:.1%}", f"{f.dp_mean:+.4f}", f"{f.dp_rms:.4f}",
                ratio(f), str(f.positions), str(f.windows), row.between,
            )  # fmt: skip


def kl(row: Row | None) -> str:
    """A mean KL; a lower bound says so."""
    if row is None:
        return "\u2013"
    return _short(row.figures.kl_mean) if row.figures.exact else f"\u2265 {_short(row.figures.kl_mean)}"


def ratio(figures: Figures) -> str:
    """A perplexity ratio with its interval, where several windows give one."""
    shown = f"{math.exp(figures.log_ratio):.4g}"
    interval = ratio_interval(figures)
    return shown if interval is None else f"{shown} ({interval[0]:.4g} to {interval[1]:.4g})"


def ratio_interval(figures: Figures) -> tuple[float, float] | None:
    """The 95% interval of a perplexity ratio; None from one window."""
    if figures.log_ratio_se is None:
        return None
    half = stats.critical(CONFIDENCE, figures.windows - 1) * figures.log_ratio_se
    try:
        return math.exp(figures.log_ratio - half), math.exp(figures.log_ratio + half)
    except OverflowError:
        return None


def noise(verdict: Verdict, found: Sequence[Noise]) -> str:
    """The A/A flips of a verdict's eval set, to stand beside its own; of slices nothing is known apart."""
    of_set = next((n for n in found if n.eval_set == verdict.eval_set), None)
    return "\u2013" if of_set is None or verdict.slice != "all" else f"{of_set.flips} of {of_set.items}"


def _short(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.3g}"
