"""Tracking and release against a real MLflow on sqlite."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipelines.errors import EnvironmentProblem
from pipelines.track import children, ui, versions, views
from pipelines.track.config import TrackingConfig
from pipelines.track.connection import session
from pipelines.track.standing import recorded
from tests import decisions
from tests.tracked import Crash, World, found

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


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


def test_a_candidates_run_has_its_data_sets_its_own_requests_and_plots(world: World, tmp_path: Path) -> None:
    """Data sets by the digest of what was drawn, requests of that engine alone, and charts that stand alone."""
    import pyarrow.parquet as pq

    made = decisions.decision()
    world.record(world.decided(made))
    with session(world.uri) as client:
        run = {r.data.tags["candidate"]: r for r in found(client, "variant")}["gptq_w4a16_g64"]
        plots = {f.path for f in client.list_artifacts(run.info.run_id, "plots")}
        requests = client.download_artifacts(run.info.run_id, "latency/requests.parquet", str(tmp_path))
        losses = Path(client.download_artifacts(run.info.run_id, "plots/losses.svg", str(tmp_path))).read_text()
        inputs = client.get_run(run.info.run_id).inputs.dataset_inputs
    assert {"plots/losses.svg", "plots/latency-1.svg"} == plots
    assert "support_intent" in losses and "awq_w4a16_g64" not in losses
    assert {made.candidates[1].keys["engine"][:16]} == set(pq.read_table(requests)["engine"].to_pylist())
    digests = {i.dataset.name: (i.dataset.digest, {t.key: t.value for t in i.tags}) for i in inputs}
    assert set(decisions.SETS) == set(digests)
    for name, (digest, tags) in digests.items():
        assert (decisions.key_of("evalset", name)[:36], "evaluation") == (digest, tags["mlflow.data.context"])
        assert decisions.key_of("evalset", name) == tags["digest"]


def test_the_champion_of_now_is_told_by_a_tag(world: World) -> None:
    """Recorded after somebody was promoted, the run of the same engine says that it is champion's."""
    decision = world.decided(decisions.decision())
    facts = world.record(decision)
    with session(world.uri) as client:
        client.set_registered_model_alias("demo", versions.CHAMPION, str(facts["model_version"]))
        client.delete_experiment(str(facts["experiment_id"]))
    world.record(decision, TrackingConfig(tracking_uri=world.uri, experiment="again"))
    with session(world.uri) as client:
        crowned = {r.data.tags["candidate"]: r.data.tags["champion"] for r in found(client, "variant")}
    assert ["gptq_w4a16_g64"] == [label for label, champion in crowned.items() if champion == "true"]


def test_the_challenger_of_a_later_decision_stays(world: World) -> None:
    """A campaign that was decided before is recorded after: it is registered, and challenger is who was."""
    later = world.decided(decisions.decision())
    first = world.record(later)
    earlier = decisions.decision().model_copy(update={"campaign": "before"})
    path = world.decided(earlier)
    told = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(told | {"started": "2026-11-01T00:00:00+00:00"}))
    second = world.record(path, TrackingConfig(tracking_uri=world.uri, registered_model="demo"))
    assert first["model_version"] != second["model_version"]
    assert {"challenger": first["model_version"]} == world.aliases()


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
        below = found(client, "variant")
        assert (1, 6) == (len(found(client, "campaign")), len(below))
        assert all(run.data.tags.get(children.COMPLETE) == "true" for run in below)
        history = [client.get_metric_history(run.info.run_id, "quality/mean_score") for run in below]
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
    """The link names the view; where MLflow refuses it, a search for these runs is linked; the recording stands."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    decision = world.decided(decisions.decision())
    facts = world.record(decision)
    (link,) = ui.links(world.uri, "demo")
    assert (facts["link"], f"viewStateShareKey={decision.name}" in link.fragment) == (link.fragment, True)

    def refuse(*args: object) -> None:
        raise MlflowException("no such thing")

    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    wanted = views.searched(str(facts["experiment_id"]), decision.name, "quality/mean_score")
    assert wanted == world.record(decision)["link"]


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
