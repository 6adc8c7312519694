"""Verbs that conduct a campaign or show it: plan, run, score, probe, decide."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines import assembly, radar, terminal
from pipelines.campaign import Campaign, open_campaign
from pipelines.cli import OUTCOME_CODES, UI_PORT, Answer
from pipelines.compose import compose, sweep
from pipelines.conduct import Conducted, Timings, Until, conduct, goals
from pipelines.decide.model import Decision
from pipelines.decide.planning import Resolution, Size, resolutions
from pipelines.evaluate.evalset import Evalset
from pipelines.flow import plan as flow_plan
from pipelines.flow.device import describe, free_bytes
from pipelines.flow.inspection import Found, look
from pipelines.flow.plan import Plan
from pipelines.flow.store import Store, manifest
from pipelines.flow.toolchain import CURRENT
from pipelines.intake.calibration import leaking
from pipelines.intake.heldout import listed
from pipelines.track.connection import is_server
from pipelines.track.masking import masked_text
from pipelines.verbs import licence, memory

SERVED = "  (`quantgate ui` serves it)"


@dataclass(frozen=True, slots=True)
class Opened:
    """A campaign and the store it works in; `asked` are the words of the command line that chose it."""

    campaign: Campaign
    store: Store
    asked: tuple[str, ...] = ()


def _open(args: argparse.Namespace, overrides: Sequence[str] | None = None) -> Opened:
    directory = Path(args.config_dir).resolve() if args.config_dir else None
    chosen = tuple(args.overrides if overrides is None else overrides)
    campaign = open_campaign(compose(chosen, directory), directory)
    asked = (*chosen, *(("--config-dir", str(args.config_dir)) if args.config_dir else ()))
    return Opened(campaign, Store(Path(campaign.config.paths.store).resolve()), asked)


def plan(args: argparse.Namespace) -> Answer:
    """Show what `run` would do."""
    opened = _open(args)
    campaign, store = opened.campaign, opened.store
    assembled = assembly.assemble(campaign, {}, Timings(store).seconds)
    planned = flow_plan.plan(goals(assembled, "run"), store)
    resolved = [r for e in campaign.evalsets for r in _resolutions(campaign, e)]
    taken = memory.footprints(campaign, assembled)
    _show_plan(planned, resolved, store.root, every=args.all)
    memory.show(taken, every=args.all)
    _show_leaks(campaign)
    refused = licence.warn(campaign)
    doubts = list(radar.warnings(campaign.radar))
    for doubt in doubts:
        print(f"warning: {doubt}")
    needed = [look(t) for t in planned.toolchains]
    _show_toolchains(needed)
    unjudged = {c.label: c.unjudged for c in assembled.candidates if c.unjudged}
    for label, why in unjudged.items():
        print(f"{label} will be built, not judged: {why}")
    document = {
        "steps": _steps(planned),
        "toolchains": [asdict(f) for f in needed],
        "unjudged": unjudged,
        "seconds": planned.seconds,
        "bytes": planned.size_bytes,
        "serving_memory": memory.document(taken),
        "excluded_calibration_rows": list(campaign.calibration.excluded),
        "radar": doubts,
        "licence": campaign.base.licence.told | {"refused": refused},
        "eval_sets": [r.model_dump(mode="json") for r in resolved],
    }
    return Answer(0, document)


def _resolutions(campaign: Campaign, evalset: Evalset) -> tuple[Resolution, ...]:
    sizes = {name: Size(items, clusters) for name, (items, clusters) in evalset.sizes.items()}
    return resolutions(evalset.name, sizes, campaign.cards[evalset.name], campaign.config.gate)


def _steps(planned: Plan) -> list[dict[str, Any]]:
    return [
        {
            "label": p.step.label,
            "kind": p.step.stage.kind,
            "key": p.step.key[:16],
            "state": p.state,
            "why": p.why,
            "toolchain": p.step.runs_in.name,
            "seconds": p.step.seconds,
            "bytes": p.step.size_bytes,
            "memory_bytes": p.step.memory_bytes,
        }
        for p in planned.steps
    ]


def _show_steps(planned: Plan, *, every: bool) -> None:
    """A line for each step, or for each kind of step where nobody would read that many lines."""
    if every or len(planned.steps) <= terminal.MOST_LINES:
        columns: tuple[str, ...] = ("step", "artifact", "state", "why", "time", "memory", "disk")
        rows: list[tuple[object, ...]] = [
            (p.step.label, f"{p.step.stage.kind}/{p.step.key[:16]}", p.state, p.why, *_cost([p])) for p in planned.steps
        ]
        if any(p.step.runs_in != CURRENT for p in planned.steps):  # a column that says nothing new is none
            columns = (*columns, "toolchain")
            rows = [(*row, p.step.runs_in.name) for row, p in zip(rows, planned.steps, strict=True)]
    else:
        kinds: dict[str, list[flow_plan.Planned]] = {}
        for p in planned.steps:
            kinds.setdefault(p.step.stage.kind, []).append(p)
        columns = ("steps (--all lists each)", "count", "to run", "time", "memory", "disk")
        rows = [(kind, len(ps), sum(p.state == "run" for p in ps), *_cost(ps)) for kind, ps in kinds.items()]
    terminal.table("Steps", columns, rows)


def _show_leaks(campaign: Campaign) -> None:
    """The calibration rows that are left out, with the eval item that each shares text with."""
    if campaign.calibration.excluded:
        found = listed(leaking(campaign.calibration))
        print(
            f"warning: {len(campaign.calibration.excluded)} calibration rows are left out (calibration.leaks):\n{found}"
        )


def _show_toolchains(needed: Sequence[Found]) -> None:
    """The toolchains that are not simply there: a run makes what is missing, and is stopped by what is unusable."""
    for found in needed:
        if found.state == "missing":
            print(f"toolchain {found.name}: {found.what}; `run` makes it first, or {found.to_do}")
        elif found.state != "ready":
            print(f"warning: toolchain {found.name}: {found.what}; {found.to_do}")


def _cost(planned: Sequence[flow_plan.Planned]) -> tuple[str, str, str]:
    """Time, memory (where it is estimated) and disk of what has to run, as if nothing ran at once."""
    steps = [p.step for p in planned if p.state == "run"]
    seconds, count = sum(s.seconds for s in steps), sum(s.size_bytes for s in steps)
    memory = max((s.memory_bytes for s in steps), default=0)
    shown = terminal.size(memory) if memory else ""
    return terminal.duration(seconds) if seconds else "", shown, terminal.size(count) if count else ""


def _show_resolutions(resolved: Sequence[Resolution]) -> None:
    terminal.table(
        "What each eval set and slice can show (slices in brackets are shown and decide nothing)",
        ("eval set", "items", "margin", "smallest loss it can rule out", "items its margin takes"),
        (
            (r.name if r.decides else f"({r.name})", r.items, f"{r.margin:.1%}" if r.relative else f"{r.margin:.3g}",
             f"{r.smallest_loss:.3f}", r.items_needed)
            for r in resolved
        ),
    )  # fmt: skip
    say = terminal.console()
    for r in resolved:
        if r.decides and not r.enough:
            margin = f"{r.margin:.1%} of the reference" if r.relative else f"{r.margin:.3g}"
            say.print(
                f"warning: {r.name} cannot settle its own margin of {margin} with {r.items} items "
                f"(about {r.items_needed} would); expect inconclusive there",
                markup=False,
            )


def _show_plan(planned: Plan, resolved: Sequence[Resolution], store: Path, *, every: bool) -> None:
    free = free_bytes(store)
    _show_steps(planned, every=every)
    _show_resolutions(resolved)
    say = terminal.console()
    reused = len(planned.steps) - len(planned.to_run)
    if planned.size_bytes > free:
        say.print(f"warning: {store} has too little space free", markup=False)
    memory = float(describe()["memory_gib"]) * 2**30
    for p in planned.to_run:
        if p.step.memory_bytes > memory:
            say.print(
                f"warning: {p.step.label} may take {terminal.size(p.step.memory_bytes)} of memory; this machine has "
                f"{terminal.size(int(memory))}; a smaller batch_size or fewer calibration samples take less",
                markup=False,
            )
    say.print(
        f"{len(planned.to_run)} steps to run, {reused} reused; about {terminal.duration(planned.seconds)} and "
        f"{terminal.size(planned.size_bytes)} of the {terminal.size(free)} free in {store}",
        markup=False,
    )


def run(args: argparse.Namespace) -> Answer:
    """Run a campaign, or one for every combination of a sweep; the worst exit code of a sweep is its own."""
    if not args.multirun:
        return _conduct(_open(args), "run")
    jobs = sweep(args.overrides)
    answers = [_conduct(_open(args, job), "run") for job in jobs]
    documents = [{"overrides": job, **a.document, "exit_code": a.code} for job, a in zip(jobs, answers, strict=True)]
    return Answer(max(a.code for a in answers), {"jobs": documents})


def score(args: argparse.Namespace) -> Answer:
    """Run a campaign as far as its scores."""
    return _conduct(_open(args), "score")


def probe(args: argparse.Namespace) -> Answer:
    """Run a campaign as far as scores and latency."""
    return _conduct(_open(args), "probe")


def decide(args: argparse.Namespace) -> Answer:
    """Run a campaign as far as its decision and report."""
    return _conduct(_open(args), "decide")


def _conduct(opened: Opened, until: Until) -> Answer:
    store = opened.store
    if until in ("decide", "run"):
        licence.warn(opened.campaign)
    done = conduct(opened.campaign, store, until, lambda p: terminal.Watcher(len(p.to_run), p.seconds))
    _show_failures(done)
    states = [o.state for o in done.outcomes.values()]
    document: dict[str, Any] = {
        "campaign": opened.campaign.config.campaign,
        "steps": {state: states.count(state) for state in ("made", "reused", "failed", "skipped")},
        "failures": [
            {"step": o.step.label, "message": o.message, "command": o.command, "log": o.log} for o in done.failed
        ],
    }
    if until in ("score", "probe"):
        _show_scores(done, store)
        return Answer(1 if done.failed else 0, document)
    if done.decision is None:
        return Answer(1, document)
    document |= _show_decision(done, done.decision, store)
    if until == "run" and done.state(done.assembled.track) not in ("made", "reused"):
        document["unrecorded"] = _show_unrecorded(opened.asked)
    nothing_to_compare_with = any(c.reference and c.status == "failed" for c in done.decision.candidates)
    return Answer(1 if nothing_to_compare_with else OUTCOME_CODES[done.decision.outcome], document)


def _show_unrecorded(asked: Sequence[str]) -> str:
    """Say that MLflow does not have this campaign, and the command that records it; give the command."""
    command = masked_text(shlex.join(["quantgate", "track", "--resume", *asked]))
    print(f"MLflow:   not recorded; all of it is kept here. Once MLflow answers: {command}")
    return command


def _show_failures(done: Conducted) -> None:
    if done.unopened:
        print(f"warning: the run in MLflow was not open during the work: {done.unopened}", file=sys.stderr)
    for outcome in done.failed:
        again = "worth another try: " if outcome.transient else ""
        print(
            f"failed: {outcome.step.label}\n  {outcome.message}\n  log: {outcome.log}\n  {again}{outcome.command}",
            file=sys.stderr,
        )


def _show_scores(done: Conducted, store: Store) -> None:
    rows = []
    for candidate in done.assembled.candidates:
        for name, step in candidate.scores.items():
            if done.state(step) in ("made", "reused"):
                facts = manifest(store.path("scores", step.key)).facts
                rows.append((candidate.label, name, facts["metric"], f"{facts['score']:.4f}", facts["items"]))
    terminal.table("Scores", ("candidate", "eval set", "metric", "score", "items"), rows)


def _show_decision(done: Conducted, decision: Decision, store: Store) -> dict[str, Any]:
    terminal.table(
        f"{decision.campaign}: {decision.outcome}",
        ("candidate", "scheme", "outcome", "mean score", "why"),
        (
            (
                c.label,
                c.scheme,
                "reference" if c.reference else c.outcome or "",
                "" if c.mean_score is None else f"{c.mean_score:.4f}",
                "; ".join(c.reasons[:2]) + (f"; and {len(c.reasons) - 2} more" if len(c.reasons) > 2 else ""),
            )
            for c in decision.candidates
        ),
    )
    report = store.path("report", done.assembled.report.key) / "report.html"
    at = store.path("decision", done.assembled.decision.key)
    say = terminal.console()
    say.print(f"{decision.headline}\n{decision.detail}", markup=False)
    say.print(f"decision: {at / 'decision.md'}\nreport:   {report}", markup=False)
    document = {
        "outcome": decision.outcome,
        "winner": decision.winner,
        "headline": decision.headline,
        "decision": str(at / "decision.json"),
        "report": str(report),
    }
    if done.state(done.assembled.track) in ("made", "reused"):
        facts = manifest(store.path("track", done.assembled.track.key)).facts
        own = str(facts.get("tracking_uri", ""))
        address, told = (own.rstrip("/"), "") if is_server(own) else (f"http://127.0.0.1:{UI_PORT}", SERVED)
        document["link"] = f"{address}/{facts.get('link')}"
        say.print(f"MLflow:   {document['link']}{told}", markup=False)
    return document
