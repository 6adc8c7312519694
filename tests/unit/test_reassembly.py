"""A champion's own campaign of now: overrides on what was recorded, what is not as it was, and what cannot be had."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pipelines.compose import amend, compose, of_now
from pipelines.config import Strict
from pipelines.errors import ConfigError, EvidenceError
from pipelines.flow.stage import Stage, Step
from pipelines.flow.store import Manifest, Store, manifest
from pipelines.moved import differences, moved
from pipelines.promoted import find, narrowed
from pipelines.reassembly import PARTS
from pipelines.release.champion import Champion
from pipelines.release.champion import find as find_champion
from pipelines.release.ledger import Change, Ledger
from tests import decisions

# --- overrides on what was recorded -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    """A campaign that was run with a gate and items of its own."""
    return compose(["campaign=mine", "gate.alpha=0.1", "items_per_set=7", "evalset=[support_intent,passage_qa]"])


def amended(recorded: dict[str, Any], *overrides: str) -> dict[str, Any]:
    return amend(recorded, compose(of_now(overrides, PARTS)), overrides, PARTS)


def test_what_was_recorded_stands_without_being_said_again(recorded: dict[str, Any]) -> None:
    """Naming the campaign is enough; conf/config.yaml's own values do not come back."""
    found = amended(recorded, "campaign=mine")
    assert (0.1, 7, ["support_intent", "passage_qa"]) == (
        found["gate"]["alpha"],
        found["items_per_set"],
        list(found["evalset"]),
    )


@pytest.mark.parametrize(
    ("override", "at", "value"),
    [
        ("gate.alpha=0.01", ("gate", "alpha"), 0.01),
        ("gate=strict", ("gate", "alpha"), 0.05),
        ("items_per_set=null", ("items_per_set",), None),
        ("evalset=[ticket_json]", ("evalset",), {"ticket_json"}),
        ("+evalset.own={path: somewhere}", ("evalset", "own", "path"), "somewhere"),
        ("paths.store=elsewhere", ("paths", "store"), "elsewhere"),
        ("experiment=demo", ("items_per_set",), 7),
        ("experiment=demo", ("campaign",), "mine"),
    ],
)
def test_an_override_changes_what_it_names_and_nothing_else(
    recorded: dict[str, Any], override: str, at: tuple[str, ...], value: object
) -> None:
    """Keys, options of groups as conf/ has them now, new entries, places; an experiment only names a campaign."""
    found: Any = amended(recorded, override)
    for name in at:
        found = found[name]
    assert value == (set(found) if isinstance(value, set) else found)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("gate.alfa=0.1", "did you mean 'alpha'"),
        ("evalset.ticket_json.limit=3", "the campaign made then has no such key"),
        ("evalset=[nowhere]", "there is no evalset 'nowhere'"),
        ("gate.alpha=0.1,0.2", "amended by single values"),
        ("~evalset", "nothing is removed"),
    ],
)
def test_an_override_that_fits_nothing_is_refused(recorded: dict[str, Any], override: str, said: str) -> None:
    """A typo, an entry that the campaign did not have, an option that there is not, a sweep, a removal."""
    with pytest.raises(ConfigError, match=said):
        amended(recorded, override)


def test_places_are_those_of_now(recorded: dict[str, Any]) -> None:
    """Toolchains, stores and trackers are where they are today, wherever they were when it was recorded."""
    old = recorded | {"paths": {"store": "gone"}, "toolchain": {}}
    found = amended(old)
    assert "engines_out" == found["paths"]["store"]
    assert "legacy" in found["toolchain"]


# --- what is not as it was ----------------------------------------------------------------------------------------


class Recipe(Strict):
    """A config with a key that enters keys and one that does not."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"path"})
    bits: int = 4
    path: str = "here"


def step(kind: str, config: Recipe | None = None, **more: Any) -> Step:
    return Step(Stage(kind, kind, 1, "", ""), kind, config or Recipe(), **more)


def chain(**changes: Any) -> Step:
    """checkpoint -> variant -> engine, each of torch 2.0."""
    torch = {"torch": changes.get("torch", "2.0")}
    base = step("checkpoint", Recipe(path=changes.get("path", "here")), toolchain=torch)
    variant = step("variant", Recipe(bits=changes.get("bits", 4)), inputs={"checkpoint": base}, toolchain=torch)
    return step("engine", inputs={"variant": variant}, toolchain=torch, device=changes.get("device"))


def made(store: Store, goal: Step) -> Step:
    """Write the manifests of a step and of all it is made from."""
    waiting = [goal]
    while waiting:
        one = waiting.pop()
        where = store.path(one.stage.kind, one.key)
        where.mkdir(parents=True, exist_ok=True)
        record = {
            "kind": one.stage.kind, "stage": one.stage.name, "version": one.stage.version, "key": one.key,
            "config": one.config_data, "inputs": one.input_keys, "toolchain": dict(one.toolchain),
            "device": one.device, "facts": {}, "files": {}, "started": "2026-01-01", "seconds": 1.0, "peak_rss": 0,
        }  # fmt: skip
        (where / "manifest.json").write_text(Manifest.model_validate(record).model_dump_json())
        waiting += one.upstream()
    return goal


def told(store: Store, now: Step, then: Step) -> list[tuple[str, str, str, str]]:
    return [(c.what, c.where, c.before, c.now) for c in differences(now, then.key, store)]


def test_nothing_differs_from_itself(tmp_path: Path) -> None:
    """The same step made before, and one whose path alone is another."""
    store = Store(tmp_path)
    then = made(store, chain())
    assert [] == told(store, chain(), then)
    assert [] == told(store, chain(path="elsewhere"), then)


def test_a_version_that_changed_everywhere_is_told_once(tmp_path: Path) -> None:
    """torch of the engine, its variant and the base: one line that names all three."""
    store = Store(tmp_path)
    then = made(store, chain())
    assert [("toolchain", "engine, variant, checkpoint: torch", "2.0", "2.1")] == told(store, chain(torch="2.1"), then)


def test_a_recipe_that_changed_is_told_where_it_changed(tmp_path: Path) -> None:
    """Bits of the variant; the engine above it is not to blame."""
    store = Store(tmp_path)
    assert [("recipe", "variant: bits", "4", "8")] == told(store, chain(bits=8), made(store, chain()))


def test_a_device_and_a_raised_stage_version_are_told(tmp_path: Path) -> None:
    """What an engine is bound to, and a stage whose code says that it makes something else now."""
    store = Store(tmp_path)
    then = made(store, chain(device={"cpu": "old"}))
    now = chain(device={"cpu": "new"})
    assert [("device", "engine: cpu", "old", "new")] == told(store, now, then)
    raised = replace(chain(device={"cpu": "old"}), stage=Stage("engine", "engine", 2, "", ""))
    assert [("code", "engine: stage", "engine 1", "engine 2")] == told(store, raised, then)


def test_a_key_that_nothing_recorded_explains_is_our_own_code(tmp_path: Path) -> None:
    """Where what enters keys changed and nothing that was written down did."""
    store = Store(tmp_path)
    then = made(store, chain())
    where = store.path("engine", then.key)
    odd = manifest(where).model_copy(update={"key": "ab" * 32})
    shutil.copytree(where, store.path("engine", odd.key))
    (store.path("engine", odd.key) / "manifest.json").write_text(odd.model_dump_json())
    found = list(differences(chain(), odd.key, store))
    assert [("code", "engine: what enters its key", "ab" * 8, then.key[:16])] == [
        (c.what, c.where, c.before, c.now) for c in found
    ]


def test_what_was_not_kept_is_said(tmp_path: Path) -> None:
    """A variant that was removed from the store cannot be compared further."""
    store = Store(tmp_path)
    then = made(store, chain())
    shutil.rmtree(tmp_path / "variant")
    found = told(store, chain(bits=8), then)
    assert [("recipe", "variant: its artifact", "not kept")] == [line[:3] for line in found]


def test_what_is_there_no_longer_has_no_value_now() -> None:
    """Keys are dotted; a side that lacks one has nothing."""
    found = list(moved("gate", "gate", {"alpha": 0.05, "old": {"a": 1}}, {"alpha": 0.1}))
    assert [("gate alpha", "0.05", "0.1"), ("gate old.a", "1", "")] == [(c.where, c.before, c.now) for c in found]


# --- what promoted a champion --------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with a decision to promote gptq and the artifacts it names."""
    decision = decisions.decision()
    for write in (decisions.engines, decisions.variants):
        write(tmp_path, decision)
    decisions.decided(tmp_path, decision)
    return Store(tmp_path)


KEY = decisions.key_of("engine", "gptq_w4a16_g64")
DECISION = decisions.key_of("decision", "demo", "promote")[:16]
CHAMPION = Champion("3", KEY, decision_key=DECISION)


def test_what_promoted_a_champion_is_found_by_its_engine(store: Store) -> None:
    """Its decision, itself and its reference; without a record of the configuration there is none."""
    then = find(CHAMPION, "demo", store)
    assert ("gptq_w4a16_g64", "baseline", {}) == (then.candidate.label, then.reference.label, then.recorded)


@pytest.mark.parametrize(
    ("champion", "gone", "said"),
    [
        (Champion(note="nobody is champion of demo"), "", "nobody is champion of demo; promote one first"),
        (Champion("3", note="version 3 cannot be compared with: its engine is not in x"), "", "its engine is not in x"),
        (CHAMPION, "decision", "the decision that promoted it, .*, is not in"),
        (replace(CHAMPION, decision_key=""), "", "the decision that promoted it, which nothing names, is not in"),
        (CHAMPION, "engine", "baseline: its engine, .*, is not in"),
        (CHAMPION, "variant", "gptq_w4a16_g64: its variant, .*, is not in"),
        (replace(CHAMPION, engine_key="0" * 64), "", "says nothing of the champion's engine, 0000000000000000"),
        (replace(CHAMPION, engine_key=decisions.key_of("engine", "baseline")), "", "champion is the reference itself"),
    ],
)
def test_what_cannot_be_had_is_one_clear_error(store: Store, champion: Champion, gone: str, said: str) -> None:
    """No champion, no engine, no decision, no reference, or nothing to compare with."""
    if gone:
        shutil.rmtree(store.root / gone)
    with pytest.raises(EvidenceError, match=said):
        find(champion, "demo", store)


def test_only_the_variants_and_engines_of_both_sides_are_kept(store: Store) -> None:
    """Each engine takes its own side; a configuration that has not got the champion's recipe is refused."""
    then = find(CHAMPION, "demo", store)
    names = ("baseline", "gptq_w4a16_g64", "other")
    data = {
        "variant": {name: {"quantizer": name, "engines": ["gone"]} for name in names},
        "engine": {"ort_genai": {"target": "ort_genai"}, "gone": {}},
        "reference": "other",
    }
    found = narrowed(data, then)
    assert {"baseline": {"quantizer": "baseline"}, "gptq_w4a16_g64": {"quantizer": "gptq_w4a16_g64"}} == found[
        "variant"
    ]
    assert {"ort_genai": {"target": "ort_genai", "variants": ["baseline", "gptq_w4a16_g64"]}} == found["engine"]
    assert "baseline" == found["reference"]
    with pytest.raises(ConfigError, match=r"variant of the champion's decision.*variant=\[gptq_w4a16_g64\]"):
        narrowed({**data, "variant": {"baseline": {}}}, then)


def test_the_ledger_says_which_decision_promoted_and_what_a_rollback_would_go_to(store: Store, tmp_path: Path) -> None:
    """After two promotions the champion is the second, and `previous` the first."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for version, before in (("1", None), ("2", "1")):
        change = Change(
            action="promote", model="demo", version=version, champion_before=before, previous_before=None, actor="me",
            override_reason=None, decision_key=DECISION, engine_key=KEY[:16],
        )  # fmt: skip
        with ledger.locked():
            ledger.append(version, "committed", change)
    found = find_champion(f"sqlite:///{tmp_path / 'none.db'}", ledger.path, "demo", store)
    assert Champion("2", KEY, decision_key=DECISION, previous="1") == found
