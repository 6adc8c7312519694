"""Verbs about releases: promote and rollback."""

from __future__ import annotations

import argparse
import getpass
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines import terminal
from pipelines.campaign import CampaignConfig
from pipelines.cli import Answer
from pipelines.compose import compose
from pipelines.config import parse
from pipelines.errors import EvidenceError
from pipelines.flow.store import Store, manifest
from pipelines.track.connection import absolute_uri

if TYPE_CHECKING:
    from pipelines.release.registry import Registry, Release


@dataclass(frozen=True, slots=True)
class Opened:
    """A campaign's configuration and the store it works in; nothing of its checkpoint or eval sets is read."""

    config: CampaignConfig
    store: Store


def _open(args: argparse.Namespace) -> Opened:
    directory = Path(args.config_dir).resolve() if args.config_dir else None
    config = parse(CampaignConfig, compose(args.overrides, directory))
    return Opened(config, Store(Path(config.paths.store).resolve()))


def latest_decision(store: Store, campaign: str) -> Path:
    """The newest decision of the campaign.

    Raises:
        EvidenceError: none was made here.
    """
    found = [p for p in (store.root / "decision").glob("*/") if _is_of(p, campaign)]
    if not found:
        raise EvidenceError(f"no decision of campaign={campaign!r} in {store.root}; make one with `quantgate run`")
    return max(found, key=lambda p: manifest(p).started)


def _is_of(artifact: Path, campaign: str) -> bool:
    return (artifact / "manifest.json").is_file() and manifest(artifact).config.get("campaign") == campaign


def promote(args: argparse.Namespace) -> Answer:
    """Promote the winner of the campaign's newest decision."""
    from pipelines.release import registry

    opened = _open(args)
    decision = latest_decision(opened.store, opened.config.campaign)
    print(f"decision {decision.name} of {manifest(decision).started}", file=sys.stderr)
    release = registry.promote(
        _registry(opened),
        decision,
        opened.store,
        actor=args.actor or getpass.getuser(),
        candidate=args.candidate,
        override_reason=args.override,
    )
    answer = _released(release)
    return Answer(answer.code, answer.document | {"rollout": _rollout(args) if release.changed else ""})


def _rollout(args: argparse.Namespace) -> str:
    """Plan the rollout of who was just promoted, and give the plan's place."""
    from pipelines.verbs.canary import after_promotion

    return after_promotion(args.overrides, args.config_dir)


def rollback(args: argparse.Namespace) -> Answer:
    """Make the previous champion the champion."""
    from pipelines.release import registry

    opened = _open(args)
    return _released(registry.rollback(_registry(opened), actor=args.actor or getpass.getuser(), reason=args.reason))


def _registry(opened: Opened) -> Registry:
    from pipelines.release.registry import Registry

    config = opened.config
    model = config.tracking.registered_model or config.campaign
    return Registry(absolute_uri(config.tracking.uri), Path(config.paths.ledger).resolve(), model)


def _released(release: Release) -> Answer:
    say = terminal.console()
    if release.repaired:
        say.print(release.repaired, markup=False)
    verb = "is now" if release.changed else "already was"
    say.print(f"{release.model}: version {release.version} {verb} champion (by {release.actor})", markup=False)
    say.print(f"previous: version {release.previous or 'none'}\nengine:   {release.engine}", markup=False)
    return Answer(0, {name: getattr(release, name) for name in type(release).__slots__})
