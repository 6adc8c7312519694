"""The script for machines with a GPU, as far as it needs none: its order, its limits, its sums, and what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.device import gpu_check, nvml
from tests.device.gpu_check import Check, Result, Setting, lacking, report, run_all
from tests.device.nvml import Look, Watch


def nothing(_: Setting) -> dict[str, Any]:
    return {}


def test_a_check_is_left_out_with_its_reason() -> None:
    """What is not installed, not made before, or not worth starting is said, not tried."""
    fine = {"model": Result("model")}
    check = Check("x", "", nothing, ("json",), ("sh",), ("model",), least_s=30)
    assert "" == lacking(check, "cpu", fine, 31)
    assert "29 s were left, and it is not begun with less than 30" == lacking(check, "cpu", fine, 29)
    assert "needs model, which did not come out" == lacking(check, "cpu", {"model": Result("model", failed="no")}, 60)
    absent = Check("x", "", nothing, ("json", "no_such_module"), ("no-such-command",))
    assert "needs no_such_module, no-such-command, not installed here" == lacking(absent, "cpu", {}, 60)


def test_without_a_gpu_everything_is_not_run_and_that_is_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line is JSON whose targets are empty, so nothing is met."""
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: False)
    assert 0 == gpu_check.main([])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {check.name for check in gpu_check.CHECKS} == found["not_run"].keys()
    assert {"needs an NVIDIA GPU with its driver"} == set(found["not_run"].values())
    assert ({}, {}, {}, False) == (found["figures"], found["failed"], found["targets"], found["met"])


def test_checks_run_in_order_and_one_failure_ends_only_what_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed check leaves its reason; those that do not build on it go on."""
    checks = (Check("a", "", nothing), Check("b", "", nothing, after=("a",)), Check("c", "", nothing))
    ran = []

    def run_one(check: Check, setting: Setting, limit_s: float) -> Result:
        ran.append(check.name)
        assert limit_s <= 100
        return Result(check.name, failed="no luck") if check.name == "a" else Result(check.name, 1.0, {"x": 1})

    monkeypatch.setattr(gpu_check, "run_one", run_one)
    found = report(run_all(Setting(tmp_path, "cpu"), 100, checks), {})
    assert ["a", "c"] == ran
    assert ({"a": "no luck"}, {"b": "needs a, which did not come out"}, {"c"}) == (
        found["failed"], found["not_run"], found["figures"].keys(),
    )  # fmt: skip


def test_a_check_that_hangs_or_breaks_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child beyond its time is killed with its group; one that breaks leaves its last word."""
    script = tmp_path / "script.py"
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    script.write_text("import time; time.sleep(60)")
    began = time.monotonic()
    assert "was ended after 1 s" == gpu_check.run_one(Check("a", "", nothing), Setting(tmp_path, "cpu"), 0.6).failed
    assert time.monotonic() - began < 30
    script.write_text("raise SystemExit('CUDA error: out of memory')")
    assert (
        "CUDA error: out of memory" == gpu_check.run_one(Check("a", "", nothing), Setting(tmp_path, "cpu"), 60).failed
    )


@pytest.mark.parametrize(("eager", "compiled", "met"), [(50.0, 75.0, True), (50.0, 49.0, False)])
def test_figures_are_held_to_their_targets(eager: float, compiled: float, met: bool) -> None:
    """Compiling must not be slower, the files must be as small as their scheme says, and nothing may be adapted."""
    results = [
        Result("eager", 10, {"tokens_per_s": eager}),
        Result("compiled", 10, {"tokens_per_s": compiled}),
        Result("fp8", 5, {"size_ratio": 0.53, "adaptations": ""}),
    ]
    found = report(results, {"gpu": "H200"})
    assert {"compiled over eager, tokens/s", "FP8 size over bfloat16", "adaptations of FP8 on a GPU"} == found[
        "targets"
    ].keys()
    assert compiled / eager == found["targets"]["compiled over eager, tokens/s"]["value"]
    assert met == found["met"]
    assert not report([*results, Result("awq", failed="no")], {})["met"]


def test_energy_is_the_area_under_power() -> None:
    """100 W for a second, then a rise to 300 W over two: 100 + 400 joules."""
    looks = [Look(0.0, 100, 5, 0), Look(1.0, 100, 9, 50), Look(3.0, 300, 7, 100)]
    found = nvml.summary(looks)
    assert (500.0, 300, 9, 50.0) == (
        found["energy_j"], found["peak_power_w"], found["peak_memory_bytes"], found["mean_busy_percent"],
    )  # fmt: skip
    assert {"looks": 0} == nvml.summary([])


def test_a_watch_looks_while_its_block_lasts() -> None:
    """Several looks in a third of a second, and none afterwards."""
    with Watch(lambda: Look(time.monotonic(), 1.0, 1, 1.0)) as watch:
        time.sleep(0.35)
    count = len(watch.looks)
    time.sleep(0.15)
    assert 2 <= count == len(watch.looks)
