"""Which toolchain each step runs in: what a conf file says, else its row, else what the executor says of the stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pipelines.errors import Problem, closest
from pipelines.flow.toolchain import CURRENT, ContainerConfig, Toolchain, unpinned

# Stages that need no more than the vendor's library; the others need what only our own environment holds.
Movable = Literal["checkpoint", "calibration", "variant", "reference", "engine"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The toolchains there are, and where the executor puts stages whose rows do not mind."""

    known: Mapping[str, Toolchain]
    by_stage: Mapping[Movable, str]

    def stage(self, kind: Movable, problems: list[Problem]) -> Toolchain:
        """Where a stage runs that belongs to no row."""
        return self._checked(self.by_stage.get(kind, CURRENT.name), f"executor.toolchains.{kind}", (), problems)

    def row(
        self, kind: Movable, key: str, own: object, default: str, packages: Iterable[str], problems: list[Problem]
    ) -> Toolchain:
        """Where a row's stage runs. `own` is what the conf file says under `key`, `default` what the row says.

        A row that names a toolchain needs it, so what the executor says of the stage moves only the others.
        """
        if own is not None:
            return self._checked(str(own), key, packages, problems)
        if default != CURRENT.name:
            return self._checked(default, key, packages, problems)
        moved = self.by_stage.get(kind, CURRENT.name)
        return self._checked(moved, f"executor.toolchains.{kind}", packages, problems)

    def _checked(self, name: str, key: str, packages: Iterable[str], problems: list[Problem]) -> Toolchain:
        if name not in self.known:
            problems.append(Problem(key, name, "no such toolchain", closest(name, self.known)))
            return CURRENT
        found = self.known[name]
        if found.pinned and (lost := found.lacks(packages)):
            problems.append(Problem(key, name, f"its lock does not hold {', '.join(lost)}"))
        if isinstance(found.spec, ContainerConfig) and found.spec.digest is None:
            problems += [p for p in [unpinned(name, found.spec)] if p not in problems]
        return found
