"""The verb `canary`: write the rollout plan of a promoted version, and judge a step by it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines import terminal
from pipelines.campaign import CampaignConfig
from pipelines.cli import Answer
from pipelines.compose import compose
from pipelines.config import parse
from pipelines.decide.canary import Finding
from pipelines.decide.rollout import Plan
from pipelines.decide.stepanswer import Answer as StepAnswer
from pipelines.errors import ConfigError, EvidenceError, Problem, QuantgateError
from pipelines.flow.store import Store
from pipelines.release import gateway, rollout
from pipelines.release.ledger import Ledger
from pipelines.release.rollout import Promoted
from pipelines.release.rolloutdata import Data, from_file, from_run
from pipelines.track.connection import absolute_uri
from pipelines.track.masking import masked_text

CODES = {"continue": 0, "hold": 3, "roll_back": 4}


@dataclass(frozen=True, slots=True)
class Asked:
    """A campaign's configuration, and the words of the command line that lead to it."""

    config: CampaignConfig
    words: tuple[str, ...]

    @classmethod
    def by(cls, overrides: Sequence[str], config_dir: str | None) -> Asked:
        directory = Path(config_dir).resolve() if config_dir else None
        words = (*overrides, *(("--config-dir", config_dir) if config_dir else ()))
        return cls(parse(CampaignConfig, compose(overrides, directory)), words)

    @property
    def model(self) -> str:
        return self.config.tracking.registered_model or self.config.campaign

    @property
    def ledger(self) -> Ledger:
        return Ledger(Path(self.config.paths.ledger).resolve())


def canary(args: argparse.Namespace) -> Answer:
    """Plan a rollout or check one of its steps."""
    return _plan(args) if args.action == "plan" else _check(args)


def _write(asked: Asked, version: str | None = None, out: str | None = None) -> Path:
    """Write the plan of a version, the champion's where none is named, beside the ledger or under `out`.

    Its command to roll back is the overrides of this one; a password among them is left out of the file.
    """
    version, engine, decision, before = _named(asked, version)
    made, candidate = rollout.candidate_of(Store(Path(asked.config.paths.store).resolve()), decision, engine)
    promoted = Promoted(made, candidate, decision, asked.model, version, before)
    rollback = masked_text(shlex.join(["quantgate", "rollback", *asked.words]))
    plan = rollout.plan_of(promoted, asked.ledger, asked.config.rollout, rollback)
    return rollout.write(plan, Path(out).resolve() if out else asked.ledger.path.parent / rollout.HOME)


def after_promotion(overrides: Sequence[str], config_dir: str | None) -> str:
    """Plan the rollout of who was just promoted and say where the plan is; "" where it cannot be written, and why not.

    The promotion stands all the same.
    """
    say = terminal.console()
    try:
        path = _write(Asked.by(overrides, config_dir))
    except (QuantgateError, OSError) as error:
        told = str(error).splitlines()
        say.print(f"warning: no rollout plan was written: {told[0] if told else type(error).__name__}", markup=False)
        return ""
    say.print(f"rollout:  {path}  (`quantgate canary check` judges its steps)", markup=False)
    return str(path)


def _plan(args: argparse.Namespace) -> Answer:
    """Write the plan of the champion, or of a named version, anew."""
    path = _write(Asked.by(args.words, args.config_dir), args.model_version, args.out)
    plan = rollout.read(path)
    show_plan(plan, path)
    return Answer(0, {"plan": str(path), **plan.model_dump(mode="json")})


def _named(asked: Asked, version: str | None) -> tuple[str, str, str, str]:
    """Version, engine, decision and the champion it is rolled out against."""
    if version is None:
        return rollout.champion(asked.ledger, asked.model)
    from pipelines.track import versions
    from pipelines.track.connection import session

    with session(absolute_uri(asked.config.tracking.uri)) as client:
        found = next((v for v in versions.versions(client, asked.model) if str(v.version) == version), None)
        now = versions.alias(client, asked.model, versions.CHAMPION)
    if found is None:
        raise EvidenceError(f"{asked.model}: there is no version {version} in {asked.config.tracking.uri}")
    if now is not None and str(now.version) == version:
        return rollout.champion(asked.ledger, asked.model)
    tags = found.tags
    return version, tags.get("engine_key", ""), tags.get("decision_key", ""), str(now.version) if now else ""


def show_plan(plan: Plan, path: Path) -> None:
    """Print the steps, and where the plan is."""
    terminal.table(
        f"Rollout of {plan.model} version {plan.canary.version} ({plan.canary.label}) against {plan.control.label}",
        ("step", "users", "canary requests", "of both arms", "because of", "at least", "because of"),
        (
            (s.step, f"{s.percent:g}%", s.canary_requests, s.requests, s.binds, f"{s.bake_minutes:g} min", s.bake_binds)
            for s in plan.steps
        ),
    )
    say = terminal.console()
    for note in plan.notes:
        say.print(f"note: {note}", markup=False)
    say.print(f"plan:    {path}\ngateway: {path.with_name(gateway.NAME)}", markup=False)
    say.print(f"check:   quantgate canary check {shlex.quote(str(path))} --step 1 --data FILE.jsonl", markup=False)


def _check(args: argparse.Namespace) -> Answer:
    path, data = Path(args.words[0]) if args.words else None, (args.data, args.mlflow_run)
    problems = [Problem("PLAN", None, "missing: the plan.yaml of the rollout")] if path is None else []
    if args.step is None:
        problems.append(Problem("--step", None, "missing: which step of the plan"))
    if sum(d is not None for d in data) != 1:
        problems.append(Problem("--data", args.data, "one of --data FILE.jsonl and --mlflow-run RUN"))
    if problems or path is None:
        raise ConfigError(problems)
    plan, answer, recorded = rollout.check(path, args.step, _read(args))
    ended = _ending(plan, answer)
    _show(plan, answer, repeat=recorded.repeat)
    terminal.console().print(ended, markup=False)
    document = {**answer.model_dump(mode="json"), "next": ended, "repeat": recorded.repeat, "record": recorded.seq}
    return Answer(CODES[answer.answer], document)


def _read(args: argparse.Namespace) -> Data:
    if args.data is not None:
        return from_file(Path(args.data))
    config = parse(
        CampaignConfig, compose(args.words[1:], Path(args.config_dir).resolve() if args.config_dir else None)
    )
    return from_run(absolute_uri(config.tracking.uri), args.mlflow_run, args.step)


def _show(plan: Plan, answer: StepAnswer, *, repeat: bool) -> None:
    terminal.table(
        f"Step {answer.step}, {answer.percent:g}% of users (judgements in brackets are shown and decide nothing)",
        ("judgement", "state", "control", "canary", "requests", "why"),
        (
            (f.what if f.gates else f"({f.what})", f.state, _figure(f.control, f), _figure(f.canary, f),
             f"{f.canary_requests}" + (f" / {f.control_requests}" if f.control_requests else ""), f.note)
            for f in answer.findings
        ),
    )  # fmt: skip
    say = terminal.console()
    looked = f"look {answer.look} at this step" + (f", {answer.ripe_look} of them ripe" if answer.ripe_look else "")
    say.print(
        f"{looked}{' (these data were judged before: no new look)' if repeat else ''}; goes on at level "
        f"{answer.continue_alpha:.4g}, rolls back at {answer.roll_back_alpha:.4g} (alpha {plan.alpha:g})",
        markup=False,
    )
    say.print(f"{answer.answer.replace('_', ' ').upper()}", markup=False)
    for reason in answer.reasons:
        say.print(f"  {reason}", markup=False)


def _figure(value: float | None, finding: Finding) -> str:
    return "" if value is None else f"{value:.1f} ms" if finding.control_needed == 0 else f"{value:.4f}"


def _ending(plan: Plan, answer: StepAnswer) -> str:
    """What to do now, as a command where there is one."""
    step = plan.step(answer.step + 1)
    match answer.answer:
        case "continue" if step is None:
            return "the rollout is complete; the engine of before can go"
        case "continue" if step is not None:
            return f"go on to step {step.step}: {step.percent:g}% of users, CANARY_BUCKETS={step.buckets}"
        case "hold":
            return f"stay at {answer.percent:g}%"
        case _:
            if not plan.rollback:
                return "send all users back to the control; nobody was champion before, so no version can be restored"
            why = f"canary step {answer.step}: {answer.reasons[0]}"
            return f"send all users back to the control, and run:\n{plan.rollback} --reason {shlex.quote(why)}"
