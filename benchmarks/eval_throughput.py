"""Scoring a multiple-choice set through the endpoint against lm-eval's own `hf` backend: same answers, how much faster?

Same checkpoint, items, cores and lm-eval; hf runs in float32, as the engine does, at whichever batch size is fastest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines import build
from outcome import conclude, conditions

from pipelines.evaluate.evalset import Evalset, EvalsetConfig, load
from pipelines.evaluate.harness import endpoint_lm

BATCH_SIZES = (1, 8)
OURS = "endpoint, ORT float32"


def main() -> None:
    """Run both backends over the same items and compare every choice's log-likelihood."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="16 items instead of 80")
    parser.add_argument("--evalset", default="support_intent")
    given = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_WAIT_POLICY="PASSIVE")
    built, threads = build(["experiment=demo", "variant=[baseline]"])
    baseline = built["baseline"]
    items = 16 if given.quick else 80
    evalset = load(EvalsetConfig(path=f"evalsets/{given.evalset}", limit=items, seed=1))
    runners = {OURS: endpoint_lm(baseline.engine)} | _hf(baseline.checkpoint, threads)
    scores, seconds = _in_turns(evalset, runners, rounds=1 if given.quick else 3)
    ours, theirs = scores[OURS], scores[_name(BATCH_SIZES[-1])]
    gaps = [abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    agree = sum(_ranking(a) == _ranking(b) for a, b in zip(ours, theirs, strict=True))
    rates = {name: len(ours) / statistics.median(took) for name, took in seconds.items()}
    print(f"{'backend':<24} {'items/s':>8} {'slowest':>8} {'fastest':>8}")
    for name, took in seconds.items():
        print(f"{name:<24} {rates[name]:>8.2f} {len(ours) / max(took):>8.2f} {len(ours) / min(took):>8.2f}")
    rate, other = rates[OURS], {name: value for name, value in rates.items() if name != OURS}
    conclude(
        "eval_throughput",
        conditions(
            ("lm-eval", "onnxruntime", "torch", "transformers"), threads=threads, evalset=given.evalset, items=len(ours)
        ),
        {"items_per_s": rate, "hf_items_per_s": other, "largest_gap": max(gaps), "same_ranking": agree / len(ours)},
        {
            "items per second over the best hf": (rate / max(other.values()), ">=", 3.0),
            "items with the same ranking of choices": (agree / len(ours), ">=", 1.0),
            "largest difference of a log-likelihood": (max(gaps), "<=", 1e-2),
        },
    )


def _ranking(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda k: scores[k])


def _name(batch_size: int) -> str:
    return f"lm-eval hf, batch {batch_size}"


def _hf(checkpoint: Path, threads: int) -> dict[str, Any]:
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(threads)
    return {
        _name(size): HFLM(pretrained=str(checkpoint), dtype="float32", device="cpu", batch_size=size)
        for size in BATCH_SIZES
    }


def _in_turns(
    evalset: Evalset, runners: Mapping[str, Any], rounds: int
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
    """Scores, and the seconds of each round, by runner; every other round in reverse, so that none is always first."""
    scores: dict[str, list[list[float]]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds):
        for name in list(runners)[:: 1 if number % 2 == 0 else -1]:
            scores[name], took = _timed(evalset, runners[name])
            seconds[name].append(took)
    return scores, seconds


def _timed(evalset: Evalset, model: Any) -> tuple[list[list[float]], float]:
    """Every item's choices' log-likelihoods, and the seconds of lm-eval's evaluation without loading anything."""
    from lm_eval import evaluate
    from lm_eval.tasks import TaskManager, get_task_dict

    with tempfile.TemporaryDirectory() as scratch:
        tasks = get_task_dict([evalset.lm_eval_task(Path(scratch))], TaskManager(include_defaults=False))
        began = time.perf_counter()
        result = evaluate(model, tasks, log_samples=True, bootstrap_iters=0)
        took = time.perf_counter() - began
    (samples,) = result["samples"].values()
    return [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples], took


if __name__ == "__main__":
    main()
