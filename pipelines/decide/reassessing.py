"""The reassessment stage: judge a champion's engine again, hold it against its own decision, write both down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from pipelines.config import Strict, read
from pipelines.decide import reassessment
from pipelines.decide.evidence import Evidence
from pipelines.decide.evidence import read as read_evidence
from pipelines.decide.gate import GateConfig
from pipelines.decide.judge import Item
from pipelines.decide.measured import Measured
from pipelines.decide.model import Candidate, Decision
from pipelines.decide.probed import Speed
from pipelines.decide.probing import compared as speed_of
from pipelines.decide.reassessed import markdown
from pipelines.decide.reassessment import Moved, Of, Reassessment, Rebuilt
from pipelines.decide.stage import DecisionConfig, doubts
from pipelines.decide.stage import run as judge_again
from pipelines.flow.store import Fact, manifest

FILE, PAGE, JUDGED = "reassessment.json", "reassessment.md", "judged.json"


class RebuiltInput(Strict):
    """The champion's recipe made again: under which label its decision has it, and because of what."""

    label: str
    of: Of
    engine_key: str | None = None


class ReassessConfig(Strict):
    """What is judged again: the champion's engine as it is against the reference's, and what changed since.

    named: overrides that name the campaign on a command line. previous: the version that a rollback would go to.
    campaign_config: what it was made from, kept so that it can be reassessed again.
    """

    judged: DecisionConfig
    label: str
    champion: str
    changes: tuple[Moved, ...] = ()
    named: str = ""
    previous: str | None = None
    latency: str = ""
    rebuilt: RebuiltInput | None = None
    campaign_config: dict[str, Any] = Field(default_factory=dict)


def run(
    config: ReassessConfig,
    out: Path,
    *,
    then: Path,
    scores: Sequence[Path],
    engines: Sequence[Path],
    variants: Sequence[Path],
    before: Sequence[Path] = (),
    divergences: Sequence[Path] = (),
    latency: Path | None = None,
    rebuilt: Path | None = None,
) -> dict[str, Fact]:
    """Judge the champion by today's gate and write reassessment.json, reassessment.md and the judgement in full.

    `then` is the decision that promoted it, `before` the scores that decision rests on as far as they were kept.
    `engines` are the reference's and the champion's, and the rebuilt one where there is one, whose decision `rebuilt`
    is.
    """
    old = read(Decision, then / "decision.json", "no readable decision")
    judge_again(
        config.judged, out, scores=list(scores), engines=list(engines), variants=list(variants),
        divergences=divergences, latency=latency,
    )  # fmt: skip
    (out / "decision.json").rename(out / JUDGED)
    (out / "decision.md").unlink()  # it would say to promote what is champion already
    judged = read(Decision, out / JUDGED, "no readable decision")
    evidence = read_evidence(scores=[*scores, *before], latency=latency, engines=engines, variants=variants)
    made = _reassessed(config, old, judged, evidence, rebuilt).model_copy(
        update={"decision_key": then.name, "decided": manifest(then).started}
    )
    text = json.dumps(made.model_dump(mode="json"), indent=2, ensure_ascii=False)
    (out / FILE).write_text(text + "\n", encoding="utf-8")
    (out / PAGE).write_text(markdown(made), encoding="utf-8")
    return {"outcome": made.outcome, "headline": made.headline, "campaign": made.campaign, "champion": made.champion}


def _reassessed(
    config: ReassessConfig, old: Decision, judged: Decision, evidence: Evidence, rebuilt: Path | None
) -> Reassessment:
    gate = config.judged.gate
    was, now = _candidate(old, config.label), _candidate(judged, config.label)
    standing = reassessment.STANDINGS[now.outcome or "hold"]
    made = _rebuilt(config, was, evidence, rebuilt)
    why = reassessment.reasons(was, now, config.changes)
    reference = judged.reference
    before, after = ((_columns(d, reference, evidence), _columns(d, config.label, evidence)) for d in (old, judged))
    return Reassessment(
        campaign=judged.campaign,
        champion=config.champion,
        label=config.label,
        engine_key=now.keys["engine"],
        decision_key="",
        decided="",
        outcome=standing,
        headline=reassessment.headline(standing, config.label, why, config.changes),
        reasons=why,
        to_do=reassessment.to_do(standing, now, made, config.named, config.previous),
        changes=config.changes,
        then=was.outcome,
        now=now.outcome,
        comparisons=reassessment.compare(was.verdicts, now.verdicts, before, after, config.judged.eval_sets, gate),
        speed_then=was.speed,
        speed_now=now.speed,
        latency=config.latency,
        rebuilt=made,
        conditions=judged.conditions,
    )


def _candidate(decision: Decision, label: str) -> Candidate:
    return next(c for c in decision.candidates if c.label == label)


def _columns(decision: Decision, label: str, evidence: Evidence) -> dict[str, Sequence[Item]]:
    """The items that a candidate was scored on, as far as they are among the inputs."""
    keys = {
        k.removeprefix("scores/"): v for k, v in _candidate(decision, label).keys.items() if k.startswith("scores/")
    }
    return {name: evidence.items[key[:16]].get(name, ()) for name, key in keys.items() if key[:16] in evidence.items}


def _rebuilt(config: ReassessConfig, was: Candidate, evidence: Evidence, decision: Path | None) -> Rebuilt | None:
    given = config.rebuilt
    if given is None or decision is None:
        return None
    made = _candidate(read(Decision, decision / "decision.json", "no readable decision"), given.label)
    return Rebuilt.model_validate(
        {
            "label": made.label,
            "of": given.of,
            "decision_key": decision.name,
            "engine_key": made.keys.get("engine", ""),
            "outcome": made.outcome,
            "reasons": made.reasons,
            "verdicts": made.verdicts,
            "perplexity": (was.perplexity, made.perplexity),
            "engine_kl": (was.engine_kl, made.engine_kl),
            "speed": _speed(config.judged.gate, was.keys["engine"], given.engine_key, evidence),
        }
    )


def _speed(gate: GateConfig, champion: str, rebuilt: str | None, evidence: Evidence) -> Speed | None:
    """How much faster the rebuilt engine is than the champion's, measured in one probe."""
    if rebuilt is None or evidence.latency is None:
        return None
    sides: Mapping[str, str] = {"the champion": champion[:16], "the rebuilt engine": rebuilt[:16]}
    if any(key not in evidence.engines for key in sides.values()):
        return None
    ours, theirs = (evidence.measured.get(key, Measured()) for key in sides.values())
    told = doubts({label: evidence.engines[key].facts for label, key in sides.items()})
    return speed_of(ours, theirs, gate, told)
