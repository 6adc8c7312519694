"""Stages in other interpreters: a bare environment, a container's stand-in; what they see, what is kept of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipelines import stages
from pipelines.engine.table import TARGETS
from pipelines.errors import Problem
from pipelines.flow import venvs
from pipelines.flow.executor import Event, Outcome, execute
from pipelines.flow.launch import PACKAGE, launch, package_path, serving
from pipelines.flow.locks import Held
from pipelines.flow.locks import locked as locked_file
from pipelines.flow.plan import plan
from pipelines.flow.stage import Stage, Step
from pipelines.flow.store import Manifest, Store, hash_tree, manifest
from pipelines.flow.toolchain import Toolchain, VenvConfig, carried, toolchains
from pipelines.quantize.baseline import BaselineConfig
from pipelines.quantize.table import QUANTIZERS
from tests import fake_docker

# pydantic and what it needs: all that a toolchain must hold besides its vendor's library.
WORKER = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions")
DIGEST = "sha256:" + "0123456789abcdef" * 4
IMAGE: dict[str, Any] = {"kind": "container", "image": "vendor/engine:1", "digest": DIGEST, "model_cache": None}
BASELINE = Stage(
    "variant", "variant.baseline", 1, "pipelines.quantize.baseline:run", "pipelines.quantize.baseline:BaselineConfig"
)
STAGES = (stages.CHECKPOINT, stages.CALIBRATION, stages.REFERENCE)
MOVABLE = sorted(
    {n for row in QUANTIZERS.values() for n in (row.function, row.config_type)}
    | {n for row in TARGETS.values() for n in (row.build, row.config_type)}
    | {n for stage in STAGES for n in (stage.function, stage.config_type)}
)
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    """A toolchain whose environment holds pydantic alone, made by hand from what is installed here."""
    home = tmp_path_factory.mktemp("toolchains")
    pinned = {name: metadata.version(name) for name in WORKER}
    (home / "bare.txt").write_text("\n".join(f"{name}=={version}" for name, version in pinned.items()))
    problems: list[Problem] = []
    data = {"kind": "venv", "python": VERSION, "lock": str(home / "bare.txt"), "env": {"BARE": "yes"}}
    made = toolchains({"bare": data}, home, problems)["bare"]
    assert ([], True) == (problems, isinstance(made.spec, VenvConfig))
    where = venvs.venv(made, made.spec)  # type: ignore[arg-type]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(where.path)], check=True)
    for name in WORKER:
        for top in {Path(str(file)).parts[0] for file in metadata.files(name) or ()} - {"..", "__pycache__"}:
            (where.site_packages / top).symlink_to(metadata.distribution(name).locate_file(top))  # type: ignore[arg-type]
    (where.path / venvs.NOTE).write_text("{}")
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.prepare()
    return made


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for docker at the front of PATH."""
    fake_docker.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "bin"


def container(**changes: Any) -> Toolchain:
    problems: list[Problem] = []
    made = toolchains({"vendor": IMAGE | changes}, Path("/none"), problems)["vendor"]
    assert [] == problems
    return made


def checkpoint(store: Store, where: Path, key: str = "c" * 64) -> Step:
    """A checkpoint artifact that links to files outside the store, as a base given by path is kept."""
    where.mkdir()
    save_file({"model.layers.0.q_proj.weight": np.ones((4, 4), np.float16)}, where / "model.safetensors")
    (where / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with store.staging("checkpoint", key) as out:
        for file in where.iterdir():
            (out / file.name).symlink_to(file)
        record = Manifest(
            kind="checkpoint", stage="checkpoint", version=1, key=key, config={}, inputs={}, toolchain={}, device=None,
            facts={}, files=hash_tree(out), started="2026-11-01T00:00:00+00:00", seconds=0.0, peak_rss=0,
        )  # fmt: skip
        store.commit(out, record)
    step = Step(Stage("checkpoint", "checkpoint", 1, "", ""), "checkpoint", BaselineConfig())
    step.__dict__["key"] = key  # as if it had been made from this
    return step


def baseline(given: Step, runs_in: Toolchain, stage: Stage = BASELINE) -> Step:
    versions = runs_in.versions(stage.packages)
    return Step(stage, "variant", BaselineConfig(), {"checkpoint": given}, versions, runs_in=runs_in)


def run(store: Store, *goals: Step, env: Mapping[str, str] | None = None) -> dict[str, Outcome]:
    return execute(plan(goals, store), store, lambda _: None, env or {})


# A bare environment


@pytest.mark.parametrize("name", ["pipelines.flow.worker:main", *MOVABLE])
def test_a_worker_and_every_stage_that_can_be_moved_import_with_pydantic_alone(
    bare: Toolchain, store: Store, name: str
) -> None:
    """Neither Hydra nor MLflow nor any vendor is needed to find a stage's function and read its configuration."""
    module, _, attribute = name.partition(":")
    started = launch(bare, store.root / "r.json", store.root, [], {}, "x")
    code = f"import {module}, sys; assert hasattr({module}, {attribute!r}); assert 'omegaconf' not in sys.modules"
    done = subprocess.run([started.argv[0], "-P", "-c", code], env=started.env, capture_output=True, text=True)
    assert (0, "") == (done.returncode, done.stderr)


def test_a_child_finds_our_package_and_nothing_else_of_ours(
    bare: Toolchain, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poison on PYTHONPATH, in the user site and in the working directory is not imported; neither is what we have
    installed, and of ours there is the package alone, which is a link to this one."""
    for place in ("path", "user/lib/python" + VERSION + "/site-packages", "cwd"):
        (tmp_path / place).mkdir(parents=True)
        for module in ("sitecustomize", "usercustomize", "pydantic", "safetensors"):
            (tmp_path / place / f"{module}.py").write_text("raise SystemExit('poisoned')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    code = (
        "import json, sys, importlib.util, pydantic, pipelines\n"
        "print(json.dumps([sys.path, pipelines.__file__, pydantic.__file__,"
        " [m for m in ('numpy', 'safetensors', 'hydra', 'tests') if importlib.util.find_spec(m)]]))"
    )
    started = launch(bare, store.root / "r.json", store.root, [], {}, "x")
    done = subprocess.run(
        [started.argv[0], "-P", "-c", code], env=started.env, capture_output=True, text=True, cwd=tmp_path / "cwd"
    )
    assert (0, "") == (done.returncode, done.stderr)
    path, ours, theirs, found = json.loads(done.stdout)
    assert [] == found
    assert [] == [p for p in path if p.startswith((sys.prefix, str(tmp_path / "path"), str(tmp_path / "user")))]
    place = package_path(store.root)
    assert (str(place), [place / "pipelines"]) == (path[0], list(place.iterdir()))
    assert PACKAGE == (place / "pipelines").resolve()
    assert (str(place / "pipelines" / "__init__.py"), True) == (ours, "site-packages/pydantic" in theirs)


def test_a_stage_runs_in_its_environment_and_says_so(bare: Toolchain, store: Store, tmp_path: Path) -> None:
    """The manifest names the toolchain and the versions found there, and is not simulated."""
    stage = Stage(**{f: getattr(BASELINE, f) for f in ("kind", "name", "version", "function", "config_type")},
                  packages=("pydantic",))  # fmt: skip
    step = baseline(checkpoint(store, tmp_path / "base"), bare, stage)
    outcome = run(store, step)[step.key]
    assert ("made", "") == (outcome.state, outcome.message)
    record = manifest(store.path("variant", step.key))
    known = {"python": VERSION, "pydantic": metadata.version("pydantic"), "toolchain": "bare", "env": "BARE=yes"}
    assert known == record.toolchain
    assert not record.simulated


def test_the_toolchain_is_part_of_the_key(bare: Toolchain, store: Store, tmp_path: Path) -> None:
    """The same stage in another interpreter is another artifact."""
    given = checkpoint(store, tmp_path / "base")
    keys = {
        baseline(given, t).key for t in (bare, Toolchain("current"), container(), container(digest=DIGEST[:-1] + "0"))
    }
    assert 4 == len(keys)


def test_steps_of_unlike_toolchains_do_not_share_a_process(bare: Toolchain, store: Store, tmp_path: Path) -> None:
    """One batch is two children where it spans two interpreters, and each runs in its own."""
    given = checkpoint(store, tmp_path / "base")
    steps = [baseline(given, bare), baseline(given, Toolchain("current"))]
    both = [Step(s.stage, s.label, s.config, s.inputs, s.toolchain, batch="b", runs_in=s.runs_in) for s in steps]
    outcomes = run(store, *both)
    assert ["made", "made"] == [outcomes[s.key].state for s in both]
    requests = [json.loads((store.root / ".requests" / f"{s.key[:16]}.json").read_text()) for s in both]
    assert [1, 1] == [len(r["steps"]) for r in requests]


@pytest.mark.parametrize("kind", ["current", "bare", "container"])
def test_the_printed_command_repeats_a_failed_step_in_every_kind(
    request: pytest.FixtureRequest, store: Store, tmp_path: Path, kind: str
) -> None:
    """Pasted into a shell with nothing set, it fails for the same reason."""
    docker: Path | None = request.getfixturevalue("docker") if kind == "container" else None
    where = {"current": Toolchain("current"), "container": container()}.get(kind) or request.getfixturevalue("bare")
    given = checkpoint(store, tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    step = baseline(given, where)
    outcome = run(store, step)[step.key]
    assert "the base is quantized already" in outcome.message
    env = {"PATH": f"{docker}:{os.defpath}" if docker else os.defpath, "HOME": str(tmp_path)}
    again = subprocess.run(
        outcome.command, shell=True, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (1, "") == (again.returncode, again.stderr)
    assert "the base is quantized already" in again.stdout


def test_drift_stops_a_stage_before_it_starts(bare: Toolchain, store: Store, tmp_path: Path) -> None:
    """An environment that is not as its lock says runs nothing: each distribution, both versions and the command."""
    where = venvs.venv(bare, bare.spec)  # type: ignore[arg-type]
    (info,) = where.site_packages.glob("pydantic-*.dist-info")
    aside = info.rename(tmp_path / info.name)
    step = baseline(checkpoint(store, tmp_path / "base"), bare)
    try:
        outcome = run(store, step)[step.key]
    finally:
        aside.rename(info)
    locked = metadata.version("pydantic")
    assert "failed" == outcome.state
    assert f"pydantic is locked at {locked}, installed: absent" in outcome.message
    assert "quantgate toolchain sync bare" in outcome.message
    assert not store.has("variant", step.key)


def test_a_version_other_than_the_keys_fails_the_step(store: Store, tmp_path: Path) -> None:
    """What the key says of a library and what is installed must agree, or the artifact would lie."""
    stage = Stage(**{f: getattr(BASELINE, f) for f in ("kind", "name", "version", "function", "config_type")},
                  packages=("pydantic",))  # fmt: skip
    step = Step(stage, "v", BaselineConfig(), {"checkpoint": checkpoint(store, tmp_path / "base")}, {"pydantic": "1.0"})
    outcome = run(store, step)[step.key]
    assert f"pydantic is {metadata.version('pydantic')}, not 1.0" in outcome.message


# A container's stand-in


def test_a_stage_runs_in_a_container_with_the_stores_path_translated(
    docker: Path, store: Store, tmp_path: Path
) -> None:
    """The request speaks of paths inside; what comes out lies in the store, its links hold outside, and it says that
    it was simulated, by which image, and with what versions."""
    stage = Stage(**{f: getattr(BASELINE, f) for f in ("kind", "name", "version", "function", "config_type")},
                  packages=("pydantic",))  # fmt: skip
    step = baseline(checkpoint(store, tmp_path / "base"), container(), stage)
    outcome = run(store, step)[step.key]
    assert ("made", "") == (outcome.state, outcome.message)
    request = json.loads((store.root / ".requests" / f"{step.key[:16]}.json").read_text())
    assert "/quantgate/store" == request["store"]
    record = manifest(store.path("variant", step.key))
    assert record.simulated
    assert {"toolchain": "vendor", "image": DIGEST, "python": VERSION, "pydantic": metadata.version("pydantic")} == (
        record.toolchain
    )
    assert (store.path("variant", step.key) / "model.safetensors").is_file()


def test_the_command_line_of_a_run(docker: Path, store: Store, tmp_path: Path) -> None:
    """Mounts are the store, the package and the directory the checkpoint links to; then the container is removed."""
    step = baseline(checkpoint(store, tmp_path / "base"), container())
    run(store, step, env={"OMP_NUM_THREADS": "2"})
    calls = fake_docker.calls(docker)
    (argv,) = [c for c in calls if c[0] == "run"]
    options, image, words = fake_docker.parsed(argv)
    base = str(tmp_path / "base")
    assert {"/quantgate/store": str(store.root), "/quantgate/packages/pipelines": str(PACKAGE), base: base} == (
        fake_docker.mounts(options)
    )
    assert [m for m in options["--mount"] if not m.endswith(",readonly")] == [options["--mount"][0]]
    assert "OMP_NUM_THREADS=2" in options["--env"]
    assert (f"vendor/engine@{DIGEST}", ["-P", "-m", "pipelines.flow.worker"]) == (image, words[:3])
    assert f"/quantgate/store/.requests/{step.key[:16]}.json" == words[3]
    assert ["rm", "--force", options["--name"][0]] == calls[-1]


def test_what_reads_a_simulated_artifact_is_simulated(docker: Path, store: Store, tmp_path: Path) -> None:
    """The label goes down with the data, whatever runs the later stage."""
    first = baseline(checkpoint(store, tmp_path / "base"), container())
    second = baseline(first, Toolchain("current"))
    assert "made" == run(store, second)[second.key].state
    assert manifest(store.path("variant", second.key)).simulated


def test_a_simulated_artifact_does_not_stand_in_for_a_real_one(docker: Path, store: Store, tmp_path: Path) -> None:
    """The next run makes it again; one that is simulated itself reuses it, and a real one would not."""
    first = baseline(checkpoint(store, tmp_path / "base"), container())
    run(store, first)
    planned = plan([first], store).steps[-1]
    assert ("run", "made before, but by a simulated container") == (planned.state, planned.why)
    assert "reused" == run(store, first)[first.key].state
    path = store.path("variant", first.key) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"simulated": False}))
    assert "reuse" == plan([first], store).steps[-1].state


@pytest.mark.parametrize(
    ("trouble", "said"),
    [("no-daemon", "docker is on PATH but does not answer"), ("no-registry", "manifest unknown")],
)
def test_a_container_that_cannot_be_had_is_one_clear_failure(
    docker: Path, store: Store, tmp_path: Path, trouble: str, said: str
) -> None:
    """No daemon, or no image to fetch: the step fails with the reason and what to do; nothing is half-written."""
    (docker / trouble).touch()
    (docker / "no-image").touch()
    step = baseline(checkpoint(store, tmp_path / "base"), container())
    outcome = run(store, step)[step.key]
    assert ("failed", "quantgate toolchain sync vendor") == (outcome.state, outcome.command)
    assert said in outcome.message
    assert not store.has("variant", step.key)


def test_a_missing_image_is_fetched_by_its_digest(docker: Path, store: Store, tmp_path: Path) -> None:
    """A run fetches what it needs, and tells that it does."""
    (docker / "no-image").touch()
    events: list[Event] = []
    step = baseline(checkpoint(store, tmp_path / "base"), container())
    execute(plan([step], store), store, events.append, {})
    assert ["pull", f"vendor/engine@{DIGEST}"] in fake_docker.calls(docker)
    assert ("preparing", f"toolchain vendor: fetching vendor/engine@{DIGEST}") == (events[-3].what, events[-3].text)


# Engines' servers


def engine(store: Store, runs_in: Toolchain, key: str = "e" * 64) -> Path:
    """An engine artifact as a toolchain made it."""
    with store.staging("engine", key) as out:
        (out / "hello").write_text("hello from inside")
        record = Manifest(
            kind="engine", stage="engine", version=1, key=key, config={}, inputs={}, facts={}, files=hash_tree(out),
            toolchain=runs_in.versions([]), device=None, started="2026-11-01T00:00:00+00:00", seconds=0.0, peak_rss=0,
        )  # fmt: skip
        return store.commit(out, record)


def test_an_engine_is_served_in_the_container_that_made_it(
    docker: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine's network so that loopback reaches it, everything read-only, paths as they are inside; the stage
    knows the toolchain from its environment, and the container is removed by name."""
    vendor = container()
    monkeypatch.setenv(*next(iter(carried([vendor, Toolchain("current")]).items())))
    where = engine(store, vendor)
    with serving(where, ["cat", f"{where}/hello"], {"CARD": f"{where}/card.json"}) as started:
        done = subprocess.run(started.argv, env=started.env, capture_output=True, text=True, check=True)
        started.tidy()
    assert "hello from inside" == done.stdout
    *_, argv, last = fake_docker.calls(docker)
    options, image, words = fake_docker.parsed(argv)
    inside = f"/quantgate/store/engine/{where.name}"
    assert (["host"], f"vendor/engine@{DIGEST}", [f"{inside}/hello"]) == (options["--network"], image, words)
    assert f"CARD={inside}/card.json" in options["--env"]
    assert [] == [m for m in options["--mount"] if not m.endswith(",readonly")]
    assert ["rm", "--force", options["--name"][0]] == last


def test_an_engine_is_served_in_the_environment_that_made_it(
    bare: Toolchain, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's name is looked up among the environment's own programs first."""
    monkeypatch.setenv(*next(iter(carried([bare]).items())))
    where = engine(store, bare)
    with serving(where, ["python", "-c", "import sys; print(sys.prefix)"], {}) as started:
        done = subprocess.run(started.argv, env=started.env, capture_output=True, text=True, check=True)
    assert str(venvs.venv(bare, bare.spec).path) == done.stdout.strip()  # type: ignore[arg-type]


def test_an_engine_of_a_toolchain_that_is_not_configured_is_not_served(store: Store) -> None:
    """The toolchain is named."""
    where = engine(store, container())
    with pytest.raises(venvs.EnvironmentProblem, match="toolchain vendor: not configured here"), serving(where, [], {}):
        pass


@pytest.fixture
def hanging(docker: Path, store: Store, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run in another process whose container does not come to an end."""
    (docker / "docker").write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase $1 in image|info) echo 1;; run) trap \'echo TERM >> '
        f"{tmp_path}/calls; exit 143' TERM; touch {tmp_path}/running; while :; do sleep 0.1; done;; esac\n"
    )
    checkpoint(store, tmp_path / "base")
    code = (
        "from pathlib import Path; from tests.contract.test_toolchains import *\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it\n"
        f"store = Store(Path({str(store.root)!r})); given = Step(Stage('checkpoint', 'checkpoint', 1, '', ''), 'c', "
        "BaselineConfig()); given.__dict__['key'] = 'c' * 64\n"
        "run(store, baseline(given, container()))"
    )
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen([sys.executable, "-c", code], cwd=root, text=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "running").exists() and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.05)
    yield child, tmp_path / "calls"
    child.kill()
    child.wait()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_run_ends_its_container(
    hanging: tuple[subprocess.Popen[str], Path], how: signal.Signals
) -> None:
    """Ctrl-C stops the client and removes the container by name; kill -9 still stops the client, which is tethered."""
    child, calls = hanging
    child.send_signal(how)
    child.wait(timeout=60)
    wanted = "rm --force quantgate-" if how == signal.SIGINT else "TERM"
    deadline = time.monotonic() + 30
    while wanted not in calls.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "TERM" in calls.read_text()
    assert wanted in calls.read_text()


# Environments made from a lock, with wheels that hold nothing but their names


def wheel(directory: Path, name: str, version: str, needs: str = "") -> None:
    """Write a wheel without code; `needs` is a requirement it declares."""
    import zipfile

    stem = f"{name}-{version}"
    said = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (f"Requires-Dist: {needs}\n" if needs else "")
    with zipfile.ZipFile(directory / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", said)
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")


LIBRARY = "pydantic==2.0\noldlib==0.1\n"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of empty wheels: an old library that asks for something nobody has, and the worker's need."""
    directory = tmp_path_factory.mktemp("wheels")
    wheel(directory, "pydantic", "2.0")
    wheel(directory, "oldlib", "0.1", "triton==99")
    return directory


def locked(home: Path, index: Path, lock: str, **changes: Any) -> venvs.Venv:
    (home / "lock.txt").write_text(f"--no-index\n--find-links {index}\n{lock}")
    data = {"kind": "venv", "python": VERSION, "lock": str(home / "lock.txt"), "installer": "pip"} | changes
    problems: list[Problem] = []
    made = toolchains({"old": data}, home / "made", problems)["old"]
    assert ([], True) == (problems, isinstance(made.spec, VenvConfig))
    return venvs.venv(made, made.spec)  # type: ignore[arg-type]


def nobody(done: int, total: int, what: str) -> None:
    """Progress that nobody watches."""


def test_two_runs_make_one_environment_and_a_half_made_one_is_replaced(index: Path, tmp_path: Path) -> None:
    """What was cut short is not used, and made anew; of two at once one makes it and the other finds it made.
    Distributions named in no_deps come without what they ask for."""
    wanted = locked(tmp_path, index, LIBRARY, no_deps=["oldlib"])
    (wanted.path / "bin").mkdir(parents=True)
    (wanted.path / "bin" / "python").write_text("half")
    with pytest.raises(venvs.EnvironmentProblem, match="quantgate toolchain sync old"), venvs.in_use(wanted):
        pass
    code = (
        "from pathlib import Path; from tests.contract.test_toolchains import LIBRARY, locked, nobody, venvs\n"
        f"wanted = locked(Path({str(tmp_path)!r}), Path({str(index)!r}), LIBRARY, no_deps=['oldlib'])\n"
        "print(venvs.make(wanted, nobody))"
    )
    root = Path(__file__).resolve().parents[2]
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    assert ["made", "there"] == sorted(p.communicate()[0].strip() for p in both)
    assert (True, [], []) == (wanted.made, wanted.drift(), wanted.beyond())


def test_progress_is_told_by_distribution(index: Path, tmp_path: Path) -> None:
    """Whoever waits sees what pip is at."""
    told: list[str] = []
    venvs.make(locked(tmp_path, index, "pydantic==2.0\n"), lambda done, total, what: told.append(what))
    assert ["making the environment", "pydantic-2.0-py3-none-any.whl", "installing"] == told


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_only_a_repair_makes_a_changed_environment_anew(
    index: Path, tmp_path: Path, installer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was installed by hand is drift; making says that the environment is there, and repairing replaces it."""
    if installer == "uv":
        if not (Path(sys.prefix) / "bin" / "uv").exists():
            pytest.skip("needs uv, which `make install` brings")
        monkeypatch.setenv("PATH", f"{sys.prefix}/bin:{os.environ['PATH']}")
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    wanted = locked(tmp_path, index, LIBRARY, installer=installer, no_deps=["oldlib"])
    assert "made" == venvs.make(wanted, nobody)
    assert installer == json.loads((wanted.path / venvs.NOTE).read_text())["installer"]
    (info,) = wanted.site_packages.glob("pydantic-*.dist-info")
    (info / "METADATA").unlink()  # uv's environments share files with its cache
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pydantic\nVersion: 2.1\n")
    assert ["pydantic is locked at 2.0, installed: 2.1"] == [str(d) for d in wanted.drift()]
    assert ("there", "made") == (venvs.make(wanted, nobody), venvs.make(wanted, nobody, repair=True))
    assert [] == wanted.drift()


def test_what_cannot_be_installed_leaves_nothing(index: Path, tmp_path: Path) -> None:
    """The installer's last words are told, and no half of an environment is left to be used."""
    wanted = locked(tmp_path, index, "pydantic==2.0\nnosuchlib==1.0\n")
    with pytest.raises(venvs.EnvironmentProblem, match=r"nosuchlib==1\.0"):
        venvs.make(wanted, nobody)
    assert [] == [p.name for p in (tmp_path / "made").iterdir() if p.is_dir()]


def test_an_interpreter_that_is_not_there_is_told(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error with the version and what to do; a shim on PATH that does not run counts as none."""
    shims = tmp_path / "shims"
    shims.mkdir()
    (shims / "python3.77").write_text("#!/bin/sh\necho 'no such version' >&2\nexit 127\n")
    (shims / "python3.77").chmod(0o755)
    monkeypatch.setenv("PATH", f"{shims}:{os.environ['PATH']}")
    wanted = locked(tmp_path, index, "pydantic==2.0\n", python="3.77")
    with pytest.raises(
        venvs.EnvironmentProblem, match=r"toolchain\.old\.python='3\.77': no python3\.77 on PATH that runs"
    ):
        venvs.make(wanted, nobody)


def test_an_environment_in_use_is_not_made_anew(bare: Toolchain) -> None:
    """One that is as its lock says is simply there; a repair of one that is not waits for the stages that run in it."""
    where = venvs.venv(bare, bare.spec)  # type: ignore[arg-type]
    with venvs.in_use(where), venvs.in_use(where):  # stages share it
        assert "there" == venvs.make(where, nobody, repair=True)
        with pytest.raises(Held), locked_file(where.path.with_name(f".{where.path.name}.lock"), wait_s=0):
            pass


def test_a_changed_lock_is_another_environment(index: Path, tmp_path: Path) -> None:
    """An environment never changes under a run that uses it."""
    one, two = (locked(tmp_path, index, lock).path for lock in ("pydantic==2.0\n", LIBRARY))
    assert one != two
