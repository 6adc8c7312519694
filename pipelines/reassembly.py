"""From a champion's own decision to the steps that judge it again: its engine as it is, and its recipe made anew.

Everything is content-addressed, so what did not change is reused, and what changed is seen in the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipelines.assembly import assemble
from pipelines.campaign import Campaign
from pipelines.config import Strict
from pipelines.decide.model import Candidate
from pipelines.decide.reassessing import ReassessConfig, RebuiltInput
from pipelines.decide.reassessment import Moved, Of
from pipelines.decide.stage import CandidateInput, ChampionInput, DecisionConfig
from pipelines.errors import ConfigError
from pipelines.flow.stage import Stage, Step, several
from pipelines.flow.store import Manifest, Store, manifest
from pipelines.moved import differences, moved, own
from pipelines.promoted import Then
from pipelines.stages import REASSESSMENT, Assembled, CandidateSteps
from pipelines.track.config import TrackingConfig
from pipelines.track.masking import masked

PARTS = ("tracking", "paths", "executor", "toolchain")
"""What of a configuration says where things are, not what they are: always that of now."""

REBUILT_FOR = ("toolchain", "checkpoint", "calibration", "recipe")
"""What makes the recipe worth making again; a change of our own code alone does not."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person asks for: measured `again` under this mark, rebuilt or as it is, and how the campaign is named."""

    again: str = ""
    rebuild: bool = True
    named: str = ""


@dataclass(frozen=True, slots=True)
class Reassembled:
    """The steps of a reassessment. `made` are those of the recipe made anew, `judged` its decision, report and record;
    both are empty where nothing about it changed."""

    changes: tuple[Moved, ...]
    measured: tuple[Step, ...]
    latency: Step | None
    reassessment: Step
    made: tuple[Step, ...] = ()
    judged: tuple[Step, ...] = ()

    def goals(self, until: str) -> list[Step]:
        """The steps of one round, each with those before it."""
        found = [*self.made, *self.measured]
        if until != "measure":
            found += [self.latency] if self.latency is not None else []
        found += self.judged[:1] if until in ("decide", "judge") else ()
        if until == "judge":
            found += [self.reassessment, *self.judged]
        return found


@dataclass(frozen=True, slots=True)
class _Sides:
    """The engines of then as steps, and what each is scored on now."""

    reference: Step
    champion: Step
    scores: tuple[Mapping[str, Step], Mapping[str, Step]] = field(default=({}, {}))


def reassemble(
    campaign: Campaign,
    then: Then,
    store: Store,
    asked: Asked,
    failures: Mapping[str, str],
    timings: Mapping[str, float],
) -> Reassembled:
    """Make the steps. `failures` are those of an earlier round: what could not be rebuilt is decided on as failed."""
    assembled = assemble(campaign, failures, timings)
    mine = _champions(assembled, then)
    lineage = tuple(differences(mine.built, then.candidate.keys["engine"], store))
    changes = [*dict.fromkeys([*lineage, *_changed(campaign, assembled, then, store)])]
    changes += [Moved(what="again", where="scores and latency", before="", now=asked.again)] if asked.again else []
    anew = asked.rebuild and any(c.what in REBUILT_FOR for c in lineage)
    new_base = any(c.what == "checkpoint" for c in lineage)
    sides = _sides(assembled, then, asked)
    latency, told = _latency(assembled, then, sides, store, anew=anew, again=asked.again)
    lost = None if latency is None else failures.get(latency.key)
    if lost is not None:
        latency, told = None, f"not measured: {lost}"
    scored = tuple(s for side in sides.scores for s in side.values())
    anew_judged = _judged_anew(_referred(assembled, then, sides, store), latency, failures) if anew else ()
    decision = anew_judged[0] if anew_judged else None
    lives = mine.failure(failures) is None
    rebuilt = (
        RebuiltInput(
            label=mine.label,
            of=_because(lineage),
            engine_key=mine.built.key if lives else None,
        )
        if decision is not None
        else None
    )
    config = ReassessConfig(
        judged=_judged(assembled, then, sides, store, new_base=new_base),
        label=then.candidate.label,
        champion=then.champion.version,
        changes=tuple(changes),
        named=asked.named,
        previous=then.champion.previous,
        latency=told,
        rebuilt=rebuilt,
        campaign_config=_kept(campaign),
    )
    step = Step(
        REASSESSMENT, "reassessment", config, _inputs(config, then, sides, store, latency, decision, mine),
        dict(assembled.decision.toolchain), seconds=timings.get(REASSESSMENT.name, 10.0),
    )  # fmt: skip
    made = tuple(assembled.measured) if anew else ()
    return Reassembled(tuple(changes), scored, latency, step, made, anew_judged)


def _kept(campaign: Campaign) -> dict[str, Any]:
    """What the campaign was made from, without where things are; secrets are masked."""
    kept = masked(campaign.config.model_dump(mode="json", exclude=set(PARTS)))
    return kept if isinstance(kept, dict) else {}


def _champions(assembled: Assembled, then: Then) -> CandidateSteps:
    """The champion's variant in its engine, as it would be made now."""
    one = then.candidate
    found = (c for c in assembled.candidates if (c.variant.name, c.engine.name) == (one.variant, one.engine))
    made = next(found, None)
    if made is None:
        raise ConfigError(f"variant={one.variant}: no longer goes into engine={one.engine} in this configuration")
    return made


def pinned(kind: str, label: str, key: str) -> Step:
    """An artifact that is there, as a step that is only read."""
    return Step(Stage(kind, "kept", 0, "", ""), label, Strict(), pinned=key)


def _sides(assembled: Assembled, then: Then, asked: Asked) -> _Sides:
    reference = pinned("engine", f"engine {then.reference.label}", then.reference.keys["engine"])
    champion = pinned("engine", f"engine {then.candidate.label}", then.candidate.keys["engine"])
    scores = tuple(
        {
            name: replace(
                step, label=f"score {side.label} as it is on {name}", inputs={"engine": engine}, again=asked.again
            )
            for name, step in assembled.champion.items()
        }
        for side, engine in ((then.reference, reference), (then.candidate, champion))
    )
    return _Sides(reference, champion, (scores[0], scores[1]))


def _changed(campaign: Campaign, assembled: Assembled, then: Then, store: Store) -> Iterator[Moved]:
    """Everything else that the champion's evidence rests on and is not as it was."""
    for name, step in assembled.champion.items():
        yield from _of_set(campaign, name, step, then, store)
    for name in sorted(then.candidate.scores.keys() - assembled.champion.keys()):
        yield Moved(what="data", where=f"eval set {name}", before="scored", now="")
    yield from moved("gate", "gate", then.decision.gate, campaign.config.gate.model_dump(mode="json"))
    recorded = _probe_of(then, store)
    if recorded is not None and assembled.latency is not None:
        yield from own(assembled.latency, recorded)


def _of_set(campaign: Campaign, name: str, step: Step, then: Then, store: Store) -> Iterator[Moved]:
    key = then.candidate.keys.get(f"scores/{name}", "")
    now = next(e for e in campaign.evalsets if e.name == name)
    if not key or not store.has("scores", key):
        yield Moved(what="data", where=f"eval set {name}", before="", now=f"{now.size} items")
        return
    made = manifest(store.path("scores", key))
    before, after = str(made.config.get("digest", "")), now.digest
    for change in own(step, made):
        if change.where == "digest":
            items = made.facts.get("items")
            told = (f"{items} items, {before[:12]}", f"{now.size} items, {after[:12]}")
            yield Moved(what="data", where=f"eval set {name}", before=told[0], now=told[1])
        else:
            yield change.model_copy(update={"where": f"eval set {name}: {change.where}"})


def _probe_of(then: Then, store: Store) -> Manifest | None:
    key = then.candidate.keys.get("latency", "")
    return manifest(store.path("latency", key)) if key and store.has("latency", key) else None


def _latency(
    assembled: Assembled, then: Then, sides: _Sides, store: Store, *, anew: bool, again: str
) -> tuple[Step | None, str]:
    """The probe of then where it holds, or one of both engines and what is rebuilt; and in words which it is."""
    recorded, step = _probe_of(then, store), assembled.latency
    if step is None:
        return None, "not measured: no engine could be probed"
    fits = recorded is not None and not recorded.partial and not list(own(step, recorded))
    if recorded is not None and fits and not anew and not again:
        return pinned("latency", "latency of then", recorded.key), f"measured {recorded.started}, under today's load"
    engines = [sides.reference, sides.champion]
    engines += [e for e in several(step.inputs["engines"]) if anew and e.key not in {s.key for s in engines}]
    longer = len(engines) / max(1, len(several(step.inputs["engines"])))
    seconds = step.seconds * longer
    return (
        replace(
            step, label="latency of the champion", inputs={"engines": tuple(engines)}, seconds=seconds, again=again
        ),
        "measured for this reassessment",
    )


def _referred(assembled: Assembled, then: Then, sides: _Sides, store: Store) -> Assembled:
    """With the reference as it is where the recipe of now makes none: an engine that rounds no more than a plainer one
    is not built of an unquantized variant."""
    step, given = assembled.decision, assembled.decision.config
    if not isinstance(given, DecisionConfig) or any(c.label == given.reference for c in given.candidates):
        return assembled
    kept = _input(then.reference, sides.scores[0], store)
    config = given.model_copy(update={"reference": kept.label, "candidates": (kept, *given.candidates)})
    more = {"scores": tuple(sides.scores[0].values()), "engines": (sides.reference,)}
    more["variants"] = (pinned("variant", f"variant {kept.label}", then.reference.keys["variant"]),)
    if kept.divergence_key is not None:
        more["divergences"] = (pinned("divergence", f"divergence of {kept.label}", kept.divergence_key),)
    extended = {
        name: tuple({s.key: s for s in (*several(step.inputs[name]), *added)}.values()) for name, added in more.items()
    }
    return replace(assembled, decision=replace(step, config=config, inputs={**step.inputs, **extended}))


def _judged_anew(assembled: Assembled, latency: Step | None, failures: Mapping[str, str]) -> tuple[Step, ...]:
    """The decision on the rebuilt engine, its report and its record in MLflow, over the one probe of this reassessment;
    nothing where it could not be decided."""
    probe = {} if latency is None else {"latency": latency}

    def over(step: Step, label: str, **changed: Step) -> Step:
        kept = {name: given for name, given in step.inputs.items() if name not in ("latency", *changed)}
        return replace(step, label=label, inputs={**kept, **probe, **changed})

    decision = over(assembled.decision, "decision on the rebuilt engine")
    report = over(assembled.report, "report on the rebuilt engine", decision=decision)
    track = over(assembled.track, "track the rebuilt engine in MLflow", decision=decision, report=report)
    if isinstance(track.config, TrackingConfig):  # no run was opened for it before any work
        track = replace(track, config=track.config.model_copy(update={"plan_key": "", "opening": None}))
    return () if decision.key in failures else (decision, report, track)


def _because(lineage: Sequence[Moved]) -> Of:
    kinds = {one.what for one in lineage}
    return "checkpoint" if "checkpoint" in kinds else "recipe" if kinds & {"recipe", "calibration"} else "toolchain"


def _judged(assembled: Assembled, then: Then, sides: _Sides, store: Store, *, new_base: bool) -> DecisionConfig:
    """What the gate of now is asked: the champion as it is against the reference as it is."""
    given = assembled.decision.config
    if not isinstance(given, DecisionConfig):
        raise TypeError(type(given))
    both = zip((then.reference, then.candidate), sides.scores, strict=True)
    return DecisionConfig(
        campaign=given.campaign,
        reference=then.reference.label,
        candidates=tuple(_input(one, scores, store) for one, scores in both),
        gate=given.gate,
        eval_sets=given.eval_sets,
        base=then.decision.base if new_base else given.base,
        champion=ChampionInput(note=f"version {then.champion.version} is what is reassessed here"),
    )


def _input(one: Candidate, scores: Mapping[str, Step], store: Store) -> CandidateInput:
    divergence = one.keys.get("divergence")
    return CandidateInput(
        label=one.label,
        variant=one.variant,
        engine=one.engine,
        quantizer=one.quantizer,
        scheme=one.scheme,
        variant_key=one.keys["variant"],
        engine_key=one.keys["engine"],
        scores=tuple(s.key for s in scores.values()),
        divergence_key=divergence if divergence and store.has("divergence", divergence) else None,
        labels=dict(one.labels),
    )


def _inputs(
    config: ReassessConfig,
    then: Then,
    sides: _Sides,
    store: Store,
    latency: Step | None,
    decision: Step | None,
    mine: CandidateSteps,
) -> dict[str, Step | tuple[Step, ...]]:
    both = (then.reference, then.candidate)
    now = {s.key: s for side in sides.scores for s in side.values()}
    kept = {
        key: pinned("scores", f"{name} of then", key)
        for one in both
        for name, key in one.keys.items()
        if name.startswith("scores/") and key not in now and store.has("scores", key)
    }
    engines = {s.key: s for s in (sides.reference, sides.champion)}
    if config.rebuilt is not None and config.rebuilt.engine_key is not None:
        engines.setdefault(mine.built.key, mine.built)
    variants = {c.keys["variant"]: c.label for c in both}
    divergences = {c.divergence_key: c.label for c in config.judged.candidates if c.divergence_key}
    inputs: dict[str, Step | tuple[Step, ...]] = {
        "then": pinned("decision", "decision of then", then.record.key),
        "scores": tuple(now.values()),
        "before": tuple(kept.values()),
        "engines": tuple(engines.values()),
        "variants": tuple(pinned("variant", f"variant {label}", key) for key, label in variants.items()),
        "divergences": tuple(pinned("divergence", f"divergence of {label}", key) for key, label in divergences.items()),
    }  # fmt: skip
    inputs |= {} if latency is None else {"latency": latency}
    return inputs | ({} if decision is None else {"rebuilt": decision})
