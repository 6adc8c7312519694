"""The divergence stage with a made-up server: which losses it tells, on which text, against whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipelines.divergence import figures, reading
from pipelines.divergence.figures import Row, summarize
from pipelines.divergence.reading import Reading, Window
from pipelines.engine.capabilities import Capabilities
from pipelines.engine.endpoint import Ranking
from pipelines.evaluate import divergence as stage
from pipelines.flow.store import Fact
from tests.decisions import artifact, key_of

HELD_OUT = (Window("held_out", (1, 2, 3, 4), 1), Window("held_out", (4, 3, 2, 1), 1))
PROMPTS = (Window("prompts", (5, 1, 6), 2), Window("prompts", (7, 1, 6, 2), 2))


def logits(seed: int) -> np.ndarray:
    """What a model of this seed predicts after each of ten tokens; seeds are a little apart."""
    base = np.random.default_rng(0).normal(size=(10, 40)) * 3
    return base + 0.1 * seed * np.random.default_rng(seed).normal(size=base.shape)


class Server:
    """Predicts by a table, and remembers how it was asked."""

    def __init__(self, seed: int, scores: bool = True, by_id: bool = True) -> None:
        self.capabilities = Capabilities(prompt_logprobs=scores)
        self.asked: list[int] = []
        self._logits, self._by_id = logits(seed), by_id

    def rank(self, prompts: Sequence[tuple[int, ...]], starts: Sequence[int], top: int) -> list[Ranking]:
        self.asked.append(len(prompts))
        found = []
        for ids, start in zip(prompts, starts, strict=True):
            logprobs, tops, values = reading.rank(self._logits[list(ids[start - 1 : -1])], ids[start:])
            rows = [tuple(r) for r in (tops.tolist() if self._by_id else [()] * len(tops))]
            its = [tuple(r) for r in (values.tolist() if self._by_id else [()] * len(tops))]
            found.append(Ranking(tuple(logprobs.tolist()), tuple(rows), tuple(its)))
        return found


def read_by(seed: int, windows: Sequence[Window]) -> Reading:
    parts = [reading.rank(logits(seed)[list(w.ids[w.start - 1 : -1])], w.true) for w in windows]
    return reading.joined(windows, parts)


class Place:
    """Artifacts of one candidate."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._patch = root, monkeypatch

    def made(self, name: str, windows: Sequence[Window] = (), **facts: Fact) -> Path:
        """An artifact with a reading of the checkpoint (seed 1), if there are windows."""
        where = self.root / name / "0"
        where.mkdir(parents=True)
        if windows:
            reading.write(where, read_by(1, windows))
            quantized = summarize(reading.positions(read_by(0, windows), read_by(1, windows)), exact=True)
            figures.write(where, [Row(loss="quantization", text=windows[0].text, between="x", figures=quantized)])
        return artifact(where, name, key_of(name), facts)

    def engine(self, built: bool = False, max_length: int = 2048, **facts: Fact) -> Path:
        where = self.root / "engine" / "0"
        where.mkdir(parents=True)
        card = {"target": "t", "native": True, "native_note": "", "max_length": max_length, "eos_token_ids": [0],
                "bos_token_id": None, "vocab_size": 40, "model_id": "m"}  # fmt: skip
        (where / "engine.json").write_text(json.dumps(card))
        if built:
            exact = summarize(reading.positions(read_by(1, HELD_OUT), read_by(1, HELD_OUT)), exact=True)
            row = Row(loss="engine", text="held_out", between="x", arithmetic="float32", figures=exact)
            figures.write(where, [row])
        return artifact(where, "engine", key_of("engine"), facts)

    def run(self, server: Server, engine: Path, name: str = "divergence", **inputs: Path) -> tuple[dict, Path]:  # type: ignore[type-arg]
        self._patch.setattr("pipelines.evaluate.harness.server_of", lambda _: SimpleNamespace(endpoint=server))
        out = self.root / name
        out.mkdir()
        return stage.run(stage.ReadingConfig(), out, engine=engine, **inputs), out


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def rows(out: Path) -> dict[tuple[str, str], Row]:
    return {(row.loss, row.text): row for row in figures.read(out)}


def test_all_three_losses_are_told_on_both_texts(place: Place) -> None:
    """The checkpoint's own, the built engine's where it was compared, the rest by the server, and against the
    reference engine: each as the two readings have it."""
    checked, asked = place.made("reference", HELD_OUT), place.made("asked", PROMPTS)
    engine = place.engine(built=True, arithmetic="float32")
    _, of_reference = place.run(Server(0), engine, "base", checked=checked, asked=asked)
    assert {"quantization", "engine"} == {loss for loss, _ in rows(of_reference)}
    server = Server(2)
    facts, out = place.run(server, engine, checked=checked, asked=asked, against=of_reference)
    found = rows(out)
    texts = ("held_out", "prompts")
    assert {(loss, text) for loss in ("quantization", "engine", "total") for text in texts} == set(found)
    windows = (*HELD_OUT, *PROMPTS)
    total = summarize(reading.positions(read_by(0, windows[:2]), read_by(2, windows[:2])), exact=False)
    assert found["total", "held_out"].figures.kl_mean == pytest.approx(total.kl_mean)
    assert found["total", "held_out"].figures.log_ratio_se == pytest.approx(total.log_ratio_se)
    engine_loss = summarize(reading.positions(read_by(1, PROMPTS), read_by(2, PROMPTS)), exact=False)
    assert found["engine", "prompts"].figures.kl_mean == pytest.approx(engine_loss.kl_mean)
    assert (True, False) == (found["engine", "held_out"].figures.exact, found["engine", "prompts"].figures.exact)
    assert "float32" == found["engine", "prompts"].arithmetic
    assert (4, 9, "", [1, 1, 2]) == (facts["windows"], facts["tokens"], facts["note"], server.asked)
    assert windows == reading.read(out).windows


@pytest.mark.parametrize(
    ("engine", "checkpoint", "expected"),
    [
        ({"arithmetic": "float32"}, {}, "float32"),
        ({"arithmetic": "int8_activations"}, {}, "int8_activations"),
        ({}, {}, "half"),
        ({"arithmetic": "float32"}, {"rounds_inputs": True}, "rounded_activations"),
    ],
)
def test_the_arithmetic_says_which_floor_holds(
    place: Place, engine: dict[str, Fact], checkpoint: dict[str, Fact], expected: str
) -> None:
    """As the target tells it, 16-bit floats where it does not; a checkpoint that rounds inputs is rounded itself."""
    checked = place.made("reference", HELD_OUT, **checkpoint)
    _, out = place.run(Server(1), place.engine(**engine), checked=checked)
    assert expected == rows(out)["engine", "held_out"].arithmetic


def test_a_server_without_ids_leaves_the_true_token_and_the_rest(place: Place) -> None:
    """The bound has two cells, top tokens are not known, and changes of the true token's probability are as exact."""
    checked, engine = place.made("reference", HELD_OUT), place.engine()
    _, named = place.run(Server(2, by_id=False), engine, "named", checked=checked)
    _, known = place.run(Server(2), engine, "known", checked=checked)
    less, more = (rows(out)["engine", "held_out"].figures for out in (named, known))
    assert (None, 0 < less.kl_mean <= more.kl_mean) == (less.same_top, True)
    assert less.dp_rms == pytest.approx(more.dp_rms)


def test_what_cannot_be_read_is_said(place: Place) -> None:
    """Windows longer than the engine admits are left out and counted; a server that scores nothing is not asked."""
    checked, asked = place.made("reference", HELD_OUT), place.made("asked", PROMPTS)
    engine = place.engine(max_length=3)
    facts, out = place.run(Server(2), engine, checked=checked, asked=asked)
    assert ("3 windows are longer than the 3 tokens that the engine admits", 1) == (facts["note"], facts["windows"])
    assert {("quantization", "held_out"), ("quantization", "prompts"), ("engine", "prompts")} == set(rows(out))
    silent = Server(2, scores=False)
    facts, out = place.run(silent, engine, "silent", checked=checked)
    assert ("the server gives no log-probabilities of prompts", [], None) == (
        facts["note"], silent.asked, facts["kl_mean"]
    )  # fmt: skip
    assert {("quantization", "held_out")} == set(rows(out))
    facts, out = place.run(Server(2), engine, "after", checked=checked, against=out)
    assert ("total", "held_out") not in rows(out)
