"""Quantization loss: a variant's logits against the base's kept ones, and the eval prompts both are asked about."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.divergence.positions import exact
from pipelines.divergence.reading import Window
from pipelines.errors import StageFailed
from pipelines.evaluate.evalset import EvalsetConfig, load
from pipelines.evaluate.prompts import DivergenceConfig, draw
from pipelines.quantize import predictions
from pipelines.quantize.reload import LoadedModel

EVALSETS = Path(__file__).resolve().parents[2] / "evalsets"
WINDOWS = (Window("held_out", (1, 2, 3, 4), 1), Window("held_out", (4, 3, 2, 1), 1), Window("prompts", (5, 1, 6), 2))
TRUE = [2, 3, 4, 3, 2, 1, 6]
FED = [1, 2, 3, 4, 3, 2, 1]


def table(seed: int, vocabulary: int = 40) -> NDArray[np.float32]:
    """Logits of what follows each token."""
    base = np.random.default_rng(0).normal(size=(8, vocabulary))
    return (base + 0.2 * seed * np.random.default_rng(seed).normal(size=base.shape)).astype(np.float32)


def model(logits: NDArray[np.float32]) -> LoadedModel:
    """A model that looks at the last token only."""
    import torch

    def forward(ids: Any, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.from_numpy(logits)[ids])

    return LoadedModel(cast(Any, forward), "by table")


def test_kept_logits_stand_for_the_base(tmp_path: Path) -> None:
    """Every predicted token's comparison is that of the two rows of logits, on both texts, clustered by window."""
    predictions.keep(model(table(0)), WINDOWS, tmp_path)
    scored = predictions.against(model(table(1)), WINDOWS, tmp_path)
    wanted = exact(table(0)[FED], table(1)[FED], np.array(TRUE), [0] * 7)
    assert np.concatenate([p.kl for p in scored.positions]) == pytest.approx(wanted.kl)
    assert np.concatenate(scored.reading.logprobs) == pytest.approx(wanted.other)
    held_out, prompts = predictions.rows(scored, "by table")
    assert ("quantization", "held_out", 6, 2) == (
        held_out.loss, held_out.text, held_out.figures.positions, held_out.figures.windows
    )  # fmt: skip
    assert ("prompts", 1, None) == (prompts.text, prompts.figures.windows, prompts.figures.log_ratio_se)
    assert held_out.figures.kl_mean == pytest.approx(wanted.kl[:6].mean())
    assert prompts.figures.kl_mean == pytest.approx(wanted.kl[6])
    assert held_out.figures.exact


def test_the_base_against_itself_loses_nothing(tmp_path: Path) -> None:
    """The same weights under another name: KL 0, the same top tokens, ratio 1; and the base alone has no rows."""
    alone = predictions.keep(model(table(0)), WINDOWS, tmp_path)
    assert [] == predictions.rows(alone, "by table")
    found = predictions.rows(predictions.against(model(table(0)), WINDOWS, tmp_path), "by table")[0].figures
    assert (0.0, 1.0, 0.0, 0.0) == (found.kl_mean, found.same_top, found.dp_rms, found.log_ratio)


def test_a_small_model_is_left_for_the_next_step_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes next takes it, or has it removed; a large one is never left."""
    loads: list[Path] = []
    monkeypatch.setattr("pipelines.quantize.reload.load", lambda path: loads.append(path) or model(table(0)))
    here, there = tmp_path / "here", tmp_path / "there"
    for path in (here, there):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"x")
    first = predictions.borrow(here)
    predictions.leave(here, first)
    assert first is predictions.borrow(here)
    assert first is not predictions.borrow(here)
    predictions.leave(here, first)
    predictions.borrow(there)
    assert first is not predictions.borrow(here)
    monkeypatch.setattr(predictions, "SMALL", 1)
    predictions.leave(here, first)
    assert first is not predictions.borrow(here)
    assert [here, here, there, here, here] == loads


def test_another_vocabulary_is_told(tmp_path: Path) -> None:
    """Logits over other tokens cannot be compared."""
    predictions.keep(model(table(0)), WINDOWS, tmp_path)
    with pytest.raises(StageFailed, match="vocabulary is not the base's"):
        predictions.against(model(table(0, 41)), WINDOWS, tmp_path)


def test_prompts_are_drawn_over_the_sets_with_their_answers() -> None:
    """Ten over four sets: three, three, two, two; each ends with its answer; texts scored whole have no prompt."""
    names = ("support_intent", "ticket_json", "passage_qa", "gsm8k_choice", "heldout_text")
    sets = [load(EvalsetConfig(path=str(EVALSETS / name))) for name in names]
    found = draw(sets, DivergenceConfig(prompts=10))
    assert found == draw(sets, DivergenceConfig(prompts=10))
    assert found != draw(sets, DivergenceConfig(prompts=10, seed=1))
    begins = ("Each message", "Ticket:", "Passage:", "Question:")
    assert [3, 3, 2, 2] == [sum(text.startswith(b) for text in found) for b in begins]
    words = ("dispatch", "refund", "cancel", "destination", "broken", "accounting", "password", "upgrade")
    assert all(text.endswith(tuple(f"Keyword: {word}" for word in words)) for text in found[:3])
    assert all(text.endswith("}") for text in found[3:6])
    assert () == draw(sets, DivergenceConfig(prompts=0))
    assert () == draw(sets[4:], DivergenceConfig())
