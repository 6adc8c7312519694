"""Every error quantgate raises on purpose, with the exit code the command line ends with.

QuantgateError                1  something quantgate could not do
├── ConfigError               2  the configuration is wrong: all problems at once
├── InputError                2  a checkpoint, eval set or text that cannot be used as it is
├── StageFailed               1  a stage ran and failed; its log and command are named
│   └── TransientFailure      1  killed, out of memory, disk full: never a result, worth another try
├── EnvironmentProblem        6  this machine: port taken, no space, no permission, server away
├── EvidenceError             7  evidence is missing or does not match: no verdict can be given
│   └── LicenceUnknown        7  nobody said what a base may be used under; no reason overrides that
└── EndpointError             1  an engine's server did not start, answer, or answer sensibly
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with what the user gave, in the four parts a person needs to mend it."""

    key: str
    value: object
    message: str
    allowed: str = ""

    def __str__(self) -> str:
        shown = repr(self.value)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        tail = f" ({self.allowed})" if self.allowed else ""
        return f"{self.key}={shown}: {self.message}{tail}"


class QuantgateError(Exception):
    """Root of the tree."""

    exit_code = 1


class ConfigError(QuantgateError):
    """The configuration is wrong. Carries every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        self.problems = tuple(problems) if not isinstance(problems, str) else ()
        text = problems if isinstance(problems, str) else "\n".join(str(p) for p in problems)
        super().__init__(text)


class InputError(QuantgateError):
    """A file or data set the user named cannot be used as it is."""

    exit_code = 2


class StageFailed(QuantgateError):
    """A stage ran and failed."""


class TransientFailure(StageFailed):
    """A stage was stopped by its surroundings (killed, memory, disk); not a result, so never cached."""


class EnvironmentProblem(QuantgateError):
    """This machine cannot do what was asked right now."""

    exit_code = 6


class EvidenceError(QuantgateError):
    """Evidence is missing, or two sides of a comparison do not match."""

    exit_code = 7


class LicenceUnknown(EvidenceError):
    """Nobody said what a base checkpoint may be used under; whoever knows states it, and no override stands for it."""


class EndpointError(QuantgateError):
    """An engine's server did not start, did not answer, or answered nonsense."""


def closest(word: str, allowed: Iterable[str]) -> str:
    """Say what is allowed, the nearest match first: "did you mean 'awq'? allowed: awq, gptq"."""
    names = sorted(allowed)
    if not names:
        return "there are none here"
    near = (
        difflib.get_close_matches(word, names, n=1, cutoff=0.5) or [n for n in names if word and n.startswith(word)][:1]
    )
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return (f"did you mean {near[0]!r}? " if near else "") + f"allowed: {listed}"
