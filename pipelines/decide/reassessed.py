"""reassessment.md: does the champion still hold, what changed, what to do. Pure: a Reassessment in, Markdown out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipelines.decide.markup import between, bullets, number, pairs, table
from pipelines.decide.model import Verdict
from pipelines.decide.probed import Speed
from pipelines.decide.reassessment import FORMULAS, Comparison, Of, Reassessment, Rebuilt

LIMITS = (
    "It speaks of the champion's engine and of these items, not of traffic that no eval set stands for.",
    "Items that came after a look at the champion are one more look at it: a set that grows until something shows will "
    "show something. Plan looks beforehand (`gate.looks`) where that matters.",
    "Engines are served by the toolchain of now; scores of then were taken with the toolchain of then.",
)
HEAD = ("eval set", "slice", "score then", "now", "verdict then", "now", "loss now", "interval", "margin",
        "known items: loss", "new items: loss", "champion moved")  # fmt: skip


def markdown(made: Reassessment) -> str:
    """Render the document: the answer in ten lines, then what changed and the figures."""
    first = {
        "Do": made.to_do[0],
        "Champion": f"version {made.champion}, {made.label}, engine `{made.engine_key[:16]}`",
        "Decided": f"{made.decided}, decision `{made.decision_key}`, {made.then or 'no outcome'} then",
        "Latency": made.latency,
    }
    parts = [
        f"# {made.headline}\n\n{pairs(first)}",
        "## What to do\n\n" + bullets(made.to_do),
        "## Why\n\n" + bullets(made.reasons),
        "## What changed since\n\n" + table(("what", "where", "then", "now"), [changed(c) for c in _changes(made)]),
        "## Then and now\n\n" + table(HEAD, [row(c) for c in made.comparisons]),
        "## Speed against the reference\n\n" + table(("when", *_SPEED), list(_speeds(made))),
        *([_rebuilt(made.rebuilt)] if made.rebuilt is not None else []),
        "## Conditions\n\n" + pairs(made.conditions),
        "## What this does not show\n\n" + bullets(LIMITS),
        "## Formulas\n\n" + pairs(dict(FORMULAS)),
    ]
    return "\n\n".join(parts) + "\n"


def _changes(made: Reassessment) -> Iterator[tuple[str, str, str, str]]:
    yield from ((c.what, c.where, c.before, c.now) for c in made.changes)


def changed(cells: tuple[str, str, str, str]) -> tuple[str, ...]:
    """A line of the table of changes; what was or is not there is a dash."""
    return tuple(cell or "–" for cell in cells)


def row(one: Comparison) -> tuple[str, ...]:
    """A line of the table of comparisons."""
    now = one.now
    return (
        one.eval_set, one.slice, _score(one.then), _score(now), _verdict(one.then), _verdict(now),
        number(now.loss if now else None, "+.4f"), between(now.interval if now else None, "+.4f"),
        number(now.margin if now else None, ".4g"), loss(one.known), loss(one.new), loss(one.moved),
    )  # fmt: skip


def _score(verdict: Verdict | None) -> str:
    return number(None if verdict is None else verdict.score, ".4f")


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return "–"
    return verdict.verdict if verdict.gates else f"({verdict.verdict})"


def loss(verdict: Verdict | None) -> str:
    """A loss with its interval and the number of items, or why there is none."""
    if verdict is None:
        return "–"
    if verdict.loss is None:
        return verdict.note or "–"
    held = "" if verdict.interval is None else f", {between(verdict.interval, '+.4f')}"
    return f"{verdict.loss:+.4f}{held} ({verdict.items} items)"


_SPEED = ("metric", "profile", "times as fast", "interval", "evidence")


def speed(found: Speed | None) -> tuple[str, ...]:
    """A speed-up with its interval, and whether it is evidence."""
    if found is None:
        return ("–",) * len(_SPEED)
    told = "yes" if found.evidence else f"no: {found.note}"
    return found.metric, found.profile, number(found.ratio, ".2f"), between(found.interval, ".2f"), told


def _speeds(made: Reassessment) -> Iterator[tuple[str, ...]]:
    yield ("then", *speed(made.speed_then))
    yield ("now", *speed(made.speed_now))


_HEADINGS: Mapping[Of, str] = {
    "checkpoint": "The same recipe on the new base checkpoint",
    "recipe": "The recipe as it is now",
    "toolchain": "The same recipe with what is installed now",
}


def _rebuilt(made: Rebuilt) -> str:
    told = {
        "outcome": made.outcome or "none",
        "why": "; ".join(made.reasons),
        "decision": f"`{made.decision_key}`, engine `{made.engine_key[:16]}`",
        "perplexity of the engine, the champion's then and the rebuilt": _both(made.perplexity, ".4f"),
        "engine loss (mean KL to its own checkpoint), likewise": _both(made.engine_kl, ".3g"),
    }
    head = ("against", "eval set", "slice", "verdict", "loss")
    rows = [(v.against, v.eval_set, v.slice, _verdict(v), loss(v)) for v in made.verdicts]
    return "\n\n".join(
        [
            f"## {_HEADINGS[made.of]}",
            pairs(told),
            table(head, rows),
            "Speed against the champion, measured in one probe:",
            table(_SPEED, [speed(made.speed)]),
        ]
    )


def _both(values: tuple[float | None, float | None], form: str) -> str:
    return " -> ".join(number(value, form) for value in values)
