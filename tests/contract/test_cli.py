"""The command line as a user meets it: one clear message, an exit code that means something, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.cli import main
from tests.unit.test_checkpoint import make

VERBS = "plan run score probe decide promote rollback status ui doctor gc verify".split()  # noqa: SIM905
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


def test_errors_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json an error is a document with its exit code."""
    code, out, _ = run(capsys, "plan", "variant=[nothing]", "--json")
    assert (2, 2) == (code, json.loads(out.splitlines()[-1])["exit_code"])


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


def test_doctor_names_what_is_missing_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Device, disk and every package, each with its version."""
    code, out, _ = run(capsys, "doctor")
    assert 0 == code
    for name in ("processor", "memory", "GPU", "disk", "onnxruntime-genai", "mlflow"):
        assert name in out


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
