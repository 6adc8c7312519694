"""What nvidia-smi says of GPUs becomes what engines are bound to."""

from __future__ import annotations

import pytest

from pipelines.flow.device import Gpu, _of_gpus, read_gpus, widest_of

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
