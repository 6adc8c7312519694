"""What is read of GPUs through NVML: sums, extremes, whose memory it is, and what is not told."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.probe import gpu
from pipelines.probe.gpu import GpuLook, Gpus


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fresh stand-in for NVML, found where the bindings would be."""
    sys.modules.pop("tests.fake_nvml.pynvml", None)
    module = importlib.import_module("tests.fake_nvml.pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    yield module
    sys.modules.pop("tests.fake_nvml.pynvml", None)


def gpus(**env: str) -> Gpus:
    found, note = gpu.find(env)
    assert found is not None, note
    return found


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def test_two_gpus_in_one_look(nvml: Any) -> None:
    """300 + 400 W, 80 and 60 per cent busy, 60 and 61 degrees, 1980 and 1880 MHz, 5 + 5 kJ so far."""
    nvml.GPUS[0]["running"] = [process(7, 1_500_000_000)]
    nvml.GPUS[1]["running"] = [process(8, 500_000_000), process(99, 1)]
    assert gpus().look([7, 8]) == GpuLook(
        memory_bytes=2_000_000_000,
        utilisation_percent=70.0,
        power_w=700.0,
        energy_j=10_000.0,
        temperature_c=61.0,
        clock_mhz=1880.0,
        throttled="",
        others=1,
    )


def test_memory_is_the_whole_gpus_where_it_is_not_known_whose_it_is(nvml: Any) -> None:
    """A driver that hides other namespaces' processes, or their memory, leaves the sum; others are not counted then."""
    nvml.GPUS[0]["running"] = [process(4242, 1)]
    hidden = gpus().look([7])
    assert (6_000_000_000, None) == (hidden.memory_bytes, hidden.others)
    nvml.GPUS[0]["running"] = [process(7, None)]
    untold = gpus().look([7])
    assert (6_000_000_000, 0) == (untold.memory_bytes, untold.others)


def test_heat_is_a_slowdown_and_a_power_cap_is_not(nvml: Any) -> None:
    """Bits 0x20, 0x40, 0x80 and 0x08 protect the GPU; 0x04 is its power cap, 0x01 idleness."""
    nvml.GPUS[0]["reasons"], nvml.GPUS[1]["reasons"] = 0x01 | 0x04, 0x20 | 0x80
    assert "thermal slowdown, power brake" == gpus().look([]).throttled
    nvml.GPUS[1]["reasons"] = 0x04
    assert "" == gpus().look([]).throttled


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        ("power", "power_w"),
        ("energy", "energy_j"),
        ("temperature", "temperature_c"),
        ("clock", "clock_mhz"),
        ("utilisation", "utilisation_percent"),
        ("used", "memory_bytes"),
    ],
)
def test_what_a_gpu_does_not_tell_is_none(nvml: Any, monkeypatch: pytest.MonkeyPatch, broken: str, field: str) -> None:
    """A figure that is not supported is missing, and takes no other with it."""
    monkeypatch.setattr(nvml, "BROKEN", {broken})
    found = gpus().look([])
    missing = {name for name in GpuLook.__slots__ if getattr(found, name) is None}
    assert {field, "others"} == missing


@pytest.mark.parametrize(
    ("visible", "power_w"), [("1", 400.0), ("0,1", 700.0), ("GPU-0a", 300.0), ("GPU-1abc,0", 700.0)]
)
def test_only_visible_gpus_count(nvml: Any, visible: str, power_w: float) -> None:
    """CUDA_VISIBLE_DEVICES names GPUs by place or by the beginning of their UUID."""
    assert power_w == gpus(CUDA_VISIBLE_DEVICES=visible).look([]).power_w


def test_without_gpus_a_note_says_why(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bindings, no driver, no GPU left visible: each has its words."""
    assert (None, "no GPU is visible here") == gpu.find({"CUDA_VISIBLE_DEVICES": ""})
    monkeypatch.setattr(nvml, "BROKEN", {"init"})
    assert (None, "NVML does not answer: NVML Shared Library Not Found") == gpu.find({})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (None, gpu.NOT_INSTALLED) == gpu.find({})
