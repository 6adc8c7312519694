"""The scores stage: one eval set against one engine through lm-eval, one row of evidence per item."""

from __future__ import annotations

import atexit
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipelines.config import Strict
from pipelines.errors import EvidenceError
from pipelines.evaluate.evalset import Evalset, EvalsetConfig, load
from pipelines.flow.store import Fact
from pipelines.intake.lean import without_unused

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from pipelines.engine.serving import Served
    from pipelines.evaluate.adapter import EndpointLM, Pace, Trace

ITEMS = "items.parquet"
SEED = 0


class ScoresConfig(Strict):
    """Which eval set, and the digest it had when the campaign was planned."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"evalset"})
    evalset: EvalsetConfig
    digest: str


class _Server:
    """The engine this process scores. Steps of one batch share it; it ends with the process."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._engine: Path | None = None
        self._served: Served | None = None
        atexit.register(self._open.close)

    def of(self, engine: Path) -> Served:
        """The server of an engine, started unless it is the one running."""
        from pipelines.engine.serving import serve

        if self._served is None or self._engine != engine:
            self._open.close()
            threads = int(os.environ.get("QUANTGATE_THREADS", "0")) or len(os.sched_getaffinity(0))
            self._served = self._open.enter_context(serve(engine, threads=threads))
            self._engine = engine
        return self._served


_server = _Server()


def run(config: ScoresConfig, out: Path, *, engine: Path) -> dict[str, Fact]:
    """Score an engine on an eval set and write items.parquet.

    Raises:
        EvidenceError: the eval set changed since it was planned, or an item came back without a usable score.
    """
    evalset = load(config.evalset)
    if evalset.digest != config.digest:
        raise EvidenceError(f"evalset.{evalset.name}: changed since this campaign was planned; run it again")
    began = time.monotonic()
    rows = rows_of(evalset, engine)
    seconds = time.monotonic() - began
    write(rows, out)
    return _facts(evalset, rows, seconds)


def rows_of(evalset: Evalset, engine: Path, pace: Pace | None = None) -> list[dict[str, object]]:
    """Score an engine on an eval set, one row an item and filter; `pace` is how requests are sent, if not as usual."""
    samples, lm = _evaluate(evalset, engine, pace)
    return list(_rows(evalset, samples, lm.traces))


def _evaluate(evalset: Evalset, engine: Path, pace: Pace | None) -> tuple[list[dict[str, Any]], EndpointLM]:
    """What lm-eval's `simple_evaluate` does with a model that is there, less what it then collects about the machine:
    that starts pip and other programs, for seconds in every step, and the manifest has it anyway."""
    with without_unused():
        from lm_eval.evaluator import evaluate
        from lm_eval.tasks import TaskManager

    lm = endpoint_lm(engine, pace)
    with tempfile.TemporaryDirectory() as scratch:
        task = evalset.lm_eval_task(Path(scratch))
        manager = TaskManager(include_defaults=isinstance(task, str))
        samples = _drawn(evalset.config, task, manager) if isinstance(task, str) else None
        _seed()
        loaded = manager.load([task])
        for one in loaded["tasks"].values():
            if one.get_config("num_fewshot") is None:
                one.set_config(key="num_fewshot", value=0)
            one.set_fewshot_seed(seed=SEED)
        result = evaluate(
            lm=lm,
            task_dict=loaded,
            samples=samples,
            log_samples=True,
            bootstrap_iters=0,
            apply_chat_template=evalset.config.chat_template,
            fewshot_as_multiturn=True,
        )
    ((_, scored),) = result["samples"].items()
    return scored, lm


def _seed() -> None:
    """The generators that a task's own code may draw from."""
    import numpy as np

    random.seed(SEED)
    np.random.seed(SEED)


def _drawn(config: EvalsetConfig, task: str, manager: TaskManager) -> dict[str, list[int]] | None:
    """Positions of the items that `limit` leaves of a task lm-eval ships; lm-eval's own limit takes the first ones."""
    if config.limit is None:
        return None
    (loaded,) = manager.load([task])["tasks"].values()
    count = len(loaded.eval_docs)
    return {task: sorted(random.Random(config.seed).sample(range(count), min(config.limit, count)))}


def server_of(engine: Path) -> Served:
    """Start an engine's server, if it is not running in this process already."""
    return _server.of(engine)


def endpoint_lm(engine: Path, pace: Pace | None = None) -> EndpointLM:
    """Give an engine's server lm-eval's interface."""
    from pipelines.engine.host.engine import Engine
    from pipelines.evaluate.adapter import USUAL, EndpointLM

    return EndpointLM(server_of(engine).endpoint, Engine.read(engine), pace or USUAL)


def _rows(
    evalset: Evalset, samples: Sequence[Mapping[str, Any]], traces: Mapping[str, Trace]
) -> Iterator[dict[str, object]]:
    card = evalset.card
    for sample in samples:
        doc = sample["doc"]
        item = str(doc["id"]) if "id" in doc else str(sample["doc_id"])
        score = sample.get(card.metric)
        if score is None or not isinstance(score, (int, float)):
            raise EvidenceError(
                f"evalset.{evalset.name}: item {item} has no {card.metric!r} (it has {', '.join(sample['metrics'])}); "
                "card.metric must name a metric of the task"
            )
        trace = traces[item]
        yield {
            "eval_set": evalset.name,
            "item_id": item,
            "slice": str(doc.get("slice") or "all"),
            "cluster": None if doc.get("cluster") is None else str(doc["cluster"]),
            "filter": sample["filter"],
            "metric": card.metric,
            "higher_is_better": card.higher_is_better,
            "binary": card.binary,
            "score": float(score),
            "prediction": _prediction(sample),
            "reference": str(sample["target"]),
            "prompt_hash": trace.prompt_hash,
            "template_id": evalset.template_id,
            "finish_reason": trace.finish_reason,
            "tokens_in": trace.tokens_in,
            "tokens_out": trace.tokens_out,
            "truncated": trace.truncated,
            "empty": trace.empty,
            "looping": trace.looping,
            "not_finite": trace.not_finite or not math.isfinite(float(score)),
            "must_pass": doc.get("must_pass") is True,
        }


def _prediction(sample: Mapping[str, Any]) -> str:
    """What the engine answered: the text, or for choices the index of the most likely one."""
    answers = sample["filtered_resps"]
    if len(answers) > 1 and all(isinstance(a, (tuple, list)) for a in answers):
        return str(max(range(len(answers)), key=lambda k: float(answers[k][0])))
    return str(answers[0])


def write(rows: Sequence[Mapping[str, object]], out: Path) -> None:
    """Write the evidence, one row an item and filter."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, flag, count = pa.string(), pa.bool_(), pa.int64()
    schema = pa.schema(
        [
            ("eval_set", text), ("item_id", text), ("slice", text), ("cluster", text), ("filter", text),
            ("metric", text), ("higher_is_better", flag), ("binary", flag), ("score", pa.float64()),
            ("prediction", text), ("reference", text), ("prompt_hash", text), ("template_id", text),
            ("finish_reason", text), ("tokens_in", count), ("tokens_out", count), ("truncated", flag), ("empty", flag),
            ("looping", flag), ("not_finite", flag), ("must_pass", flag),
        ]
    )  # fmt: skip
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), out / ITEMS, compression="zstd")


def _facts(evalset: Evalset, rows: Sequence[Mapping[str, object]], seconds: float) -> dict[str, Fact]:
    gated = evalset.card.filter or rows[0]["filter"]
    first = [r for r in rows if r["filter"] == gated]
    scores = [float(str(r["score"])) for r in first]
    return {
        "eval_set": evalset.name,
        "metric": evalset.card.metric,
        "score": sum(scores) / len(scores),
        "items": len(first),
        "higher_is_better": evalset.card.higher_is_better,
        "binary": evalset.card.binary,
        "truncated": sum(bool(r["truncated"]) for r in first),
        "empty": sum(bool(r["empty"]) for r in first),
        "length_finished": sum(r["finish_reason"] == "length" for r in first),
        "items_per_s": round(len(first) / seconds, 3),
    }
