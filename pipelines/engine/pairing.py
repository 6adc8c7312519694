"""A variant and an engine it is about to be put into, as a preflight sees them: nothing of either exists yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pipelines.errors import Problem
from pipelines.flow.store import Fact

FEW = 3


@dataclass(frozen=True, slots=True)
class Longest:
    """The most tokens anything of a kind takes, at least, and what it is: `eval set ticket_json`."""

    tokens: int
    whose: str


@dataclass(frozen=True, slots=True)
class Workload:
    """What a campaign will ask of every engine; None where that is known only when it runs.

    `request` is a prompt with the answer it asks for; `in_flight` how many requests the probe keeps under way at once;
    `scored` names the eval sets that ask for log-probabilities of prompts. Texts that are scored in windows fit any
    engine and are left out.
    """

    prompt: Longest | None = None
    request: Longest | None = None
    in_flight: int = 1
    scored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pairing:
    """All that a preflight may look at.

    facts: of the base (architecture, parameters, base_bytes, max_positions, vocab_size, hidden_size, layers, heads,
    kv_heads) and of the variant (quantizer, scheme, and what the quantizer promises of it, as quant_method); what is
    unknown is None or absent.
    linear_shapes: (out_features, in_features) of each linear layer by module name; `ignored` names, or matches with
    re:, those that the variant leaves as they are.
    device: as `flow.device.describe` has it, and `vectors`. free_bytes: on the disk that artifacts go to.
    """

    facts: Mapping[str, Fact] = field(default_factory=dict)
    linear_shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    device: Mapping[str, str] = field(default_factory=dict)
    workload: Workload = Workload()
    free_bytes: int | None = None
    ignored: tuple[str, ...] = ()

    def number(self, fact: str) -> int | None:
        """A fact that is a whole number, None where it is unknown."""
        found = self.facts.get(fact)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def text(self, fact: str) -> str | None:
        """A fact that is a text, None where it is unknown."""
        found = self.facts.get(fact)
        return found if isinstance(found, str) else None


def told(found: Iterable[tuple[str, str, Problem]]) -> list[Problem]:
    """Problems of (variant, engine, problem), keys saying whose they are; one that variants share is told once."""
    shared: dict[tuple[str, str], tuple[Problem, list[str]]] = {}
    for variant, engine, problem in found:
        shared.setdefault((engine, str(problem)), (problem, []))[1].append(f"variant.{variant}")
    return [
        replace(problem, key=f"{problem.key} ({_listed(variants)} in engine.{engine})")
        for (engine, _), (problem, variants) in shared.items()
    ]


def _listed(variants: list[str]) -> str:
    return ", ".join(variants) if len(variants) <= FEW else f"{len(variants)} variants"
