"""The command line as a user meets it: one clear message, an exit code that means something, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.flow.device import Gpu
from pipelines.verbs import doctor
from tests.unit.test_checkpoint import make

VERBS = [
    *("plan", "run", "score", "probe", "decide", "promote", "rollback", "history", "verify-ledger", "bundle", "status"),
    *("ui", "doctor", "toolchain", "gc", "verify"),
]
QUANTGATE = [sys.executable, "-c", "from pipelines.cli import entry; entry()"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def local(tmp_path: Path) -> list[str]:
    """Overrides for a tiny checkpoint and a store of its own."""
    return [f"checkpoint.source={make(tmp_path / 'base')}", f"paths.store={tmp_path / 'store'}", "variant=[baseline]"]


def test_help_lists_every_verb_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` names each verb and says what exit codes mean."""
    code, out, _ = run(capsys, "--help")
    assert 0 == code
    for verb in VERBS:
        assert f"  {verb} " in out
    assert "3 hold, 4 reject" in out


def test_a_wrong_verb_offers_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """`quantgate paln` is told of plan."""
    code, _, err = run(capsys, "paln")
    assert 2 == code
    assert "did you mean 'plan'" in err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["varaint=[baseline]"], "did you mean 'variant'"),
        (["variant=[baselnie]"], "did you mean 'baseline'"),
        (["gate.alfa=0.1"], "did you mean 'alpha'"),
        (["gate.alpha=2"], "gate.alpha=2"),
        (["checkpoint.source=/no/such/place"], "no such directory or file"),
        (["gate.speed.profile=closed1"], "did you mean 'closed_1'"),
        (["+evalset.support_intent.limt=3"], "did you mean 'limit'"),
        (["tracking.uri=postgres://me:hunter2@db/mlflow"], "postgresql://"),
        (["tracking.uri=mlruns"], "sqlite:///FILE"),
    ],
)
def test_wrong_configuration_is_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], local: list[str], overrides: list[str], said: str
) -> None:
    """Typos and impossible values are told before anything runs; nothing is written."""
    code, out, err = run(capsys, "run", *local, *overrides)
    assert 2 == code
    assert said in err
    assert err.startswith("error: ")
    assert "Traceback" not in out + err


def test_json_is_the_last_line_of_stdout(capsys: pytest.CaptureFixture[str], local: list[str]) -> None:
    """`plan --json` prints its tables, then one document with every step."""
    code, out, _ = run(capsys, "plan", *local, "--json")
    document = json.loads(out.splitlines()[-1])
    assert (0, 0, "plan") == (code, document["exit_code"], document["verb"])
    assert "checkpoint" == document["steps"][0]["kind"]
    assert {"run"} == {step["state"] for step in document["steps"]}


def test_plan_warns_of_a_base_whose_licence_nobody_states(capsys: pytest.CaptureFixture[str], local: list[str]) -> None:
    """That every candidate will be vetoed is said before anything runs, with the key to state it; then it is silent."""
    code, out, err = run(capsys, "plan", *local, "--json")
    said = json.loads(out.splitlines()[-1])["licence"]
    assert (0, "unknown") == (code, said["licence"])
    assert "every candidate will be vetoed" in err and "checkpoint.licence=" in err and said["refused"] in err
    _, out, err = run(capsys, "plan", *local, "checkpoint.licence=mit", "--json")
    said = json.loads(out.splitlines()[-1])["licence"]
    assert ("MIT", "stated", "") == (said["licence"], said["licence source"], said["refused"])
    assert "licence" not in err


def test_errors_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json an error is a document with its exit code."""
    code, out, _ = run(capsys, "plan", "variant=[nothing]", "--json")
    assert (2, 2) == (code, json.loads(out.splitlines()[-1])["exit_code"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["ui", "--port", "70000"], "70000 is no port: 1 to 65535"),
        (["gc", "--keep", "-1"], "-1 is below 0"),
        (["plan", "--bogus"], "unrecognized arguments: --bogus"),
        (["toolchain", "lisst"], "invalid choice: 'lisst'"),
    ],
)
def test_a_wrong_command_line_is_said_in_json_too(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    """An argument that is not one ends like any bad input: one message, code 2, a document where one was asked for."""
    code, out, err = run(capsys, *argv, "--json")
    document = json.loads(out.splitlines()[-1])
    assert (2, 2, argv[0]) == (code, document["exit_code"], document["verb"])
    assert said in document["message"]
    assert said in err
    assert 1 == len(err.splitlines())


def test_a_password_in_a_refused_address_is_not_shown(capsys: pytest.CaptureFixture[str], local: list[str]) -> None:
    """What is wrong with a tracking URI is said without the credentials in it."""
    _, out, err = run(capsys, "run", *local, "tracking.uri=postgres://me:hunter2@db/mlflow", "--json")
    assert "tracking.uri=" in err
    assert "hunter2" not in out + err


def test_an_interrupted_run_has_its_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends with 130, in JSON as in words."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "doctor", interrupted)
    code, out, err = run(capsys, "doctor", "--json")
    assert (130, 130) == (code, json.loads(out)["exit_code"])
    assert "interrupted" in err


def test_plan_writes_no_artifact(capsys: pytest.CaptureFixture[str], local: list[str], tmp_path: Path) -> None:
    """Planning leaves nothing behind but the digests it took."""
    run(capsys, "plan", *local)
    left = [p.name for p in (tmp_path / "store").rglob("*") if p.is_file()]
    assert set(left) <= {".digests.json"}


def test_plan_warns_where_a_set_cannot_settle_its_margin(capsys: pytest.CaptureFixture[str], local: list[str]) -> None:
    """Ten items cannot resolve two points, and plan says so before they are scored."""
    _, out, _ = run(capsys, "plan", *local, "evalset=[support_intent]", "evalset.support_intent.limit=10")
    assert "warning: support_intent cannot settle its own margin of 0.02 with 10 items" in out


def test_a_store_that_cannot_be_written_is_said(
    capsys: pytest.CaptureFixture[str], local: list[str], tmp_path: Path
) -> None:
    """A file where the store should be is an environment problem that names paths.store."""
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "run", *local, f"paths.store={tmp_path / 'file' / 'store'}")
    assert 6 == code
    assert "paths.store" in err


def test_a_bad_checkpoint_fails_its_stage_with_its_reason(local: list[str]) -> None:
    """NaN weights stop the first stage; the reason and the command that repeats it are printed, no traceback."""
    import numpy as np

    source = Path(local[0].partition("=")[2])
    make(source, weight=np.full((2, 2), np.nan, np.float32))
    done = subprocess.run([*QUANTGATE, "score", *local], capture_output=True, text=True, check=False)
    assert 1 == done.returncode
    assert "NaN or infinite values in weight" in done.stderr
    assert "-m pipelines.flow.worker" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_status_gc_and_verify_work_on_an_empty_store(capsys: pytest.CaptureFixture[str], local: list[str]) -> None:
    """Verbs about the store have nothing to say about one that is empty, and say that."""
    assert "0 artifacts hashed, 0 differ" in run(capsys, "verify", *local)[1]
    assert "0 artifacts" in run(capsys, "gc", *local)[1]
    assert 0 == run(capsys, "status", *local)[0]


def test_promoting_without_a_decision_is_refused(capsys: pytest.CaptureFixture[str], local: list[str]) -> None:
    """There is nothing to promote, so evidence is missing: exit code 7."""
    code, _, err = run(capsys, "promote", *local)
    assert 7 == code
    assert "make one with `quantgate run`" in err


def findings(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, dict[str, str]]:
    """What doctor finds, by what it is about."""
    code, out, _ = run(capsys, "doctor", *overrides, "--json")
    assert 0 == code
    return {f["what"]: f for f in json.loads(out.splitlines()[-1])["findings"]}


def test_doctor_names_what_is_missing_and_what_to_do(
    capsys: pytest.CaptureFixture[str], local: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Machine, GPU, disk, containers, toolchains, packages, ports and MLflow; nothing absent is left without advice."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "gpus", lambda: ())
    monkeypatch.setattr(doctor, "_nvml", lambda: False)
    found = findings(capsys, *local, f"tracking.uri=sqlite:///{tmp_path}/mlruns/mlflow.db")
    abouts = ("machine", "GPU", "disk", "container", "toolchain", "package", "port", "MLflow")
    assert set(abouts) == {f["about"] for f in found.values()}
    for what, said, to_do in [
        ("device", "none (neither nvidia-smi nor NVML is here)", "TensorRT-LLM needs an NVIDIA GPU"),
        ("docker", "docker is not on PATH", "install it"),
        ("compiler", "none", "install g++"),
        ("legacy", "missing: not made yet", "quantgate toolchain sync legacy"),
        ("trtllm", "unusable: an image is pinned by its digest, and none is given", "docker pull"),
        (f"sqlite:///{tmp_path}/mlruns/mlflow.db", "no database yet, the first run makes it", ""),
    ]:
        assert said in found[what]["found"]
        assert to_do in found[what]["to_do"]


def test_doctor_knows_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, SM, memory, driver and CUDA of each; a torch built for the CPU and a GPU without FP8 are advised on."""
    cards = (Gpu("NVIDIA A100", 80, 81920, "580.95.05"), Gpu("NVIDIA L4", 89, 23034, "580.95.05"))
    monkeypatch.setattr(doctor, "gpus", lambda: cards)
    monkeypatch.setattr(doctor, "cuda_of_driver", lambda: "13.0")
    monkeypatch.setattr(doctor, "version_of", lambda name: "2.13.0+cpu")
    found = findings(capsys)
    assert ("NVIDIA A100, SM 80, 81920 MiB", "no FP8 kernels below SM 89; AWQ and GPTQ run") == (
        found["device 0"]["found"], found["device 0"]["to_do"]
    )  # fmt: skip
    assert "" == found["device 1"]["to_do"]
    assert "580.95.05, CUDA up to 13.0" == found["driver"]["found"]
    assert "cannot use the GPU" in found["torch build"]["to_do"]


def test_doctor_says_when_mlflow_does_not_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A server that is away, and a file that is no database, are findings, not failures."""
    away = findings(capsys, "tracking.uri=http://127.0.0.1:9")["http://127.0.0.1:9"]
    assert "does not answer" in away["found"]
    assert "start it" in away["to_do"]
    (tmp_path / "x.db").write_text("no database")
    broken = findings(capsys, f"tracking.uri=sqlite:///{tmp_path}/x.db")[f"sqlite:///{tmp_path}/x.db"]
    assert "no MLflow database" in broken["found"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["list", "legcy"], 2, "did you mean 'legacy'"),
        (["check", "legacy"], 6, "not made yet"),
        (["check"], 0, ""),
        (["check", "trtllm"], 6, "an image is pinned by its digest"),
        (["sync", "trtllm"], 2, "toolchain.trtllm.digest=None"),
        (["list", "toolchain.legacy.lock=none.txt"], 2, "toolchain.legacy.lock='none.txt': no such lock file"),
        (["sync", "legacy", "toolchain.legacy.installer=uv"], 6, "uv is not on PATH"),
    ],
)
def test_the_toolchain_verb_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], local: list[str], words: list[str], code: int, said: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """One message each, with the exit code of its kind."""
    monkeypatch.setenv("PATH", str(tmp_path))
    ended, _, err = run(capsys, "toolchain", *words, local[1])
    assert code == ended
    assert said in err
    assert not (tmp_path / "toolchains").exists() or not list((tmp_path / "toolchains").glob("*/"))


def test_toolchains_are_listed_as_they_are_here(capsys: pytest.CaptureFixture[str], local: list[str]) -> None:
    """Each with its state, and as JSON."""
    code, out, _ = run(capsys, "toolchain", "list", local[1], "--json")
    document = json.loads(out.splitlines()[-1])
    states = {t["name"]: t["state"] for t in document["toolchains"]}
    wanted = {"current": "ready", "legacy": "missing", "trtllm": "unusable"}
    assert (0, wanted) == (code, {name: states[name] for name in wanted})


def test_plan_shows_where_steps_run_and_what_is_missing(capsys: pytest.CaptureFixture[str], local: list[str]) -> None:
    """A column for toolchains where there is more than the current one, and what a run would make first."""
    code, out, _ = run(
        capsys,
        "plan",
        *local,
        "+executor.toolchains.calibration=legacy",
        "+executor.toolchains.reference=legacy",
        "--json",
    )
    document = json.loads(out.splitlines()[-1])
    placed = {s["label"]: s["toolchain"] for s in document["steps"]}
    assert (0, "legacy", "current") == (code, placed["reload baseline"], placed["checkpoint"])
    assert "toolchain legacy: not made yet, 58 distributions; `run` makes it first" in out
    assert ("legacy", "missing") == tuple(document["toolchains"][-1][k] for k in ("name", "state"))


def test_a_container_without_a_digest_is_told_by_plan(capsys: pytest.CaptureFixture[str], local: list[str]) -> None:
    """Exit code 2, and the command that finds the digest."""
    code, _, err = run(capsys, "plan", *local, "+executor.toolchains.engine=trtllm")
    assert 2 == code
    assert "error: toolchain.trtllm.digest=None: an image is pinned by its digest" in err
    assert "docker image inspect --format '{{.RepoDigests}}' nvcr.io/nvidia/tensorrt-llm/release:1.2.1" in err


def test_a_run_is_stopped_before_it_starts_where_a_toolchain_cannot_be(
    capsys: pytest.CaptureFixture[str], local: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No container runtime is this machine's problem: told at once, exit code 6, no step was run."""
    monkeypatch.setenv("PATH", str(tmp_path))
    digest = "toolchain.trtllm.digest=sha256:" + "0" * 64
    code, _, err = run(capsys, "run", *local, "+executor.toolchains.engine=trtllm", digest)
    assert 6 == code
    assert "toolchain trtllm: docker is not on PATH" in err
    assert [] == list((tmp_path / "store").glob("*/*/manifest.json"))


def test_a_directory_that_is_no_configuration_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--config-dir without a config.yaml names the directory."""
    code, _, err = run(capsys, "plan", "--config-dir", str(tmp_path))
    assert 2 == code
    assert "holds no config.yaml" in err


def test_a_sweep_runs_every_combination_and_keeps_the_worst_code(local: list[str]) -> None:
    """Two values give two jobs, each with its own document, even when all fail."""
    argv = [*QUANTGATE, "run", *local, "held_out.windows=1,2", "-m", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    jobs = json.loads(done.stdout.splitlines()[-1])["jobs"]
    assert 2 == len(jobs)
    assert all(job["exit_code"] == 1 for job in jobs)
