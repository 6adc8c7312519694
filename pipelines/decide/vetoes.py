"""What rules a candidate out before statistics, as far as its own figures tell: each veto is one function in a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipelines.decide import licences
from pipelines.decide.engineloss import exceeded, words
from pipelines.decide.gate import GateConfig
from pipelines.decide.measured import named
from pipelines.decide.model import Candidate, Promise, Veto
from pipelines.decide.resources import peak_memory

GIB = 2**30
Found = Iterator[tuple[Veto, bool]]
"""Vetoes, each with whether it is certain; one that is not holds a candidate back until it is cleared."""


def inspect(
    one: Candidate, reference: Candidate, gate: GateConfig, base: Mapping[str, str]
) -> tuple[tuple[Veto, ...], tuple[Veto, ...]]:
    """Give what vetoes a candidate and what could not be cleared, those found on its answers among them."""
    found = [
        *_licence(gate, base),
        *_labels(one, gate),
        *_perplexity(one, reference, gate),
        *_memory(one, gate),
        *_engine_loss(one, gate),
        *_divergence(one, gate),
        *_promises(one),
    ]
    vetoes = [veto for veto, certain in found if certain]
    return (*one.vetoes, *vetoes), (*one.undecided, *(veto for veto, certain in found if not certain))


def _licence(gate: GateConfig, base: Mapping[str, str]) -> Found:
    if told := licences.refusal(base, gate.constraints.licences):
        yield Veto(kind="licence", text=told), True


def _labels(one: Candidate, gate: GateConfig) -> Found:
    for name, allowed in gate.constraints.labels.items():
        has = one.labels.get(name)
        if has not in allowed:
            told = f"its engine's {name} is {has or 'not stated'}, allowed {', '.join(allowed)}"
            yield Veto(kind="label", where=name, text=told), True


def _perplexity(one: Candidate, reference: Candidate, gate: GateConfig) -> Found:
    limit = gate.max_perplexity_ratio
    if limit is None:
        return
    if one.perplexity is None or not reference.perplexity:
        yield Veto(kind="perplexity", text="no perplexity was measured"), False
        return
    ratio = one.perplexity / reference.perplexity
    if ratio > limit:
        yield Veto(kind="perplexity", text=f"perplexity is {ratio:.3f} times the reference's, allowed {limit:g}"), True


def _memory(one: Candidate, gate: GateConfig) -> Found:
    cap = gate.vetoes.max_memory_gib
    if cap is None:
        return
    rss = max((t.peak_rss_bytes for t in one.throughput if t.peak_rss_bytes is not None), default=None)
    peak = peak_memory(one.probed.resources, rss)
    if peak is None:
        yield Veto(kind="memory", text="no peak memory was measured"), False
    elif peak > cap * GIB:
        yield Veto(kind="memory", text=f"takes {peak / GIB:.2f} GiB at its peak, allowed {cap:g}"), True


def _engine_loss(one: Candidate, gate: GateConfig) -> Found:
    for told in exceeded(one.divergences, gate.engine_loss):
        yield Veto(kind="engine_loss", text=told), True


def _divergence(one: Candidate, gate: GateConfig) -> Found:
    """Lower bounds, so that what is above the cap is so for certain, and what is below it is not cleared by them."""
    cap = gate.vetoes.max_kl
    rows = [row for row in one.divergences if row.loss == "total"] if cap is not None else []
    for row in rows:
        if cap is not None and row.figures.kl_mean > cap:
            told = f"mean KL to the reference engine is at least {row.figures.kl_mean:.2g} on {words(row.text)}"
            yield Veto(kind="divergence", text=f"{told}, allowed {cap:g}"), True
    if cap is not None and not rows:
        yield Veto(kind="divergence", text="no divergence from the reference engine was measured"), False


def _promises(one: Candidate) -> Found:
    """An emulated format's latency says nothing, for it or against it; a remote's is what its users see."""
    for promise in one.promises if one.doubt != "emulated" else ():
        if promise.state != "kept":
            yield Veto(kind="slo", where=promise.profile, text=promised(promise)), promise.state == "broken"


def promised(promise: Promise) -> str:
    """Say what was found of a promise, and where requests are too few, how many it takes."""
    where = named(promise.profile, promise.phase, promise.bucket)
    name = f"{promise.metric} p{promise.percentile:g} at {where}"
    limit = f"allowed {promise.max_ms:g} ms"
    if promise.state == "broken":
        at = "at least " + (f"{promise.lower:.1f} ms" if promise.lower is not None else "that of a failed request")
        return f"{name} is {at} at 95%, {limit}"
    if promise.upper is not None:
        return f"{name} is up to {promise.upper:.1f} ms at 95%, {limit}"
    if promise.requests >= promise.requests_needed:
        return f"{name} may be that of a failed request, {limit}"
    few = f"{promise.requests} requests cannot bound p{promise.percentile:g} at 95%"
    return f"{name}: {few}, which takes {promise.requests_needed}; {limit}"
