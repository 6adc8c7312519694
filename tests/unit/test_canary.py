"""One step of a rollout: continue on evidence alone, hold where any is missing, roll back on harm."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.decide.canary import Finding
from pipelines.decide.stepanswer import Answer, Past, judge_step
from pipelines.errors import EvidenceError
from tests.rollouts import GATE, SLO, START, a_plan, shadows, traffic

PLAN = a_plan()
USERS = 4000


def judged(lines: list[Any], step: int = 1, past: Past = Past(), plan: Any = PLAN) -> Answer:  # noqa: B008
    chosen = plan.step(step)
    assert chosen is not None
    return judge_step(plan, chosen, lines, past)


def by_name(answer: Answer) -> dict[str, Finding]:
    return {f.what: f for f in answer.findings}


def without(name: str) -> Any:
    return lambda row: {key: value for key, value in row.items() if key != name}


def test_equal_arms_go_on() -> None:
    """Every judgement passed, by requests enough and time enough."""
    answer = judged(traffic(PLAN, 1, USERS))
    assert ("continue", 1, 1) == (answer.answer, answer.look, answer.ripe_look)
    assert {"quality": "pass", "errors": "pass", "e2e_ms p95": "pass"} == {f.what: f.state for f in answer.findings}
    assert 0.025 == answer.continue_alpha
    assert 0.025 / 3 / 4 == pytest.approx(answer.roll_back_alpha)  # 3 steps; pairs, scores, errors, a promise


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        ({"right": (0.8, 0.5)}, "quality"),
        ({"failing": (0.01, 0.3)}, "errors"),
        ({"e2e_ms": (400.0, 900.0)}, "e2e_ms p95"),
    ],
)
def test_harm_rolls_back_and_needs_no_ripeness(harm: dict[str, Any], what: str) -> None:
    """Scores, failures, latency: each alone ends a rollout, also where requests are too few to go on."""
    for users in (USERS, 500):
        answer = judged(traffic(PLAN, 1, users, **harm))
        assert "roll_back" == answer.answer
        assert what in {f.what for f in answer.findings if f.state == "fail"}


def test_errors_are_told_as_shares_that_failed() -> None:
    """One request in ten of the control and three of the canary."""
    errors = by_name(judged(traffic(PLAN, 1, USERS, failing=(0.1, 0.3))))["errors"]
    assert (0.1, 0.3) == pytest.approx((errors.control, errors.canary), abs=0.03)
    assert "more fail, at least" in errors.note


def test_too_few_requests_hold_and_say_how_many_more() -> None:
    """The counts of the plan stand beside what came."""
    answer = judged(traffic(PLAN, 1, 300))
    quality = by_name(answer)["quality"]
    step = PLAN.step(1)
    assert step is not None
    assert ("hold", 0, "few") == (answer.answer, answer.ripe_look, quality.state)
    more = step.needs[0].canary - quality.canary_requests
    assert any(f"{more} more of the canary" in reason for reason in answer.reasons)


def test_bake_time_that_is_not_over_holds() -> None:
    """So do requests that do not say when they were."""
    short = judged(traffic(PLAN, 1, USERS, change=lambda row: row if row["at"] < "2026-12-02T08:30" else None))
    assert "hold" == short.answer
    assert any("bake time: 30 of 60 min" in reason for reason in short.reasons)
    silent = judged(traffic(PLAN, 1, USERS, change=without("at")))
    assert any("do not say when" in reason for reason in silent.reasons)
    assert "hold" == silent.answer


@pytest.mark.parametrize("missing", ["correct", "e2e_ms", "error"])
def test_a_missing_metric_holds(missing: str) -> None:
    """Nothing that the plan asks for may simply be absent."""
    answer = judged(traffic(PLAN, 1, USERS, change=without(missing)))
    what = {"correct": "quality", "e2e_ms": "e2e_ms p95", "error": "errors"}[missing]
    assert ("hold", "missing") == (answer.answer, by_name(answer)[what].state)


def test_a_single_line_without_a_latency_holds() -> None:
    """A latency left out where it was long would pass any promise."""
    first = iter((True,))
    lines = traffic(
        PLAN, 1, USERS, failing=(0, 0),
        change=lambda row: without("e2e_ms")(row) if row["arm"] == "canary" and next(first, False) else row,
    )  # fmt: skip
    assert "hold" == judged(lines).answer


def test_a_promise_that_the_control_breaks_too_is_nobodys_harm() -> None:
    """It holds, since nothing says that rolling back would mend it."""
    answer = judged(traffic(PLAN, 1, USERS, e2e_ms=(900.0, 900.0)))
    assert ("hold", "open") == (answer.answer, by_name(answer)["e2e_ms p95"].state)
    assert any("the control breaks it too" in reason for reason in answer.reasons)


def test_the_last_step_is_judged_by_promises() -> None:
    """Nobody is left to compare with; without a promise nothing can be judged, which holds."""
    lines = traffic(PLAN, 3, 500)
    answer = judged(lines, 3)
    assert ("continue", ("e2e_ms p95",)) == (answer.answer, tuple(f.what for f in answer.findings))
    silent = a_plan({**GATE, "vetoes": {}})
    assert "hold" == judged(lines, 3, plan=silent).answer


def test_shadow_prompts_are_judged_as_pairs() -> None:
    """A third of the requests settle what unpaired ones could not; they are no part of the split."""
    live = traffic(PLAN, 1, USERS, change=without("correct"))
    answer = judged([*live, *shadows(600, lost=0)])
    assert "continue" == answer.answer
    assert ("pass", 600) == (by_name(answer)["quality (pairs)"].state, answer.pairs)
    assert "roll_back" == judged([*live, *shadows(600, lost=150)]).answer


def test_split_scores_beside_pairs_can_only_harm() -> None:
    """Pairs that pass do not hide a loss of the traffic itself, nor do few live scores hold them up."""
    pairs = shadows(600, lost=0)
    assert "roll_back" == judged([*traffic(PLAN, 1, USERS, right=(0.8, 0.5)), *pairs]).answer
    few = traffic(PLAN, 1, USERS, change=lambda r: r if r["request_id"].endswith("7") else without("correct")(r))
    assert "continue" == judged([*few, *pairs]).answer


def test_slices_that_gate_decide() -> None:
    """A slice that the decision was made by must be there and pass; others are shown."""
    plan = a_plan({**GATE, "slices": "gate"})
    assert {"billing": 0.1, "delivery and returns, several languages": 0.1} == plan.quality.slices
    names = (*plan.quality.slices, "other")

    def sliced(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"slice": names[int(row["request_id"].split("-")[1]) % 3]}

    answer = judged(traffic(plan, 1, 3 * USERS, change=sliced), plan=plan)
    assert "continue" == answer.answer
    assert {"quality/billing": True, "quality/other": False} == {
        name: f.gates for name, f in by_name(answer).items() if name in ("quality/billing", "quality/other")
    }
    absent = judged(traffic(plan, 1, USERS), plan=plan)
    assert ("hold", "missing") == (absent.answer, by_name(absent)["quality/billing"].state)


def test_requests_of_one_user_are_one_cluster() -> None:
    """The same requests of 40 users instead of 4,000 show far less."""

    def grouped(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"user": None}

    alone = judged(traffic(PLAN, 1, USERS, change=grouped))
    assert "continue" == alone.answer
    same = a_plan(hash="other")

    def of_few(row: dict[str, Any]) -> dict[str, Any]:
        return row | {
            "user": f"{row['arm']}-{int(row['request_id'].split('-')[1]) % (5 if row['arm'] == 'canary' else 20)}"
        }

    few = judged(traffic(same, 1, USERS, change=of_few), plan=same)
    assert (by_name(few)["quality"].upper or 0) > 2 * (by_name(alone)["quality"].upper or 0)
    assert "hold" == few.answer


# Evidence that is none


def refused(lines: list[Any], past: Past = Past()) -> str:  # noqa: B008
    with pytest.raises(EvidenceError) as caught:
        judged(lines, past=past)
    return str(caught.value)


def test_users_on_both_arms_are_a_broken_split() -> None:
    """The user and both lines are named."""
    lines = traffic(PLAN, 1, USERS)
    other = lines[6].model_copy(update={"arm": "control" if lines[6].arm == "canary" else "canary", "request_id": "x"})
    told = refused([*lines, other])
    assert "both arms" in told and "'user-0-6'" in told and f"{USERS + 1}" in told


def test_a_user_on_the_arm_of_another_hash_is_found() -> None:
    """Whoever splits otherwise must say so in the plan."""
    lines = [line.model_copy(update={"user": f"other-{line.user}"}) for line in traffic(PLAN, 1, USERS)]
    assert "rollout.hash=other" in refused(lines)
    other = a_plan(hash="other")
    assert "continue" == judged(lines, plan=other).answer


def test_a_share_unlike_the_planned_one_is_invalid() -> None:
    """A tenth of the control's requests lost on the way: 22% instead of 20% of 4,000, p below 0.001."""
    lines = traffic(PLAN, 1, USERS, change=lambda r: None if r["arm"] == "control" and r["user"][-1] in "38" else r)
    assert "planned is 20%" in refused(lines)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"arm": "canary", "request_id": "twice"}, "one arm has twice: 'twice' (lines 1 and 2)"),
        ({"arm": "canary", "request_id": "other", "score": 0.5, "user": "twin"}, "some lines have `score`"),
    ],
)
def test_lines_that_contradict_each_other(extra: dict[str, Any], said: str) -> None:
    """Request ids are unique to an arm, and scores of one kind."""
    line = traffic(PLAN, 1, USERS)[0]
    first = line.model_copy(update={"arm": "canary", "request_id": "twice", "correct": True, "user": None})
    assert said in refused([first, first.model_copy(update={"correct": None, **extra})])


def test_half_a_pair_is_no_pair() -> None:
    """One side scored alone, or another user behind the same id."""
    one, two = shadows(1, lost=0)
    assert "one side alone is scored" in refused([one, two.model_copy(update={"correct": None})])
    assert "another user or slice" in refused([one, two.model_copy(update={"user": "somebody"})])
    failed = two.model_copy(update={"correct": None, "error": "timeout"})
    assert failed.as_pair == 0.0


def test_data_from_before_the_step_are_not_its_own() -> None:
    """What is older than the data that passed the step before cannot be of this one."""
    told = refused(traffic(PLAN, 1, USERS), Past(not_before=START.replace(day=2, hour=9)))
    assert "older than the data" in told


def test_what_the_record_says_is_heeded() -> None:
    """A step that was not reached holds; a rollout that was ended stays ended; a second ripe look is judged harder."""
    lines = traffic(PLAN, 1, USERS)
    assert ("hold", ("step 0 was not passed",)) == (
        (a := judged(lines, past=Past(blocked="step 0 was not passed"))).answer,
        a.reasons,
    )
    assert "roll_back" == judged(lines, past=Past(ended="step 1 was answered with roll back")).answer
    again = judged(lines, past=Past(looks=4, ripe=1))
    assert (5, 2, pytest.approx(0.05 / 6)) == (again.look, again.ripe_look, again.continue_alpha)


def test_a_promise_in_two_profiles_is_the_wider_one() -> None:
    """Production traffic is neither of them."""
    slos = [SLO, {**SLO, "profile": "open-2", "max_ms": 1500}, {**SLO, "metric": "ttft_ms", "max_ms": 80}]
    plan = a_plan({**GATE, "vetoes": {"slo": slos}})
    assert [("e2e_ms", 1500.0), ("ttft_ms", 80.0)] == [(s.metric, s.max_ms) for s in plan.promises]
