"""A store with decided campaigns of any shape, made up: what the verbs that read stores are tested on."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pipelines.decide.judge import Item
from pipelines.decide.measured import Block, Request
from pipelines.decide.model import Candidate, Decision
from pipelines.flow.store import Manifest, Store, hash_tree
from tests import decisions
from tests.decisions import key_of

DEVICE = {"cpu": "AMD EPYC", "cores": "2", "memory_gib": "24", "gpu": "none"}
PROFILE = {"name": "closed_1", "mode": "closed", "concurrency": 1, "requests": 5}
PROBE: dict[str, Any] = {"profiles": [PROFILE], "prompts_sha256": "c793", "threads": 2, "rounds": 2, "seed": 1}
CARDS = {
    "intent": {"family": "standard", "metric": "acc", "higher_is_better": True, "binary": True},
    "qa": {"family": "standard", "metric": "f1", "higher_is_better": True, "binary": False},
}
GATE: dict[str, Any] = {
    "alpha": 0.05, "speed": {"profile": "closed_1"}, "latency": {"profile": "closed_1", "percentile": 50.0},
}  # fmt: skip
NIGHT = "2026-11-29T22:00:00+00:00"


@dataclass(frozen=True)
class Engine:
    """A candidate: what it answered, how fast it was, and the facts of its engine.

    right: of each item of `intent` whether it was answered right. grades: of each item of `qa`. times: milliseconds to
    the first token, by round.
    """

    label: str
    right: Sequence[bool] = ()
    grades: Sequence[float] = ()
    times: Sequence[Sequence[float]] = ()
    size_bytes: int = 100_000_000
    native: bool = True
    toolchain: Mapping[str, str] = field(default_factory=lambda: {"python": "3.11", "onnxruntime-genai": "0.18.0"})
    config: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Shop:
    """A store under `root`."""

    root: Path

    @property
    def store(self) -> Store:
        return Store(self.root / "store")

    def artifact(self, kind: str, key: str, **given: Any) -> Path:
        """Close the directory of an artifact, with what is in it, by a manifest."""
        where = self.store.path(kind, key)
        where.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {
            "kind": kind, "stage": kind, "version": 1, "key": key, "config": {}, "inputs": {}, "toolchain": {},
            "device": None, "facts": {}, "files": hash_tree(where), "started": NIGHT, "seconds": 1.0, "peak_rss": 0,
        }  # fmt: skip
        record = Manifest.model_validate(about | given)
        (where / "manifest.json").write_text(record.model_dump_json())
        return where

    def campaign(
        self, name: str, engines: Sequence[Engine], *, started: str = NIGHT, night: str = "", items: str = "",
        probe: Mapping[str, Any] | None = None, device: Mapping[str, str] | None = None, digest: str = "d1",
    ) -> str:  # fmt: skip
        """Decide a campaign about these engines and give the decision's key.

        night: engines of one label are the same engine in two campaigns unless this differs. items: goes into the
        prompt of every item, so that other items are asked.
        """
        latency = key_of("latency", name, started, night)
        made = [self._candidate(one, name, night, items, digest, latency, started) for one in engines]
        alive = [(one, c) for one, c in zip(engines, made, strict=True) if not one.failure]
        self._probe(latency, alive, started, {**PROBE, **(probe or {})}, {**DEVICE, **(device or {})})
        key = key_of("decision", name, started)
        where = self.store.path("decision", key)
        where.mkdir(parents=True)
        plain = decisions.decision().model_dump() | {
            "campaign": name, "reference": engines[0].label, "winner": None, "outcome": "hold", "candidates": made,
            "gate": GATE,
        }  # fmt: skip
        (where / "decision.json").write_text(Decision.model_validate(plain).model_dump_json())
        listed = [
            {
                "label": c.label, "engine_key": c.keys.get("engine"), "variant_key": c.keys.get("variant"),
                "status": c.status,
            }
            for c in made
        ]  # fmt: skip
        config = {"campaign": name, "candidates": listed, "eval_sets": CARDS, "gate": GATE}
        self.artifact("decision", key, config=config, started=started, facts={"outcome": "hold"})
        return key

    def _candidate(
        self, one: Engine, name: str, night: str, items: str, digest: str, latency: str, started: str
    ) -> Candidate:
        blank = decisions.candidate(one.label, score=0.5, ttft=50)
        about = {
            "label": one.label, "keys": {}, "verdicts": (), "latency": (), "throughput": (), "outcome": "hold",
            "scores": {}, "native": one.native, "engine_bytes": one.size_bytes,
        }  # fmt: skip
        if one.failure:
            lost = {"status": "failed", "failure": one.failure}
            return Candidate.model_validate(blank.model_dump() | about | lost)
        engine, variant = key_of("engine", one.label, night), key_of("variant", one.label, night)
        facts = {"target": "ort_genai", "native": one.native, "size_bytes": one.size_bytes}
        facts |= {} if one.native else {"native_note": "float weights of 4 or 8 bits are multiplied as float32"}
        self.artifact(
            "engine", engine, stage="engine.ort_genai", facts=facts, inputs={"variant": variant},
            toolchain=dict(one.toolchain), started=started,
        )  # fmt: skip
        self.artifact("variant", variant, config=dict(one.config), facts={"size_bytes": one.size_bytes - 7})
        keys = {"engine": engine, "variant": variant, "latency": latency}
        for eval_set, rows in (("intent", intent(one.right, items)), ("qa", graded(one.grades, items))):
            if rows:
                key = key_of("scores", eval_set, name, one.label, started, night)
                self._scores(key, eval_set, rows, engine, f"{eval_set}-{digest}", started)
                keys[f"scores/{eval_set}"] = key
        return Candidate.model_validate(blank.model_dump() | about | {"keys": keys})

    def _scores(self, key: str, eval_set: str, rows: Sequence[Item], engine: str, digest: str, started: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        where = self.store.path("scores", key)
        where.mkdir(parents=True)
        dropped = ("generated", "cut")
        plain = [{n: v for n, v in asdict(i).items() if n not in dropped} for i in rows]
        told = [row | {"eval_set": eval_set, "finish_reason": None} for row in plain]
        pq.write_table(pa.Table.from_pylist(told), where / "items.parquet")
        facts = {"eval_set": eval_set, "items": len(rows)}
        self.artifact(
            "scores", key, config={"digest": digest}, inputs={"engine": engine}, facts=facts, started=started,
            toolchain={"lm-eval": "0.4.13"}, version=2,
        )  # fmt: skip

    def _probe(
        self, key: str, engines: Sequence[tuple[Engine, Candidate]], started: str, config: Mapping[str, Any],
        device: Mapping[str, str],
    ) -> None:  # fmt: skip
        import pyarrow as pa
        import pyarrow.parquet as pq

        where = self.store.path("latency", key)
        where.mkdir(parents=True)
        sent = [r for one, c in engines for r in requests(c.keys["engine"][:16], one.times)]
        blocks = [b for one, c in engines for b in loads(c.keys["engine"][:16], one.times)]
        columns = [f.name for f in fields(Block) if f.name not in ("started_s", "excused")]
        rows = [{n: getattr(b, n) for n in columns} | {"started": started} for b in blocks]
        pq.write_table(pa.Table.from_pylist([asdict(r) for r in sent]), where / "requests.parquet")
        pq.write_table(pa.Table.from_pylist(rows), where / "blocks.parquet")
        self.artifact(
            "latency", key, config=dict(config), device=dict(device), started=started, version=2,
            inputs={"engines": [c.keys["engine"] for _, c in engines]}, toolchain={"uvloop": "0.23.0"},
        )  # fmt: skip

    def recorded(self, decision: str, runs: Mapping[str, str], uri: str) -> None:
        """Leave what recording a decision in MLflow leaves in the store."""
        key = key_of("track", decision)
        where = self.store.path("track", key)
        where.mkdir(parents=True)
        (where / "runs.yaml").write_text(json.dumps({"parent": "p", "children": dict(runs)}))
        facts = {"experiment_id": "1", "tracking_uri": uri, "run_id": "p"}
        self.artifact("track", key, inputs={"decision": decision}, facts=facts)


def intent(right: Sequence[bool], items: str = "") -> list[Item]:
    """Items scored 0 or 1, in two slices: the even and the odd ones."""
    blank = Item("", 0.0, "", "intent@1.0", metric="acc", binary=True)
    return [
        replace(blank, item_id=f"{n:03}", score=float(ok), prompt_hash=f"h{n}{items}", slice=("even", "odd")[n % 2])
        for n, ok in enumerate(right)
    ]


def graded(grades: Sequence[float], items: str = "") -> list[Item]:
    """Items with a graded score, three to a cluster."""
    blank = Item("", 0.0, "", "qa@1.0", metric="f1")
    return [
        replace(blank, item_id=f"{n:03}", score=grade, prompt_hash=f"q{n}{items}", cluster=f"passage {n // 3}")
        for n, grade in enumerate(grades)
    ]


def requests(engine: str, times: Sequence[Sequence[float]]) -> list[Request]:
    """Requests of a closed loop, whose answers have 11 tokens and take ten times the first one."""
    return [
        Request(
            engine=engine, profile="closed_1", round=r, ok=True, request=n, prompt_id=f"p{n}", ttft_ms=ms,
            tpot_ms=ms / 10, e2e_ms=ms * 2, itl_ms=[ms / 10] * 10, bucket="<=128", input_tokens=20, output_tokens=11,
            asked_tokens=11, concurrency=1, sent_s=float(n),
        )
        for r, row in enumerate(times)
        for n, ms in enumerate(row)
    ]  # fmt: skip


def loads(engine: str, times: Sequence[Sequence[float]]) -> list[Block]:
    """A block a round, whose rate goes with the mean of its times."""
    return [
        Block(
            engine=engine, profile="closed_1", round=r, wall_s=sum(row) * 2 / 1e3, requests=len(row), failed=0,
            output_tokens_per_s=5500.0 * len(row) / sum(row), peak_rss_bytes=400_000_000, steady=True,
        )
        for r, row in enumerate(times)
    ]  # fmt: skip


def spread(seed: int, middle: float, *, rounds: int = 5, count: int = 40) -> list[list[float]]:
    """Skewed times, as latencies are; of one seed the rounds share their luck."""
    rng, luck = random.Random(seed), random.Random(3)
    drift = [luck.lognormvariate(0, 0.04) for _ in range(rounds)]
    return [[middle * drift[r] * rng.lognormvariate(0, 0.25) for _ in range(count)] for r in range(rounds)]
