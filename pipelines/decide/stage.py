"""The decision stage: read what was measured, decide, write decision.json and decision.md."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from pipelines.config import Strict
from pipelines.decide.decision import decide
from pipelines.decide.document import markdown
from pipelines.decide.evidence import Evidence, read
from pipelines.decide.gate import EvalCard, GateConfig
from pipelines.decide.judge import Item, judge
from pipelines.decide.lengths import buckets
from pipelines.decide.measured import Measured
from pipelines.decide.model import Candidate, Outputs, Verdict
from pipelines.decide.outputs import Findings, describe, inspect
from pipelines.decide.probed import Speed
from pipelines.decide.probing import compared as speed_of
from pipelines.decide.probing import figures
from pipelines.errors import ConfigError, Problem, closest
from pipelines.intake.licence import UNKNOWN

Facts = dict[str, str | int | float | bool | None]
_NOTES = {
    "ended": "servers that ended",
    "gpu_note": "GPU figures",
    "metrics_note": "servers' metrics",
    "client_cpu_ms_per_request": "client's CPU a request, ms",
    "client_busy_percent": "client's own CPU at most, %",
}
"""Facts of a probe that say what was not measured and why, and what the client took."""


class CandidateInput(Strict):
    """One variant in one engine: labels for people, keys of what was made of it, or why it could not be made.

    `unjudged` says why it was built and no more.
    """

    label: str
    variant: str
    engine: str
    quantizer: str = ""
    scheme: str = ""
    variant_key: str | None = None
    engine_key: str | None = None
    scores: tuple[str, ...] = ()
    divergence_key: str | None = None
    status: Literal["ok", "failed"] = "ok"
    failure: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    unjudged: str = ""


class ChampionInput(Strict):
    """The champion of now: its version, engine and scores, or why there is nothing to compare with."""

    version: str = ""
    engine_key: str = ""
    scores: tuple[str, ...] = ()
    note: str = ""

    @property
    def told(self) -> str:
        return self.note or f"version {self.version}, engine {self.engine_key[:16]}, compared with on the same items"


class DecisionConfig(Strict):
    """What is compared with what, under which gate."""

    campaign: str
    reference: str
    candidates: tuple[CandidateInput, ...] = Field(min_length=1)
    gate: GateConfig
    eval_sets: dict[str, EvalCard]
    base: dict[str, str] = Field(default_factory=dict)
    champion: ChampionInput = ChampionInput(note="nobody is champion")


def run(
    config: DecisionConfig,
    out: Path,
    *,
    scores: list[Path],
    engines: list[Path],
    variants: list[Path],
    divergences: Sequence[Path] = (),
    noise: Sequence[Path] = (),
    latency: Path | None = None,
) -> Facts:
    """Judge every candidate against the reference and write the decision.

    Raises:
        ConfigError: the reference is not among the candidates, a label is used twice, or a key is not among the inputs.
        EvidenceError: an artifact that cannot be read.
    """
    measured = {"scores": scores, "engines": engines, "variants": variants, "divergences": divergences, "noise": noise}
    evidence = read(latency=latency, **measured)
    _check(config, evidence)
    reference = next(c for c in config.candidates if c.label == config.reference)
    candidates = [_candidate(one, reference, config, evidence) for one in config.candidates]
    conditions = {**_conditions(evidence), "champion": config.champion.told}
    decided = decide(config.campaign, candidates, config.reference, config.gate, conditions, config.base)
    decision = decided.model_copy(update={"noise": tuple(evidence.noise)})
    text = json.dumps(decision.model_dump(mode="json"), indent=2, ensure_ascii=False)
    (out / "decision.json").write_text(text + "\n", encoding="utf-8")
    (out / "decision.md").write_text(markdown(decision), encoding="utf-8")
    base = config.base
    return {
        "outcome": decision.outcome, "winner": decision.winner, "headline": decision.headline,
        "licence": base.get("licence", UNKNOWN), "licence_source": base.get("licence source", ""),
    }  # fmt: skip


def _check(config: DecisionConfig, evidence: Evidence) -> None:
    labels = [c.label for c in config.candidates]
    found = [
        Problem("candidates", label, "label used by more than one candidate")
        for label in sorted({one for one in labels if labels.count(one) > 1})
    ]
    if config.reference not in labels:
        found.append(Problem("reference", config.reference, "no such candidate", closest(config.reference, labels)))
    for one in config.candidates:
        wanted: list[tuple[str, str | None, Collection[str]]] = [
            ("variant_key", one.variant_key, evidence.variants),
            ("engine_key", one.engine_key, evidence.engines),
            ("divergence_key", one.divergence_key, evidence.divergences),
            *(("scores", key, evidence.scores) for key in one.scores),
        ]
        found += [
            Problem(f"candidates.{one.label}.{name}", key, "not among the inputs of this stage", closest(key, known))
            for name, key, known in wanted
            if key is not None and key[:16] not in known
        ]
    found += [
        Problem("champion.scores", key, "not among the inputs of this stage", closest(key, evidence.scores))
        for key in config.champion.scores
        if key[:16] not in evidence.scores
    ]
    measured = {name for by_set in evidence.items.values() for name in by_set}
    found += [
        Problem("eval_sets", name, "scored, but it has no card here", closest(name, config.eval_sets))
        for name in sorted(measured - config.eval_sets.keys())
    ]
    if found:
        raise ConfigError(found)


def _candidate(one: CandidateInput, reference: CandidateInput, config: DecisionConfig, evidence: Evidence) -> Candidate:
    variant = evidence.variants[one.variant_key[:16]].facts if one.variant_key else {}
    engine = evidence.engines[one.engine_key[:16]].facts if one.engine_key else {}
    items = _items_of(one, evidence)
    means = {name: mean for name, rows in items.items() if (mean := _mean(rows, config.eval_sets[name])) is not None}
    compared = one.status == "ok" and one.label != reference.label
    findings = _findings(items, _items_of(reference, evidence), config) if compared else {}
    against = _measured_of(reference, evidence) if compared else None
    probe = figures(_measured_of(one, evidence), against, config.gate, evidence.searched)
    return Candidate(
        label=one.label,
        variant=one.variant,
        engine=one.engine,
        reference=one.label == reference.label,
        status=one.status,
        failure=one.failure,
        quantizer=one.quantizer or _text(variant, "quantizer"),
        scheme=one.scheme or _text(variant, "scheme"),
        library=f"{_text(variant, 'library')} {_text(variant, 'library_version')}".strip(),
        target=_text(engine, "target") or one.engine,
        native=engine.get("native") is True,
        native_note=_text(engine, "native_note"),
        served_on=_text(engine, "served_on"),
        simulated=_simulated(one, evidence),
        unjudged=one.unjudged,
        keys=_keys(one, evidence),
        variant_bytes=_whole(variant, "size_bytes"),
        engine_bytes=_whole(engine, "size_bytes"),
        perplexity=_real(engine, "perplexity"),
        engine_kl=_real(engine, "kl_mean"),
        scores=means,
        mean_score=_mean_score(means, config),
        verdicts=(
            *_verdicts(items, _items_of(reference, evidence), config, findings),
            *_against_champion(one, items, config, evidence),
        )
        if compared
        else (),
        latency=probe.latency,
        throughput=probe.throughput,
        speed=_speed(one, reference, config, evidence) if compared else None,
        pareto=False,
        outcome=None,
        reasons=(),
        labels=one.labels,
        lengths=tuple(
            b
            for name in findings
            for b in buckets(name, _items_of(reference, evidence)[name], items[name], config.eval_sets[name])
        ),
        goodput=probe.goodput,
        divergences=tuple(evidence.divergences[one.divergence_key[:16]]) if one.divergence_key else (),
        outputs=_outputs(items, findings, config),
        promises=probe.promises,
        probed=probe.probed,
        vetoes=tuple(v for found in findings.values() for v in found.vetoes),
        undecided=tuple(v for found in findings.values() for v in found.undecided),
    )


def _simulated(one: CandidateInput, evidence: Evidence) -> bool:
    """Whether a stand-in for a container made the variant or the engine, or what they were made from."""
    made = (evidence.variants.get((one.variant_key or "")[:16]), evidence.engines.get((one.engine_key or "")[:16]))
    return any(m is not None and m.simulated for m in made)


def _findings(
    items: Mapping[str, Sequence[Item]], reference: Mapping[str, Sequence[Item]], config: DecisionConfig
) -> dict[str, Findings]:
    """What a candidate's answers show on each eval set that both sides have."""
    return {
        name: inspect(name, reference[name], items[name], card, config.gate.vetoes)
        for name, card in config.eval_sets.items()
        if name in items and name in reference
    }


def _outputs(
    items: Mapping[str, Sequence[Item]], findings: Mapping[str, Findings], config: DecisionConfig
) -> tuple[Outputs, ...]:
    return tuple(
        findings[name].outputs if name in findings else describe(name, items[name], config.eval_sets[name])
        for name in config.eval_sets
        if name in items
    )


def _verdicts(
    items: Mapping[str, Sequence[Item]],
    reference: Mapping[str, Sequence[Item]],
    config: DecisionConfig,
    findings: Mapping[str, Findings],
) -> tuple[Verdict, ...]:
    """Verdicts on every set and slice; what a veto was found on is vetoed, whatever its figures."""
    found: list[Verdict] = []
    for name, card in config.eval_sets.items():
        judged = judge(reference.get(name), items.get(name), name, card, config.gate)
        vetoes = findings[name].vetoes if name in findings else ()
        if vetoes:
            note = "; ".join([*(v.text for v in vetoes), *filter(None, [judged[0].note])])
            judged = (judged[0].model_copy(update={"verdict": "veto", "note": note}), *judged[1:])
        found += judged
    return tuple(found)


def _against_champion(
    one: CandidateInput, items: Mapping[str, Sequence[Item]], config: DecisionConfig, evidence: Evidence
) -> Iterator[Verdict]:
    """The same comparisons with the champion of now; nothing for the champion itself, or where it cannot be had."""
    champion = config.champion
    if not champion.scores or champion.engine_key == one.engine_key:
        return
    theirs = {name: rows for key in champion.scores for name, rows in evidence.items[key[:16]].items()}
    for name, card in config.eval_sets.items():
        for verdict in judge(theirs.get(name), items.get(name), name, card, config.gate):
            gates = verdict.gates and config.gate.champion == "gate"
            yield verdict.model_copy(update={"against": "champion", "gates": gates})


def _speed(one: CandidateInput, reference: CandidateInput, config: DecisionConfig, evidence: Evidence) -> Speed | None:
    if evidence.latency is None:
        return None
    sides = {side.label: evidence.engines[side.engine_key[:16]].facts for side in (reference, one) if side.engine_key}
    return speed_of(_measured_of(reference, evidence), _measured_of(one, evidence), config.gate, doubts(sides))


def doubts(sides: Mapping[str, Facts]) -> list[str]:
    """Why the latencies of engines are no evidence of which is faster, by what is known of each under its label: one
    emulates its format, nobody knows where one runs, or they run in different places."""
    found = [
        f"{label} is {'not ours' if 'served_on' in facts else 'emulated'} "
        f"({_text(facts, 'native_note') or 'its engine does not run the format natively'})"
        for label, facts in sides.items()
        if facts.get("native") is not True
    ]
    places = {label: _text(facts, "served_on") or "this machine" for label, facts in sides.items()}
    if found or len(set(places.values())) == 1:
        return found
    return ["; ".join(f"{label} is served on {place}" for label, place in places.items())]


def _measured_of(one: CandidateInput, evidence: Evidence) -> Measured:
    return evidence.measured.get((one.engine_key or "")[:16], Measured())


def _items_of(one: CandidateInput, evidence: Evidence) -> dict[str, Sequence[Item]]:
    return {name: rows for key in one.scores for name, rows in evidence.items[key[:16]].items()}


def _keys(one: CandidateInput, evidence: Evidence) -> dict[str, str]:
    found = {"variant": one.variant_key, "engine": one.engine_key}
    found |= {f"scores/{name}": key for key in one.scores for name in evidence.items[key[:16]]}
    found |= {"divergence": one.divergence_key} if one.divergence_key else {}
    found |= {"latency": evidence.latency.key} if evidence.latency and one.engine_key else {}
    return {name: key for name, key in found.items() if key is not None}


def _mean(rows: Sequence[Item], card: EvalCard) -> float | None:
    scores = [i.score for i in rows if card.filter in (None, i.filter)]
    known = [s for s in scores if s is not None and math.isfinite(s)]
    return math.fsum(known) / len(known) if scores and len(known) == len(scores) else None


def _mean_score(means: Mapping[str, float], config: DecisionConfig) -> float | None:
    """Average over the eval sets where higher is better; None unless all of them were scored."""
    wanted = [name for name, card in config.eval_sets.items() if card.higher_is_better and card.family != "perplexity"]
    if not wanted or any(name not in means for name in wanted):
        return None
    return math.fsum(means[name] for name in wanted) / len(wanted)


def _conditions(evidence: Evidence) -> dict[str, str]:
    """Name everything the figures depend on, each with the date it was measured."""
    found: dict[str, str] = {}
    if evidence.scores:
        found["scores measured"] = _span(m.started for m in evidence.scores.values())
        found["data"] = _data(evidence)
    if evidence.latency is not None:
        facts = evidence.latency.facts
        found["latency measured"] = evidence.latency.started
        found |= {name: str(facts[name]) for name in ("device", "profiles", "rounds") if facts.get(name) is not None}
        found |= {what: _told(facts[name]) for name, what in _NOTES.items() if facts.get(name)}
        found |= evidence.load
    versions = {
        f"{k} {v}" for m in (*evidence.engines.values(), *evidence.variants.values()) for k, v in m.toolchain.items()
    }
    if versions:
        found["toolchains"] = ", ".join(sorted(versions))
    return found


def _told(fact: str | float | None) -> str:
    return f"{fact:.3g}" if isinstance(fact, float) else str(fact)


def _data(evidence: Evidence) -> str:
    """The eval sets as they were put to engines, each with its number of items."""
    rows = [item for sets in evidence.items.values() for items in sets.values() for item in items]
    templates = sorted({item.template_id for item in rows})
    counts = {t: len({item.item_id for item in rows if item.template_id == t}) for t in templates}
    return ", ".join(f"{template} ({count} items)" for template, count in counts.items())


def _span(dates: Iterable[str]) -> str:
    ordered = sorted(dates)
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def _text(facts: Mapping[str, object], name: str) -> str:
    found = facts.get(name)
    return "" if found is None else str(found)


def _real(facts: Mapping[str, object], name: str) -> float | None:
    found = facts.get(name)
    is_number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    return float(found) if is_number and isinstance(found, int | float) else None


def _whole(facts: Mapping[str, object], name: str) -> int | None:
    found = _real(facts, name)
    return None if found is None else int(found)
