"""The divergence stage: an engine predicts the held-out windows and eval prompts token by token, through its server.

What it predicts is compared with its own checkpoint (engine loss) and with the reference engine (what the user gets);
the checkpoint's own comparison with the base (quantization loss) is put beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pipelines.config import Strict
from pipelines.divergence import figures, reading
from pipelines.divergence.figures import Arithmetic, Row, summarize
from pipelines.divergence.reading import ABSENT, RANKED, TEXTS, Reading, Window
from pipelines.flow.progress import report
from pipelines.flow.store import Fact, facts

if TYPE_CHECKING:
    from pipelines.engine.endpoint import Endpoint, Ranking

TOGETHER = 16  # prompts share instructions, which a server may compute once for those it sees together


class ReadingConfig(Strict):
    """Nothing to choose: what is read follows from the checkpoint's own readings."""


def run(
    config: ReadingConfig,
    out: Path,
    *,
    engine: Path,
    checked: Path,
    asked: Path | None = None,
    against: Path | None = None,
) -> dict[str, Fact]:
    """Read an engine and write divergence.json with all three losses.

    `checked` and `asked` are the checkpoint's readings of the held-out windows and of the prompts; `against` is the
    reference engine's own divergence, absent for the reference. An engine whose server scores no prompts is not read:
    the losses known without it stay.

    Raises:
        EndpointError: the server failed, or answered about other tokens.
        StageFailed: it gave numbers that are none.
    """
    del config
    checkpoint = reading.merged(*(reading.read(one) for one in (checked, asked) if one is not None))
    kept = [row for one in (checked, asked) if one is not None for row in figures.read(one)]
    built = list(figures.read(engine))
    found, note = _read(engine, checkpoint.windows)
    reading.write(out, found)
    lost = _engine_loss(built, checkpoint, found, _arithmetic(facts(engine), facts(checked)))
    rows = [*kept, *built, *lost, *([] if against is None else _total(reading.read(against), found))]
    figures.write(out, rows)
    total = next((r.figures for r in rows if (r.loss, r.text) == ("total", "held_out")), None)
    return {
        "windows": len(found.windows),
        "tokens": sum(len(w.true) for w in found.windows),
        "note": note,
        "kl_mean": None if total is None else total.kl_mean,
        "kl_is_lower_bound": True,
    }


def _read(engine: Path, windows: Sequence[Window]) -> tuple[Reading, str]:
    """What the engine predicts of the windows that it admits, and what was left out."""
    from pipelines.engine.card import read_card
    from pipelines.evaluate.harness import server_of

    endpoint, card = server_of(engine).endpoint, read_card(engine)
    if not endpoint.capabilities.scores_prompts:
        return reading.joined((), ()), "the server gives no log-probabilities of prompts"
    limit = min(card.max_length, card.max_prompt or card.max_length)
    fits = [w for w in windows if len(w.ids) <= limit]
    parts = [part for some in _batches(fits) for part in _ranks(endpoint, some)]
    note = f"{len(windows) - len(fits)} windows are longer than the {limit} tokens that the engine admits"
    return reading.joined(fits, parts), note if len(fits) < len(windows) else ""


def _batches(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Held-out windows one by one, prompts together: the order stays that of the windows."""
    at = 0
    while at < len(windows):
        report(at, len(windows), "windows read")
        count = TOGETHER if windows[at].text == "prompts" else 1
        yield list(windows[at : at + count])
        at += count
    report(len(windows), len(windows), "windows read")


def _ranks(endpoint: Endpoint, windows: Sequence[Window]) -> Iterator[reading.Ranks]:
    found = endpoint.rank([w.ids for w in windows], [w.start for w in windows], RANKED)
    yield from (_arrays(one) for one in found)


def _arrays(one: Ranking) -> reading.Ranks:
    import numpy as np

    ids = np.full((len(one.logprobs), RANKED), ABSENT, np.int32)
    values = np.zeros((len(one.logprobs), RANKED))
    for row, (some, its) in enumerate(zip(one.ids, one.values, strict=True)):
        ids[row, : len(some)], values[row, : len(its)] = some, its
    return np.array(one.logprobs), ids, values


def _arithmetic(engine: Mapping[str, Fact], checkpoint: Mapping[str, Fact]) -> Arithmetic:
    """How the two sides of an engine's comparison with its checkpoint multiply; where nothing tells, 16-bit floats.

    A checkpoint that asks for rounded inputs was run with them, whether or not the engine rounds them too.
    """
    if checkpoint.get("rounds_inputs") is True:
        return "rounded_activations"
    known: tuple[Arithmetic, ...] = get_args(Arithmetic)
    return next((name for name in known if name == engine.get("arithmetic")), "half")


def _engine_loss(built: Sequence[Row], checkpoint: Reading, found: Reading, arithmetic: Arithmetic) -> Iterator[Row]:
    """The engine against its checkpoint, on each text that was not compared when it was built."""
    known = {row.text for row in built}
    between = "variant checkpoint, transformers float32, and engine, through its server"
    for row in _compared("engine", checkpoint, found, between):
        if row.text not in known:
            yield row.model_copy(update={"arithmetic": arithmetic})


def _total(reference: Reading, found: Reading) -> Iterator[Row]:
    return _compared("total", reference, found, "reference engine and variant engine, through their servers")


def _compared(loss: figures.Loss, ours: Reading, theirs: Reading, between: str) -> Iterator[Row]:
    """Two readings on each text, over the windows both have."""
    for text in TEXTS:
        both = [w for w in theirs.windows if w.text == text and w in ours.windows]
        if both:
            compared = reading.positions(ours.only(both), theirs.only(both))
            yield Row(loss=loss, text=text, between=between, figures=summarize(compared, exact=False))
