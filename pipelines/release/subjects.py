"""What a name on the command line stands for: a candidate of a decision, an engine, a whole decision, or an alias.

A name is looked for among what there is, whole; no label is taken apart. Nothing here imports MLflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipelines.decide.gate import EvalCard
from pipelines.decide.model import Candidate, Decision
from pipelines.errors import ConfigError, EvidenceError, Problem, closest
from pipelines.flow.store import Manifest, Store, manifest
from pipelines.release.champion import find
from pipelines.track.report import read
from pipelines.track.standing import aliased_tags
from pipelines.track.versions import CHALLENGER, CHAMPION, PREVIOUS

SHORTEST = 6
ALIASES = (CHAMPION, CHALLENGER, PREVIOUS)
HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine with what was measured of it. `keys` are as a decision names them: variant, engine, scores/<eval set>,
    latency, divergence. Without a decision they are the newest that were made of the engine."""

    asked: str
    label: str
    engine: Manifest
    keys: Mapping[str, str]
    decision: Manifest | None = None
    made: Decision | None = None
    candidate: Candidate | None = None
    cards: Mapping[str, EvalCard] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """A name that only this one has."""
        if self.decision is None:
            return self.engine.key[:16]
        return f"{self.decision.config['campaign']}@{self.decision.key[:SHORTEST]}/{self.label}"


@dataclass(frozen=True, slots=True)
class Whole:
    """A decision with all its candidates."""

    asked: str
    decision: Manifest

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(_labels(self.decision))


Named = Subject | Whole


@dataclass(frozen=True)
class Known:
    """Everything that can be named here.

    A bare label or alias is about `campaign`; where nothing was decided of that, about the campaign decided last.
    `model`: the registered model of a bare alias, where it is not called like the campaign.
    """

    store: Store
    campaign: str
    tracking_uri: str
    model: str
    ledger: Path

    @cached_property
    def decisions(self) -> tuple[Manifest, ...]:
        """Every decision, newest first."""
        return tuple(sorted(self._all("decision"), key=lambda m: m.started, reverse=True))

    @cached_property
    def newest(self) -> dict[str, Manifest]:
        """The newest decision of each campaign."""
        found: dict[str, Manifest] = {}
        for made in self.decisions:
            found.setdefault(str(made.config["campaign"]), made)
        return found

    @property
    def own(self) -> str:
        """The campaign that bare names are about."""
        return self.campaign if self.campaign in self.newest else next(iter(self.newest), self.campaign)

    def resolve(self, names: Sequence[str]) -> list[Named]:
        """Find what each name stands for.

        Raises:
            ConfigError: a name that stands for nothing, or for several things; all of them at once.
            EvidenceError: what it stands for failed, or is not in the store any more.
        """
        found, problems = [], []
        for name in names:
            meant = list(self._meant(name))
            if len(meant) == 1:
                found.append(meant[0])
            elif meant:
                several = ", ".join(one.address if isinstance(one, Subject) else f"campaign {name}" for one in meant)
                problems.append(Problem("compare", name, f"may be several things: {several}; say which"))
            else:
                problems.append(Problem("compare", name, *self._unknown(name)))
        if problems:
            raise ConfigError(problems)
        return found

    def _meant(self, name: str) -> Iterator[Named]:
        """Everything that a name stands for; an alias is only looked up where nothing else has the name."""
        meant: list[Named] = [*self._candidates(name), *self._wholes(name), *self._engines(name)]
        yield from meant
        if not meant:
            yield from self._aliased(name)

    def _candidates(self, name: str) -> Iterator[Subject]:
        """A label of the campaign's newest decision; `campaign/label`; `campaign@key/label`."""
        mine = self.newest.get(self.own)
        if mine is not None and name in _labels(mine):
            yield self.candidate(mine, name, name)
        for campaign, made in self.newest.items():
            if name.startswith(f"{campaign}/") and (label := name.removeprefix(f"{campaign}/")) in _labels(made):
                yield self.candidate(made, label, name)
        for made in self.decisions:
            start = f"{made.config['campaign']}@"
            key, _, label = name.removeprefix(start).partition("/") if name.startswith(start) else ("", "", "")
            if _begins(made.key, key) and label in _labels(made):
                yield self.candidate(made, label, name)

    def _wholes(self, name: str) -> Iterator[Whole]:
        """A campaign's name, for its newest decision; a decision's key; `campaign@key`."""
        if name in self.newest:
            yield Whole(name, self.newest[name])
        for made in self.decisions:
            if _begins(made.key, name.removeprefix(f"{made.config['campaign']}@")):
                yield Whole(name, made)

    def _engines(self, name: str) -> Iterator[Subject]:
        """The beginning of an engine's key."""
        for made in self._all("engine") if _begins_hex(name) else ():
            if _begins(made.key, name):
                yield self.engine(made, name)

    def _aliased(self, name: str) -> Iterator[Subject]:
        """`@alias` of the campaign's model, `model@alias` of another."""
        model, at, alias = name.rpartition("@")
        if not at or not alias or "/" in alias:
            return
        model = model or self.model or self.own
        tags = self._tags(model, alias)
        if not tags:
            return
        engine, decision, label = (tags.get(k, "") for k in ("engine_key", "decision_key", "candidate"))
        if not engine or not self.store.has("engine", engine):
            raise EvidenceError(
                f"{name}: version {tags.get('version', '?')} of {model} stands for engine "
                f"{engine or 'unknown'}, which is not in {self.store.root}"
            )
        built = manifest(self.store.path("engine", engine))
        if decision and self.store.has("decision", decision):
            made = manifest(self.store.path("decision", decision))
            if any(c["label"] == label and c["engine_key"] == built.key for c in made.config["candidates"]):
                yield self.candidate(made, label, name)
                return
        yield self.engine(built, name)

    def _tags(self, model: str, alias: str) -> Mapping[str, str]:
        """What the registry says of an alias; of the champion what the ledger says, as a campaign does."""
        tags = aliased_tags(self.tracking_uri, model, alias)
        if tags or alias != CHAMPION:
            return tags
        known = find(self.tracking_uri, self.ledger, model, self.store)
        return {"version": known.version, "engine_key": known.engine_key} if known.engine_key else {}

    def candidate(self, decision: Manifest, label: str, asked: str) -> Subject:
        """A candidate of a decision.

        Raises:
            EvidenceError: it failed, or its engine is gone.
        """
        made = read(self.store.path("decision", decision.key))
        one = next(c for c in made.candidates if c.label == label)
        key = one.keys.get("engine")
        if one.status == "failed" or key is None:
            raise EvidenceError(f"{asked}: there is no engine to compare: {one.failure or 'none was built'}")
        if not self.store.has("engine", key):
            raise EvidenceError(f"{asked}: its engine {key[:16]} is not in {self.store.root} any more")
        cards = {name: EvalCard.model_validate(card) for name, card in decision.config["eval_sets"].items()}
        return Subject(
            asked, label, manifest(self.store.path("engine", key)), one.keys, decision, made, one, cards
        )  # fmt: skip

    def engine(self, built: Manifest, asked: str) -> Subject:
        """An engine: as the newest decision about it has it, or with the newest of what was measured of it."""
        for made in self.decisions:
            for one in made.config["candidates"]:
                if one["engine_key"] == built.key and one["status"] == "ok":
                    return self.candidate(made, one["label"], asked)
        keys = {"engine": built.key}
        variant = built.inputs.get("variant")
        keys |= {"variant": variant} if isinstance(variant, str) else {}
        for kind in ("scores", "divergence", "latency"):
            about = [m for m in self._all(kind) if built.key in (m.inputs.get("engine"), *_listed(m, "engines"))]
            for m in sorted(about, key=lambda m: m.started):  # the newest last, which stays
                keys[f"scores/{m.facts.get('eval_set')}" if kind == "scores" else kind] = m.key
        return Subject(asked, built.key[:16], built, keys)

    def _all(self, kind: str) -> Iterator[Manifest]:
        for path in sorted((self.store.root / kind).glob("*/manifest.json")):
            yield manifest(path.parent)

    def _unknown(self, name: str) -> tuple[str, str]:
        """What to say of a name that stands for nothing: what it may have been, and the nearest."""
        mine = self.newest.get(self.own)
        labels = [] if mine is None else _labels(mine)
        others = [f"{c}/{label}" for c, made in self.newest.items() if c != self.own for label in _labels(made)]
        allowed = closest(name, [*labels, *self.newest, *others, *(f"@{alias}" for alias in ALIASES)])
        if "@" in name and "/" not in name:
            model, _, alias = name.rpartition("@")
            nobody = f"nobody has the alias {alias!r} of model {model or self.model or self.own!r}"
            return nobody, "`quantgate promote` gives it" if alias in ALIASES else allowed
        engine = "" if len(name) >= SHORTEST or not set(name) <= HEX else f"; a key takes {SHORTEST} digits"
        return f"no candidate, campaign, decision, engine or alias{engine}", allowed


def _labels(decision: Manifest) -> list[str]:
    return [str(one["label"]) for one in decision.config["candidates"]]


def _listed(made: Manifest, name: str) -> Sequence[str]:
    given = made.inputs.get(name, ())
    return [given] if isinstance(given, str) else given


def _begins_hex(text: str) -> bool:
    return SHORTEST <= len(text) <= 64 and set(text) <= HEX


def _begins(key: str, text: str) -> bool:
    return _begins_hex(text) and key.startswith(text)
