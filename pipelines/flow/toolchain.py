"""A toolchain names the interpreter a stage runs in, and gives its children a clean environment."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata

# What may pass from our environment into a stage: enough to run, nothing that changes which code is imported.
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "VIRTUAL_ENV", "MLFLOW_RUN_ID")


@functools.cache
def version_of(distribution: str) -> str:
    """The installed version of a distribution, or "absent"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions that enter a key: Python's own and those of the named distributions."""
    found = {name: version_of(name) for name in packages}
    return {"python": f"{sys.version_info.major}.{sys.version_info.minor}", **found}


def command(request: str) -> list[str]:
    """The argv that runs a request in this interpreter."""
    return [sys.executable, "-m", "pipelines.flow.worker", request]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """A child's environment: ours without what would change its imports, and threads that do not spin."""
    env = {k: v for k, v in os.environ.items() if k not in _DROPPED}
    env |= {
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads collapse on a shared machine
        "TOKENIZERS_PARALLELISM": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return env | dict(extra)
