"""What nvidia-smi says of GPUs becomes what engines are bound to."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.flow.device import Gpu, _of_gpus, free_memory, group_room, read_gpus, widest_of

H100 = "NVIDIA H100 80GB HBM3, 9.0, 81559, 580.95.05\n"
A100 = "NVIDIA A100-SXM4-40GB, 8.0, 40960, 580.95.05\n"


def test_a_gpu_is_read_with_its_compute_capability() -> None:
    """9.0 is SM 90."""
    assert (Gpu("NVIDIA H100 80GB HBM3", 90, 81559, "580.95.05"),) == read_gpus(H100)


def test_unlike_gpus_are_told_apart_and_the_smallest_counts() -> None:
    """An engine of two ranks needs both GPUs to be alike, so both capabilities are told."""
    told = _of_gpus(read_gpus(H100 + A100))
    assert {"gpu_count": "2", "driver": "580.95.05", "gpu_sm": "80,90", "gpu_memory_gib": "40.0"} == told


def test_what_an_old_driver_does_not_know_is_left_out() -> None:
    """[N/A] and error lines are no numbers."""
    assert (Gpu("Tesla T4", None, None, "450.1"),) == read_gpus("Tesla T4, [N/A], [N/A], 450.1\n")
    assert () == read_gpus("No devices were found\n")
    assert {"gpu_count": "1", "driver": "450.1"} == _of_gpus(read_gpus("Tesla T4, [N/A], [N/A], 450.1\n"))


@pytest.mark.parametrize(
    ("flags", "widest"),
    [
        ("flags : fpu avx avx2 fma", "avx2"),
        ("flags : avx2 avx512f avx512bw", "avx512"),
        ("flags : avx2 avx512f amx_bf16 amx_tile", "amx"),
        ("flags : fpu sse2", ""),
        ("", ""),
    ],
)
def test_the_widest_vectors_of_a_processor(flags: str, widest: str) -> None:
    """As the kernel lists flags; without any there is nothing to tell."""
    assert widest == widest_of(flags)


def _group(place: Path, **files: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text)


def test_room_in_control_groups_is_what_each_limit_leaves(tmp_path: Path) -> None:
    """Version 2: of 1000 bytes 700 are used, 200 of them by files that can go; the group around has no limit."""
    _group(tmp_path / "outer", memory__max="max\n", memory__current="9999\n", memory__stat="inactive_file 5\n")
    inner = tmp_path / "outer" / "inner"
    _group(inner, memory__max="1000\n", memory__current="700\n", memory__stat="anon 500\ninactive_file 200\n")
    assert [500] == list(group_room("0::/outer/inner\n", tmp_path))
    assert [] == list(group_room("0::/\n", tmp_path))


def test_room_in_control_groups_of_version_1(tmp_path: Path) -> None:
    """The names are others; inside a container the path is that of the host, and only the root is there."""
    told = {"memory__usage_in_bytes": "300\n", "memory__stat": "total_inactive_file 100\n"}
    _group(tmp_path / "memory", memory__limit_in_bytes="1000\n", **told)
    assert [800] == list(group_room("4:memory:/docker/0123\n0::/\n", tmp_path))


def test_free_memory_of_this_machine_is_told() -> None:
    """In bytes: more than a MiB, and less than any machine has."""
    assert 2**20 < free_memory() < 2**50
