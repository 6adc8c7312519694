"""What is not as it was when an artifact was made: a step of now held against the manifests of then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pipelines.config import keyed
from pipelines.decide.changes import flat
from pipelines.decide.reassessment import Moved, What
from pipelines.flow.stage import Step
from pipelines.flow.store import Manifest, Store, manifest

_OF: Mapping[str, What] = {
    "checkpoint": "checkpoint", "calibration": "calibration", "latency": "load", "scores": "data",
}  # fmt: skip


def differences(step: Step, key: str, store: Store) -> Iterator[Moved]:
    """Everything in which a step, and what it is made from, differ from the artifact of this key; nothing where its own
    key is the same. One thing that differs in several steps is told once."""
    found: dict[tuple[What, str, str, str], list[str]] = {}
    for at, one in _walked(step, key, store):
        found.setdefault((one.what, one.where, one.before, one.now), []).append(at)
    for (what, where, before, now), places in found.items():
        listed = ", ".join(dict.fromkeys(places))
        yield Moved(what=what, where=f"{listed}: {where}", before=before, now=now)


def _walked(step: Step, key: str, store: Store) -> Iterator[tuple[str, Moved]]:
    waiting, seen = [(step, key)], set()
    while waiting:
        now, then = waiting.pop(0)
        if now.key == then or (now.key, then) in seen:
            continue
        seen.add((now.key, then))
        kind = now.stage.kind
        if not store.has(kind, then):
            yield kind, Moved(what=_OF.get(kind, "recipe"), where="its artifact", before="not kept", now=now.key[:16])
            continue
        made = manifest(store.path(kind, then))
        found = list(own(now, made))
        inputs = {n: given for n, given in now.inputs.items() if isinstance(given, Step)}
        recorded = {n: key for n, key in made.inputs.items() if isinstance(key, str)}
        found += moved("recipe", "input", _named(recorded.keys() - inputs), _named(inputs.keys() - recorded))
        yield from ((kind, one) for one in found)
        deeper = [(given, recorded[n]) for n, given in inputs.items() if n in recorded and given.key != recorded[n]]
        if not found and not deeper:  # nothing that was recorded tells why, so it is what is counted in
            yield kind, Moved(what="code", where="what enters its key", before=then[:16], now=now.key[:16])
        waiting += deeper


def _named(names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(names, "given")


def own(step: Step, made: Manifest) -> Iterator[Moved]:
    """In what a step differs from an artifact of its kind by itself, whatever it reads."""
    if (made.stage, made.version) != (step.stage.name, step.stage.version):
        as_now = f"{step.stage.name} {step.stage.version}"
        yield Moved(what="code", where="stage", before=f"{made.stage} {made.version}", now=as_now)
    known = {name: made.toolchain.get(name, "") for name in step.toolchain}
    yield from moved("toolchain", "", known, step.toolchain)
    if step.device is not None:
        yield from moved("device", "", made.device or {}, step.device)
    # Keys that say where or how to run are left out; a key that there is no longer may have entered keys then.
    now, here = flat(keyed(step.config)), flat(step.config.model_dump(mode="json"))
    then = {name: value for name, value in flat(made.config).items() if name in now or name not in here}
    yield from moved(_OF.get(step.stage.kind, "recipe"), "", then, now)


def moved(what: What, where: str, before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[Moved]:
    """What two mappings have unlike, by dotted key."""
    then, today = flat(before), flat(now)
    for name in sorted(then.keys() | today.keys()):
        if then.get(name) != today.get(name):
            at = f"{where} {name}".strip()
            yield Moved(what=what, where=at, before=then.get(name, ""), now=today.get(name, ""))
