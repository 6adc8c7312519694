"""Verbs about the store: status, gc, verify."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pipelines import terminal
from pipelines.campaign import CampaignConfig
from pipelines.cli import Answer
from pipelines.compose import compose
from pipelines.config import parse
from pipelines.flow.store import Manifest, Store, manifest
from pipelines.flow.store import verify as rehash


def _config(args: argparse.Namespace) -> CampaignConfig:
    directory = Path(args.config_dir).resolve() if args.config_dir else None
    return parse(CampaignConfig, compose(args.overrides, directory))


def _store(args: argparse.Namespace) -> Store:
    return Store(Path(_config(args).paths.store).resolve())


def status(args: argparse.Namespace) -> Answer:
    """Show every decision made in this store, newest first, and what was left unfinished."""
    store = _store(args)
    made = sorted(
        (manifest(p) for p in store.artifacts() if p.parent.name == "decision"), key=lambda m: m.started, reverse=True
    )
    rows = [
        (m.config["campaign"], m.started, m.facts["outcome"], m.facts["winner"] or "-", m.facts["headline"])
        for m in made
    ]
    terminal.table(f"Decisions in {store.root}", ("campaign", "made", "outcome", "winner", "headline"), rows)
    unfinished = sorted(p.name for p in (store.root / ".tmp").glob("*-*")) if store.root.is_dir() else []
    for name in unfinished:
        print(f"in progress or interrupted: {name}")
    decisions = [{"campaign": m.config["campaign"], "made": m.started, **m.facts, "key": m.key} for m in made]
    return Answer(0, {"decisions": decisions, "unfinished": unfinished})


def verify(args: argparse.Namespace) -> Answer:
    """Hash every artifact again."""
    store = _store(args)
    wrong = {str(p.relative_to(store.root)): differing for p in store.artifacts() if (differing := rehash(p))}
    count = sum(1 for _ in store.artifacts())
    for name, files in wrong.items():
        print(f"differs from its manifest: {name}: {', '.join(files[:5])}", file=sys.stderr)
    print(f"{count} artifacts hashed, {len(wrong)} differ")
    return Answer(7 if wrong else 0, {"artifacts": count, "differing": wrong})


def gc(args: argparse.Namespace) -> Answer:
    """Remove what neither a recent decision nor a registry alias reaches."""
    from pipelines.release import registry
    from pipelines.track.connection import absolute_uri

    config = _config(args)
    store, ledger = Store(Path(config.paths.store).resolve()), Path(config.paths.ledger).resolve()
    everything = {p: manifest(p) for p in store.artifacts()}
    aliased = registry.aliased(absolute_uri(config.tracking.uri)) if everything else set()
    roots = _roots(everything, ledger, args.keep) | {m.key for m in everything.values() if m.key[:16] in aliased}
    kept = reachable(everything.values(), roots)
    doomed = [p for p, m in everything.items() if m.key not in kept]
    freed = sum(size for p in doomed for _, size in everything[p].files.values())
    for path in doomed:
        print(f"{'would remove' if args.dry_run else 'removing'} {path.relative_to(store.root)}")
        if not args.dry_run:
            store.remove(everything[path].kind, everything[path].key)
    print(f"{len(doomed)} artifacts, {terminal.size(freed)}; {len(everything) - len(doomed)} kept")
    return Answer(
        0, {"removed": [str(p.relative_to(store.root)) for p in doomed], "bytes": freed, "dry_run": args.dry_run}
    )


def _roots(everything: Mapping[Path, Manifest], ledger: Path, keep: int) -> set[str]:
    """Recent decisions of each campaign and every one the ledger says was promoted, with their reports and tracks, and
    the last reassessments of each."""
    from pipelines.release.ledger import Ledger

    recent = {m.key for m in _newest(everything, "decision", lambda m: str(m.config["campaign"]), keep)}
    promoted = {entry.change.decision_key[:16] for entry in Ledger(ledger).entries()}
    recent |= {m.key for m in everything.values() if m.key[:16] in promoted}
    above = {m.key for m in everything.values() if m.kind in ("report", "track") and recent & set(_inputs(m))}
    looked = _newest(everything, "reassessment", lambda m: str(m.inputs["then"]), keep)
    return recent | above | {m.key for m in looked if m.inputs["then"] in recent}


def _newest(
    everything: Mapping[Path, Manifest], kind: str, of: Callable[[Manifest], str], keep: int
) -> Iterator[Manifest]:
    """The newest artifacts of a kind, so many of each group."""
    groups: dict[str, list[Manifest]] = {}
    for made in everything.values():
        if made.kind == kind:
            groups.setdefault(of(made), []).append(made)
    for found in groups.values():
        yield from sorted(found, key=lambda m: m.started, reverse=True)[:keep]


def reachable(manifests: Iterable[Manifest], roots: set[str]) -> set[str]:
    """Every key that the roots are made from, the roots included."""
    known = {m.key: m for m in manifests}
    found: set[str] = set()
    waiting = [key for key in roots if key in known]
    while waiting:
        key = waiting.pop()
        if key not in found:
            found.add(key)
            waiting += [up for up in _inputs(known[key]) if up in known]
    return found


def _inputs(made: Manifest) -> list[str]:
    return [key for given in made.inputs.values() for key in ([given] if isinstance(given, str) else given)]
