"""The Pareto front over score and latency."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.decide.pareto import Point, front

unhurried = settings(deadline=None, max_examples=50)
numbers = st.one_of(st.none(), st.sampled_from([math.nan, math.inf, 1.0, 2.0, 3.0]), st.floats(0.1, 10.0))
points = st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), max_size=12).map(
    lambda rows: [Point(str(n), row[:3], row[3]) for n, row in enumerate(rows)]
)


def test_front_by_hand() -> None:
    """Worse on one axis and no better on another is off the front; equals stay together."""
    found = front(
        [
            Point("base", (0.70, -80.0)), Point("fast", (0.68, -30.0)), Point("dominated", (0.67, -35.0)),
            Point("twin", (0.68, -30.0)), Point("slow and equal", (0.70, -90.0)),
        ]
    )  # fmt: skip
    assert {"base", "fast", "twin"} == found


def test_a_third_axis_saves_what_two_would_drop() -> None:
    """Slower and worse, but smaller than anything else."""
    found = front(
        [Point("a", (0.7, -10.0, -500.0)), Point("small", (0.6, -20.0, -90.0)), Point("b", (0.6, -20.0, -500.0))]
    )
    assert {"a", "small"} == found


def test_emulated_and_unmeasured_points_neither_join_nor_shape_it() -> None:
    """An emulated engine that would dominate everything changes nothing."""
    found = front(
        [
            Point("real", (0.5, -50.0)),
            Point("fp8", (0.9, -1.0), real=False),
            Point("x", (None, -1.0)),
            Point("y", (0.9, math.nan)),
        ]
    )
    assert {"real"} == found


@unhurried
@given(points)
def test_front_is_exactly_what_nothing_dominates(given_points: list[Point]) -> None:
    """Against the definition, pair by pair."""
    real = [(p.label, [f or 0.0 for f in p.figures]) for p in given_points if p.counts]
    expected = {
        label
        for label, mine in real
        if not any(all(map(float.__ge__, f, mine)) and any(map(float.__gt__, f, mine)) for _, f in real)
    }
    assert expected == front(given_points)
