"""Scoring a multiple-choice set through the endpoint against lm-eval's own `hf` backend: same answers, how much faster?

Same checkpoint, items, cores and lm-eval; hf runs in float32, as the engine does, at whichever batch size is fastest.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import build
from outcome import conclude, conditions

from pipelines.evaluate.evalset import Evalset, EvalsetConfig, load
from pipelines.evaluate.harness import endpoint_lm

BATCH_SIZES = (1, 8)


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
    ours, our_seconds = _timed(evalset, endpoint_lm(baseline.engine))
    theirs, seconds = _best_hf(evalset, baseline.checkpoint, threads)
    gaps = [abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    agree = sum(_ranking(a) == _ranking(b) for a, b in zip(ours, theirs, strict=True))
    rate, other = len(ours) / our_seconds, {size: len(ours) / s for size, s in seconds.items()}
    print(f"{'backend':<24} {'items/s':>8}")
    print(f"{'endpoint, ORT float32':<24} {rate:>8.2f}")
    for size, value in other.items():
        print(f"{f'lm-eval hf, batch {size}':<24} {value:>8.2f}")
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


def _best_hf(evalset: Evalset, checkpoint: Path, threads: int) -> tuple[list[list[float]], dict[int, float]]:
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(threads)
    seconds, scores = {}, []
    for size in BATCH_SIZES:
        model = HFLM(pretrained=str(checkpoint), dtype="float32", device="cpu", batch_size=size)
        scores, seconds[size] = _timed(evalset, model)
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
