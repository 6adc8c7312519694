"""The verb reassess: does the champion still hold, on new items, in new toolchains, on a new base?

It changes no alias: it says what changed, what the gate of now says, and what to do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipelines import terminal
from pipelines.campaign import Campaign, CampaignConfig, open_campaign
from pipelines.cli import OUTCOME_CODES, Answer
from pipelines.compose import amend, compose, of_now
from pipelines.conduct import Timings, environment
from pipelines.config import parse, read
from pipelines.decide.gate import OVERALL
from pipelines.decide.reassessed import HEAD, row
from pipelines.decide.reassessing import FILE, PAGE
from pipelines.decide.reassessment import STANDINGS, Moved, Reassessment, Standing, reasons
from pipelines.errors import ConfigError, EnvironmentProblem, StageFailed, TransientFailure
from pipelines.flow.executor import Outcome, execute
from pipelines.flow.inspection import hindrances
from pipelines.flow.plan import Plan, plan
from pipelines.flow.store import Store
from pipelines.flow.toolchain import carried, toolchains
from pipelines.promoted import Then, find, narrowed
from pipelines.reassembly import PARTS, Asked, Reassembled, reassemble
from pipelines.release.champion import find as find_champion
from pipelines.track.connection import absolute_uri, addressed

CODES: Mapping[Standing, int] = {standing: OUTCOME_CODES[outcome] for outcome, standing in STANDINGS.items()}
OWN = ("variant", "engine", "reference")
NAMING = ("campaign", "experiment", "tracking", "paths")
ROUNDS = ("measure", "probe", "decide", "judge")


def reassess(args: argparse.Namespace) -> Answer:
    """Judge the champion again on what there is now."""
    directory = Path(args.config_dir).resolve() if args.config_dir else None
    config, store, then = _opened(args.overrides, directory)
    campaign = open_campaign(config, directory)
    again = datetime.now(UTC).isoformat(timespec="seconds") if args.again else ""
    asked = Asked(again, not args.as_is, " ".join(o for o in args.overrides if _names(o)))
    made = reassemble(campaign, then, store, asked, {}, Timings(store).seconds)
    _show_changes(made.changes, then)
    if not made.changes:
        return _unchanged(then)
    planned = plan(made.goals("judge"), store)
    if args.dry_run:
        return _told(made, planned, then)
    reassembled = _conduct(campaign, then, store, asked, made)
    where = store.path("reassessment", reassembled.reassessment.key)
    return _shown(read(Reassessment, where / FILE, "no readable reassessment"), where)


def _opened(overrides: Sequence[str], directory: Path | None) -> tuple[dict[str, Any], Store, Then]:
    """The champion's campaign as it was recorded, with the overrides on top; its store; what promoted it."""
    for override in overrides:
        name = override.lstrip("+~").partition("=")[0]
        if name in OWN:
            raise ConfigError(
                f"{override}: a reassessment keeps the champion's own {name}; `quantgate run` tries others"
            )
    fresh = compose(of_now(overrides, PARTS, directory), directory)
    now = parse(CampaignConfig, fresh)
    store, ledger = Store(Path(now.paths.store).resolve()), Path(now.paths.ledger).resolve()
    champion = find_champion(now.tracking.uri, ledger, now.tracking.registered_model or now.campaign, store)
    then = find(champion, now.campaign, store)
    if then.recorded:
        return narrowed(amend(then.recorded, fresh, overrides, PARTS, directory), then), store, then
    print("the champion's configuration was not recorded; taken from conf/ and the overrides given", file=sys.stderr)
    return narrowed(compose(overrides, directory), then), store, then


def _names(override: str) -> bool:
    return override.lstrip("+").partition("=")[0].partition(".")[0] in NAMING


def _unchanged(then: Then) -> Answer:
    """Nothing to do: how the champion stood then is how it stands."""
    standing = STANDINGS[then.candidate.outcome or "hold"]
    why = reasons(then.candidate, then.candidate, ())
    headline = f"{standing.upper()}: nothing changed since {then.record.started}"
    print(headline)
    for reason in why:
        print(f"  {reason}")
    print("`--again` scores and probes it once more")
    document = {
        "outcome": standing,
        "headline": headline,
        "reasons": why,
        "changes": [],
        "decision": str(then.artifact),
    }
    return Answer(CODES[standing], document)


def _told(made: Reassembled, planned: Plan, then: Then) -> Answer:
    rows = [(p.step.label, f"{p.step.stage.kind}/{p.step.key[:16]}", p.state, p.why) for p in planned.steps]
    terminal.table("Steps", ("step", "artifact", "state", "why"), rows)
    print(f"{len(planned.to_run)} steps to run, {len(rows) - len(planned.to_run)} reused; about "
          f"{terminal.duration(planned.seconds)}")  # fmt: skip
    steps = [{"label": label, "artifact": artifact, "state": state} for label, artifact, state, _ in rows]
    changes = [c.model_dump() for c in made.changes]
    return Answer(0, {"changes": changes, "steps": steps, "decision": str(then.artifact)})


def _conduct(campaign: Campaign, then: Then, store: Store, asked: Asked, made: Reassembled) -> Reassembled:
    """Run what must run, round by round: what could not be rebuilt is decided on as failed.

    Raises:
        StageFailed: the champion as it is, or the reference, could not be scored.
    """
    store.prepare()
    store.sweep()
    timings, env = Timings(store), environment(campaign) | _all_toolchains(campaign)
    outcomes: dict[str, Outcome] = {}
    everything = plan(made.goals("judge"), store)
    if hindered := hindrances(everything.toolchains):
        raise EnvironmentProblem("\n".join(hindered))
    watcher = terminal.Watcher(len(everything.to_run), everything.seconds)
    with watcher as watch, addressed(absolute_uri(campaign.config.tracking.uri)):
        for until in ROUNDS:
            failures = {key: o.message for key, o in outcomes.items() if o.state in ("failed", "skipped")}
            if failures:
                made = reassemble(campaign, then, store, asked, failures, timings.seconds)
            now = plan(made.goals(until), store)
            fresh = Plan(tuple(p for p in now.steps if p.step.key not in outcomes))
            done = execute(fresh, store, watch, env, outcomes)
            timings.learn((o for key, o in done.items() if key not in outcomes), store)
            outcomes = done
    _check(made, outcomes)
    return made


def _all_toolchains(campaign: Campaign) -> dict[str, str]:
    """Every toolchain of the configuration: the champion's engine may have been made in one that is no longer used."""
    config = campaign.config
    return carried(toolchains(config.toolchain, config.paths.toolchains_home, []).values())


def _check(made: Reassembled, outcomes: Mapping[str, Outcome]) -> None:
    failed = [o for o in outcomes.values() if o.state == "failed"]
    for one in failed:
        print(f"failed: {one.step.label}\n  {one.message}\n  log: {one.log}\n  {one.command}", file=sys.stderr)
    if outcomes[made.reassessment.key].state not in ("made", "reused"):
        kind = TransientFailure if any(o.transient for o in failed) else StageFailed
        first = failed[0] if failed else outcomes[made.reassessment.key]
        raise kind(f"the champion could not be reassessed: {first.step.label}: {first.message}")


def _show_changes(changes: Sequence[Moved], then: Then) -> None:
    record = then.record
    print(f"champion: version {then.champion.version}, {then.candidate.label}, by decision {then.artifact.name} of "
          f"{record.started}")  # fmt: skip
    if changes:
        terminal.table(
            "What changed since", ("what", "where", "then", "now"),
            ((c.what, c.where, c.before or "–", c.now or "–") for c in changes),
        )  # fmt: skip


def _shown(made: Reassessment, where: Path) -> Answer:
    deciding = [c for c in made.comparisons if c.slice == OVERALL or (c.now is not None and c.now.gates)]
    terminal.table("Then and now (slices that decide nothing are in the document)", HEAD, map(row, deciding))
    say = terminal.console()
    say.print(made.headline, markup=False)
    for reason in made.reasons:
        say.print(f"  {reason}", markup=False)
    if made.rebuilt is not None:
        of = made.rebuilt
        told = "; ".join(of.reasons[:2])
        say.print(f"rebuilt ({of.of}): {of.outcome or 'no outcome'}, {told} (decision {of.decision_key})", markup=False)
    for line in made.to_do:
        say.print(f"to do: {line}", markup=False)
    say.print(f"reassessment: {where / PAGE}", markup=False)
    return Answer(CODES[made.outcome], made.model_dump(mode="json") | {"reassessment": str(where / FILE)})
