"""What it costs to plan a campaign and to run one that is done, for few and for many variants."""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import yaml
from outcome import conclude, conditions

from pipelines.assembly import assemble
from pipelines.campaign import open_campaign
from pipelines.compose import compose
from pipelines.config import CONF_DIR
from pipelines.decide.model import Decision
from pipelines.flow.plan import in_order
from pipelines.flow.stage import Step
from pipelines.flow.store import Manifest, Store

FEW, MANY = 4, 400


def main() -> None:
    """Measure `quantgate plan` and `quantgate run` of a finished campaign; the best of a few, as processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repetition")
    repeats = 1 if parser.parse_args().quick else 3
    with tempfile.TemporaryDirectory() as scratch:
        figures = {n: _measure(Path(scratch) / str(n), n, repeats) for n in (FEW, MANY)}
    print(f"{'variants':>8} {'plan s':>8} {'rerun s':>8} {'steps':>6}")
    for n, figure in figures.items():
        print(f"{n:>8} {figure['plan_s']:>8.2f} {figure['rerun_s']:>8.2f} {figure['steps']:>6.0f}")
    growth = MANY / FEW
    conclude(
        "rerun_cost",
        conditions(("hydra-core", "pydantic"), repeats=repeats, best_of=repeats),
        {f"{name}_{n}": value for n, figure in figures.items() for name, value in figure.items()},
        {
            "plan of 400 variants, s": (figures[MANY]["plan_s"], "<=", 3.0),
            "rerun of 4 variants, s": (figures[FEW]["rerun_s"], "<=", 5.0),
            "plan growth over variants growth": (figures[MANY]["plan_s"] / figures[FEW]["plan_s"] / growth, "<=", 1.0),
            "rerun growth over variants growth": (
                figures[MANY]["rerun_s"] / figures[FEW]["rerun_s"] / growth,
                "<=",
                1.0,
            ),
        },
    )


def _measure(scratch: Path, variants: int, repeats: int) -> dict[str, float]:
    conf = scratch / "conf"
    shutil.copytree(CONF_DIR, conf)
    given = {f"v{k}": {"quantizer": "llmcompressor_rtn", "scheme": "W4A16_G64", "seed": k} for k in range(variants - 1)}
    (conf / "experiment" / "many.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /variant: [baseline]\n" + yaml.safe_dump({"variant": given})
    )
    overrides = [
        "experiment=many", f"paths.store={scratch / 'store'}", f"tracking.uri=sqlite:///{scratch / 'mlflow.db'}",
        "campaign=many", "probe=quick", "gate.latency.percentile=50",
    ]  # fmt: skip
    steps = _finish(overrides, conf, scratch)
    return {
        "plan_s": min(_seconds("plan", overrides, conf) for _ in range(repeats)),
        "rerun_s": min(_seconds("run", overrides, conf) for _ in range(repeats)),
        "steps": float(steps),
    }


def _seconds(verb: str, overrides: list[str], conf: Path) -> float:
    argv = [str(Path(sys.executable).parent / "quantgate"), verb, *overrides, "--config-dir", str(conf)]
    began = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - began


def _finish(overrides: list[str], conf: Path, scratch: Path) -> int:
    """Put an artifact in the store for every step, so that there is nothing left to do."""
    _database(scratch / "mlflow.db")  # first: who is champion is part of what a decision is made from
    campaign = open_campaign(compose(overrides, conf))
    store = Store(Path(campaign.config.paths.store))
    store.prepare()
    steps = in_order([assemble(campaign, {}, {}).track])
    for step in steps:
        with store.staging(step.stage.kind, step.key) as out:
            if step.stage.kind == "decision":
                (out / "decision.json").write_text(_decision().model_dump_json())
            store.commit(out, _manifest(step))
    return len(steps)


def _database(path: Path) -> None:
    """What quantgate reads of MLflow's database without MLflow: one finished run, and nobody with an alias."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE runs (run_uuid, status, lifecycle_stage)")
        database.execute("INSERT INTO runs VALUES ('done', 'FINISHED', 'active')")
        database.execute("CREATE TABLE registered_model_aliases (name, alias, version)")
        database.commit()


def _decision() -> Decision:
    return Decision(
        version=1, campaign="many", outcome="hold", winner=None, headline="hold", detail="", would_change=(),
        reference="baseline", candidates=(), gate={}, conditions={}, base={},
    )  # fmt: skip


def _manifest(step: Step) -> Manifest:
    return Manifest(
        kind=step.stage.kind, stage=step.stage.name, version=1, key=step.key, config=step.config_data,
        inputs=step.input_keys, toolchain=dict(step.toolchain), device=None, facts={"run_id": "done", "link": ""},
        files={}, started="2026-11-01T00:00:00+00:00", seconds=1.0, peak_rss=0,
    )  # fmt: skip


if __name__ == "__main__":
    main()
