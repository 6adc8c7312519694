"""Which steps a reassessment takes: nothing that is there already, and no engine that nothing asks to be made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.assembly import assemble
from pipelines.campaign import Campaign
from pipelines.decide.reassessing import ReassessConfig
from pipelines.decide.stage import DecisionConfig
from pipelines.flow import toolchain
from pipelines.flow.plan import plan
from pipelines.flow.store import Store
from pipelines.promoted import Then, find
from pipelines.reassembly import Asked, Reassembled, reassemble
from pipelines.release.champion import Champion
from pipelines.stages import CandidateSteps
from tests import decisions
from tests.unit import test_campaign as campaigns
from tests.unit.test_reassembly import made

GIVEN = ("campaign=demo", "variant=[baseline,rtn_w4a16_g64]", "evalset=[support_intent,passage_qa]", "items_per_set=8")
Open = Callable[..., Campaign]
checkpoint, opened = campaigns.checkpoint, campaigns.opened  # fixtures


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def then(opened: Open, store: Store) -> Then:
    """A campaign that is finished, as far as manifests tell, whose rtn variant is champion."""
    campaign = opened(*GIVEN)
    steps = assemble(campaign, {}, {})
    made(store, steps.track)
    read = decisions.decision().model_copy(
        update={
            "candidates": tuple(candidate(c, steps.latency.key if steps.latency else "") for c in steps.candidates),
            "gate": campaign.config.gate.model_dump(mode="json"),
        }
    )
    where = store.path("decision", steps.decision.key)
    (where / "decision.json").write_text(read.model_dump_json())
    champion = Champion("3", steps.candidates[1].built.key, decision_key=where.name)
    return find(champion, "demo", store)


def candidate(steps: CandidateSteps, latency: str) -> Any:
    """A candidate of the decision with the keys of its steps."""
    keys = {"variant": steps.quantized.key, "engine": steps.built.key, "latency": latency}
    keys |= {"divergence": steps.read.key} if steps.read is not None else {}
    keys |= {f"scores/{name}": step.key for name, step in steps.scores.items()}
    changes = {"keys": keys, "scores": dict.fromkeys(steps.scores, 0.5), "reference": steps.label == "baseline"}
    return decisions.candidate(steps.label, score=0.5, ttft=50.0, outcome="promote", changes=changes)


def judged(campaign: Campaign, then: Then, store: Store, asked: Asked = Asked()) -> Reassembled:  # noqa: B008 - frozen
    return reassemble(replace(campaign, champion=then.champion), then, store, asked, {}, {})


def to_run(found: Reassembled, store: Store) -> list[str]:
    return [p.step.label for p in plan(found.goals("judge"), store).to_run]


def test_the_configuration_is_found_with_the_decision(then: Then) -> None:
    """What the track stage kept: enough to open the campaign again without a word."""
    assert ("demo", 8) == (then.recorded["campaign"], then.recorded["items_per_set"])


def test_where_nothing_changed_nothing_is_told(opened: Open, then: Then, store: Store) -> None:
    """The same campaign again: no change, and no step but the reassessment itself."""
    found = judged(opened(*GIVEN), then, store)
    assert () == found.changes
    assert ["reassessment"] == to_run(found, store)


def test_more_items_are_scored_by_both_engines_as_they_are(opened: Open, then: Then, store: Store) -> None:
    """One set of two has more items: one score for each side; the probe of then stands."""
    found = judged(opened(*GIVEN, "evalset.support_intent.limit=16"), then, store)
    assert [("data", "eval set support_intent")] == [(c.what, c.where) for c in found.changes]
    assert [
        "score baseline as it is on support_intent", "score rtn_w4a16_g64 as it is on support_intent", "reassessment",
    ] == to_run(found, store)  # fmt: skip
    assert found.latency is not None and found.latency.pinned


def test_a_new_set_and_a_set_that_is_dropped_are_told(opened: Open, then: Then, store: Store) -> None:
    """Both are changes; only the new one is scored."""
    found = judged(opened(*GIVEN[:2], "evalset=[support_intent,ticket_json]", GIVEN[3]), then, store)
    assert [("eval set passage_qa", "scored", ""), ("eval set ticket_json", "", "8 items")] == sorted(
        (c.where, c.before, c.now) for c in found.changes
    )
    assert 3 == len(to_run(found, store))


def test_a_gate_of_now_needs_no_measurement(opened: Open, then: Then, store: Store) -> None:
    """Its difference is told by key, and it is judged from what was measured."""
    found = judged(opened(*GIVEN, "gate.alpha=0.01"), then, store)
    assert [("gate", "gate alpha", "0.05", "0.01")] == [(c.what, c.where, c.before, c.now) for c in found.changes]
    assert ["reassessment"] == to_run(found, store)


def test_another_load_is_measured_with_both_engines(opened: Open, then: Then, store: Store) -> None:
    """The probe's own configuration changed: one probe of the two, nothing scored, nothing built."""
    found = judged(opened(*GIVEN, "probe.rounds=4"), then, store)
    assert ["load"] == [c.what for c in found.changes]
    assert ["latency of the champion", "reassessment"] == to_run(found, store)


def test_measured_again_under_a_mark_of_its_own(opened: Open, then: Then, store: Store) -> None:
    """Four scores and a probe that are there already are taken anew; another mark takes them anew again."""
    found = judged(opened(*GIVEN), then, store, Asked(again="monday"))
    assert 6 == len(to_run(found, store))
    other = judged(opened(*GIVEN), then, store, Asked(again="tuesday"))
    assert set() == {s.key for s in found.measured} & {s.key for s in other.measured}


def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed says another version of the runtime."""
    known = toolchain.version_of
    monkeypatch.setattr(toolchain, "version_of", lambda name: "99.0" if name == "onnxruntime-genai" else known(name))


def test_a_new_runtime_builds_both_engines_anew_and_probes_them_beside_the_champions(
    opened: Open,
    then: Then,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Variants are reused; engines, their scores and divergences are made; all four engines are in one probe."""
    newer(monkeypatch)
    found = judged(opened(*GIVEN), then, store)
    assert [("toolchain", "engine: onnxruntime-genai")] == [(c.what, c.where) for c in found.changes]
    ran = to_run(found, store)
    assert {"engine baseline", "engine rtn_w4a16_g64", "decision on the rebuilt engine"} < set(ran)
    assert not any(label.startswith(("variant", "checkpoint", "score rtn_w4a16_g64 as it is")) for label in ran)
    assert ran.index("decision on the rebuilt engine") < ran.index("reassessment")
    assert "track the rebuilt engine in MLflow" == ran[-1]
    assert found.latency is not None and 4 == len(found.latency.inputs["engines"])  # type: ignore[arg-type]
    config = found.reassessment.config
    assert isinstance(config, ReassessConfig) and config.rebuilt is not None
    assert ("rtn_w4a16_g64", "toolchain") == (config.rebuilt.label, config.rebuilt.of)


def test_as_it_is_rebuilds_nothing(
    opened: Open,
    then: Then,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new runtime is told, and only the champion's own engine is judged."""
    newer(monkeypatch)
    found = judged(opened(*GIVEN), then, store, Asked(rebuild=False))
    assert ["toolchain"] == [c.what for c in found.changes]
    assert ["reassessment"] == to_run(found, store)


def test_a_new_base_is_told_and_the_old_base_stays_the_champions(opened: Open, then: Then, store: Store) -> None:
    """Everything is made from the new base; the champion is judged with the facts of its own."""
    campaign = opened(*GIVEN)
    other = campaign.base.config.model_copy(update={"digest": "f" * 64})
    found = judged(replace(campaign, base=replace(campaign.base, config=other)), then, store)
    assert "checkpoint" in {c.what for c in found.changes}
    config = found.reassessment.config
    assert isinstance(config, ReassessConfig) and config.rebuilt is not None and "checkpoint" == config.rebuilt.of
    assert then.decision.base == config.judged.base
    assert "checkpoint" in to_run(found, store)


def test_what_could_not_be_rebuilt_is_decided_on_as_failed(
    opened: Open,
    then: Then,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine does not build: its candidate is failed, its engine in no probe, and the champion is judged all the
    same."""
    newer(monkeypatch)
    campaign = replace(opened(*GIVEN), champion=then.champion)
    built = assemble(campaign, {}, {}).candidates[1].built
    found = reassemble(campaign, then, store, Asked(), {built.key: "no such operator"}, {})
    config = found.reassessment.config
    assert isinstance(config, ReassessConfig) and config.rebuilt is not None and config.rebuilt.engine_key is None
    assert found.latency is not None
    assert built.key not in {s.key for s in found.latency.inputs["engines"]}  # type: ignore[union-attr]
    assert "score rtn_w4a16_g64 as it is on support_intent" in [s.label for s in found.goals("judge")]


def test_a_decision_that_fails_leaves_the_champion_judged(
    opened: Open, then: Then, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rebuilt engine's own decision comes a round before, so the reassessment does not wait for what failed."""
    newer(monkeypatch)
    campaign = replace(opened(*GIVEN), champion=then.champion)
    first = reassemble(campaign, then, store, Asked(), {}, {})
    assert first.judged[0] in first.goals("decide") and first.reassessment not in first.goals("decide")
    found = reassemble(campaign, then, store, Asked(), {first.judged[0].key: "no"}, {})
    assert () == found.judged and "rebuilt" not in found.reassessment.inputs
    assert found.reassessment in found.goals("judge")


def test_a_recipe_that_makes_no_reference_is_held_against_the_reference_as_it_is(
    opened: Open, then: Then, store: Store
) -> None:
    """An engine with activations in 8 bits is not built of the base, which it would not round: the reference's engine
    of then stands in the rebuilt one's decision, with its scores."""
    found = judged(opened(*GIVEN, "engine.ort_genai.accuracy_level=4"), then, store)
    config = found.judged[0].config
    assert isinstance(config, DecisionConfig) and "baseline" == config.reference
    assert ["baseline", "rtn_w4a16_g64"] == [c.label for c in config.candidates]
    assert then.reference.keys["engine"] == config.candidates[0].engine_key
    for name, keys in {
        "engines": {config.candidates[0].engine_key},
        "scores": set(config.candidates[0].scores),
    }.items():
        assert keys <= {s.key for s in found.judged[0].inputs[name]}  # type: ignore[union-attr]
