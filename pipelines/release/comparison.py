"""Put engines side by side: read what was measured of each, compare what may be compared, list what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipelines.decide import alike, contrast, evidence
from pipelines.decide.compared import Compared, Comparison, Delta, Refusal, Side
from pipelines.decide.contrast import Asked
from pipelines.decide.contrastload import Load, loads
from pipelines.decide.contrastread import predictions, sizes
from pipelines.decide.evidence import Evidence
from pipelines.decide.gate import ChoiceRule
from pipelines.decide.judge import Item
from pipelines.decide.measured import OF_A_REQUEST, Group, Measured, Request, groups, named
from pipelines.divergence import reading
from pipelines.divergence.reading import Reading
from pipelines.errors import ConfigError, EvidenceError, Problem
from pipelines.flow.store import Manifest, Store, manifest
from pipelines.release import differing
from pipelines.release.subjects import Known, Named, Subject, Whole

READING = "divergence"


@dataclass(frozen=True, slots=True)
class Distribution:
    """The sorted times of several sides in one group of a load profile; `doubtful` names those that are no evidence."""

    place: str
    metric: str
    values: Mapping[str, tuple[float, ...]]
    doubtful: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Shown:
    """A comparison with what only a page draws."""

    comparison: Comparison
    distributions: tuple[Distribution, ...]


@dataclass(frozen=True)
class _Reader:
    """Reads artifacts of one store, each once."""

    store: Store
    _probes: dict[str, Evidence] = field(default_factory=dict)

    def made(self, kind: str, key: str | None) -> Manifest | None:
        """An artifact's manifest; None where it has none, or is gone."""
        return manifest(self.store.path(kind, key)) if key and self.store.has(kind, key) else None

    def items(self, key: str) -> Mapping[str, Sequence[Item]]:
        path = self.store.path("scores", key)
        return evidence.read(scores=[path], latency=None, engines=[], variants=[]).items[path.name]

    def probe(self, key: str) -> Evidence:
        if key not in self._probes:
            path = self.store.path("latency", key)
            self._probes[key] = evidence.read(scores=[], latency=path, engines=[], variants=[])
        return self._probes[key]

    def reading(self, key: str | None) -> Reading | None:
        """What an engine predicted; None where nobody asked it to, or its server does not say."""
        if self.made(READING, key) is None or key is None:
            return None
        found = reading.read(self.store.path(READING, key))
        return found if found.windows else None


@dataclass(frozen=True)
class _Seen:
    """A subject with everything that was measured of it, read when it is asked for."""

    subject: Subject
    name: str
    reader: _Reader

    @cached_property
    def scores(self) -> Mapping[str, tuple[Manifest, Sequence[Item]]]:
        """Of each eval set the artifact and its items."""
        found: dict[str, tuple[Manifest, Sequence[Item]]] = {}
        for key in dict.fromkeys(key for name, key in self.subject.keys.items() if name.startswith("scores/")):
            made = self.reader.made("scores", key)
            if made is not None:
                found |= {name: (made, items) for name, items in self.reader.items(key).items()}
        return found

    @cached_property
    def lost(self) -> frozenset[str]:
        """Eval sets whose scores are gone from the store."""
        asked = {n.removeprefix("scores/") for n in self.subject.keys if n.startswith("scores/")}
        return frozenset(asked - self.scores.keys())

    @cached_property
    def load(self) -> Load | None:
        """What the probe measured of it; None where it measured nothing."""
        key = self.subject.keys.get("latency")
        probe = self.reader.made("latency", key)
        if probe is None or key is None:
            return None
        found = self.reader.probe(key)
        measured = found.measured.get(self.subject.engine.key[:16], Measured())
        if not measured.requests:
            return None
        return Load(self.subject.engine, probe, measured, found.searched, self._price)

    @property
    def _price(self) -> tuple[float, str] | None:
        made = self.subject.made
        rule = ChoiceRule.model_validate(made.gate.get("choice") or {}) if made is not None else ChoiceRule()
        price = rule.price_per_device_hour
        return None if price is None else (price, rule.currency)

    @cached_property
    def reading(self) -> Reading | None:
        return self.reader.reading(self.subject.keys.get(READING))

    @cached_property
    def sizes(self) -> dict[str, float | None]:
        variant = self.reader.made("variant", self.subject.keys.get("variant"))
        return {
            "engine on disk": _number(self.subject.engine.facts.get("size_bytes")),
            "variant's checkpoint on disk": _number(variant.facts.get("size_bytes")) if variant else None,
        }

    @property
    def side(self) -> Side:
        subject, one = self.subject, self.subject.candidate
        variant = self.reader.made("variant", subject.keys.get("variant"))
        facts = variant.facts if variant is not None else {}
        run_id = differing.run_of(self.reader.store, subject)
        return Side(
            name=self.name, asked=subject.asked, engine_key=subject.engine.key,
            campaign=subject.made.campaign if subject.made else "", candidate=subject.label if one else "",
            decision_key=subject.decision.key if subject.decision else "",
            outcome=("reference" if one.reference else one.outcome or "") if one else "",
            scheme=one.scheme if one else str(facts.get("scheme") or ""),
            quantizer=one.quantizer if one else str(facts.get("quantizer") or ""),
            target=str(subject.engine.facts.get("target") or ""), native=subject.engine.facts.get("native") is True,
            native_note=str(subject.engine.facts.get("native_note") or ""), run_id=run_id,
        )  # fmt: skip


def compare(
    known: Known, names: Sequence[str], *, confidence: float = 0.95, anyway: bool = False
) -> tuple[Compared, list[Shown]]:
    """Compare what the names stand for with the first of them.

    Engines, candidates and aliases are compared with each other; campaigns and decisions pairwise, candidate by
    candidate of the same label.

    Raises:
        ConfigError: a name stands for nothing, one engine by one decision is named twice, or campaigns are named along
            with candidates.
        EvidenceError: what a name stands for failed or is gone, or decisions have no label in common.
    """
    reader = _Reader(known.store)
    wanted, unmatched = _together(known, known.resolve(names))
    shown = [_compare(some, reader, confidence, anyway) for some in wanted]
    compared = Compared(
        asked=tuple(names), confidence=confidence, anyway=anyway, unmatched=unmatched,
        comparisons=tuple(one.comparison for one in shown),
    )  # fmt: skip
    return compared, shown


def _together(known: Known, found: Sequence[Named]) -> tuple[list[list[Subject]], dict[str, str]]:
    """What is compared with what; and what of decisions has no counterpart, with the reason."""
    wholes = [one for one in found if isinstance(one, Whole)]
    if not wholes:
        subjects = [one for one in found if isinstance(one, Subject)]
        _no_twins(subjects)
        return [subjects], {}
    if len(wholes) < len(found):
        mixed = next(one for one in found if isinstance(one, Subject))
        told = f"is one engine, and {wholes[0].asked} a whole campaign; name a candidate of it"
        candidate = f"{wholes[0].asked}/{wholes[0].labels[0]}"
        raise ConfigError([Problem("compare", mixed.asked, told, f"for example {candidate}")])
    return _by_label(known, wholes)


def _by_label(known: Known, wholes: Sequence[Whole]) -> tuple[list[list[Subject]], dict[str, str]]:
    keys = [one.decision.key for one in wholes]
    if len(set(keys)) < len(keys):
        twice = next(one.asked for one in wholes if keys.count(one.decision.key) > 1)
        raise ConfigError([Problem("compare", twice, "is named twice: both stand for one decision")])
    wanted: list[list[Subject]] = []
    unmatched: dict[str, str] = {}
    for label in dict.fromkeys(label for one in wholes for label in one.labels):
        absent = [one.asked for one in wholes if label not in one.labels]
        if absent:
            unmatched[label] = f"not in {', '.join(absent)}"
            continue
        try:
            wanted.append([known.candidate(one.decision, label, f"{one.asked}/{label}") for one in wholes])
        except EvidenceError as error:
            unmatched[label] = str(error)
    if not wanted:
        told = "; ".join(f"{label}: {why}" for label, why in unmatched.items())
        raise EvidenceError(f"{' and '.join(one.asked for one in wholes)} have no candidate to compare: {told}")
    return wanted, unmatched


def _no_twins(subjects: Sequence[Subject]) -> None:
    seen: dict[str, str] = {}
    for one in subjects:
        if one.address in seen:
            told = f"is {one.address}, as {seen[one.address]} is: there is nothing to compare"
            raise ConfigError([Problem("compare", one.asked, told)])
        seen[one.address] = one.asked


def _compare(subjects: Sequence[Subject], reader: _Reader, confidence: float, anyway: bool) -> Shown:
    labels = [one.label for one in subjects]
    options = (labels, [one.asked for one in subjects], [one.address for one in subjects])
    names = next(some for some in options if len(set(some)) == len(some))
    seen = [_Seen(one, name, reader) for one, name in zip(subjects, names, strict=True)]
    base = seen[0]
    found: list[Delta | Refusal] = []
    for other in seen[1:]:
        found += _against(base, other, Asked((base.name, other.name), confidence, anyway))
    changes, same = differing.differences(reader.store, subjects)
    refused = tuple(one for one in found if isinstance(one, Refusal))
    sides = tuple(one.side for one in seen)
    comparison = Comparison(
        sides=sides, deltas=tuple(one for one in found if isinstance(one, Delta)), refusals=refused,
        changes=tuple(changes), same=same, mlflow=differing.mlflow_link(reader.store, subjects, sides),
    )  # fmt: skip
    return Shown(comparison, tuple(_distributions(seen, comparison)))


def _against(base: _Seen, other: _Seen, asked: Asked) -> Iterator[Delta | Refusal]:
    yield from _scores(base, other, asked)
    if base.load is not None and other.load is not None:
        yield from loads(base.load, other.load, asked)
    elif base.load is not None or other.load is not None:
        told = f"{(base if base.load is None else other).name} was never probed, or its probe is gone"
        yield asked.refuse("load", "all profiles", [told], missing=True)
    yield from sizes(base.sizes, other.sizes, asked)
    if base.reading is not None and other.reading is not None:
        yield from predictions(base.reading, other.reading, asked)
    elif base.reading is not None or other.reading is not None:
        told = f"what {(base if base.reading is None else other).name} predicts was not read"
        yield asked.refuse("perplexity", "given texts", [told], missing=True)


def _scores(base: _Seen, other: _Seen, asked: Asked) -> Iterator[Delta | Refusal]:
    for name in dict.fromkeys((*base.scores, *other.scores, *sorted(base.lost | other.lost))):
        absent = [one for one in (base, other) if name not in one.scores]
        if absent:
            told = [f"{one.name}'s are gone" if name in one.lost else f"{one.name} has none" for one in absent]
            yield asked.refuse("score", name, ["; ".join(told)], missing=True)
            continue
        (ours, items), (theirs, others) = base.scores[name], other.scores[name]
        card = base.subject.cards.get(name) or other.subject.cards.get(name) or contrast.card_of(items)
        conditions, edition = list(alike.about_scores(ours, theirs)), list(alike.about_data(ours, theirs))
        yield from contrast.scores(items, others, name, card, asked, conditions, edition)


def _distributions(seen: Sequence[_Seen], comparison: Comparison) -> Iterator[Distribution]:
    """The times of the sides that were compared in each group, the base's first."""
    compared = {(d.side, d.name): bool(d.marks) for d in comparison.deltas if d.kind == "latency"}
    base = seen[0]
    for group, requests in groups(_counted(base)) if base.load is not None else ():
        place = named(group.profile, group.phase, group.bucket)
        others = [one for one in seen[1:] if (one.name, place) in compared]
        for metric in OF_A_REQUEST:
            sides = {base.name: requests} | {one.name: _of_group(one, group) for one in others}
            values = {n: tuple(sorted(v for r in rs if (v := r.value(metric)) is not None)) for n, rs in sides.items()}
            kept = {name: some for name, some in values.items() if len(some) > 1}
            if others and len(kept) > 1:
                doubtful = frozenset(one.name for one in others if compared[one.name, place])
                yield Distribution(place, metric, kept, doubtful)


def _counted(one: _Seen) -> list[Request]:
    """The requests that figures are taken from, searches aside."""
    if one.load is None:
        return []
    measured = one.load.measured
    return [r for p in measured.profiles for r in measured.shown(p)[0].requests if r.mode != "search"]


def _of_group(one: _Seen, group: Group) -> list[Request]:
    return [r for r in _counted(one) if group.holds(r)]


def _number(value: object) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known and isinstance(value, int | float) else None
