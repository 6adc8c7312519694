"""Take a campaign through its steps: make candidates, probe the engines that came out, decide, report, track."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipelines.assembly import assemble
from pipelines.campaign import Campaign
from pipelines.decide.model import Decision
from pipelines.errors import EnvironmentProblem
from pipelines.flow.device import describe, free_bytes
from pipelines.flow.executor import Outcome, Watch, execute
from pipelines.flow.inspection import hindrances
from pipelines.flow.plan import Plan, plan
from pipelines.flow.stage import Step
from pipelines.flow.store import Store, manifest
from pipelines.flow.toolchain import carried
from pipelines.stages import Assembled
from pipelines.track.config import TrackingConfig
from pipelines.track.connection import absolute_uri, addressed
from pipelines.track.keeper import Keeper, kept_open
from pipelines.track.opening import Opening, look

if TYPE_CHECKING:
    from pipelines.track.parent import End

Until = Literal["score", "probe", "decide", "run"]
Watching = Callable[[Plan], AbstractContextManager[Watch]]


@dataclass(slots=True)
class Conducted:
    """What a run did and found. `unopened` is why its run in MLflow was not open during the work, "" if it was."""

    assembled: Assembled
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    decision: Decision | None = None
    unopened: str = ""

    def state(self, step: Step | None) -> str:
        outcome = None if step is None else self.outcomes.get(step.key)
        return "not run" if outcome is None else outcome.state

    @property
    def failed(self) -> list[Outcome]:
        return [o for o in self.outcomes.values() if o.state == "failed"]


MOST_AT_ONCE = 2
"""Unless a campaign asks for more: what was measured, see docs/decisions/0013."""


class Timings:
    """How long each stage took here last, by stage name: the estimates of the next plan.

    Of stages whose operations are counted, what is kept is how many times the count's guess they took. What ran beside
    others teaches nothing: its seconds are not its own.
    """

    def __init__(self, store: Store) -> None:
        self._path = store.root / ".timings.json"
        try:
            self.seconds: dict[str, float] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            self.seconds = {}

    def learn(self, outcomes: Iterable[Outcome], store: Store) -> None:
        made = [o.step for o in outcomes if o.state == "made"]
        if not made:
            return
        for step in made:
            record = manifest(store.path(step.stage.kind, step.key))
            if record.beside:
                continue
            self.seconds[step.stage.name] = record.seconds
            if step.guess:
                self.seconds[step.stage.pace] = record.seconds / step.guess
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self.seconds))
        fresh.replace(self._path)


def goals(assembled: Assembled, until: Until) -> list[Step]:
    """The steps whose artifacts a verb asks for."""
    made = list(assembled.measured)
    if until != "score":
        made += [assembled.latency] if assembled.latency is not None else []
    if until in ("decide", "run"):
        made += [assembled.decision, assembled.report]
    return [*made, assembled.track] if until == "run" else made


def conduct(campaign: Campaign, store: Store, until: Until, watching: Watching) -> Conducted:
    """Run a campaign as far as asked. A failed candidate is decided on as failed; the others go on."""
    store.prepare()
    store.sweep()
    timings = Timings(store)
    env = environment(campaign)
    done = Conducted(assemble(campaign, {}, timings.seconds))
    uri = absolute_uri(campaign.config.tracking.uri)
    forget_lost_track(done.assembled.track, store, uri)
    everything = plan(goals(done.assembled, until), store)
    _check_space(everything, store)
    _check_toolchains(everything)
    opening = look(everything, Path.cwd()) if until == "run" and everything.to_run else None
    if opening is not None:
        done.assembled = _told(done.assembled, opening)
        everything = plan(goals(done.assembled, until), store)
    with watching(everything) as watch, addressed(uri), _kept(done.assembled.track, everything, store) as kept:
        for n, wanted in enumerate(_rounds(until, everything)):
            if n and kept is not None:
                kept.wait()  # nothing is probed while MLflow is still at work
            failures = _failures(done.outcomes)
            if failures:
                done.assembled = _told(assemble(campaign, failures, timings.seconds), opening)
                forget_lost_track(done.assembled.track, store, uri)
            now = everything if wanted == until and not failures else plan(goals(done.assembled, wanted), store)
            fresh = Plan(tuple(p for p in now.steps if p.step.key not in done.outcomes))
            outcomes = execute(fresh, store, watch, env, done.outcomes, at_once=at_once(campaign))
            timings.learn((o for key, o in outcomes.items() if key not in done.outcomes), store)
            done.outcomes.update(outcomes)
        if kept is not None:
            kept.leave(*_end(done), wait=True)
            done.unopened = kept.problem
    if until in ("decide", "run") and done.state(done.assembled.decision) in ("made", "reused"):
        path = store.path("decision", done.assembled.decision.key) / "decision.json"
        done.decision = Decision.model_validate_json(path.read_bytes())
    return done


def _told(assembled: Assembled, opening: Opening | None) -> Assembled:
    """The steps with what was known as the campaign began, for the run that records it; no key changes by it."""
    config = assembled.track.config.model_copy(update={"opening": opening})
    return replace(assembled, track=replace(assembled.track, config=config))


def _kept(track: Step, everything: Plan, store: Store) -> AbstractContextManager[Keeper | None]:
    """Hold the campaign's run in MLflow open beside the work, where it is recorded and there is any."""
    recorded = any(p.step.key == track.key for p in everything.steps)
    works = any(p.step.key != track.key for p in everything.to_run)
    if not (recorded and works and isinstance(track.config, TrackingConfig)):
        return nullcontext()
    return kept_open(track.config, store)


def _end(done: Conducted) -> tuple[End | None, str]:
    """How the run that was opened ends: as its recording left it, or as one that came to nothing new, or to nothing."""
    outcome = done.outcomes.get(done.assembled.track.key)
    if outcome is not None and outcome.state in ("made", "reused"):
        return (None if outcome.state == "made" else "SPARE"), ""
    lost = [o for o in done.failed if o.step.key in (done.assembled.decision.key, done.assembled.track.key)]
    first = next(iter(lost or done.failed), None)
    return "FAILED", f"{first.step.label}: {first.message}" if first else "it was not decided"


def _rounds(until: Until, everything: Plan) -> tuple[Until, ...]:
    """Failures of one round change the steps of the next, so what depends on all candidates comes later."""
    if not everything.to_run:
        return (until,)
    order: tuple[Until, ...] = ("score", "probe", "decide", "run")
    return order[: order.index(until) + 1]


def _failures(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    return {key: o.message for key, o in outcomes.items() if o.state in ("failed", "skipped")}


def environment(campaign: Campaign) -> dict[str, str]:
    """What every stage's process is told about this machine."""
    threads = str(campaign.threads)
    env = {"OMP_NUM_THREADS": threads, "QUANTGATE_THREADS": threads}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    env |= carried({e.toolchain.name: e.toolchain for e in campaign.engines}.values())
    return env | (offline if campaign.config.executor.offline else {})


def at_once(campaign: Campaign) -> int:
    """How many processes may run beside each other; one where there is a GPU, whose memory nobody would share out."""
    given = campaign.config.executor.parallel
    if given is not None:
        return given
    return 1 if describe()["gpu"] != "none" else min(MOST_AT_ONCE, campaign.threads)


def forget_lost_track(step: Step, store: Store, tracking_uri: str) -> None:
    """A track record whose MLflow run is gone (the database was removed, say) is no record; make it again."""
    from pipelines.track.standing import recorded

    artifact = store.path("track", step.key)
    if store.has("track", step.key) and not recorded(tracking_uri, str(manifest(artifact).facts.get("run_id", ""))):
        store.remove("track", step.key)


def _check_toolchains(everything: Plan) -> None:
    hindered = hindrances(everything.toolchains)
    if hindered:
        raise EnvironmentProblem("\n".join(hindered))


def _check_space(everything: Plan, store: Store) -> None:
    needed, free = everything.size_bytes, free_bytes(store.root)
    if needed > free:
        raise EnvironmentProblem(
            f"paths.store={str(store.root)!r}: this campaign needs about {needed / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free; choose another store, free some space or run `quantgate gc`"
        )
