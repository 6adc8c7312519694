"""How often a whole rollout errs, simulated with fixed seeds: levels, minimum requests and looks are the plan's own."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from pipelines.decide.arms import Share, share_bounds
from pipelines.decide.rollout import Plan, Step
from pipelines.decide.stepanswer import levels_of
from tests.rollouts import a_plan

PLAN = a_plan(steps=(1, 5, 20, 50, 100), margin=0.05)
RIGHT, RUNS, LOOKS, SURE = 0.71, 500, 3, 3.7


def at_most(rate: float) -> float:
    """So many of RUNS are not more than `rate`, but for one run in 9,000."""
    return RUNS * rate + SURE * math.sqrt(RUNS * rate * (1 - rate))


def looked(plan: Plan, step: Step, rng: np.random.Generator, loss: float) -> Iterator[tuple[bool, bool]]:
    """Up to three looks at growing data of a step, each by what the plan says: whether it goes on, or rolls back."""
    need = next(n for n in step.needs if n.what == "quality")
    sizes, right = np.array([need.control, need.canary]), np.zeros(2)
    for look in range(1, LOOKS + 1):
        right += rng.binomial(sizes, [RIGHT, RIGHT - loss])
        levels = levels_of(plan, step, look, look)
        sides = [Share(float(r), float(n * look)) for r, n in zip(right, sizes, strict=True)]
        lower, upper = share_bounds(*sides, below=levels.back, above=levels.go)
        yield upper < plan.quality.margin, lower > plan.quality.margin


def rolled_out(plan: Plan, rng: np.random.Generator, loss: float) -> tuple[str, int]:
    """How a rollout ends, and after how many steps that were passed."""
    for passed, step in enumerate(s for s in plan.steps if not s.last):
        for goes_on, harm in looked(plan, step, rng, loss):
            if harm:
                return "rolled back", passed
            if goes_on:
                break
        else:
            return "held", passed
    return "everywhere", len(plan.steps) - 1


@pytest.fixture(scope="module")
def ends() -> dict[float, list[tuple[str, int]]]:
    """Rollouts of a canary without loss, and of one exactly at the margin."""
    rng = np.random.default_rng(20261201)
    return {loss: [rolled_out(PLAN, rng, loss) for _ in range(RUNS)] for loss in (0.0, PLAN.quality.margin)}


def test_a_canary_at_the_margin_is_continued_at_most_alpha_of_the_time(
    ends: dict[float, list[tuple[str, int]]],
) -> None:
    """Already the first step, with three looks at it, lets through no more than that; all of them far less."""
    at_margin = ends[PLAN.quality.margin]
    assert sum(passed > 0 for _, passed in at_margin) <= at_most(PLAN.alpha)
    assert sum(passed > 0 for _, passed in at_margin) > 0, "a test that nothing ever passes shows nothing"
    assert 0 == sum(end == "everywhere" for end, _ in at_margin)


def test_a_harm_that_begins_at_half_the_traffic_is_let_through_at_most_alpha_of_the_time() -> None:
    """The other steps were passed by right; this one alone must find it."""
    rng = np.random.default_rng(20261202)
    step = PLAN.steps[3]
    passed = sum(any(ok for ok, _ in looked(PLAN, step, rng, PLAN.quality.margin)) for _ in range(RUNS))
    assert passed <= at_most(PLAN.alpha)


def test_a_canary_at_the_margin_is_rolled_back_at_most_alpha_of_the_time(
    ends: dict[float, list[tuple[str, int]]],
) -> None:
    """Over all steps and looks; identical arms never were."""
    assert sum(end == "rolled back" for end, _ in ends[PLAN.quality.margin]) <= at_most(PLAN.alpha)
    assert 0 == sum(end == "rolled back" for end, _ in ends[0.0])


def test_identical_arms_reach_all_users(ends: dict[float, list[tuple[str, int]]]) -> None:
    """Each step is passed at its first look with the planned power of 80%, and nearly always by the third."""
    rng = np.random.default_rng(20261203)
    first = sum(next(looked(PLAN, PLAN.steps[0], rng, 0.0))[0] for _ in range(RUNS))
    assert 0.8 == pytest.approx(first / RUNS, abs=SURE * math.sqrt(0.16 / RUNS))
    assert sum(end == "everywhere" for end, _ in ends[0.0]) > 0.85 * RUNS
