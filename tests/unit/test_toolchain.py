"""Toolchains as values: what they are parsed from, what enters keys, where steps are put, what a container is told."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipelines.compose import compose
from pipelines.errors import ConfigError, Problem
from pipelines.flow import containers, lockfile, surroundings, venvs
from pipelines.flow.placement import Placement
from pipelines.flow.toolchain import CARRIED, ContainerConfig, Toolchain, VenvConfig, toolchains, versions
from tests import fake_docker

DIGEST = "sha256:" + "0123456789abcdef" * 4
IMAGE: dict[str, Any] = {"kind": "container", "image": "nvcr.io/nvidia/tensorrt-llm/release:1.2.1", "digest": DIGEST}
LOCK = "# pinned\nTorch==2.13.0\npydantic==2.14.4\nauto_gptq==0.7.1  # old\n"


def read(given: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Toolchain], list[str]]:
    problems: list[Problem] = []
    found = toolchains(given, Path("/made"), problems)
    return found, [str(p) for p in problems]


@pytest.fixture
def legacy(tmp_path: Path) -> dict[str, Any]:
    """A venv toolchain's configuration with a small lock."""
    (tmp_path / "lock.txt").write_text(LOCK)
    return {"kind": "venv", "python": "3.11", "lock": str(tmp_path / "lock.txt")}


def test_the_shipped_toolchains_are_valid() -> None:
    """conf/toolchain/ parses without a problem, and the legacy lock pins what its quantizers and the worker need."""
    found, problems = read(compose([])["toolchain"])
    assert ([], True) == (problems, {"current", "legacy", "trtllm"} <= found.keys())
    assert [] == found["legacy"].lacks(["autoawq", "auto-gptq", "torch", "transformers", "pydantic"])
    assert "4.51.3" == found["legacy"].pinned["transformers"]


def test_current_is_always_there_and_adds_nothing_to_keys() -> None:
    """Without any configuration there is `current`, whose versions are this interpreter's alone."""
    found, _ = read({})
    assert ["current"] == list(found)
    assert versions(["pydantic"]) == found["current"].versions(["pydantic"])


def test_a_venv_is_known_by_its_lock_before_it_is_made(legacy: dict[str, Any]) -> None:
    """Versions enter keys from the lock, by whatever spelling of a name; what it does not hold is absent."""
    found, problems = read({"legacy": legacy})
    told = found["legacy"].versions(["torch", "auto-gptq", "autoawq"])
    assert [] == problems
    assert {
        "python": "3.11",
        "torch": "2.13.0",
        "auto-gptq": "0.7.1",
        "autoawq": "absent",
        "toolchain": "legacy",
    } == told


def test_a_container_is_known_by_its_digest() -> None:
    """The digest stands for every version inside."""
    found, _ = read({"trtllm": IMAGE})
    assert {"toolchain": "trtllm", "image": DIGEST} == found["trtllm"].versions(["torch"])


def test_a_toolchains_own_variables_enter_the_key() -> None:
    """They may change what a library computes, in whatever order they are written."""
    told = [
        read({"t": IMAGE | {"env": env}})[0]["t"].versions([]) for env in ({"A": "1", "B": "2"}, {"B": "2", "A": "1"})
    ]
    assert ["A=1 B=2", "A=1 B=2"] == [t["env"] for t in told]


def test_how_something_is_compiled_is_part_of_the_key(legacy: dict[str, Any], tmp_path: Path) -> None:
    """Settings and the content of the build's file make another environment and other keys; where it lies does not."""
    made, builds = [], []
    for folder, content, native in (("a", "x", "ON"), ("b", "x", "ON"), ("c", "y", "ON"), ("d", "x", "OFF")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "f.cmake").write_text(content)
        file = str(tmp_path / folder / "f.cmake")
        build = {"names": ["auto_gptq"], "file": file, "env": {"ARGS": f"-DNATIVE={native} -DINCLUDE={{file}}"}}
        found, problems = read({"x": legacy | {"build": build}})
        spec = found["x"].spec
        assert isinstance(spec, VenvConfig)
        assert spec.build is not None
        assert ([], {"ARGS": f"-DNATIVE={native} -DINCLUDE={file}"}) == (problems, spec.build.variables())
        made.append(venvs.venv(found["x"], spec).path.name)
        builds.append(found["x"].versions([])["build"])
    assert 3 == len(set(made)) == len(set(builds))
    assert (made[0], builds[0]) == (made[1], builds[1])
    plain, _ = read({"x": legacy})
    assert "build" not in plain["x"].versions([])


def test_what_is_compiled_comes_last_and_by_itself(legacy: dict[str, Any], tmp_path: Path) -> None:
    """What it is built with is there by then, and its settings reach no other build."""
    found, _ = read({"x": legacy | {"build": {"names": ["Auto-GPTQ"]}, "no_deps": ["torch"]}})
    spec = found["x"].spec
    assert isinstance(spec, VenvConfig)
    files = [tmp_path / name for name in ("first", "last", "built")]
    apart, built = venvs._split(venvs.venv(found["x"], spec), *files)
    assert ({"torch"}, {"auto-gptq"}) == (set(apart), set(built))
    assert [["pydantic==2.14.4"], ["Torch==2.13.0"], ["auto_gptq==0.7.1"]] == [
        f.read_text().split("\n")[:-1] for f in files
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "venvv"}, "toolchain.x.kind='venvv': no such kind of toolchain (did you mean 'venv'?"),
        ({"lock": "/no/such/lock.txt"}, "toolchain.x.lock='/no/such/lock.txt': no such lock file"),
        ({"python": "3.10"}, "toolchain.x.python='3.10'"),
        ({"pyhton": "3.11"}, "did you mean 'python'?"),
        ({"no_deps": ["triton"]}, "toolchain.x.no_deps='triton': is not in the lock"),
        ({"build": {"names": ["triton"]}}, "toolchain.x.build.names='triton': is not in the lock"),
        ({"build": {"names": ["torch"], "file": "/none.cmake"}}, "toolchain.x.build.file='/none.cmake': no such file"),
    ],
)
def test_a_wrong_venv_is_told(legacy: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    """Each mistake is one problem that names its key."""
    _, problems = read({"x": legacy | changes})
    assert 1 == len(problems)
    assert said in problems[0]


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        ("torch>=2\npydantic==2\n", "every line must pin a distribution by ==, and these do not: torch>=2"),
        ("-r other.txt\npydantic==2\n", "-r other.txt"),
        ("torch==2.13.0\n", "does not pin pydantic, which the worker needs"),
    ],
)
def test_a_lock_must_pin_everything(legacy: dict[str, Any], lock: str, said: str) -> None:
    """A line that would install another version tomorrow is an error, and so is a lock without the worker's need."""
    Path(legacy["lock"]).write_text(lock)
    assert said in read({"x": legacy})[1][0]


@pytest.mark.parametrize("digest", ["latest", "sha256:abc", "0123"])
def test_a_digest_is_a_digest(digest: str) -> None:
    """A tag or half a digest is none."""
    assert "toolchain.x.digest" in read({"x": IMAGE | {"digest": digest}})[1][0]


def place(kind: str, own: object, default: str, by_stage: Mapping[Any, str], **known: Toolchain) -> str:
    problems: list[Problem] = []
    placement = Placement({"current": Toolchain("current")} | known, by_stage)
    found = placement.row(kind, "variant.v.toolchain", own, default, (), problems)  # type: ignore[arg-type]
    assert [] == problems
    return found.name


def test_the_conf_file_wins_over_the_row_and_the_row_over_the_executor() -> None:
    """A row that names a toolchain needs it, so what is said of all stages of a kind moves only the others."""
    known = {name: Toolchain(name) for name in ("a", "b", "c")}
    assert "a" == place("variant", "a", "b", {"variant": "c"}, **known)
    assert "b" == place("variant", None, "b", {"variant": "c"}, **known)
    assert "c" == place("variant", None, "current", {"variant": "c"}, **known)
    assert "current" == place("variant", None, "current", {"engine": "c"}, **known)
    assert "current" == place("variant", "current", "b", {}, **known)


def test_an_unset_digest_is_one_problem_with_the_command_that_finds_it() -> None:
    """However many steps need the image, what to do is said once, and can be pasted into a shell."""
    found, _ = read({"trtllm": IMAGE | {"digest": None}})
    problems: list[Problem] = []
    placement = Placement(found, {})
    for kind in ("variant", "engine"):
        placement.row(kind, f"{kind}.x.toolchain", "trtllm", "current", (), problems)  # type: ignore[arg-type]
    assert ["toolchain.trtllm.digest"] == [p.key for p in problems]
    asked = shlex.split(problems[0].allowed.removeprefix("find it: "))
    assert [
        "docker",
        "pull",
        IMAGE["image"],
        "&&",
        "docker",
        "image",
        "inspect",
        "--format",
        "{{.RepoDigests}}",
    ] == asked[:9]


def test_an_unknown_toolchain_and_a_lock_without_the_library_are_told(legacy: dict[str, Any]) -> None:
    """A typo is answered with the nearest name; a toolchain that cannot hold the stage's library with what it lacks."""
    found, _ = read({"legacy": legacy})
    problems: list[Problem] = []
    Placement(found, {}).row("variant", "variant.v.toolchain", "legcy", "current", (), problems)
    Placement(found, {}).row("variant", "variant.v.toolchain", "legacy", "current", ("autoawq",), problems)
    assert "did you mean 'legacy'?" in str(problems[0])
    assert "its lock does not hold autoawq" in str(problems[1])


def test_drift_names_both_versions() -> None:
    """A locked version is also met by a build of it, and by nothing else."""
    locked = {"torch": "2.13.0", "peft": "0.14.0", "tqdm": "4.70.1", "rouge": "1.0.1"}
    found = lockfile.drift(locked, {"torch": "2.13.0+cpu", "peft": "0.21.2", "tqdm": "4.70.1"})
    assert ["peft is locked at 0.14.0, installed: 0.21.2", "rouge is locked at 1.0.1, installed: absent"] == [
        str(d) for d in found
    ]
    assert not lockfile.agrees("2.13.0+cpu", "2.13.0")


def test_a_lock_is_read_as_installers_read_it() -> None:
    """Continued lines, hashes, markers, comments and index options."""
    text = "--index-url https://example.org\na==1 \\\n  --hash=sha256:00\nB_c==2+cpu ; python_version > '3'\n\n# d==4\n"
    assert ["--index-url https://example.org", "a==1    --hash=sha256:00", "B_c==2+cpu ; python_version > '3'"] == (
        lockfile.lines(text)
    )
    kept, apart = lockfile.split(text, frozenset({"b-c"}))
    option = "--index-url https://example.org"
    assert ([option, "B_c==2+cpu ; python_version > '3'"], option) == (apart, kept[0])


# What a child is told


def test_nothing_that_steers_imports_reaches_a_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python's paths, start-up files, optimization and warnings, and marks of an active environment, are gone."""
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONOPTIMIZE", "PYTHONWARNINGS",
                 "VIRTUAL_ENV", "CONDA_PREFIX", "MLFLOW_RUN_ID"):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path))
    env = surroundings.environment({})
    assert {"PYTHONNOUSERSITE", "PYTHONUNBUFFERED"} == {n for n in env if n.startswith("PYTHON")} - {
        "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONPYCACHEPREFIX"
    }  # fmt: skip
    assert not {"VIRTUAL_ENV", "CONDA_PREFIX", "MLFLOW_RUN_ID"} & env.keys()


def test_another_interpreter_finds_no_program_of_the_active_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PATH begins with the child's own programs and has none of an active environment's; the system's stay."""
    active = tmp_path / "active"
    monkeypatch.setenv("VIRTUAL_ENV", str(active))
    monkeypatch.setenv("PATH", f"{active}/bin:/usr/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{active}/lib:/usr/local/cuda/lib64")
    env = surroundings.foreign({}, tmp_path / "package", tmp_path / "other" / "bin")
    assert [str(tmp_path / "other" / "bin"), "/usr/bin"] == env["PATH"].split(":")
    assert "/usr/local/cuda/lib64" == env["LD_LIBRARY_PATH"]
    assert str(tmp_path / "package") == env["PYTHONPATH"]


def test_loopback_never_goes_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub may lie behind a proxy, an engine never does; a stage that may reach no hub is told of no proxy."""
    monkeypatch.setenv("https_proxy", "http://ada:secret@proxy:3128")
    monkeypatch.setenv("no_proxy", "intranet")
    online, offline = surroundings.environment({}), surroundings.environment({"HF_HUB_OFFLINE": "1"})
    assert "http://ada:secret@proxy:3128" == online["https_proxy"]
    assert {"intranet", "127.0.0.1", "localhost", "::1"} == set(online["no_proxy"].split(","))
    assert "https_proxy" not in offline


def test_an_installer_installs_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's index, certificates and proxies are used; what would send packages elsewhere is not."""
    for name in ("PIP_INDEX_URL", "PIP_TARGET", "PIP_USER", "PIP_CONSTRAINT", "PYTHONPATH", "https_proxy"):
        monkeypatch.setenv(name, "x")
    kept = {"PIP_INDEX_URL", "PIP_TARGET", "PIP_USER", "PIP_CONSTRAINT", "PYTHONPATH", "https_proxy"}
    assert {"PIP_INDEX_URL", "https_proxy"} == kept & surroundings.installing().keys()


# The command line of a container


def command(spec: ContainerConfig, **env: str) -> list[str]:
    mounted = [containers.Mount(Path("/data/store"), containers.STORE, writable=True)]
    return containers.run_argv(spec, "quantgate-1", mounted, env, ["python3", "-m", "worker", "r.json"])


def test_a_container_is_isolated_and_goes_away() -> None:
    """Removed when it ends, never pulled in passing, no network, this user, memory to lock, GPUs, the digest alone."""
    options, image, words = fake_docker.parsed(command(ContainerConfig.model_validate(IMAGE))[1:])
    assert {"--rm", "--init", "--name", "--pull", "--network", "--ipc", "--ulimit", "--gpus", "--user", "--workdir",
            "--mount", "--entrypoint"} == options.keys()  # fmt: skip
    assert (["never"], ["none"], ["host"], ["all"]) == tuple(
        options[o] for o in ("--pull", "--network", "--ipc", "--gpus")
    )
    assert ["memlock=-1", "stack=67108864"] == options["--ulimit"]
    assert [f"{os.getuid()}:{os.getgid()}"] == options["--user"]
    assert f"nvcr.io/nvidia/tensorrt-llm/release@{DIGEST}" == image
    assert (["python3"], ["-m", "worker", "r.json"]) == (options["--entrypoint"], words)


def test_podman_has_its_own_words() -> None:
    """GPUs are devices to it."""
    spec = ContainerConfig.model_validate(IMAGE | {"runtime": "podman", "gpus": "0,1"})
    argv = command(spec)
    assert "podman" == argv[0]
    assert ["nvidia.com/gpu=0", "nvidia.com/gpu=1"] == [b for a, b in itertools.pairwise(argv) if a == "--device"]
    assert "--gpus" not in argv


def test_a_secret_is_passed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of `pass_env` are nowhere on the command line."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    argv = command(ContainerConfig.model_validate(IMAGE | {"pass_env": ["HF_TOKEN"]}))
    assert "HF_TOKEN" in argv
    assert not [word for word in argv if "hf_secret" in word]


def test_our_environment_does_not_go_into_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the stage is told and what the toolchain says; without a network it is told to ask no hub."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    spec = ContainerConfig.model_validate(IMAGE | {"env": {"TRTLLM_X": "1"}})
    env = containers.inner_env(spec, {"OMP_NUM_THREADS": "2", "PYTHONPATH": "/ours", CARRIED: "{}"})
    assert ("1", "2", "1", containers.PACKAGES) == tuple(
        env[n] for n in ("TRTLLM_X", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PYTHONPATH")
    )
    assert not {"AWS_SECRET_ACCESS_KEY", CARRIED} & env.keys()


def test_mounts_are_the_store_the_package_the_model_cache_and_what_inputs_link_to(tmp_path: Path) -> None:
    """The package and links are read-only; the cache too, where nothing can be fetched into it."""
    base, store, cache, package = (tmp_path / name for name in ("base", "store", "cache", "pipelines"))
    for path in (base, store / "checkpoint" / "k", cache, package):
        path.mkdir(parents=True)
    (base / "model.safetensors").write_bytes(b"x")
    (store / "checkpoint" / "k" / "model.safetensors").symlink_to(base / "model.safetensors")
    spec = ContainerConfig.model_validate(IMAGE | {"model_cache": str(cache)})
    found = containers.mounts(spec, store, package, [store / "checkpoint" / "k"])
    assert [
        (store, "/quantgate/store", True),
        (package, "/quantgate/packages/pipelines", False),
        (cache, "/quantgate/models", False),
        (base, str(base), False),
    ] == [(m.source, m.target, m.writable) for m in found]


def test_a_mount_says_any_path() -> None:
    """A comma in a path is quoted as CSV quotes it, since --mount is read as CSV."""
    said = str(containers.Mount(Path("/data/a,b"), "/in"))
    assert 'type=bind,"src=/data/a,b",dst=/in,readonly' == said


@pytest.mark.parametrize(
    ("image", "run"),
    [("repo/name:1.2", "repo/name"), ("host:5000/name", "host:5000/name"), ("host:5000/name:1", "host:5000/name")],
)
def test_the_tag_is_left_out_of_what_is_run(image: str, run: str) -> None:
    """A port is no tag."""
    assert f"{run}@{DIGEST}" == containers.reference(ContainerConfig.model_validate(IMAGE | {"image": image}))


def test_specs_are_strict() -> None:
    """An unknown key is refused."""
    with pytest.raises(ConfigError, match="unknown key"):
        from pipelines.config import parse

        parse(VenvConfig, {"kind": "venv", "python": "3.11", "lock": "x", "pipp": True})
