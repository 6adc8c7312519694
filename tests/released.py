"""Promotion and rollback of made-up engines: everything is real but the engines, which hold no model to start."""

from __future__ import annotations

from pathlib import Path

from pipelines.release.registry import Person, Release, promote, rollback
from tests import decisions
from tests.tracked import World


def answers(engine: Path) -> str:
    """Stands for an engine that was started and answered."""
    return f"{engine.name} answered"


def promoted(
    world: World, decision: Path, *, actor: str = "ada", candidate: str | None = None, reason: str | None = None
) -> Release:
    """Promote the winner of a decision, or with a reason a candidate that is named."""
    return promote(world.registry, decision, world.store, Person(actor, reason), answers, candidate=candidate)


def champions(world: World, *labels: str) -> None:
    """Promote some candidates one after another, by override, so that there is a champion and a previous."""
    decision = world.decided(decisions.decision())
    for label in labels:
        promoted(world, decision, candidate=label, reason="set-up")


def rolled_back(world: World, reason: str | None = None) -> Release:
    return rollback(world.registry, world.store, Person("ada", reason))
