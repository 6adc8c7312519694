"""Promotion and rollback against a real MLflow on sqlite."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from pipelines.errors import ConfigError, EvidenceError, LicenceUnknown
from pipelines.flow.store import Store
from pipelines.release import champion, registry
from pipelines.release.ledger import Ledger
from pipelines.release.registry import Person, promote
from pipelines.track.connection import session
from tests import decisions
from tests.released import answers, champions, promoted, rolled_back
from tests.tracked import World, found

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


def test_a_decision_of_promote_makes_its_winner_champion(world: World) -> None:
    """Alias and ledger agree; doing it again changes nothing."""
    decision = world.decided(decisions.decision())
    world.record(decision)
    first = promoted(world, decision)
    again = promoted(world, decision)
    assert (True, False) == (first.changed, again.changed)
    assert {"champion": first.version} == world.aliases()
    ledger = Ledger(world.registry.ledger)
    assert ["intent", "alias_set", "committed"] == [e.state for e in ledger.entries()]
    assert first.version == ledger.champion("demo")


def test_the_champion_is_found_by_ledger_or_registry_without_mlflow(world: World, tmp_path: Path) -> None:
    """The ledger's last, or where it knows nobody the registry's alias; its engine must be in the store."""
    nobody = champion.find(world.uri, world.registry.ledger, "demo", world.store)
    assert ("", "nobody is champion of demo") == (nobody.engine_key, nobody.note)
    champions(world, "awq_w4a16_g64")
    engine = next(c.keys["engine"] for c in decisions.decision().candidates if c.label == "awq_w4a16_g64")
    for ledger in (world.registry.ledger, tmp_path / "no_ledger.jsonl"):
        found = champion.find(world.uri, ledger, "demo", world.store)
        assert ("1", engine, "") == (found.version, found.engine_key, found.note)
    lost = champion.find(world.uri, world.registry.ledger, "demo", Store(tmp_path / "elsewhere"))
    assert ("1", "") == (lost.version, lost.engine_key)
    assert "version 1 cannot be compared with: its engine is not in" in lost.note
    away = champion.find("http://127.0.0.1:9", tmp_path / "no_ledger.jsonl", "demo", world.store)
    assert "not known: tracking.uri='http://127.0.0.1:9'" in away.note


def test_what_an_alias_stands_for_is_known_without_the_ledger(world: World) -> None:
    """Champion, previous and an alias that a person set by hand all count; an absent database is not made by asking."""
    assert set() == registry.aliased(f"sqlite:///{world.root}/elsewhere/mlflow.db")
    assert not (world.root / "elsewhere").exists()
    champions(world, "rtn_w4a16_g64", "gptq_w4a16_g64", "awq_w4a16_g64")
    engines = {c.label: c.keys["engine"][:16] for c in decisions.decision().candidates if "engine" in c.keys}
    decision = world.decided(decisions.decision()).name
    wanted = {decision, engines["gptq_w4a16_g64"], engines["awq_w4a16_g64"]}
    assert wanted == registry.aliased(world.uri)
    with session(world.uri) as client:
        client.set_registered_model_alias("demo", "canary", "1")
    assert wanted | {engines["rtn_w4a16_g64"]} == registry.aliased(world.uri)


@pytest.mark.parametrize("outcome", ["hold", "reject"])
def test_any_other_decision_is_refused_unless_overridden_by_a_named_person(world: World, outcome: str) -> None:
    """The refusal gives the decision; the override's reason and actor are in the ledger."""
    decision = world.decided(decisions.decision(outcome))
    with pytest.raises(EvidenceError, match=f"the decision is {outcome}"):
        promoted(world, decision)
    with pytest.raises(ConfigError, match="no winner"):
        promoted(world, decision, actor="ada", reason="we know better")
    with pytest.raises(ConfigError, match=r"actor[\s\S]*override"):
        promoted(world, decision, actor=" ", reason="")
    label = "awq_w4a16_g64"
    made = promoted(world, decision, actor="ada", candidate=label, reason="we know better")
    (entry,) = [e for e in Ledger(world.registry.ledger).entries() if e.state == "committed"]
    assert made.overridden
    assert ("ada", "we know better") == (entry.change.actor, entry.change.override_reason)


def test_a_candidate_that_is_unknown_or_failed_is_refused(world: World) -> None:
    """The closest name is offered; a failed one has no engine, override or not."""
    decision = world.decided(decisions.decision())
    with pytest.raises(ConfigError, match="did you mean 'awq_w4a16_g64'"):
        promoted(world, decision, actor="ada", candidate="awq_w4a16")
    with pytest.raises(EvidenceError, match="no engine to promote"):
        promoted(world, decision, actor="a", candidate="gptq_w3a16_g64", reason="please")


def test_a_simulated_engine_is_never_promoted(world: World) -> None:
    """What a stand-in for a container made is refused, whatever the decision says and whoever overrides it."""
    decision = world.decided(decisions.decision())
    (one,) = [c for c in decisions.decision().candidates if c.label == "awq_w4a16_g64"]
    engine = world.store.path("engine", one.keys["engine"])
    record = json.loads((engine / "manifest.json").read_text())
    (engine / "manifest.json").write_text(json.dumps(record | {"simulated": True}))
    with pytest.raises(EvidenceError, match="made by a simulated container"):
        promoted(world, decision, actor="ada", candidate="awq_w4a16_g64", reason="please")
    assert [] == Ledger(world.registry.ledger).entries()


def test_what_was_built_and_not_judged_is_never_promoted(world: World) -> None:
    """An engine that never ran has no evidence, whoever overrides the decision."""
    made = decisions.decision()
    waiting = [c.model_copy(update={"unjudged": "it has no server"}) for c in made.candidates if not c.reference]
    decision = world.decided(made.model_copy(update={"candidates": (made.candidates[0], *waiting)}))
    with pytest.raises(EvidenceError, match="was built, not judged, and is never promoted: it has no server"):
        promoted(world, decision, actor="ada", candidate="awq_w4a16_g64", reason="please")
    assert [] == Ledger(world.registry.ledger).entries()


def test_one_changed_byte_of_the_engine_stops_promotion_and_rollback(world: World) -> None:
    """The file is named, and no alias moves."""
    champions(world, "awq_w4a16_g64", "gptq_w4a16_g64")
    before = world.aliases()
    for one in decisions.decision().candidates[1:3]:
        path = world.store.path("engine", one.keys["engine"]) / "model.onnx"
        path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(EvidenceError, match=r"model\.onnx"):
        rolled_back(world)
    with pytest.raises(EvidenceError, match=r"model\.onnx"):
        champions(world, "awq_w4a16_g64")
    assert before == world.aliases()


def test_rollback_goes_back_to_previous_and_forth(world: World) -> None:
    """Two versions swap places; without a previous there is nothing to go back to."""
    champions(world, "awq_w4a16_g64")
    with pytest.raises(EvidenceError, match="nothing to go back to"):
        rolled_back(world)
    champions(world, "gptq_w4a16_g64")
    assert {"champion": "2", "previous": "1"} == world.aliases()
    rolled_back(world, "latency alarm")
    assert {"champion": "1", "previous": "2"} == world.aliases()
    rolled_back(world)
    assert {"champion": "2", "previous": "1"} == world.aliases()


def test_a_champion_the_decision_did_not_know_stops_promotion(world: World) -> None:
    """Recorded against nobody, refused once somebody else is champion."""
    decision = world.decided(decisions.decision())
    world.record(decision)
    champions_of_other = decisions.decision("hold")
    other = world.decided(champions_of_other)
    promoted(world, other, actor="eve", candidate="awq_w4a16_g64", reason="first")
    with pytest.raises(EvidenceError, match=r"was made against none"):
        promoted(world, decision)


def test_a_deleted_champion_is_noticed(world: World) -> None:
    """MLflow drops the alias with the version; the ledger remembers."""
    champions(world, "awq_w4a16_g64")
    with session(world.uri) as client:
        client.delete_model_version("demo", "1")
    with pytest.raises(EvidenceError, match="ledger's champion is version 1, the registry's is none"):
        promoted(world, world.root / "store" / "decision" / _key())


def _key() -> str:
    return decisions.key_of("decision", "demo", "promote")[:16]


def test_a_version_links_its_evidence_by_reference(world: World) -> None:
    """Tags and ledger name the same runs, decision and engine, and each hash is that of the file it is about."""
    decision = world.decided(decisions.decision())
    report = world.root / "store" / "report" / "r1"
    decisions.artifact(
        report, "report", "r1" * 32, inputs={"decision": decisions.key_of("decision", "demo", "promote")}
    )
    world.record(decision)
    release = promoted(world, decision)
    (entry,) = [e for e in Ledger(world.registry.ledger).entries() if e.state == "committed"]
    with session(world.uri) as client:
        tags = client.get_model_version("demo", release.version).tags
        (child,) = [run for run in found(client, "variant") if run.data.tags["candidate"] == release.candidate]
        (parent,) = found(client, "campaign")
    told = entry.change.evidence
    assert told is not None
    assert (child.info.run_id, parent.info.run_id) == (told.run_id, told.parent_run_id)
    assert hashlib.sha256((decision / "decision.json").read_bytes()).hexdigest() == told.decision_sha256
    assert hashlib.sha256((release.engine / "manifest.json").read_bytes()).hexdigest() == told.manifest_sha256
    assert (release.engine.as_uri(), decision.as_uri()) == (told.engine_uri, told.decision_uri)
    assert (report / "report.html").as_uri() == told.report_uri
    assert f"{release.engine.name} answered" == told.answered
    assert {name: value for name, value in told.model_dump().items() if value} == {
        name: tags[name] for name in told.model_dump() if name in tags
    }


def test_an_override_finds_the_run_of_a_candidate_that_was_not_registered(world: World) -> None:
    """A decision of hold registers no version; its candidate's run is linked all the same."""
    decision = world.decided(decisions.decision("hold"))
    world.record(decision)
    promoted(world, decision, candidate="awq_w4a16_g64", reason="needed now")
    told = Ledger(world.registry.ledger).entries()[-1].change.evidence
    with session(world.uri) as client:
        (child,) = [run for run in found(client, "variant") if run.data.tags["candidate"] == "awq_w4a16_g64"]
    assert told is not None and child.info.run_id == told.run_id


def test_an_engine_that_does_not_answer_is_never_promoted(world: World) -> None:
    """Not by the decision, and by no override; nothing is written down and no alias is set."""
    decision = world.decided(decisions.decision())

    def silent(engine: Path) -> str:
        raise EvidenceError(f"{engine}: does not answer")

    for person in (Person("ada"), Person("ada", "please")):
        with pytest.raises(EvidenceError, match="does not answer"):
            promote(world.registry, decision, world.store, person, silent)
    assert [] == Ledger(world.registry.ledger).entries()


@pytest.mark.parametrize("reason", [None, "please"])
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("decision", r"not the decision that was made; .*decision\.json"),
        ("scores", r"not what gptq_w4a16_g64 was judged by; .*items\.parquet"),
        ("gone", r"gptq_w4a16_g64: scores/support_intent .*gone"),
    ],
)
def test_evidence_that_was_changed_or_is_gone_stops_promotion_whoever_overrides(
    world: World, harm: str, said: str, reason: str | None
) -> None:
    """A decision that was edited, a score of which one byte changed, a score that was removed."""
    made = decisions.decision()
    decision = world.decided(made)
    scores = world.store.path("scores", made.candidates[1].keys["scores/support_intent"])
    if harm == "decision":
        path = decision / "decision.json"
        path.write_text(path.read_text().replace("0.708", "0.718"))
    elif harm == "scores":
        path = scores / "items.parquet"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    else:
        shutil.rmtree(scores)
    with pytest.raises(EvidenceError, match=said):
        promoted(world, decision, reason=reason)
    assert [] == Ledger(world.registry.ledger).entries()


def test_a_file_that_is_touched_while_it_is_verified_stops_promotion(world: World) -> None:
    """It was hashed before the lock was taken, and changes while the engine is started."""
    decision = world.decided(decisions.decision())

    def touching(engine: Path) -> str:
        (engine / "model.onnx").write_bytes((engine / "model.onnx").read_bytes())
        return "answered"

    with pytest.raises(EvidenceError, match=r"model\.onnx was touched"):
        promote(world.registry, decision, world.store, Person("ada"), touching)
    assert [] == Ledger(world.registry.ledger).entries()


def test_the_champion_that_the_decision_was_made_against_counts_not_that_of_its_recording(world: World) -> None:
    """Its own configuration says whom it was compared with; recorded later, the version's tag says another."""
    champions(world, "rtn_w4a16_g64")
    decision = world.decided(decisions.decision())
    world.record(decision)
    record = json.loads((decision / "manifest.json").read_text())
    against: list[tuple[dict[str, str], str | None]] = [
        ({"version": "", "engine_key": ""}, "champion is version 1, but the decision was made against none"),
        ({"version": "1", "engine_key": "f" * 64}, r"champion is engine \w+, but the decision was made against f{16}"),
        ({"version": "1", "engine_key": ""}, None),
    ]
    for compared, refused in against:
        (decision / "manifest.json").write_text(json.dumps(record | {"config": {"champion": compared}}))
        if refused:
            with pytest.raises(EvidenceError, match=refused):
                promoted(world, decision)
    assert "2" == promoted(world, decision).version


def test_a_licence_that_is_not_allowed_takes_a_person_and_an_unknown_one_takes_more(world: World) -> None:
    """What was overridden is in the ledger; that nobody knows a licence is overridden by nobody."""
    made = decisions.decision()
    forbidden = {"gate": made.gate | {"constraints": {"licences": ["MIT"]}}}
    decision = world.decided(made.model_copy(update=forbidden))
    with pytest.raises(EvidenceError, match=r"Apache-2\.0[\s\S]*override"):
        promoted(world, decision)
    release = promoted(world, decision, reason="counsel agreed")
    assert "Apache-2.0" in release.noted and "Apache-2.0" in Ledger(world.registry.ledger).entries()[-1].note
    unknown = world.decided(made.model_copy(update={"base": {"model": "m"}}))
    with pytest.raises(LicenceUnknown):
        promoted(world, unknown, candidate="awq_w4a16_g64", reason="please")


def test_an_unknown_licence_does_not_stop_who_goes_back_with_a_reason(world: World) -> None:
    """Decisions from before licences were asked for know none; the ledger says that it was overridden."""
    champions(world, "rtn_w4a16_g64", "awq_w4a16_g64")
    for path in (world.store.root / "decision").glob("*/decision.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base": {"model": "m"}}))
    with pytest.raises(EvidenceError, match="go back all the same"):
        rolled_back(world)
    assert "licence" in rolled_back(world, "p99 alarm").noted
    assert "overridden" in Ledger(world.registry.ledger).entries()[-1].note


def test_a_ledger_that_lost_its_end_takes_an_override_and_does_not_stop_a_rollback(world: World) -> None:
    """What the registry was told last is not in it; whoever goes on leaves a note that says so."""
    champions(world, "rtn_w4a16_g64", "awq_w4a16_g64")
    ledger = Ledger(world.registry.ledger)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:3]))
    decision = world.decided(decisions.decision())
    with pytest.raises(EvidenceError, match=r"told of line 6.*3 lines do not"):
        promoted(world, decision)
    assert "told of line 6" in rolled_back(world).noted
    assert "told of line 6" in ledger.entries()[-1].note
    assert "" == rolled_back(world).noted


@pytest.mark.parametrize("reason", [None, "both want it"])
def test_of_two_that_promote_at_once_one_wins_and_one_is_told(world: World, reason: str | None) -> None:
    """Two processes have looked at the champion before either changes it; even an override is not made over another."""
    made = decisions.decision()
    better = [
        c.model_copy(update={"outcome": "promote"} if c.label == "awq_w4a16_g64" else {}) for c in made.candidates
    ]
    other = made.model_copy(update={"campaign": "second", "winner": "awq_w4a16_g64", "candidates": tuple(better)})
    racing = multiprocessing.get_context("fork")
    together, told = racing.Barrier(2), racing.SimpleQueue()

    def race(decision: Path) -> None:
        def waiting(engine: Path) -> str:
            together.wait(30)
            return answers(engine)

        try:
            told.put(promote(world.registry, decision, world.store, Person("ada", reason), waiting).version)
        except EvidenceError as error:
            told.put(str(error))

    both = [racing.Process(target=race, args=(world.decided(one),)) for one in (made, other)]
    for process in both:
        process.start()
    said = sorted((told.get(), told.get()), key=len)
    for process in both:
        process.join(30)
    assert (0, 0) == tuple(process.exitcode for process in both)
    assert said[0] == world.aliases()["champion"] == Ledger(world.registry.ledger).champion("demo")
    assert f"demo: version {said[0]} became champion (before: none)" in said[1]
    assert ["intent", "alias_set", "committed"] == [e.state for e in Ledger(world.registry.ledger).entries()]


def test_what_a_crash_left_on_another_registry_is_repaired_there(world: World, tmp_path: Path) -> None:
    """It is neither finished nor given up by looking at aliases that it is not about; the registry is named."""
    champions(world, "rtn_w4a16_g64")
    ledger = Ledger(world.registry.ledger)
    elsewhere = ledger.entries()[-1].change.model_copy(update={"registry": "http://elsewhere:5000", "version": "9"})
    ledger.append("t", "intent", elsewhere)
    with pytest.raises(EvidenceError, match=r"tracking\.uri='http://elsewhere:5000' was cut short"):
        rolled_back(world)
