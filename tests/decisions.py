"""A realistic decision and the artifacts around it, made up, for the tests of reports, tracking and release."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.decide.interval import Interval
from pipelines.decide.model import Candidate, Decision, Verdict, VerdictName
from pipelines.decide.probed import Latency, Speed, Throughput
from pipelines.flow.store import Manifest, hash_tree

SETS = {"support_intent": (400, 0.02, True), "ticket_json": (300, 0.01, True), "passage_qa": (320, 0.02, False)}
CONDITIONS = {
    "device": "2 x Intel Xeon (AVX-512), no GPU",
    "toolchain": "onnxruntime-genai 0.9.2, transformers 5.24.0",
    "measured": "2026-11-30T12:00:00+00:00",
    "profiles": "closed-1, closed-4, open-2",
}


def key_of(*parts: str) -> str:
    """A key as the store makes them: 64 hex digits."""
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def verdict(eval_set: str, slice_: str, loss: float, half: float, outcome: VerdictName, items: int = 300) -> Verdict:
    """One comparison, its figures around a given loss."""
    _, margin, binary = SETS[eval_set]
    return Verdict(
        eval_set=eval_set,
        slice=slice_,
        metric="acc" if binary else "f1",
        higher_is_better=True,
        binary=binary,
        items=items,
        clusters=None if binary else 80,
        reference_score=0.71,
        score=0.71 - loss,
        loss=loss,
        interval=Interval(lower=loss - half, upper=loss + half, confidence=0.9),
        margin=margin,
        gains=4 if binary else None,
        losses=4 + round(loss * items) if binary else None,
        p_value=0.03,
        method="Nam score test" if binary else "cluster-robust t",
        verdict=outcome,
        more_items=640 if outcome == "inconclusive" else None,
        note="",
    )


def latencies(ttft: float, supported: bool = True) -> tuple[Latency, ...]:
    """Percentiles of three metrics under three load profiles."""
    found = []
    for profile, load in (("closed-1", 1.0), ("closed-4", 2.4), ("open-2", 1.6)):
        for metric, scale in (("ttft_ms", 1.0), ("tpot_ms", 0.12), ("e2e_ms", 4.2)):
            for percentile, tail in ((50.0, 1.0), (95.0, 1.5), (99.0, 1.9)):
                value = ttft * load * scale * tail
                kept = supported or percentile < 99
                interval = Interval(lower=value * 0.94, upper=value * 1.09, confidence=0.95)
                found.append(
                    Latency(
                        profile=profile,
                        metric=metric,
                        percentile=percentile,
                        value=value if kept else None,  # type: ignore[arg-type]
                        interval=interval if kept and (percentile < 99 or ttft > 40) else None,
                        requests=320 if supported else 120,
                    )
                )
    return tuple(found)


def candidate(
    label: str,
    *,
    score: float,
    ttft: float,
    verdicts: Sequence[Verdict] = (),
    outcome: str | None = None,
    changes: Mapping[str, object] | None = None,
) -> Candidate:
    """One candidate; `changes` replaces any of its fields. Where there are verdicts, its scores are theirs."""
    found = {v.eval_set: v.score or 0.0 for v in verdicts if v.slice == "all"} or dict.fromkeys(SETS, score)
    given: dict[str, object] = {
        "label": label,
        "variant": label.split("@")[0],
        "engine": "ort_genai",
        "reference": False,
        "status": "ok",
        "failure": None,
        "quantizer": label.split("_")[0],
        "scheme": "W4A16_G64",
        "library": "llm-compressor 0.9.0",
        "target": "ort_genai",
        "native": True,
        "native_note": "",
        "keys": {kind: key_of(kind, label) for kind in ("variant", "engine", *(f"scores/{name}" for name in SETS))},
        "variant_bytes": 118_000_000,
        "engine_bytes": 124_000_000,
        "perplexity": 21.4,
        "engine_kl": 0.0004,
        "scores": found,
        "mean_score": sum(found.values()) / len(found),
        "verdicts": tuple(verdicts),
        "latency": latencies(ttft),
        "throughput": tuple(
            Throughput(
                profile=p,
                requests=320,
                failed=0,
                requests_per_s=100 / ttft,
                output_tokens_per_s=4000 / ttft,
                peak_rss_bytes=410_000_000,
            )
            for p in ("closed-1", "closed-4", "open-2")
        ),
        "speed": Speed(
            metric="ttft_ms",
            profile="closed-4",
            ratio=78 / ttft,
            interval=Interval(lower=70 / ttft, upper=86 / ttft, confidence=0.95),
            evidence=True,
            note="",
        ),
        "pareto": False,
        "outcome": outcome,
        "reasons": (),
    }
    return Candidate.model_validate(given | dict(changes or {}))


def decision(outcome: str = "promote") -> Decision:
    """Six candidates of every kind: reference, winner, close second, failing, emulated, and one that broke."""
    fine = [
        verdict("support_intent", "all", 0.002, 0.011, "pass", 400),
        verdict("support_intent", "billing", 0.006, 0.013, "pass", 130),
        verdict("support_intent", "delivery and returns, several languages", -0.004, 0.017, "pass", 140),
        verdict("ticket_json", "all", -0.003, 0.009, "pass"),
        verdict("passage_qa", "all", 0.004, 0.012, "pass", 320),
    ]
    unsure = [
        verdict("support_intent", "all", 0.008, 0.016, "inconclusive", 400),
        verdict("ticket_json", "all", 0.002, 0.012, "inconclusive"),
        verdict("passage_qa", "all", 0.006, 0.01, "pass", 320),
    ]
    bad = [
        verdict("support_intent", "all", 0.071, 0.024, "fail", 400),
        verdict("ticket_json", "all", 0.12, 0.03, "veto"),
        verdict("passage_qa", "all", 0.05, 0.02, "fail", 320),
    ]
    emulated = {
        "quantizer": "fp8",
        "scheme": "W8A8_FP8",
        "native": False,
        "native_note": "FP8 weights run in fp32",
        "engine_bytes": 541_000_000,
    }
    base = {
        "reference": True,
        "quantizer": "none",
        "scheme": "BF16",
        "library": "",
        "speed": None,
        "pareto": True,
        "engine_bytes": 541_000_000,
    }
    broken = {
        "status": "failed",
        "failure": "perplexity 4812 is above 1.5 x 20.9 of the base: the checkpoint loads as noise",
        "scores": {},
        "mean_score": None,
        "latency": (),
        "throughput": (),
        "speed": None,
        "perplexity": 4812.0,
        "engine_kl": None,
    }
    promoted = "promote" if outcome == "promote" else "hold"
    found = (
        candidate("baseline", score=0.71, ttft=78, changes=base),
        candidate("gptq_w4a16_g64", score=0.708, ttft=31, verdicts=fine, outcome=promoted, changes={"pareto": True}),
        candidate(
            "awq_w4a16_g64",
            score=0.703,
            ttft=31.5,
            verdicts=unsure,
            outcome="hold",
            changes={"reasons": ("support_intent is inconclusive",)},
        ),
        candidate(
            "rtn_w4a16_g64",
            score=0.64,
            ttft=30.4,
            verdicts=bad,
            outcome="reject",
            changes={"pareto": True, "latency": latencies(30.4, supported=False)},
        ),
        candidate("fp8_dynamic", score=0.709, ttft=79, verdicts=fine[:1], outcome="hold", changes=emulated),
        candidate("gptq_w3a16_g64", score=0.1, ttft=30, outcome="reject", changes=broken),
    )
    return Decision(
        version=1,
        campaign="demo",
        outcome=outcome,
        winner="gptq_w4a16_g64" if outcome == "promote" else None,  # type: ignore[arg-type]
        headline="PROMOTE gptq_w4a16_g64: within the margin on 5 of 5 comparisons, 2.52x as fast as the reference"
        if outcome == "promote"
        else "HOLD: none of 5 variants may be promoted yet; awq_w4a16_g64: support_intent is inconclusive",
        detail="gptq_w4a16_g64 promote (within the margin on 5 of 5 comparisons); awq_w4a16_g64 hold (support_intent "
        "is inconclusive); rtn_w4a16_g64 reject (fails on 2 of 3 comparisons)",
        would_change=("awq_w4a16_g64: 640 more items of support_intent would decide",),
        reference="baseline",
        candidates=found,
        gate={"alpha": 0.05, "latency": {"profile": "closed-4", "metric": "ttft_ms", "percentile": 99.0}},
        conditions=CONDITIONS,
        base={"model": "SmolLM2-135M-Instruct", "licence": "Apache-2.0"},
    )


def artifact(
    where: Path,
    kind: str,
    key: str,
    facts: Mapping[str, object] | None = None,
    inputs: Mapping[str, str] | None = None,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Close a directory with a manifest, as the store does; files already in it are hashed."""
    where.mkdir(parents=True, exist_ok=True)
    record = Manifest.model_validate(
        {
            "kind": kind,
            "stage": kind,
            "version": 1,
            "key": key,
            "config": dict(config or {}),
            "inputs": dict(inputs or {}),
            "toolchain": {},
            "device": {"name": CONDITIONS["device"]},
            "facts": dict(facts or {}),
            "files": hash_tree(where),
            "started": CONDITIONS["measured"],
            "seconds": 12.5,
            "peak_rss": 0,
        }
    )
    (where / "manifest.json").write_text(record.model_dump_json())
    return where


def engines(root: Path, made: Decision) -> list[Path]:
    """One small engine directory per candidate that ran."""
    found = []
    for one in made.candidates:
        where = root / "engine" / one.keys["engine"][:16]
        where.mkdir(parents=True)
        (where / "model.onnx").write_bytes(one.label.encode() * 50)
        found.append(artifact(where, "engine", one.keys["engine"], {"target": one.target}))
    return found


def variants(root: Path, made: Decision) -> list[Path]:
    """A table of two layers for each candidate that was quantized."""
    rows = [
        {"module": "model.layers.0.mlp.up_proj", "scheme": "W4A16_G64", "bits": 4, "group_size": 64, "error": 0.25},
        {"module": "lm_head", "scheme": "kept", "reason": "ignored by 'lm_head'", "bits": 16},
    ]
    facts = {"quantized_modules": 1, "kept_modules": 1, "bits_per_linear_weight": 4.25, "bits_per_weight": 6.5}
    found = []
    for one in made.candidates:
        if one.status == "failed":
            continue
        where = root / "variant" / one.keys["variant"][:16]
        where.mkdir(parents=True)
        (where / "layers.json").write_text(json.dumps(rows))
        declared = {} if one.reference else {"quantization_config": {"quant_method": "gptq", "bits": 4}}
        (where / "config.json").write_text(json.dumps(declared))
        found.append(artifact(where, "variant", one.keys["variant"], facts))
    return found


def scores(root: Path, made: Decision) -> list[Path]:
    """Items of each eval set for each candidate that ran."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = []
    for one in made.candidates:
        for eval_set in one.scores:
            key = one.keys[f"scores/{eval_set}"]
            where = root / "scores" / key[:16]
            where.mkdir(parents=True)
            pq.write_table(pa.table({"item_id": ["1", "2"], "score": [1.0, 0.0]}), where / "items.parquet")
            config = {"digest": key_of("evalset", eval_set)}
            found.append(artifact(where, "scores", key, {"eval_set": eval_set}, {"engine": one.keys["engine"]}, config))
    return found


def requests(root: Path, made: Decision, count: int = 320) -> Path:
    """Requests of every engine under three profiles, skewed as latencies are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(7)
    rows: list[dict[str, object]] = []
    for one in made.candidates:
        middle = next((x.value for x in one.latency if x.metric == "ttft_ms" and x.profile == "closed-4"), None)
        for n in range(count if middle else 0):
            ttft = (middle or 0) * rng.lognormvariate(0, 0.3)
            rows.append(
                {
                    "engine": one.keys["engine"][:16],
                    "profile": "closed-4",
                    "phase": 0,
                    "bucket": "",
                    "mode": "closed",
                    "concurrency": 4,
                    "round": n % 5,
                    "request": n,
                    "ttft_ms": ttft,
                    "tpot_ms": ttft * 0.12,
                    "e2e_ms": ttft * 4,
                    "ok": n != 3,
                }
            )
    key = key_of("latency", made.campaign)
    where = root / "latency" / key[:16]
    where.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), where / "requests.parquet")
    return artifact(
        where, "latency", key, {"rounds": 5, "device": CONDITIONS["device"], "started": CONDITIONS["measured"]}
    )


def decided(root: Path, made: Decision) -> Path:
    """The decision's own artifact."""
    key = key_of("decision", made.campaign, made.outcome)
    where = root / "decision" / key[:16]
    where.mkdir(parents=True, exist_ok=True)
    (where / "decision.json").write_text(made.model_dump_json(indent=1))
    (where / "decision.md").write_text(f"# {made.headline}\n\n{made.detail}\n")
    return artifact(where, "decision", key, config={"campaign": made.campaign})
