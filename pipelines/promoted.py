"""What promoted a champion: its decision, both sides of it, and the configuration that it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config import read
from pipelines.decide.model import Candidate, Decision
from pipelines.errors import ConfigError, EvidenceError, Problem
from pipelines.flow.store import Manifest, Store, manifest
from pipelines.release.champion import Champion


@dataclass(frozen=True, slots=True)
class Then:
    """The decision that made a champion, and what it says of both sides."""

    champion: Champion
    artifact: Path
    decision: Decision
    candidate: Candidate
    reference: Candidate
    recorded: Mapping[str, Any]

    @property
    def record(self) -> Manifest:
        return manifest(self.artifact)


def find(champion: Champion, campaign: str, store: Store) -> Then:
    """Find what promoted a champion.

    Raises:
        EvidenceError: there is no champion, or its engine, its decision or the reference's engine is gone.
    """
    if not champion.engine_key:
        hint = "" if champion.version else "; promote one first, e.g. `quantgate promote`"
        raise EvidenceError(f"campaign={campaign!r}: {champion.note}{hint}")
    artifact = store.path("decision", champion.decision_key)
    if not champion.decision_key or not store.has("decision", champion.decision_key):
        named = champion.decision_key or "which nothing names"
        raise EvidenceError(
            f"version {champion.version} cannot be reassessed: the decision that promoted it, {named}, is not in "
            f"{store.root}"
        )
    decision = read(Decision, artifact / "decision.json", "no readable decision")
    candidate = next((c for c in decision.candidates if c.keys.get("engine") == champion.engine_key), None)
    if candidate is None:
        raise EvidenceError(f"{artifact}: says nothing of the champion's engine, {champion.engine_key[:16]}")
    reference = next(c for c in decision.candidates if c.label == decision.reference)
    if candidate.reference:
        raise EvidenceError(
            f"{candidate.label}: the champion is the reference itself, so there is nothing it could have lost against; "
            "run a campaign with other variants"
        )
    for one, kind in ((candidate, "variant"), (reference, "engine"), (reference, "variant")):
        if kind not in one.keys or not store.has(kind, one.keys[kind]):
            raise EvidenceError(
                f"{one.label}: its {kind}, {one.keys.get(kind, 'never made')[:16]}, is not in {store.root}; it was "
                "removed since the decision, and there is nothing to compare with"
            )
    return Then(champion, artifact, decision, candidate, reference, _recorded(manifest(artifact).key, store))


def _recorded(decision: str, store: Store) -> dict[str, Any]:
    """The configuration of the campaign that made a decision, as it was recorded; empty where it was not."""
    made = [
        manifest(p.parent) for kind in ("track", "reassessment") for p in store.root.glob(f"{kind}/*/manifest.json")
    ]
    above = [m for m in made if decision in (m.inputs.get("decision"), m.inputs.get("rebuilt"))]
    found: dict[str, Any] = next((c for m in above if (c := m.config.get("campaign_config"))), {})
    return found


def narrowed(data: Mapping[str, Any], then: Then) -> dict[str, Any]:
    """The configuration with the reference's and the champion's variants and engines, and no others.

    Raises:
        ConfigError: it has none of that name.
    """
    sides = (then.reference, then.candidate)
    variants, engines = (tuple(dict.fromkeys(getattr(s, kind) for s in sides)) for kind in ("variant", "engine"))
    problems = [
        Problem(
            kind, name, f"{kind} of the champion's decision, and not in this configuration; name it: {kind}=[{name}]"
        )
        for kind, names in (("variant", variants), ("engine", engines))
        for name in names
        if name not in data.get(kind, {})
    ]
    if problems:
        raise ConfigError(problems)
    into = {name: [s.variant for s in sides if s.engine == name] for name in engines}
    return {
        **data,
        "variant": {name: {k: v for k, v in data["variant"][name].items() if k != "engines"} for name in variants},
        "engine": {name: {**data["engine"][name], "variants": list(dict.fromkeys(into[name]))} for name in engines},
        "reference": then.reference.variant,
    }
