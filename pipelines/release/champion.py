"""Who is champion now, and whether it can be compared with: its engine must be in this store.

The ledger says who was promoted last; the registry is asked where the ledger knows nobody. Neither imports MLflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.errors import EnvironmentProblem, EvidenceError
from pipelines.flow.store import Store, manifest
from pipelines.release.ledger import Ledger
from pipelines.track.standing import aliased_tags
from pipelines.track.versions import CHAMPION


@dataclass(frozen=True, slots=True)
class Champion:
    """The champion's version and engine key; without a key, `note` says why there is nothing to compare with.

    decision_key: the name of the decision that promoted it. previous: the version that a rollback would go to.
    """

    version: str = ""
    engine_key: str = ""
    note: str = ""
    decision_key: str = ""
    previous: str | None = None


def find(tracking_uri: str, ledger: Path, model: str, store: Store) -> Champion:
    """Look the champion of a model up. Never raises: what cannot be had is said in `note`."""
    try:
        known = _recorded(ledger, model) or aliased_tags(tracking_uri, model, CHAMPION)
    except (EnvironmentProblem, EvidenceError) as error:
        return Champion(note=f"not known: {str(error).splitlines()[0]}")
    if not known:
        return Champion(note=f"nobody is champion of {model}")
    version, name = known.get("version", "?"), known.get("engine_key", "")
    decision, previous = known.get("decision_key", ""), known.get("previous") or None
    if not name or not store.has("engine", name):
        note = f"version {version} cannot be compared with: its engine is not in {store.root}"
        return Champion(version, note=note, decision_key=decision, previous=previous)
    return Champion(version, manifest(store.path("engine", name)).key, decision_key=decision, previous=previous)


def _recorded(path: Path, model: str) -> Mapping[str, str]:
    """The change that the ledger committed last for this model, and the version that a rollback would go to."""
    done = (e.change for e in reversed(Ledger(path).entries()) if e.state == "committed" and e.change.model == model)
    last = next(done, None)
    if last is None:
        return {}
    before = (last.champion_before, last.previous_before)
    previous = next((one for one in before if one is not None and one != last.version), "")
    told = {"version": last.version, "engine_key": last.engine_key, "decision_key": last.decision_key}
    return told | {"previous": previous}
