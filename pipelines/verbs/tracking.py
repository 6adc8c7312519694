"""The verb `track`: record in MLflow what was decided here and is not recorded there yet, each campaign once."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipelines import terminal
from pipelines.campaign import CampaignConfig
from pipelines.cli import Answer
from pipelines.compose import compose
from pipelines.conduct import forget_lost_track
from pipelines.config import Strict, parse
from pipelines.errors import EnvironmentProblem
from pipelines.flow.executor import execute
from pipelines.flow.plan import plan
from pipelines.flow.stage import Stage, Step
from pipelines.flow.store import Store, manifest
from pipelines.flow.toolchain import CURRENT
from pipelines.stages import TRACK
from pipelines.track.config import TrackingConfig
from pipelines.track.connection import absolute_uri, addressed, artifact_root, reachable
from pipelines.track.masking import masked_text

KINDS = {"engines": "engine", "variants": "variant"}
"""Inputs of a recording that are called otherwise than what they are."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A recording that some run asked for: its configuration and the keys of what it reads, by input."""

    config: Mapping[str, Any]
    inputs: Mapping[str, str | list[str]]

    @property
    def decision(self) -> str:
        return str(self.inputs["decision"])


def track(args: argparse.Namespace) -> Answer:
    """Record every campaign of the store, or the one that is named, that this tracking URI does not have.

    Raises:
        EnvironmentProblem: it is still away; nothing here is changed.
    """
    directory = Path(args.config_dir).resolve() if args.config_dir else None
    config = parse(CampaignConfig, compose(args.overrides, directory))
    named = any(o.lstrip("+").startswith(("campaign=", "experiment=")) for o in args.overrides)
    store, uri = Store(Path(config.paths.store).resolve()), absolute_uri(config.tracking.uri)
    store.prepare()
    reachable(uri)
    root = artifact_root(uri, config.tracking.artifacts) or ""
    steps, gone, before = [], {}, 0
    for asked in recordings(store, config.campaign if named else ""):
        one = step(asked, uri, root)
        forget_lost_track(one, store, uri)
        if store.has(TRACK.kind, one.key):
            before += 1
        elif lost := missing(asked, store):
            gone[asked.decision[:16]] = lost
        else:
            steps.append(one)
    planned = plan(steps, store)
    with addressed(uri), terminal.Watcher(len(planned.to_run), planned.seconds) as watch:
        outcomes = execute(planned, store, watch, {})
    found = [outcomes[one.key] for one in steps]
    sent = [o.step.label for o in found if o.state == "made"]
    failed = {o.step.label: o.message for o in found if o.state == "failed"}
    print(f"{len(sent)} recorded now, {before} were recorded before, {len(failed)} failed")
    for label, why in failed.items():
        print(f"failed: {label}: {why}", file=sys.stderr)
    for key, what in gone.items():
        print(f"decision {key} cannot be recorded any more: {what} is gone from the store", file=sys.stderr)
    document = {"recorded": sent, "before": before, "failed": failed, "gone": gone}
    return Answer(EnvironmentProblem.exit_code if failed else 0, document)


def recordings(store: Store, campaign: str = "") -> Iterator[Asked]:
    """What was asked to be recorded, each decision once, the oldest first: a later one is the challenger.

    Decisions that were collected are no longer asked for.
    """
    found: dict[str, Asked] = {}
    for asked in (*_requested(store), *_recorded(store)):
        found.setdefault(asked.decision, asked)
    there = [asked for asked in found.values() if store.has("decision", asked.decision)]
    of = {asked.decision: manifest(store.path("decision", asked.decision)) for asked in there}
    for asked in sorted(there, key=lambda one: of[one.decision].started):
        if campaign in ("", of[asked.decision].config.get("campaign")):
            yield asked


def _requested(store: Store) -> Iterator[Asked]:
    """Requests that were given to a worker, whatever became of them."""
    for path in sorted((store.root / ".requests").glob("*.json")):
        try:
            steps = json.loads(path.read_text()).get("steps", [])
            tracks = [one for one in steps if one["kind"] == TRACK.kind]
        except (OSError, ValueError, KeyError, AttributeError):
            continue  # being written, or not a worker's request
        for one in tracks:
            yield Asked(one["config"], {name: _keys(given) for name, given in one["inputs"].items()})


def _keys(given: str | list[str]) -> str | list[str]:
    return given.partition("/")[2] if isinstance(given, str) else [one.partition("/")[2] for one in given]


def _recorded(store: Store) -> Iterator[Asked]:
    for path in sorted((store.root / TRACK.kind).glob("*/manifest.json")):
        made = manifest(path.parent)
        yield Asked(made.config, made.inputs)


def missing(asked: Asked, store: Store) -> str:
    """The first artifact of a recording that is not there any more, "" where all are."""
    for name, given in asked.inputs.items():
        kind = KINDS.get(name, name)
        for key in [given] if isinstance(given, str) else given:
            if not store.has(kind, key):
                return f"{kind}/{key[:16]}"
    return ""


def step(asked: Asked, uri: str, root: str) -> Step:
    """The step that records it where this campaign's configuration says now."""
    config = _config(asked.config).model_copy(update={"tracking_uri": masked_text(uri), "artifact_root": root})
    inputs = {
        name: _pinned(KINDS.get(name, name), given)
        if isinstance(given, str)
        else tuple(_pinned(KINDS.get(name, name), key) for key in given)
        for name, given in asked.inputs.items()
    }
    label = f"record {config.experiment} {asked.decision[:6]}"
    return Step(TRACK, label, config, inputs, CURRENT.versions(TRACK.packages))


def _config(given: Mapping[str, Any]) -> TrackingConfig:
    """A recording's configuration; of one by another version of ours, what this one knows."""
    try:
        return TrackingConfig.model_validate(given)
    except ValidationError:
        known = {name: value for name, value in given.items() if name in TrackingConfig.model_fields}
        return TrackingConfig.model_validate(known | {"opening": None})


def _pinned(kind: str, key: str) -> Step:
    return Step(Stage(kind, kind, 0, "", ""), f"{kind} {key[:6]}", Strict(), pinned=key)
