"""Whether two figures were taken under the same conditions: every reason why they may not be compared. Pure.

No reason means that they may. The conditions are those that artifacts record about themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipelines.decide.changes import flat, unlike
from pipelines.decide.gate import LagRule
from pipelines.decide.measured import Measured
from pipelines.decide.soundness import HITS_APART, soundness
from pipelines.flow.store import Manifest

_OF_THE_LOAD = frozenset({"profiles", "prompts"})  # looked at profile by profile; a path, of which the digest counts
SHOWN = 12


def about_scores(ours: Manifest, theirs: Manifest) -> Iterator[str]:
    """What two artifacts of scores of one eval set were made with, the items aside."""
    if ours.version != theirs.version:
        yield f"scored by versions {ours.version} and {theirs.version} of the stage"
    if differing := unlike(ours.toolchain, theirs.toolchain):
        yield f"scored by other libraries: {differing}"


def about_data(ours: Manifest, theirs: Manifest) -> Iterator[str]:
    """The eval set as two artifacts of scores had it; it may differ though no prompt does: in answers, say."""
    a, b = (str(side.config.get("digest", "")) for side in (ours, theirs))
    if a != b:
        yield f"another edition of the eval set (digests {a[:SHOWN]} and {b[:SHOWN]})"


def about_engines(ours: Manifest, theirs: Manifest, names: Sequence[str]) -> Iterator[str]:
    """What of two engines makes times, rates and memory no comparison of what was asked for."""
    pairs = list(zip(names, (ours, theirs), strict=True))
    for name, engine in pairs:
        if engine.simulated or engine.facts.get("simulated") is True:
            yield f"{name} was made by a stand-in for a container"
    if (ours.facts.get("native") is True) != (theirs.facts.get("native") is True):
        yield "; ".join(f"{name} is {_format(engine)}" for name, engine in pairs)
    places = [str(engine.facts.get("served_on") or "this machine") for _, engine in pairs]
    if places[0] != places[1]:
        yield "; ".join(f"{name} is served on {place}" for name, place in zip(names, places, strict=True))
    same_server = ours.stage == theirs.stage and ours.inputs.get("variant") != theirs.inputs.get("variant")
    if same_server and (differing := unlike(ours.toolchain, theirs.toolchain)):
        yield f"other versions of the engine's libraries besides another variant: {differing}"


def about_probes(ours: Manifest, theirs: Manifest) -> Iterator[str]:
    """Two probes are two moments, whatever else they have in common."""
    if ours.key == theirs.key:
        return
    yield f"measured in other runs of the probe ({ours.started} and {theirs.started})"
    if differing := unlike(ours.device or {}, theirs.device or {}):
        yield f"on other devices: {differing}"
    if differing := unlike(ours.toolchain, theirs.toolchain):
        yield f"by a client with other libraries: {differing}"
    if ours.version != theirs.version:
        yield f"by versions {ours.version} and {theirs.version} of the stage"
    if differing := unlike(_load(ours.config), _load(theirs.config)):
        yield f"under another load: {differing}"


def about_profile(ours: Manifest, theirs: Manifest, profile: str) -> Iterator[str]:
    """One load profile as two probes had it."""
    if differing := unlike(_profile(ours.config, profile), _profile(theirs.config, profile)):
        yield f"under another load: {profile}: {differing}"


def _load(config: Mapping[str, object]) -> dict[str, str]:
    return flat({name: value for name, value in config.items() if name not in _OF_THE_LOAD})


def _profile(config: Mapping[str, object], profile: str) -> dict[str, str]:
    known = config.get("profiles")
    listed = known if isinstance(known, list | tuple) else ()
    return next((flat(one) for one in listed if isinstance(one, Mapping) and one.get("name") == profile), {})


def about_rows(ours: Measured, theirs: Measured, names: Sequence[str]) -> Iterator[str]:
    """What the rows of one profile say against a comparison: lost blocks and requests, a late client, caches."""
    sides = list(zip(names, (ours, theirs), strict=True))
    for name, side in sides:
        if not side.sound.requests:
            reasons = ", ".join(dict.fromkeys(one.reason for one in side.left_out))
            yield f"every block of {name} was left out ({reasons})"
        failed = sum(r.failed for r in side.requests)
        if failed:
            yield f"{failed} of {len(side.requests)} requests of {name} failed"
    hits = []
    for name, side in sides:
        for one in soundness(side, LagRule()):
            hits.append(one.prefix_hits)
            if one.late:
                lag = one.lag_max_ms if one.lag_p99_ms is None else one.lag_p99_ms
                yield f"the client was too slow with {name}: sent {lag:.1f} ms late, allowed {one.lag_limit_ms:.1f}"
    if len(hits) == 2 and hits[0] is not None and hits[1] is not None and abs(hits[0] - hits[1]) > HITS_APART:
        yield f"prefix-cache hits differ ({hits[0]:.1%} and {hits[1]:.1%} of input tokens)"


def _format(engine: Manifest) -> str:
    """How an engine computes, as far as anybody here knows: of what somebody else runs nobody does."""
    if engine.facts.get("native") is True:
        return "native"
    return "remote" if "served_on" in engine.facts else "emulated"
