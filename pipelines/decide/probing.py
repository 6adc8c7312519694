"""From a probe's rows to everything a decision says about one candidate's speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipelines.decide import drift, latencies, promises, resources, soundness, speed, throughput
from pipelines.decide.gate import GateConfig
from pipelines.decide.measured import OF_A_REQUEST, Measured
from pipelines.decide.model import Promise
from pipelines.decide.probed import Latency, Probed, Saturation, Speed, Throughput
from pipelines.decide.throughput import Limits
from pipelines.probe.latency import PERCENTILES

FORMULAS = {
    **latencies.FORMULAS,
    **throughput.FORMULAS,
    **promises.FORMULAS,
    **speed.FORMULAS,
    **drift.FORMULAS,
    **soundness.FORMULAS,
    **resources.FORMULAS,
    "blocks left out": "a block that was disturbed, interrupted, or whose server was not steady when it began is no "
    "evidence; its failures count all the same. Where no block of a profile counts, figures are shown marked and none "
    "of them is evidence",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What a candidate's own requests and blocks show."""

    latency: tuple[Latency, ...]
    throughput: tuple[Throughput, ...]
    goodput: float | None
    promises: tuple[Promise, ...]
    probed: Probed


def figures(
    measured: Measured, reference: Measured | None, gate: GateConfig, searched: Mapping[str, Limits]
) -> Figures:
    """Sum up one engine; `reference` is None where there is nothing to compare with, as for the reference itself.

    searched: what each searched profile promises.
    """
    limits = {**searched, **_promised(gate)}
    sound, axis = measured.sound, gate.latency
    return Figures(
        latency=latencies.latencies(measured, {*PERCENTILES, axis.percentile, gate.speed.percentile}),
        throughput=throughput.throughputs(measured, limits),
        goodput=throughput.goodput(
            sound.requests, sound.blocks, axis.profile, {slo.metric: slo.max_ms for slo in gate.goodput_slos}
        ),
        promises=tuple(p for slo in gate.vetoes.slo for p in promises.promises(measured, slo)),
        probed=Probed(
            differences=speed.differences(reference.sound.requests, sound.requests) if reference else (),
            drifts=drift.drifts(measured, gate.speed.metric),
            saturations=_saturations(measured, searched),
            left_out=measured.left_out,
            soundness=soundness.soundness(measured, gate.lag),
            resources=resources.resources(measured),
        ),
    )


def compared(reference: Measured, candidate: Measured, gate: GateConfig, against: Sequence[str]) -> Speed:
    """Judge a candidate's speed by the gate's rule, over the blocks of both sides that are evidence."""
    sides = (reference.of(gate.speed.profile), candidate.of(gate.speed.profile))
    told = [*against, *_against(*sides, gate)]
    ours, theirs = (side.sound.requests for side in sides)
    found = speed.compare(ours, theirs, gate.speed, gate.confidence, told)
    gone = [*_left_out("reference", sides[0]), *_left_out("candidate", sides[1])]
    return found.model_copy(update={"note": "; ".join([found.note, *gone])}) if gone else found


def _against(reference: Measured, candidate: Measured, gate: GateConfig) -> Iterator[str]:
    """What speaks against a comparison, but for what `compare` sees itself."""
    mine, theirs = (next(iter(soundness.soundness(side, gate.lag)), None) for side in (reference, candidate))
    yield from soundness.against(mine, theirs)
    for who, side in (("reference", reference), ("candidate", candidate)):
        lost = sum(r.failed for r in side.requests) - sum(r.failed for r in side.sound.requests)
        if lost:
            yield f"{lost} requests of the {who} failed in blocks that were left out"


def _left_out(who: str, side: Measured) -> Iterator[str]:
    for one in side.left_out:
        yield f"round {one.round} of the {who} left out ({one.reason})"


def _saturations(measured: Measured, searched: Mapping[str, Limits]) -> tuple[Saturation, ...]:
    found = (throughput.saturation(measured, profile, limits) for profile, limits in searched.items())
    return tuple(one for one in found if one is not None)


def _promised(gate: GateConfig) -> dict[str, Limits]:
    """The gate's promises by profile, the strictest of each metric."""
    found: dict[str, Limits] = {}
    for slo in gate.vetoes.slo:
        known = dict(found[slo.profile].max_ms) if slo.profile in found else {}
        known[slo.metric] = min(slo.max_ms, known.get(slo.metric, slo.max_ms))
        found[slo.profile] = Limits(known)
    return found


def searched(config: Mapping[str, object]) -> dict[str, Limits]:
    """What the searched profiles of a probe promise, from the configuration it was run with."""
    profiles = config.get("profiles")
    found: dict[str, Limits] = {}
    for profile in profiles if isinstance(profiles, list | tuple) else ():
        if isinstance(profile, Mapping) and isinstance(slo := profile.get("slo"), Mapping):
            asked = {metric: float(slo[metric]) for metric in OF_A_REQUEST if slo.get(metric) is not None}
            found[str(profile["name"])] = Limits(asked, float(slo.get("share", 1.0)))
    return found
