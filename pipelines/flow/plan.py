"""START READING HERE: a plan is the steps in running order, each reused or to do, and why. Pure but for looking
whether an artifact exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipelines.flow.stage import Step
from pipelines.flow.store import Store, manifest
from pipelines.flow.toolchain import ContainerConfig, Toolchain


@dataclass(frozen=True, slots=True)
class Planned:
    """A step with what will happen to it."""

    step: Step
    state: Literal["reuse", "run"]
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a campaign needs, upstream first."""

    steps: tuple[Planned, ...]

    @property
    def to_run(self) -> tuple[Planned, ...]:
        return tuple(p for p in self.steps if p.state == "run")

    @property
    def toolchains(self) -> tuple[Toolchain, ...]:
        """Those that the steps to run need, each once."""
        return tuple({p.step.runs_in.name: p.step.runs_in for p in self.to_run}.values())

    @property
    def seconds(self) -> float:
        return sum(p.step.seconds for p in self.to_run)

    @property
    def size_bytes(self) -> int:
        return sum(p.step.size_bytes for p in self.to_run)


def in_order(goals: Iterable[Step]) -> list[Step]:
    """Every step the goals need, once by key, upstream first; linear in steps and edges."""
    seen: set[str] = set()
    ordered: list[Step] = []
    stack: list[tuple[Step, bool]] = [(goal, False) for goal in reversed(list(goals))]
    while stack:
        step, expanded = stack.pop()
        if expanded:
            ordered.append(step)
        elif step.key not in seen:
            seen.add(step.key)
            stack.append((step, True))
            stack.extend((up, False) for up in reversed(list(step.upstream())) if up.key not in seen)
    return ordered


def plan(goals: Iterable[Step], store: Store) -> Plan:
    """Decide for each step whether its artifact is reused or must be made."""
    planned = []
    running: dict[str, str] = {}
    contained: set[str] = set()
    doubtful: set[str] = set()
    for step in in_order(goals):
        if isinstance(step.runs_in.spec, ContainerConfig) or any(up.key in contained for up in step.upstream()):
            contained.add(step.key)
        if step.stage.may_be_partial or any(up.key in doubtful for up in step.upstream()):
            doubtful.add(step.key)
        if store.has(step.stage.kind, step.key):
            lack = _lack(step, store) if step.key in contained or step.key in doubtful else ""
            if not lack:
                planned.append(Planned(step, "reuse", "made before from the same inputs"))
                continue
            running[step.key] = step.label
            planned.append(Planned(step, "run", f"made before, but {lack}"))
            continue
        waits = [up.label for up in step.upstream() if up.key in running]
        running[step.key] = step.label
        why = (
            f"needs {waits[0]}" + (f" and {len(waits) - 1} more" if len(waits) > 1 else "") if waits else "not made yet"
        )
        planned.append(Planned(step, "run", why))
    return Plan(tuple(planned))


def _lack(step: Step, store: Store) -> str:
    """What keeps an artifact that is there from being reused."""
    there = manifest(store.path(step.stage.kind, step.key))
    if there.simulated:
        return "by a simulated container"
    return "only in part" if there.partial else ""
