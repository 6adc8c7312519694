"""Made-up rollouts: a plan from a made-up decision, and the requests of a step under a known truth."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from pipelines.decide.gate import GateConfig
from pipelines.decide.model import Decision
from pipelines.decide.rollout import Plan, RolloutConfig, Side, plan
from pipelines.decide.split import bucket
from pipelines.decide.traffic import Line
from tests import decisions

SLO = {"profile": "closed-4", "metric": "e2e_ms", "percentile": 95, "max_ms": 900}
GATE: dict[str, Any] = {
    "speed": {"profile": "closed-4"},
    "latency": {"profile": "closed-4"},
    "vetoes": {"slo": [SLO]},
}
SALT = "0123456789abcdef"
START = datetime(2026, 12, 1, 8, tzinfo=UTC)


def decision(gate: Mapping[str, Any] | None = None) -> Decision:
    """The made-up decision to promote, with a whole gate."""
    return decisions.decision().model_copy(
        update={"gate": GateConfig.model_validate(gate or GATE).model_dump(mode="json")}
    )


def a_plan(gate: Mapping[str, Any] | None = None, **config: Any) -> Plan:
    """A plan with wide margins, so that few requests settle it; `config` goes over that."""
    made = decision(gate)
    winner = next(c for c in made.candidates if c.label == made.winner)
    wide: dict[str, Any] = {"margin": 0.1, "error_margin": 0.1, "expected_errors": 0.05, "steps": (20, 50, 100)}
    return plan(
        winner, GateConfig.model_validate(made.gate), RolloutConfig(**wide | config), campaign="demo",
        decision_key="d" * 16, canary=Side(version="3", engine_key=SALT, label="gptq_w4a16_g64"),
        control=Side(version="2", engine_key="c" * 16, label="version 2"), model="demo",
        rollback="quantgate rollback campaign=demo",
    )  # fmt: skip


def traffic(
    made: Plan,
    step: int,
    users: int,
    *,
    seed: int = 0,
    right: tuple[float, float] = (0.8, 0.8),
    failing: tuple[float, float] = (0.01, 0.01),
    e2e_ms: tuple[float, float] = (400.0, 400.0),
    change: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda row: row,
) -> list[Line]:
    """One request each of so many users, over two hours, split by the plan; tuples are (control, canary)."""
    rng, found, chosen = random.Random(seed), [], made.step(step)
    assert chosen is not None
    for n in range(users):
        user = f"user-{seed}-{n}"
        canary = bucket(made.split.salt, user) < chosen.buckets
        failed = rng.random() < failing[canary]
        row: dict[str, Any] = {
            "arm": "canary" if canary else "control", "user": user, "request_id": f"{seed}-{n}", "error": failed,
            "at": (START + timedelta(minutes=120 * n / users, days=step)).isoformat(),
        }  # fmt: skip
        correct, late = rng.random() < right[canary], e2e_ms[canary] * rng.lognormvariate(0, 0.3)
        row |= {} if failed else {"correct": correct, "e2e_ms": late}
        if (changed := change(row)) is not None:
            found.append(changed)
    return [Line.model_validate_json(json.dumps(row), strict=True) for row in found]


def shadows(count: int, *, lost: int, seed: int = 0) -> list[Line]:
    """Prompts that both arms answered: the control right on 4 of 5, the canary wrong on `lost` of those."""
    rows = []
    for n in range(count):
        for arm in ("control", "canary"):
            right = n % 5 > 0 and not (arm == "canary" and n < lost * 5 / 4)
            rows.append({"arm": arm, "request_id": f"s{seed}-{n}", "correct": right, "error": False})
    return [Line.model_validate(row) for row in rows]
