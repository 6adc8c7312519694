"""Verbs about releases: promote, rollback, history, verify-ledger."""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines import terminal
from pipelines.campaign import CampaignConfig
from pipelines.cli import Answer
from pipelines.compose import compose
from pipelines.config import parse
from pipelines.errors import ConfigError, EvidenceError, Problem
from pipelines.flow.store import Store, manifest
from pipelines.flow.toolchain import toolchains
from pipelines.track.connection import absolute_uri

if TYPE_CHECKING:
    from pipelines.release.ledger import Entry
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
    from pipelines.release import answering, registry

    opened = _open(args)
    decision = latest_decision(opened.store, opened.config.campaign)
    print(f"decision {decision.name} of {manifest(decision).started}", file=sys.stderr)
    problems: list[Problem] = []
    known = toolchains(opened.config.toolchain, opened.config.paths.toolchains_home, problems)
    if problems:
        raise ConfigError(problems)
    release = registry.promote(
        _registry(opened),
        decision,
        opened.store,
        registry.Person(args.actor or getpass.getuser(), args.override),
        lambda engine: answering.ask(engine, opened.store, known.values()),
        candidate=args.candidate,
        tell=_tell,
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
    person = registry.Person(args.actor or getpass.getuser(), args.reason)
    return _released(registry.rollback(_registry(opened), opened.store, person, tell=_tell))


def history(args: argparse.Namespace) -> Answer:
    """Show every promotion and rollback, finished or given up, oldest first."""
    from pipelines.release.ledger import Ledger

    opened = _open(args)
    read = Ledger(Path(opened.config.paths.ledger).resolve()).read()
    rows = [_row(transaction) for transaction in _transactions(read.entries)]
    columns = {name.replace("_", " "): [row[name] for row in rows] for name in _COLUMNS}
    terminal.table("Promotions and rollbacks", tuple(columns), list(zip(*columns.values(), strict=True)))
    for fault in read.faults:
        print(f"warning: {fault}", file=sys.stderr)
    return Answer(EvidenceError.exit_code if read.faults else 0, {"history": rows, "faults": list(read.faults)})


_COLUMNS = ("when", "model", "action", "version", "candidate", "engine", "actor", "reason", "decision", "outcome")


def _transactions(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries by transaction, in the order in which these began."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.transaction, []).append(entry)
    return list(found.values())


def _row(entries: Sequence[Entry]) -> dict[str, object]:
    """What one transaction was about and how it ended."""
    last, change = entries[-1], entries[-1].change
    ended = last.state if last.state in ("committed", "aborted") else "cut short"
    return {
        "when": entries[0].at,
        "model": change.model,
        "action": change.action,
        "version": change.version,
        "candidate": change.evidence.candidate if change.evidence else "",
        "engine": change.engine_key[:16],
        "actor": change.actor,
        "reason": change.override_reason or "",
        "decision": change.decision_key[:16],
        "outcome": f"{ended}: {last.note}" if last.note else ended,
        "change": change.model_dump(mode="json"),
    }


def verify_ledger(args: argparse.Namespace) -> Answer:
    """Hold the ledger against itself, the store and the registry."""
    from pipelines.release import registry
    from pipelines.release.audit import audit

    opened = _open(args)
    if args.repair and (repaired := registry.repair(_registry(opened))):
        print(repaired)
    found = audit(_registry(opened), opened.store)
    for fault in found.faults:
        print(f"fault: {fault}", file=sys.stderr)
    for note in found.notes:
        print(f"note: {note}")
    print(
        f"{found.entries} entries, {found.promotions} committed, {found.artifacts} artifacts hashed, "
        f"{len(found.faults)} faults"
    )
    return Answer(EvidenceError.exit_code if found.faults else 0, asdict(found))


def _registry(opened: Opened) -> Registry:
    from pipelines.release.registry import Registry

    config = opened.config
    model = config.tracking.registered_model or config.campaign
    return Registry(absolute_uri(config.tracking.uri), Path(config.paths.ledger).resolve(), model)


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def _released(release: Release) -> Answer:
    say = terminal.console()
    for said in filter(None, (release.repaired, release.noted)):
        say.print(said, markup=False)
    verb = "is now" if release.changed else "already was"
    say.print(f"{release.model}: version {release.version} {verb} champion (by {release.actor})", markup=False)
    say.print(f"previous: version {release.previous or 'none'}\nengine:   {release.engine}", markup=False)
    return Answer(0, {name: getattr(release, name) for name in type(release).__slots__})
