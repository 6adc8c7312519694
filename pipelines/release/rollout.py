"""The rollout plan of a promotion, on disk: plan.yaml, a gateway that follows it, and the record of checks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from pipelines.config import parse
from pipelines.decide import rollout
from pipelines.decide.gate import GateConfig
from pipelines.decide.model import Candidate, Decision
from pipelines.decide.rollout import Plan, RolloutConfig, Side
from pipelines.decide.stepanswer import Answer, judge_step
from pipelines.errors import ConfigError, EvidenceError, InputError, Problem
from pipelines.flow.store import Store
from pipelines.release import gateway
from pipelines.release.ledger import Ledger
from pipelines.release.rolloutdata import Data
from pipelines.release.rolloutrecord import Check, past, record_of

HOME, PLAN = "rollouts", "plan.yaml"
_HEAD = (
    "# The rollout of a promoted engine: what `quantgate canary check` judges each step by (docs/canary.md).\n"
    "# A plan is not changed once a step was checked.\n"
)


@dataclass(frozen=True, slots=True)
class Promoted:
    """A version that is rolled out: the decision about it, and the version that was champion before ("": nobody)."""

    made: Decision
    candidate: Candidate
    decision_key: str
    model: str
    version: str
    champion_before: str


def plan_of(promoted: Promoted, ledger: Ledger, config: RolloutConfig, rollback: str) -> Plan:
    """Plan a rollout. The control is the champion of before; where there was none, what the decision compared with.

    `rollback` is the command that undoes the promotion; it is left out where there is nothing to go back to.
    """
    made, candidate = promoted.made, promoted.candidate
    canary = Side(version=promoted.version, engine_key=candidate.keys["engine"][:16], label=candidate.label)
    return rollout.plan(
        candidate,
        parse(GateConfig, made.gate, "gate"),
        config,
        campaign=made.campaign,
        decision_key=promoted.decision_key,
        canary=canary,
        control=_control(promoted, ledger),
        model=promoted.model,
        rollback=rollback if promoted.champion_before else "",
    )


def _control(promoted: Promoted, ledger: Ledger) -> Side:
    before = promoted.champion_before
    if not before:
        reference = next((c for c in promoted.made.candidates if c.reference), None)
        key = reference.keys.get("engine", "")[:16] if reference else ""
        return Side(version="", engine_key=key, label=f"{promoted.made.reference}, or what serves now")
    done = (e.change for e in reversed(ledger.entries()) if e.state == "committed")
    change = next((c for c in done if (c.model, c.version) == (promoted.model, before)), None)
    return Side(version=before, engine_key=change.engine_key if change else "", label=f"version {before}")


def champion(ledger: Ledger, model: str) -> tuple[str, str, str, str]:
    """The version that was promoted last, its engine's and decision's names, and the champion before it.

    Raises:
        EvidenceError: nothing was promoted, or the champion came back by a rollback.
    """
    entry = ledger.committed(model)
    if entry is None:
        raise EvidenceError(f"{model}: nothing was promoted yet, so there is nothing to roll out")
    change = entry.change
    if change.action == "rollback":
        raise EvidenceError(f"{model}: version {change.version} came back by a rollback; a promotion is rolled out")
    return change.version, change.engine_key, change.decision_key, change.champion_before or ""


def candidate_of(store: Store, decision_key: str, engine_key: str) -> tuple[Decision, Candidate]:
    """The decision by which an engine was promoted, and what it says about it.

    Raises:
        EvidenceError: it is gone, or about other engines.
    """
    path = store.path("decision", decision_key) / "decision.json"
    try:
        made = Decision.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{path}: no readable decision ({error})") from None
    for one in made.candidates:
        if one.keys.get("engine", "")[:16] == engine_key[:16]:
            return made, one
    raise EvidenceError(f"{path}: is not about engine {engine_key}")


def write(plan: Plan, home: Path) -> Path:
    """Write a plan under `home`, with its gateway, and give its path. One that was checked already is left alone: the
    same plan again is the same rollout, another one gets a place of its own."""
    text = _HEAD + yaml.safe_dump(plan.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    model = home / "".join(c if c.isalnum() or c in "-_." else "_" for c in plan.model).lstrip(".")
    number = 1
    while _taken(path := model / f"{plan.canary.version}{f'-{number}' if number > 1 else ''}" / PLAN, text):
        number += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.with_name(gateway.NAME).write_text(gateway.haproxy(plan), encoding="utf-8")
    return path


def _taken(path: Path, text: str) -> bool:
    """Whether another rollout is recorded there, or the same one that has ended."""
    checks = record_of(path).entries()
    if not checks:
        return False
    ended = any(c.answer == "roll_back" for c in checks)
    return ended or not path.is_file() or path.read_text(encoding="utf-8") != text


def read(path: Path) -> Plan:
    """Read a plan.

    Raises:
        InputError: there is none.
        ConfigError: it is not as a plan should be.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: no readable rollout plan ({error})") from None
    return parse(Plan, data, str(path))


def check(path: Path, number: int, data: Data) -> tuple[Plan, Answer, Check]:
    """Judge a step by its plan and record the answer.

    Raises:
        ConfigError: the plan has no such step.
        EvidenceError: the data are no evidence about it, which is recorded too; or plan or record were changed.
    """
    plan = read(path)
    step = plan.step(number)
    if step is None:
        known = ", ".join(f"{s.step} ({s.percent:g}%)" for s in plan.steps)
        raise ConfigError([Problem("--step", number, "the plan has no such step", f"allowed: {known}")])
    record, plan_sha256 = record_of(path), hashlib.sha256(path.read_bytes()).hexdigest()
    with record.locked("check"):
        checks = record.entries()
        bare = Check(
            seq=0, at=datetime.now(UTC).replace(microsecond=0), plan_sha256=plan_sha256, step=number, answer="invalid",
            look=0, ripe_look=0, repeat=False, data=data.name, data_sha256=data.sha256, lines=len(data.lines),
            last_at=None, reasons=(), before="", seal="",
        )  # fmt: skip
        before, repeat = past(checks, plan_sha256, number, data.sha256)
        try:
            answer = judge_step(plan, step, data.lines, before)
        except EvidenceError as error:
            record.append(bare.model_copy(update={"reasons": tuple(str(error).splitlines())}))
            raise
        said = answer.model_dump(include={"answer", "look", "ripe_look", "last_at", "reasons"})
        return plan, answer, record.append(bare.model_copy(update=said | {"repeat": repeat}))
