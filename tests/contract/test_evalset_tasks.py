"""Every shipped eval set runs through lm-eval: a model that is always right scores best, one that never is worst."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelines.evaluate.evalset import EvalsetConfig, load
from pipelines.evaluate.metrics import count_words

EVALSETS = Path(__file__).resolve().parents[2] / "evalsets"
SHIPPED = sorted(card.parent.name for card in EVALSETS.glob("*/card.yaml") if (card.parent / "task.yaml").is_file())


def evaluated(name: str, right: bool, scratch: Path) -> list[float]:
    """The scores of a model that knows the references and tells them, or tells something else."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Oracle(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return [(0.0 if self.is_gold(r) == right else -1.0, False) for r in requests]

        def is_gold(self, request: Any) -> bool:
            return bool(request.doc["gold"] == request.idx)

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return [-(1.0 if right else 10.0) * count_words(r.args[0]) for r in requests]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return [" " + self.answer(r.doc) if right else " no idea" for r in requests]

        def answer(self, doc: dict[str, Any]) -> str:
            return str(doc["answer"] if "answer" in doc else doc["answers"][0])

    loaded = load(EvalsetConfig.model_validate({"path": str(EVALSETS / name), "limit": 15}))
    result = simple_evaluate(
        model=Oracle(),
        tasks=[loaded.lm_eval_task(scratch)],
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert loaded.card.higher_is_better == result["higher_is_better"][name][loaded.card.metric]
    samples: list[dict[str, Any]] = result["samples"][name]
    assert [item.id for item in loaded.drawn] == [sample["doc"]["id"] for sample in samples]
    return [float(sample[loaded.card.metric]) for sample in samples]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", SHIPPED)
def test_scores_span_from_worst_to_best(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the drawn items are scored, each in the card's metric, 1 or 0 (for perplexity 1 and 10 nats per word)."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    for right, expected in ((True, 1.0), (False, 10.0 if name == "heldout_text" else 0.0)):
        scratch = tmp_path / str(right)
        scratch.mkdir()
        assert {expected} == {round(score, 9) for score in evaluated(name, right, scratch)}
