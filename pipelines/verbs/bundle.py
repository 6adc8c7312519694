"""The verb `bundle`: write what one deploys of a campaign's promoted engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipelines import terminal
from pipelines.campaign import CampaignConfig
from pipelines.cli import Answer
from pipelines.compose import compose
from pipelines.config import parse
from pipelines.errors import ConfigError, EvidenceError, Problem
from pipelines.flow.store import Store
from pipelines.flow.toolchain import toolchains
from pipelines.release import bundle as bundles
from pipelines.release.ledger import Ledger
from pipelines.verbs.release import latest_decision

PLACE = "bundles"


def bundle(args: argparse.Namespace) -> Answer:
    """Bundle the champion, or with --unpromoted a candidate of the newest decision."""
    config = parse(
        CampaignConfig, compose(args.overrides, Path(args.config_dir).resolve() if args.config_dir else None)
    )
    store = Store(Path(config.paths.store).resolve())
    if args.unpromoted:
        subject = bundles.named(latest_decision(store, config.campaign), store, args.candidate)
    else:
        model = config.tracking.registered_model or config.campaign
        subject = bundles.promoted(Ledger(Path(config.paths.ledger).resolve()), model, store)
        if args.candidate not in (None, subject.candidate.label):
            raise EvidenceError(
                f"{args.candidate}: not promoted, the champion is {subject.candidate.label}; "
                "--unpromoted bundles it all the same, and says so inside"
            )
    problems: list[Problem] = []
    known = toolchains(config.toolchain, config.paths.toolchains_home, problems)
    if problems:
        raise ConfigError(problems)
    name = f"{config.campaign}-{subject.candidate.label}-{subject.engine.name}"
    out = Path(args.out) if args.out else Path(PLACE) / name
    card = bundles.bundle(subject, store, known, out.resolve())
    say = terminal.console()
    if not card.promoted:
        say.print(f"warning: {card.candidate} is not promoted; the bundle says so", markup=False)
    say.print(f"bundle: {out}\nserve:  {out}/serve.sh" if out.suffix != ".tar" else f"bundle: {out}", markup=False)
    return Answer(0, {"bundle": str(out), **card.model_dump(mode="json")})
