"""Tracking and release against a real MLflow on sqlite."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipelines.decide.model import Decision
from pipelines.errors import ConfigError, EnvironmentProblem, EvidenceError
from pipelines.flow.store import Store
from pipelines.release import champion, registry
from pipelines.release.ledger import Ledger
from pipelines.release.registry import Registry, promote, rollback
from pipelines.track import runs, ui, versions, views
from pipelines.track.connection import recorded, session
from pipelines.track.runs import TrackingConfig
from tests import decisions

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


class Crash(BaseException):
    """Stands for the end of the process at one place."""


@dataclass(frozen=True)
class World:
    """One store, one MLflow, and what to record."""

    root: Path

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.root}/mlruns/mlflow.db"

    @property
    def store(self) -> Store:
        return Store(self.root / "store")

    @property
    def registry(self) -> Registry:
        return Registry(self.uri, self.root / "mlruns" / "ledger.jsonl", "demo")

    def decided(self, made: Decision) -> Path:
        return decisions.decided(self.root / "store", made)

    def record(self, decision: Path, config: TrackingConfig | None = None) -> dict[str, object]:
        out, report, store = self.root / "out", self.root / "report", self.root / "store"
        out.mkdir(exist_ok=True)
        report.mkdir(exist_ok=True)
        (report / "report.html").write_text("<p>report</p>")
        found = runs.run(
            config or TrackingConfig(tracking_uri=self.uri),
            out,
            decision=decision,
            report=report,
            engines=sorted((store / "engine").iterdir()),
            variants=sorted((store / "variant").iterdir()),
            scores=sorted((store / "scores").iterdir()),
            latency=next((store / "latency").iterdir()),
        )
        return dict(found)

    def aliases(self) -> dict[str, str]:
        with session(self.uri) as client:
            return {str(k): str(v) for k, v in client.get_registered_model("demo").aliases.items()}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store and an initialised database, copied for each test."""
    root = tmp_path_factory.mktemp("template")
    made = decisions.decision()
    decisions.engines(root / "store", made)
    decisions.variants(root / "store", made)
    decisions.scores(root / "store", made)
    decisions.requests(root / "store", made, 20)
    with session(f"sqlite:///{root}/mlruns/mlflow.db"):
        pass
    return root


@pytest.fixture
def world(template: Path, tmp_path: Path) -> Iterator[World]:
    shutil.copytree(template, tmp_path / "world")
    yield World(tmp_path / "world")
    from mlflow.tracking._tracking_service.utils import _get_store

    _get_store(f"sqlite:///{tmp_path}/world/mlruns/mlflow.db").engine.dispose()


def found(client: MlflowClient, kind: str) -> list[Run]:
    experiments = [e.experiment_id for e in client.search_experiments()]
    return list(client.search_runs(experiments, f"tags.kind = '{kind}'"))


def test_a_campaign_is_one_parent_and_a_run_per_candidate(world: World) -> None:
    """Params, metrics, tags, status and documents are there; the failed candidate is a run too."""
    made = decisions.decision()
    facts = world.record(world.decided(made))
    with session(world.uri) as client:
        (parent,) = found(client, "campaign")
        children = {run.data.tags["candidate"]: run for run in found(client, "variant")}
        files = {f.path for f in client.list_artifacts(parent.info.run_id)}
        scores = {f.path for f in client.list_artifacts(children["baseline"].info.run_id, "scores")}
    assert facts["run_id"] == parent.info.run_id
    assert {one.label for one in made.candidates} == children.keys()
    assert {parent.info.run_id} == {run.data.tags["mlflow.parentRunId"] for run in children.values()}
    statuses = {label: run.info.status for label, run in children.items()}
    assert {"gptq_w3a16_g64"} == {label for label, status in statuses.items() if status == "FAILED"}
    winner = children["gptq_w4a16_g64"]
    assert ("promote", "true", "W4A16_G64") == (
        winner.data.tags["verdict"],
        winner.data.tags["winner"],
        winner.data.params["scheme"],
    )
    assert pytest.approx(31 * 2.4 * 1.9) == winner.data.metrics["latency/closed-4/ttft_p99_ms"]
    assert {"config.yaml", "decision.json", "decision.md", "report.html", "latency"} == files
    assert {f"scores/{name}" for name in decisions.SETS} == scores


def test_a_variants_layers_are_a_table_of_its_run(world: World, tmp_path: Path) -> None:
    """The file is in the form of MLflow's tables, its tag says that it is one, and runs sort by its figures."""
    from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

    world.record(world.decided(decisions.decision()))
    with session(world.uri) as client:
        runs_of = {run.data.tags["candidate"]: run for run in found(client, "variant")}
        run = runs_of["gptq_w4a16_g64"]
        table = json.loads(Path(client.download_artifacts(run.info.run_id, "layers.json", str(tmp_path))).read_text())
        config = Path(client.download_artifacts(run.info.run_id, "quantization_config.json", str(tmp_path)))
        of_base = client.list_artifacts(runs_of["baseline"].info.run_id)
        of_failed = client.list_artifacts(runs_of["gptq_w3a16_g64"].info.run_id)
    assert ["module", "scheme", "reason", "bits", "group_size", "error"] == table["columns"]
    assert ["model.layers.0.mlp.up_proj", "W4A16_G64", "", 4, 64, 0.25] == table["data"][0]
    assert [{"path": "layers.json", "type": "table"}] == json.loads(run.data.tags[MLFLOW_LOGGED_ARTIFACTS])
    assert (1.0, 4.25) == (run.data.metrics["layers/quantized"], run.data.metrics["size/bits_per_linear_weight"])
    assert {"quant_method": "gptq", "bits": 4} == json.loads(config.read_text())
    assert "quantization_config.json" not in [file.path for file in of_base]
    assert "layers.json" not in [file.path for file in of_failed]


def test_recording_the_same_decision_twice_changes_nothing(world: World) -> None:
    """Same facts, no second run, no second version."""
    decision = world.decided(decisions.decision())
    first, second = world.record(decision), world.record(decision)
    with session(world.uri) as client:
        counted = len(found(client, "campaign")), len(found(client, "variant"))
        registered = len(versions.versions(client, "demo"))
    assert first == second
    assert (1, 6, 1) == (*counted, registered)


def test_an_interrupted_recording_is_taken_up_where_it_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after any number of calls to MLflow, the next recording completes it and doubles nothing."""
    from mlflow.tracking import MlflowClient

    decision = world.decided(decisions.decision())
    for limit in (1, 3, 8, 14, 20):
        with monkeypatch.context() as patch:
            _cut(patch, MlflowClient, ("create_run", "log_batch", "log_artifact", "set_terminated"), limit)
            with pytest.raises(Crash):
                world.record(decision)
    facts = world.record(decision)
    with session(world.uri) as client:
        children = found(client, "variant")
        assert (1, 6) == (len(found(client, "campaign")), len(children))
        assert all(run.data.tags.get(runs.COMPLETE) == "true" for run in children)
        history = [client.get_metric_history(run.info.run_id, "quality/mean_score") for run in children]
    assert {0, 1} == {len(points) for points in history}
    assert recorded(world.uri, str(facts["run_id"]))


def _cut(patch: pytest.MonkeyPatch, owner: type, names: tuple[str, ...], limit: int) -> None:
    """Let the first `limit` calls of some methods through, then crash."""
    left = [limit]

    def wrap(name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return original(*args, **kwargs)

        patch.setattr(owner, name, counted)

    for name in names:
        wrap(name)


def test_only_a_winner_is_challenger(world: World) -> None:
    """A decision of promote names it; a hold registers nothing and names nobody."""
    from mlflow.exceptions import MlflowException

    held = world.record(world.decided(decisions.decision("hold")))
    assert ("", "") == (held["model"], held["model_version"])
    with session(world.uri) as client, pytest.raises(MlflowException):
        client.get_registered_model("demo")
    promoted = world.record(world.decided(decisions.decision()))
    assert {"challenger": promoted["model_version"]} == world.aliases()


def test_a_version_points_at_its_engine_by_reference(world: World) -> None:
    """URI, manifest hash, decision and licence are on it; no bytes are copied."""
    made = decisions.decision()
    decision = world.decided(made)
    world.record(decision)
    with session(world.uri) as client:
        version = versions.alias(client, "demo", "challenger")
    assert version is not None
    engine = world.store.path("engine", made.candidates[1].keys["engine"])
    assert engine.as_uri() == version.tags["engine_uri"]
    assert (decision.name, "Apache-2.0", "none") == tuple(
        version.tags[name] for name in ("decision_key", "licence", "assumed_champion")
    )
    assert not list((world.root / "mlruns").rglob("model.onnx"))


def test_secrets_do_not_reach_mlflow(world: World) -> None:
    """Planted in the configuration, they are in no file under mlruns."""
    config = TrackingConfig(
        tracking_uri=world.uri, campaign_config={"hub": {"token": "s3cr3t-a"}, "url": "https://me:s3cr3t-b@h/x"}
    )
    world.record(world.decided(decisions.decision()), config)
    stored = b"".join(p.read_bytes() for p in (world.root / "mlruns").rglob("*") if p.is_file())
    assert b"s3cr3t" not in stored
    assert "s3cr3t" not in config.model_dump_json()


def test_a_recorded_run_is_known_without_mlflow(world: World) -> None:
    """True for a finished run; false for one deleted, unknown, or in a database that is gone."""
    facts = world.record(world.decided(decisions.decision("hold")))
    run_id = str(facts["run_id"])
    assert recorded(world.uri, run_id)
    with session(world.uri) as client:
        client.delete_run(run_id)
    assert not recorded(world.uri, run_id)
    assert not recorded(world.uri, "0" * 32)
    assert not recorded(f"sqlite:///{world.root}/none.db", run_id)


def test_the_saved_view_is_found_and_its_failure_is_harmless(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link names the view; where MLflow refuses it, the plain run list is linked and the recording stands."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    decision = world.decided(decisions.decision())
    facts = world.record(decision)
    (link,) = ui.links(world.uri, "demo")
    assert (facts["link"], f"viewStateShareKey={decision.name}" in link.fragment) == (link.fragment, True)

    def refuse(*args: object) -> None:
        raise MlflowException("no such thing")

    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    assert views.fragment(str(facts["experiment_id"])) == world.record(decision)["link"]


def test_an_experiment_deleted_in_mlflow_is_named(world: World) -> None:
    """What the user deleted does not come back by itself."""
    decision = world.decided(decisions.decision())
    facts = world.record(decision)
    with session(world.uri) as client:
        client.delete_experiment(str(facts["experiment_id"]))
    with pytest.raises(EnvironmentProblem, match=r"tracking\.experiment='demo'.*deleted"):
        world.record(decision)


def test_an_absent_server_is_told_within_seconds(world: World) -> None:
    """The key, the address and what happens to the results are named; no retry storm."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(EnvironmentProblem, match=r"tracking\.uri='http://127.*kept locally"):
            world.record(world.decided(decisions.decision()), TrackingConfig(tracking_uri=uri, timeout_s=2))
        assert not recorded(uri, "0" * 32, timeout_s=1)
    assert time.monotonic() - begun < 8


def test_a_database_that_cannot_be_written_is_named(world: World) -> None:
    """A path under a file is no place for a database."""
    (world.root / "file").write_text("")
    uri = f"sqlite:///{world.root}/file/mlflow.db"
    with pytest.raises(EnvironmentProblem, match=r"tracking\.uri="):
        world.record(world.decided(decisions.decision()), TrackingConfig(tracking_uri=uri))


def test_ui_says_when_nothing_was_recorded_and_when_the_port_is_taken(world: World) -> None:
    """Both are told before a server is started."""
    with pytest.raises(EnvironmentProblem, match="nothing was recorded"):
        ui.links(f"sqlite:///{world.root}/none.db")
    with pytest.raises(EnvironmentProblem, match="campaign='other'"):
        ui.links(world.uri, "other")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"port={port}"), ui.server(world.uri, port):
            pass


def champions(world: World, *labels: str) -> None:
    """Promote some candidates one after another, by override, so that there is a champion and a previous."""
    decision = world.decided(decisions.decision())
    for label in labels:
        promote(world.registry, decision, world.store, actor="ada", candidate=label, override_reason="set-up")


def test_a_decision_of_promote_makes_its_winner_champion(world: World) -> None:
    """Alias and ledger agree; doing it again changes nothing."""
    decision = world.decided(decisions.decision())
    world.record(decision)
    first = promote(world.registry, decision, world.store, actor="ada")
    again = promote(world.registry, decision, world.store, actor="ada")
    assert (True, False) == (first.changed, again.changed)
    assert {"challenger": first.version, "champion": first.version} == world.aliases()
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
        promote(world.registry, decision, world.store, actor="ada")
    with pytest.raises(ConfigError, match="no winner"):
        promote(world.registry, decision, world.store, actor="ada", override_reason="we know better")
    with pytest.raises(ConfigError, match=r"actor[\s\S]*override"):
        promote(world.registry, decision, world.store, actor=" ", override_reason="")
    label = "awq_w4a16_g64"
    made = promote(
        world.registry, decision, world.store, actor="ada", candidate=label, override_reason="we know better"
    )
    (entry,) = [e for e in Ledger(world.registry.ledger).entries() if e.state == "committed"]
    assert made.overridden
    assert ("ada", "we know better") == (entry.change.actor, entry.change.override_reason)


def test_a_candidate_that_is_unknown_or_failed_is_refused(world: World) -> None:
    """The closest name is offered; a failed one has no engine, override or not."""
    decision = world.decided(decisions.decision())
    with pytest.raises(ConfigError, match="did you mean 'awq_w4a16_g64'"):
        promote(world.registry, decision, world.store, actor="ada", candidate="awq_w4a16")
    with pytest.raises(EvidenceError, match="no engine to promote"):
        promote(world.registry, decision, world.store, actor="a", candidate="gptq_w3a16_g64", override_reason="please")


def test_a_simulated_engine_is_never_promoted(world: World) -> None:
    """What a stand-in for a container made is refused, whatever the decision says and whoever overrides it."""
    decision = world.decided(decisions.decision())
    (one,) = [c for c in decisions.decision().candidates if c.label == "awq_w4a16_g64"]
    engine = world.store.path("engine", one.keys["engine"])
    record = json.loads((engine / "manifest.json").read_text())
    (engine / "manifest.json").write_text(json.dumps(record | {"simulated": True}))
    with pytest.raises(EvidenceError, match="made by a simulated container"):
        promote(world.registry, decision, world.store, actor="ada", candidate="awq_w4a16_g64", override_reason="please")
    assert [] == Ledger(world.registry.ledger).entries()


def test_what_was_built_and_not_judged_is_never_promoted(world: World) -> None:
    """An engine that never ran has no evidence, whoever overrides the decision."""
    made = decisions.decision()
    waiting = [c.model_copy(update={"unjudged": "it has no server"}) for c in made.candidates if not c.reference]
    decision = world.decided(made.model_copy(update={"candidates": (made.candidates[0], *waiting)}))
    with pytest.raises(EvidenceError, match="was built, not judged, and is never promoted: it has no server"):
        promote(world.registry, decision, world.store, actor="ada", candidate="awq_w4a16_g64", override_reason="please")
    assert [] == Ledger(world.registry.ledger).entries()


def test_one_changed_byte_of_the_engine_stops_promotion_and_rollback(world: World) -> None:
    """The file is named, and no alias moves."""
    champions(world, "awq_w4a16_g64", "gptq_w4a16_g64")
    before = world.aliases()
    for one in decisions.decision().candidates[1:3]:
        path = world.store.path("engine", one.keys["engine"]) / "model.onnx"
        path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(EvidenceError, match=r"model\.onnx"):
        rollback(world.registry, actor="ada")
    with pytest.raises(EvidenceError, match=r"model\.onnx"):
        champions(world, "awq_w4a16_g64")
    assert before == world.aliases()


def test_rollback_goes_back_to_previous_and_forth(world: World) -> None:
    """Two versions swap places; without a previous there is nothing to go back to."""
    champions(world, "awq_w4a16_g64")
    with pytest.raises(EvidenceError, match="nothing to go back to"):
        rollback(world.registry, actor="ada")
    champions(world, "gptq_w4a16_g64")
    assert {"champion": "2", "previous": "1"} == world.aliases()
    rollback(world.registry, actor="ada", reason="latency alarm")
    assert {"champion": "1", "previous": "2"} == world.aliases()
    rollback(world.registry, actor="ada")
    assert {"champion": "2", "previous": "1"} == world.aliases()


def test_a_champion_the_decision_did_not_know_stops_promotion(world: World) -> None:
    """Recorded against nobody, refused once somebody else is champion."""
    decision = world.decided(decisions.decision())
    world.record(decision)
    champions_of_other = decisions.decision("hold")
    other = world.decided(champions_of_other)
    promote(world.registry, other, world.store, actor="eve", candidate="awq_w4a16_g64", override_reason="first")
    with pytest.raises(EvidenceError, match=r"recorded against none"):
        promote(world.registry, decision, world.store, actor="ada")


def test_a_deleted_champion_is_noticed(world: World) -> None:
    """MLflow drops the alias with the version; the ledger remembers."""
    champions(world, "awq_w4a16_g64")
    with session(world.uri) as client:
        client.delete_model_version("demo", "1")
    with pytest.raises(EvidenceError, match="ledger's champion is version 1, the registry's is none"):
        promote(world.registry, world.root / "store" / "decision" / _key(), world.store, actor="ada")


def _key() -> str:
    return decisions.key_of("decision", "demo", "promote")[:16]


@pytest.mark.parametrize("action", ["promote", "rollback"])
@pytest.mark.parametrize("step", range(5))
def test_a_crash_after_any_step_is_repaired_at_the_next_start(
    world: World, monkeypatch: pytest.MonkeyPatch, action: str, step: int
) -> None:
    """Afterwards there is one champion, the ledger verifies and agrees, and nothing is left open."""
    from mlflow.tracking import MlflowClient

    champions(world, "awq_w4a16_g64", "gptq_w4a16_g64")
    ledger = Ledger(world.registry.ledger)
    decision = world.root / "store" / "decision" / _key()

    def act() -> None:
        if action == "rollback":
            rollback(world.registry, actor="ada")
        else:
            promote(world.registry, decision, world.store, actor="a", candidate="baseline", override_reason="r")

    with monkeypatch.context() as patch:
        steps = [0]
        _crash_after(patch, Ledger, "append", steps, step)
        _crash_after(patch, MlflowClient, "set_registered_model_alias", steps, step)
        with pytest.raises(Crash):
            act()
    with ledger.locked(), session(world.uri) as client:
        registry.repair(client, ledger)
    aliases = world.aliases()
    assert ledger.open_transaction() is None
    assert ledger.champion("demo") == aliases["champion"]
    assert aliases["champion"] != aliases["previous"]


def _crash_after(patch: pytest.MonkeyPatch, owner: object, name: str, steps: list[int], step: int) -> None:
    """Crash right after the step-th durable change."""
    original = getattr(owner, name)

    def counted(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        steps[0] += 1
        if steps[0] == step + 1:
            raise Crash
        return result

    patch.setattr(owner, name, counted)
