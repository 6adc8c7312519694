"""The environment variables a child process gets: enough to run, nothing that changes which code it imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# Python's own variables change what is imported or how it runs; these few only say how it talks and caches.
_KEPT_PYTHON = frozenset(
    {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONHASHSEED"}
)
_DROPPED = frozenset(
    {"VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "__PYVENV_LAUNCHER__", "MLFLOW_RUN_ID"}
)
_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy"})
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SETTINGS = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads collapse on a shared machine
    "TOKENIZERS_PARALLELISM": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """A child's environment in this interpreter: ours without what would change its imports."""
    return _without_proxies_where_useless(_clean() | _SETTINGS, extra) | dict(extra)


def foreign(extra: Mapping[str, str], package_path: Path, bin_dir: Path) -> dict[str, str]:
    """A child's environment in an interpreter that is not ours: besides, nothing on its paths leads back to ours.

    `package_path` holds our package and nothing else; `bin_dir` the programs of the child's own environment.
    """
    env = environment(extra)
    env["PYTHONPATH"] = os.pathsep.join([str(package_path), *([extra["PYTHONPATH"]] if "PYTHONPATH" in extra else [])])
    env["PATH"] = os.pathsep.join([str(bin_dir), *_elsewhere(env.get("PATH", os.defpath))])
    if "LD_LIBRARY_PATH" in env:
        env["LD_LIBRARY_PATH"] = os.pathsep.join(_elsewhere(env["LD_LIBRARY_PATH"]))
    return env


def installing() -> dict[str, str]:
    """The environment of an installer: its indexes, certificates and proxies are the user's, its destination is not."""
    steering = {"PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON", "PIP_NO_DEPS", "PIP_CONSTRAINT",
                "PIP_REQUIREMENT", "PIP_REQUIRE_VIRTUALENV", "PIP_DRY_RUN", "UV_PYTHON", "UV_PROJECT_ENVIRONMENT",
                "UV_CONSTRAINT", "UV_OVERRIDE", "UV_SYSTEM_PYTHON", "UV_NO_DEPS"}  # fmt: skip
    return {name: value for name, value in _clean().items() if name not in steering} | {"PYTHONUNBUFFERED": "1"}


def _clean() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED and (name in _KEPT_PYTHON or not name.startswith("PYTHON"))
    }


def _without_proxies_where_useless(env: dict[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Engines answer on loopback, which no proxy reaches; and a stage that may reach no hub needs no proxy at all,
    whose address often holds a password. Other proxies stay: a hub may lie behind them."""
    if extra.get("HF_HUB_OFFLINE") == "1":
        return {name: value for name, value in env.items() if name.lower() not in _PROXIES}
    for name in ("no_proxy", "NO_PROXY"):
        known = [host for host in env.get(name, "").split(",") if host]
        env[name] = ",".join([*known, *(host for host in _LOOPBACK if host not in known)])
    return env


def _elsewhere(path: str) -> list[str]:
    """The entries of a search path that lie outside our own environment and any other that is active."""
    ours = [Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
    ours += [Path(active) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if (active := os.environ.get(name))]
    return [entry for entry in path.split(os.pathsep) if entry and not any(_inside(Path(entry), o) for o in ours)]


def _inside(path: Path, root: Path) -> bool:
    return path.absolute().is_relative_to(root.absolute())
