"""Whether an engine that exists can run here: it belongs to the GPUs, the TensorRT and the split it was built for.

TensorRT has no check of its own but to deserialize, which fails late and says little (#1838, #1324, #3031, #1695).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipelines.errors import Problem
from pipelines.flow.store import Manifest

BOUND = {"image": "image", "tensorrt": "TensorRT", "tensorrt_llm": "TensorRT-LLM"}
"""What of a toolchain a plan is tied to, and what people call it."""


def mismatches(made: Manifest, device: Mapping[str, str], toolchain: Mapping[str, str]) -> list[Problem]:
    """Say everything that is not as it was built: `device` and `toolchain` are those of now. Pure; what is unknown on
    one side says nothing."""
    return [*_device(made, device), *_toolchain(made, toolchain)]


def _device(made: Manifest, device: Mapping[str, str]) -> Iterator[Problem]:
    facts = made.facts
    sm, here = facts.get("gpu_sm"), device.get("gpu_sm")
    if sm is not None and here is None:
        yield Problem("gpu", device.get("gpu", "none"), f"it was built for SM {sm}, and there is no GPU here")
    elif sm is not None and str(sm) not in str(here).split(","):
        yield Problem("gpu", here, f"it was built for SM {sm}, and a plan runs on that alone (#3031)")
    ranks, count = _whole(facts.get("tp")) * _whole(facts.get("pp")), device.get("gpu_count")
    if count is not None and int(count) < ranks:
        yield Problem("gpu_count", int(count), f"it has {ranks} ranks, a GPU each")
    built, now = str(facts.get("driver") or ""), device.get("driver", "")
    if built and now and _major(now) < _major(built):
        yield Problem("driver", now, f"it was built with driver {built}, and an older one may not run its kernels")


def _toolchain(made: Manifest, toolchain: Mapping[str, str]) -> Iterator[Problem]:
    for name, called in BOUND.items():
        before, now = made.toolchain.get(name), toolchain.get(name)
        if before and now and before != now:
            yield Problem(name, now, f"it was built with {called} {before}, and runs with that only (#1838, #1324)")


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 1


def _major(driver: str) -> int:
    first = driver.partition(".")[0]
    return int(first) if first.isdigit() else 0
