"""Stages and steps as values: a stage is a pure function to a directory, a step a stage with its config and inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from pipelines.config import keyed
from pipelines.flow.store import digest_of
from pipelines.flow.toolchain import CURRENT, Toolchain


@dataclass(frozen=True, slots=True)
class Stage:
    """What can be run: `function` is "module:name", called as (config, out, *, <input>=Path | list[Path]) -> facts.

    `packages` are the distributions whose versions change the result, so they enter the key. Raise `version`
    when the code changes what comes out. A stage that `may_be_partial` keeps what it has when it is stopped, or when
    it loses what it measures, and says so in its fact `partial`: such an artifact serves the run that made it, and is
    made anew by the next.

    A stage that `shares_machine` may run while others run: nothing in its artifact or facts is a time, a speed or
    another figure of the machine, it starts no server, and it is content with some of the cores. It does not enter the
    key. What is bound to a device runs alone whatever it says.
    """

    kind: str
    name: str
    version: int
    function: str
    config_type: str
    packages: tuple[str, ...] = ()
    device_bound: bool = False
    may_be_partial: bool = False
    shares_machine: bool = False

    @property
    def pace(self) -> str:
        """Under which name it is kept how many times its guess a step of this stage took."""
        return f"{self.name} pace"


@dataclass(frozen=True)
class Step:
    """One stage to run in one campaign. Its key is a hash of what it depends on, never of what comes out.

    `toolchain` holds the versions that enter the key; `runs_in` is where the child is started. Steps with the same
    `batch` may share one child process, and with it imports and a running engine, unless they run in unlike toolchains.
    `seconds` are what it may take here; `guess` what counting its operations gives, 0 where nobody counts them;
    `memory_bytes` its peak, 0 where nobody knows. `pinned` is the key of an artifact that is there already, made by a
    step nobody here knows; such a step is only read. `again` marks a measurement that is to be taken anew, though it
    was taken before from the same inputs.
    """

    stage: Stage
    label: str
    config: BaseModel
    inputs: Mapping[str, Step | tuple[Step, ...]] = field(default_factory=dict)
    toolchain: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, str] | None = None
    batch: str | None = None
    seconds: float = 0.0
    size_bytes: int = 0
    runs_in: Toolchain = CURRENT
    guess: float = 0.0
    memory_bytes: int = 0
    pinned: str = ""
    again: str = ""

    @property
    def config_data(self) -> dict[str, Any]:
        """The whole config as plain data, for the request and the manifest."""
        return self.config.model_dump(mode="json")

    @cached_property
    def key(self) -> str:
        """sha256 over stage, version, config, input keys, toolchain, and the device where the stage is bound to it."""
        return self.pinned or digest_of(
            {
                "stage": self.stage.name,
                "version": self.stage.version,
                "config": keyed(self.config),
                "inputs": self.input_keys,
                "toolchain": dict(self.toolchain),
                "device": dict(self.device) if self.device is not None else None,
            }
            | ({"again": self.again} if self.again else {})
        )

    @cached_property
    def input_keys(self) -> dict[str, str | list[str]]:
        return {
            name: given.key if isinstance(given, Step) else [step.key for step in given]
            for name, given in self.inputs.items()
        }

    def upstream(self) -> Iterator[Step]:
        """The steps this one reads from directly."""
        for given in self.inputs.values():
            yield from several(given)


def several(given: Step | tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps of one input, which may be one or many."""
    return (given,) if isinstance(given, Step) else given


def resolve(name: str) -> Callable[..., Any]:
    """Import "module:attribute"."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found
