"""The variants and engines of a campaign: rows of the two tables with their validated configurations, and which go
together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from pipelines.config import problems_of
from pipelines.engine.memory import Footprint
from pipelines.engine.pairing import Pairing, Workload
from pipelines.engine.table import TARGETS, Target
from pipelines.errors import Problem, closest
from pipelines.flow.device import describe, vectors
from pipelines.flow.placement import Placement
from pipelines.flow.stage import resolve
from pipelines.flow.toolchain import Toolchain
from pipelines.intake.checkpoint import Inspected
from pipelines.quantize import scheme as schemes
from pipelines.quantize.table import QUANTIZERS, Quantizer
from pipelines.radar import Kind

ALWAYS = frozenset({"hydra-core", "lm-eval", "mlflow"})  # libraries under every campaign
BASE = "BASE"  # the baseline's scheme: whatever the base is in, at most 16 bits


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the campaign: a row of the quantizer table with its validated config."""

    name: str
    row: Quantizer
    config: BaseModel
    scheme: schemes.Scheme
    engines: tuple[str, ...]
    toolchain: Toolchain


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine of the campaign: a row of the target table with its validated config.

    `variants` names the only ones that go into it; empty: all that a variant's own `engines` does not keep out.
    """

    name: str
    row: Target
    config: BaseModel
    toolchain: Toolchain
    labels: Mapping[str, str]
    variants: tuple[str, ...] = ()

    def takes(self, variant: str) -> bool:
        """Whether a variant may go into it."""
        return not self.variants or variant in self.variants


def engines(
    given: Mapping[str, Mapping[str, Any]], known: Collection[str], placement: Placement, problems: list[Problem]
) -> list[Engine]:
    """Check the engines of a campaign, by name; `known` are the names of its variants."""
    found = []
    for name, one in given.items():
        target = str(one.get("target", ""))
        if target not in TARGETS:
            problems.append(Problem(f"engine.{name}.target", target, "no such target", closest(target, TARGETS)))
            continue
        row, rest = TARGETS[target], dict(one)
        own = rest.pop("toolchain", None)
        labels = _labels(name, rest.pop("labels", None) or {}, problems)
        only = _only(name, row, rest.pop("variants", None) or (), known, problems)
        checked = _row_config(row.config_type, rest, f"engine.{name}", problems)
        if checked is not None:
            key = f"engine.{name}.toolchain"
            placed = placement.row("engine", key, own, row.toolchain, row.packages, problems)
            found.append(Engine(name, row, checked, placed, labels, only))
    return found


def _labels(engine: str, given: object, problems: list[Problem]) -> dict[str, str]:
    """What an engine is called by people who may only use some: residency, hardware, whatever the gate asks for."""
    if isinstance(given, dict) and all(isinstance(value, str) for value in given.values()):
        return {str(name): value for name, value in given.items()}
    problems.append(Problem(f"engine.{engine}.labels", given, "names with texts", "e.g. {residency: eu}"))
    return {}


def _only(engine: str, row: Target, given: object, known: Collection[str], problems: list[Problem]) -> tuple[str, ...]:
    """The variants that an engine takes; a server that somebody else runs has one in it already."""
    key = f"engine.{engine}.variants"
    if not isinstance(given, (list, tuple)):
        problems.append(Problem(key, given, "a list of variants of this campaign", closest("", known)))
        return ()
    names = tuple(str(name) for name in given)
    problems += [Problem(key, n, "no such variant here", closest(n, known)) for n in names if n not in known]
    if row.external and len(names) != 1:
        message = "what somebody else serves is one variant; name it"
        problems.append(Problem(key, list(names), message, f"e.g. [{next(iter(known), 'baseline')}]"))
    return names


def variants(
    given: Mapping[str, Mapping[str, Any]],
    engines: list[Engine],
    known: Collection[str],
    placement: Placement,
    problems: list[Problem],
) -> list[Variant]:
    """Check the variants of a campaign, by name; `known` are the names of its engines, sound or not."""
    found = []
    for name, one in given.items():
        rest = dict(one)
        asked = rest.pop("engines", None) or ()
        own = rest.pop("toolchain", None)
        quantizer = str(rest.get("quantizer", ""))
        key = f"variant.{name}.engines"
        problems += [Problem(key, n, "no such engine here", closest(n, known)) for n in sorted(set(asked) - set(known))]
        for e in engines:
            if e.name in asked and not e.takes(name):
                problems.append(Problem(key, e.name, f"engine.{e.name}.variants has only {', '.join(e.variants)}"))
        if quantizer not in QUANTIZERS:
            problems.append(
                Problem(f"variant.{name}.quantizer", quantizer, "no such quantizer", closest(quantizer, QUANTIZERS))
            )
            continue
        row = QUANTIZERS[quantizer]
        checked = _row_config(row.config_type, rest, f"variant.{name}", problems)
        if checked is not None:
            named = str(getattr(checked, "scheme", BASE))
            scheme = schemes.parse("BF16" if named == BASE else named)
            key = f"variant.{name}.toolchain"
            placed = placement.row("variant", key, own, row.toolchain, row.packages, problems)
            into = tuple(e.name for e in engines if e.takes(name) and (not asked or e.name in asked))
            found.append(Variant(name, row, checked, scheme, into, placed))
    return found


def _row_config(config_type: str, given: Mapping[str, Any], key: str, problems: list[Problem]) -> BaseModel | None:
    model: type[BaseModel] = resolve(config_type)  # type: ignore[assignment]
    try:
        return model.model_validate(given)
    except ValidationError as error:
        problems += problems_of(error, model, key)
    return None


def engines_of(variant: Variant, engines: Iterable[Engine]) -> Iterator[Engine]:
    """The engines a variant is built into: those that take it, less those that would be the same as a plainer one."""
    for engine in engines:
        if engine.name in variant.engines and engine.row.redundant(engine.config, variant.scheme) is None:
            yield engine


def pairing(variant: Variant, base: Inspected, workload: Workload, free: int) -> Pairing:
    """What is known of a variant before it exists; `free` bytes are left where artifacts go."""
    row = variant.row
    known = {**base.facts(), "quantizer": row.name, "scheme": str(variant.scheme), **row.promises(variant.config)}
    ignored = tuple(getattr(variant.config, "ignore", ()))
    device = {**describe(), "vectors": vectors()}
    return Pairing(known, base.linear_shapes, device, workload, free, ignored)


def footprint(variant: Variant, engine: Engine, base: Inspected, workload: Workload) -> Footprint | None:
    """Estimate what serving takes in memory; None where it is not on a device of ours."""
    return engine.row.footprint(engine.config, pairing(variant, base, workload, 0))


def preflight(variant: Variant, engines: list[Engine], pairing: Pairing) -> Iterator[tuple[str, str, Problem]]:
    """What the engines have against a variant, from what is known before it exists."""
    for engine in engines_of(variant, engines):
        yield from ((variant.name, engine.name, p) for p in engine.row.preflight(engine.config, pairing))


def tools(variants: Iterable[Variant], engines: Iterable[Engine]) -> dict[Kind, set[str]]:
    """What a campaign uses, by kind, in the words of the tables: rows, distributions, formats of checkpoints."""
    variants, engines = tuple(variants), tuple(engines)
    packages = [*(v.row.packages for v in variants), *(e.row.packages for e in engines)]
    packages += [e.row.graph.packages for e in engines if e.row.graph is not None]
    return {
        "quantizer": {v.row.name for v in variants},
        "target": {e.row.name for e in engines},
        "library": {name for names in packages for name in names} | ALWAYS,
        "format": {str(v.row.promises(v.config).get("quant_method", "")) for v in variants},
    }
