"""What differs between the engines of a comparison, from their manifests; and where MLflow shows their runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from pipelines.decide.changes import changes, flat
from pipelines.decide.compared import Change, Side
from pipelines.flow.store import Manifest, Store, manifest
from pipelines.release.subjects import Subject

SECTIONS = ("config", "toolchain", "device", "data", "load", "gate", "stages", "date")
_PLACES = frozenset({"source", "held_out", "text_path", "prompts"})  # paths: what lies there counts by its digest


def differences(store: Store, subjects: Sequence[Subject]) -> tuple[list[Change], dict[str, int]]:
    """List by section what is not the same on all sides, and count what is."""
    made = [dict(_made(store, one)) for one in subjects]
    everywhere = frozenset.intersection(*(frozenset(side) for side in made))
    told = [_sections(one, side, everywhere) for one, side in zip(subjects, made, strict=True)]
    found: list[Change] = []
    same: dict[str, int] = {}
    for section in SECTIONS:
        listed, count = changes(section, [side[section] for side in told])
        found += listed
        same |= {section: count}
    return found, same


def _sections(one: Subject, made: Mapping[str, Manifest], everywhere: frozenset[str]) -> dict[str, dict[str, str]]:
    """What one side was made with. Of what not all sides have, only the data tell: it is there, or it is not."""
    shared = {kind: m for kind, m in made.items() if kind in everywhere}
    config = {kind: made[kind].config for kind in ("variant", "engine") if kind in made}
    probe = made.get("latency")
    return {
        "config": flat(config) | _stage_names(made),
        "toolchain": flat({kind: m.toolchain for kind, m in shared.items() if m.toolchain}),
        "device": flat({kind: m.device for kind, m in shared.items() if m.device is not None}),
        "data": dict(_data(made, everywhere)),
        "load": {} if probe is None else flat({n: v for n, v in probe.config.items() if n not in _PLACES}),
        "gate": flat(one.decision.config["gate"]) if one.decision is not None else {},
        "stages": {kind: f"{m.stage} {m.version}" for kind, m in shared.items()},
        "date": {kind: m.started for kind, m in shared.items()},
    }


def _made(store: Store, one: Subject) -> Iterator[tuple[str, Manifest]]:
    """The artifacts behind a subject that are still there, by what a decision calls them, and what they came from."""
    wanted = {name: (name.partition("/")[0], key) for name, key in one.keys.items()}
    for name, (kind, key) in wanted.items():
        if store.has(kind, key):
            yield name, manifest(store.path(kind, key))
    variant = one.keys.get("variant")
    inputs = manifest(store.path("variant", variant)).inputs if variant and store.has("variant", variant) else {}
    for kind in ("checkpoint", "calibration"):
        source = inputs.get(kind)
        if isinstance(source, str) and store.has(kind, source):
            yield kind, manifest(store.path(kind, source))
    if one.decision is not None:
        yield "decision", one.decision


def _stage_names(made: Mapping[str, Manifest]) -> dict[str, str]:
    """Which quantizer and which target, also where their configurations have the same keys."""
    return {f"{kind}.stage": made[kind].stage for kind in ("variant", "engine") if kind in made}


def _data(made: Mapping[str, Manifest], everywhere: frozenset[str]) -> Iterator[tuple[str, str]]:
    for kind in ("checkpoint", "calibration"):
        config = made[kind].config if kind in made else {}
        wanted = {n: v for n, v in config.items() if n not in _PLACES and (kind in everywhere or n == "digest")}
        yield from flat({kind: wanted}).items() if wanted else ()
    for name, scored in made.items():
        if name.startswith("scores/"):
            evalset = f"evalset.{name.removeprefix('scores/')}"
            yield f"{evalset}.digest", str(scored.config.get("digest"))
            yield f"{evalset}.items", str(scored.facts.get("items"))


def run_of(store: Store, one: Subject) -> str:
    """The MLflow run that a candidate was recorded as, "" where it was not."""
    if one.decision is None or one.candidate is None:
        return ""
    children = _recorded(store, one.decision.key).get("children")
    return str(children.get(one.label, "")) if isinstance(children, Mapping) else ""


def mlflow_link(store: Store, subjects: Sequence[Subject], sides: Sequence[Side]) -> str:
    """The fragment of MLflow's own page that compares these runs; "" unless all of them are recorded in one place."""
    facts = [_track(store, one.decision.key) for one in subjects if one.decision is not None]
    places = {str(m.facts.get("tracking_uri")) for m in facts if m is not None}
    if any(not side.run_id for side in sides) or len(places) != 1:
        return ""
    ids = [side.run_id for side in sides]
    experiments = list(dict.fromkeys(str(m.facts.get("experiment_id")) for m in facts if m is not None))
    return f"#/compare-runs?runs={quote(json.dumps(ids))}&experiments={quote(json.dumps(experiments))}"


def _track(store: Store, decision_key: str) -> Manifest | None:
    """The newest record of a decision in MLflow."""
    found = (manifest(p.parent) for p in sorted((store.root / "track").glob("*/manifest.json")))
    mine = [m for m in found if m.inputs.get("decision") == decision_key]
    return max(mine, key=lambda m: m.started, default=None)


def _recorded(store: Store, decision_key: str) -> Mapping[str, object]:
    made = _track(store, decision_key)
    return {} if made is None else _runs(store.path("track", made.key) / "runs.yaml")


def _runs(path: Path) -> Mapping[str, object]:
    """The runs that a recording made; nothing where the file is not there or not to be read."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, Mapping) else {}
