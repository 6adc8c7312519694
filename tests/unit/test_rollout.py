"""The rollout plan: its arithmetic by hand, its files, the record that counts looks, and what is read as evidence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.decide.gate import GateConfig
from pipelines.decide.rollout import Plan, RolloutConfig
from pipelines.errors import ConfigError, EvidenceError, InputError
from pipelines.release import rollout
from pipelines.release.gateway import haproxy
from pipelines.release.ledger import Change, Ledger
from pipelines.release.rollout import Promoted
from pipelines.release.rolloutdata import Data, from_file, parsed
from pipelines.release.rolloutrecord import record_of
from tests.rollouts import GATE, a_plan, decision, traffic

GOLDEN = Path(__file__).parent.parent / "golden" / "rollout"


def the_plan(ledger: Path, config: RolloutConfig | None = None, before: str = "2") -> Plan:
    """The plan of the made-up winner, with everything as it is by default."""
    made = decision(GATE)
    winner = next(c for c in made.candidates if c.label == made.winner)
    promoted = Promoted(made, winner, "d" * 16, "demo", "3", before)
    return rollout.plan_of(promoted, Ledger(ledger), config or RolloutConfig(), "quantgate rollback campaign=demo")


def data_of(lines: Any, name: str = "step.jsonl") -> Data:
    return parsed(name, "\n".join(line.model_dump_json(exclude_unset=True) for line in lines).encode())


def test_the_plans_figures_by_hand(tmp_path: Path) -> None:
    """(1.95996 + 0.84162)^2 = 7.8489 for a first look at half of 5% with power 80%.

    Scores: margin 0.01 (ticket_json, the smallest) at 0.71: 7.8489 * 0.2059 / 0.0001 = 16,160.9 at equal variances of
    one arm, times 1 / (1 - p). p95 takes 59 requests at 95%, 72 at 97.5%.
    """
    plan = the_plan(tmp_path / "ledger.jsonl")
    assert ("ticket_json", 0.01, 0.71) == (plan.quality.eval_set, plan.quality.margin, plan.quality.expected_score)
    first, last = plan.steps[0], plan.steps[-1]
    assert [1, 5, 20, 50, 100] == [s.percent for s in plan.steps]
    assert [100, 500, 2000, 5000, 10000] == [s.buckets for s in plan.steps]
    assert 16160.9 / 0.99 == pytest.approx(first.canary_requests, abs=2)
    assert 99 * first.canary_requests == first.control_requests
    assert "quality" == first.binds
    assert {"quality", "errors", "e2e_ms p95"} == {n.what for n in first.needs}
    assert 72 == next(n.canary for n in first.needs if n.what == "e2e_ms p95")
    assert 7.8489 * 0.0099 / 0.99 / 0.0001 == pytest.approx(
        next(n.canary for n in first.needs if n.what == "errors"), abs=1
    )
    assert 32321.8 == pytest.approx(plan.steps[3].canary_requests, abs=2)
    assert (72, 0, "e2e_ms p95") == (last.canary_requests, last.control_requests, last.binds)


def test_a_p99_takes_299_requests_and_more_for_looking_again() -> None:
    """ln 0.05 / ln 0.99 = 298.07, ln 0.025 / ln 0.99 = 367.04; both are told."""
    slo = {"profile": "closed-4", "metric": "e2e_ms", "percentile": 99, "max_ms": 900}
    (need,) = a_plan({**GATE, "vetoes": {"slo": [slo]}}).steps[-1].needs
    assert 368 == need.canary
    assert "299 bound p99 at 95%" in need.why


def test_bake_time_is_the_longer_of_the_stated_and_the_requests(tmp_path: Path) -> None:
    """1.632 million requests at 100 a second take 4 h 33 min; what binds is told."""
    known = the_plan(tmp_path / "l.jsonl", RolloutConfig(requests_per_s=100))
    first, last = known.steps[0], known.steps[-1]
    assert -(-first.requests // 6000) == first.bake_minutes
    assert f"{first.requests} requests at 100 a second" == first.bake_binds
    assert (60.0, "the stated minimum; the requests take 1 min") == (last.bake_minutes, last.bake_binds)
    unknown = the_plan(tmp_path / "l.jsonl").steps[0]
    assert 60.0 == unknown.bake_minutes and "not known" in unknown.bake_binds


def test_requests_of_few_users_are_planned_for() -> None:
    """Four requests a user, correlated by 0.3: 1.9 times as many."""
    one, four = a_plan().steps[0].needs[0].canary, a_plan(requests_per_user=4).steps[0].needs[0].canary
    assert 1.9 == pytest.approx(four / one, rel=0.01)


@pytest.mark.parametrize("steps", [[], [5, 1, 100], [1, 50], [0.001, 100]])
def test_steps_grow_to_all(steps: list[float]) -> None:
    """Anything else is no rollout."""
    with pytest.raises(ValueError, match="steps"):
        RolloutConfig.model_validate({"steps": steps})


def test_golden_plan_and_gateway(tmp_path: Path) -> None:
    """plan.yaml and haproxy.cfg are the golden ones (QUANTGATE_REWRITE_GOLDEN=1 rewrites them), and read back whole."""
    plan = the_plan(tmp_path / "ledger.jsonl", RolloutConfig(requests_per_s=50))
    path = rollout.write(plan, tmp_path)
    for name in ("plan.yaml", "haproxy.cfg"):
        text = path.with_name(name).read_text()
        if os.environ.get("QUANTGATE_REWRITE_GOLDEN"):
            GOLDEN.mkdir(parents=True, exist_ok=True)
            (GOLDEN / name).write_text(text)
        assert (GOLDEN / name).read_text() == text
    assert tmp_path / "demo" / "3" / "plan.yaml" == path
    assert plan == rollout.read(path)
    assert {"step", "percent", "buckets"} < yaml.safe_load(path.read_text())["steps"][0].keys()


def test_the_control_is_the_champion_of_before(tmp_path: Path) -> None:
    """Its engine is what the ledger says; where nobody was champion it is what the decision compared with."""
    change = Change(
        action="promote", model="demo", version="2", champion_before=None, previous_before=None, actor="a",
        override_reason=None, decision_key="e" * 16, engine_key="f" * 16,
    )  # fmt: skip
    Ledger(tmp_path / "l.jsonl").append("t", "committed", change)
    plan = the_plan(tmp_path / "l.jsonl")
    assert ("2", "f" * 16) == (plan.control.version, plan.control.engine_key)
    assert "quantgate rollback campaign=demo" == plan.rollback
    first = the_plan(tmp_path / "l.jsonl", before="")
    assert ("", "") == (first.control.version, first.rollback)
    assert "baseline" in first.control.label
    assert any("nobody was champion" in note for note in first.notes)
    assert ("2", "f" * 16, "e" * 16, "") == rollout.champion(Ledger(tmp_path / "l.jsonl"), "demo")


def test_the_gateway_holds_every_step_and_the_salt() -> None:
    """Buckets of each step, the plan's hash, and both servers."""
    plan = a_plan()
    text = haproxy(plan)
    for step in plan.steps:
        assert f"CANARY_BUCKETS={step.buckets} haproxy" in text
    assert f'str("{plan.split.salt}:"),concat(,txn.user),sha2(256),bytes(0,4),be2dec(,4),mod(10000)' in text
    assert f"presetenv CANARY_BUCKETS {plan.steps[0].buckets}\n" in text


# Checks and their record


def test_checks_are_counted_and_a_step_must_be_reached(tmp_path: Path) -> None:
    """Hold, then more data, then continue: two looks of which one was ripe; the next step begins anew."""
    path = rollout.write(a_plan(), tmp_path)
    few = data_of(traffic(a_plan(), 1, 300))
    assert ("hold", 1) == ((first := rollout.check(path, 1, few)[1]).answer, first.look)
    early = rollout.check(path, 2, data_of(traffic(a_plan(), 2, 4000, seed=2)))[1]
    assert ("hold", ("step 1 was not passed: its last answer is hold",)) == (early.answer, early.reasons)
    _, passed, recorded = rollout.check(path, 1, data_of(traffic(a_plan(), 1, 4000)))
    assert ("continue", 2, 1, False) == (passed.answer, passed.look, passed.ripe_look, recorded.repeat)
    _, second, _ = rollout.check(path, 2, data_of(traffic(a_plan(), 2, 4000, seed=3)))
    assert ("continue", 2, 1) == (second.answer, second.look, second.ripe_look)
    assert [1, 2, 3, 4] == [c.seq for c in record_of(path).entries()]


def test_the_same_data_again_is_no_new_look(tmp_path: Path) -> None:
    """A job that runs twice gives one answer, at one level, and both are on record."""
    path = rollout.write(a_plan(), tmp_path)
    data = data_of(traffic(a_plan(), 1, 4000))
    answers = [rollout.check(path, 1, data)[1] for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert [False, True, True] == [c.repeat for c in record_of(path).entries()]
    more = rollout.check(path, 1, data_of(traffic(a_plan(), 1, 4100)))[1]
    assert (2, 2) == (more.look, more.ripe_look)


def test_a_rollout_that_was_rolled_back_stays_so(tmp_path: Path) -> None:
    """Other data do not bring it back; a plan written again is another rollout."""
    path = rollout.write(a_plan(), tmp_path)
    bad = data_of(traffic(a_plan(), 1, 4000, right=(0.8, 0.4)))
    assert "roll_back" == rollout.check(path, 1, bad)[1].answer
    good = rollout.check(path, 1, data_of(traffic(a_plan(), 1, 4000)))[1]
    assert "roll_back" == good.answer and "step 1 was answered with roll back" in good.reasons[0]
    assert tmp_path / "demo" / "3-2" / "plan.yaml" == rollout.write(a_plan(), tmp_path)


def test_invalid_data_are_recorded_and_are_no_look(tmp_path: Path) -> None:
    """The reason stands in the record."""
    path = rollout.write(a_plan(), tmp_path)
    lines = traffic(a_plan(), 1, 4000)
    with pytest.raises(EvidenceError, match="planned is 20%"):
        rollout.check(path, 1, data_of([line for line in lines if line.arm == "canary" or line.user[-1] in "0123"]))  # type: ignore[index]
    (check,) = record_of(path).entries()
    assert ("invalid", 0) == (check.answer, check.look)
    assert 1 == rollout.check(path, 1, data_of(lines))[1].look


def test_data_are_used_once(tmp_path: Path) -> None:
    """A step has requests of its own."""
    path = rollout.write(a_plan(), tmp_path)
    data = data_of(traffic(a_plan(), 1, 4000))
    rollout.check(path, 1, data)
    with pytest.raises(EvidenceError, match="judged at step 1 already"):
        rollout.check(path, 2, data)


def test_a_changed_plan_or_record_is_found(tmp_path: Path) -> None:
    """Wider margins after the first look, or a look that was taken out, are refused."""
    path = rollout.write(a_plan(), tmp_path)
    for users in (300, 400):
        rollout.check(path, 1, data_of(traffic(a_plan(), 1, users)))
    data = data_of(traffic(a_plan(), 1, 4000))
    assert path.parent == rollout.write(a_plan(), tmp_path).parent
    assert path.parent != rollout.write(a_plan(margin=0.2), tmp_path).parent
    text = path.read_text()
    path.write_text(text.replace("margin: 0.1", "margin: 0.3"))
    with pytest.raises(EvidenceError, match="the plan was changed after its first check"):
        rollout.check(path, 1, data)
    path.write_text(text)
    record = record_of(path).path
    first, second = record.read_text().splitlines(keepends=True)
    record.write_text(second)
    with pytest.raises(EvidenceError, match=r"record.jsonl:1: the record was changed here"):
        rollout.check(path, 1, data)
    record.write_text(first + second.replace('"hold"', '"continue"'))
    with pytest.raises(EvidenceError, match=r"record.jsonl:2"):
        rollout.check(path, 1, data)
    record.write_text(first + second[:40])  # cut short by a crash
    assert 2 == rollout.check(path, 1, data)[1].look


def test_a_plan_must_be_a_plan(tmp_path: Path) -> None:
    """What is missing and what is unknown is named; so are steps that it does not have."""
    path = rollout.write(a_plan(), tmp_path)
    with pytest.raises(ConfigError, match=r"allowed: 1 \(20%\), 2 \(50%\), 3 \(100%\)"):
        rollout.check(path, 4, data_of(traffic(a_plan(), 1, 10)))
    path.write_text(path.read_text() + "surprise: 1\n")
    with pytest.raises(ConfigError, match="surprise"):
        rollout.read(path)
    with pytest.raises(InputError, match="no readable rollout plan"):
        rollout.read(tmp_path / "nothing.yaml")


# What is read


def test_bad_lines_are_told_at_once_with_their_numbers(tmp_path: Path) -> None:
    """Every one, and what is wrong with it."""
    rows = [
        '{"arm": "canary", "score": 0.5}',
        '{"arm": "champion"}',
        '{"arm": "canary", "score": 1.5}',
        '{"arm": "canary", "score": 0.5, "correct": true}',
        '{"arm": "canary", "latency": 3}',
        "not json",
        '{"arm": "canary", "e2e_ms": "12"}',
        '{"arm": "canary", "e2e_ms": NaN}',
        '{"arm": "canary", "at": "2026-12-01T08:00:00"}',
        "",
        '{"arm": "control", "at": "2026-12-01T08:00:00+01:00", "correct": 1, "error": "timeout"}',
    ]
    path = tmp_path / "step.jsonl"
    path.write_text("\n".join(rows))
    with pytest.raises(EvidenceError) as caught:
        from_file(path)
    told = str(caught.value)
    assert "9 bad lines" in told
    for number in range(2, 11):
        assert f"line {number}: " in told
    assert "line 11" not in told
    assert "score and correct: one of the two" in told and "unknown key (allowed: arm, user" in told


def test_nothing_is_no_evidence(tmp_path: Path) -> None:
    """An empty file, and none."""
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(EvidenceError, match="no line"):
        from_file(tmp_path / "empty.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        from_file(tmp_path / "none.jsonl")


def test_a_plans_gate_is_the_decisions() -> None:
    """The margins, risks and promises that the candidate was promoted by."""
    made = decision({**GATE, "alpha": 0.01, "power": 0.9})
    assert 0.01 == GateConfig.model_validate(made.gate).alpha == a_plan({**GATE, "alpha": 0.01, "power": 0.9}).alpha
    assert json.loads(a_plan().model_dump_json())["version"] == 1
