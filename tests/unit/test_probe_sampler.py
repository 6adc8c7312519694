"""What the sampler's samples add up to, and that the sampling process measures a real one."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from pipelines.probe.sampler import Sample, Sampler, Usage, usage


def sample(at_s: float, rss: int = 0, server: float = 0.0, client: float = 0.0, busy: float = 0.0) -> Sample:
    return Sample(
        at_s=at_s, rss_bytes=rss, server_cpu_s=server, client_cpu_s=client, busy_cpu_s=busy, load_average=at_s
    )


def test_usage_by_hand() -> None:
    """Two seconds on four CPUs: 3 s of server are 150% of one CPU, 7 - 3 - 1 = 3 s of others 37.5% of all four."""
    samples = [sample(10, 100), sample(11, 300, 1.0, 0.5, 3.0), sample(12, 200, 3.0, 1.0, 7.0)]
    assert usage(samples, 10.0, 12.0, cpus=4) == Usage(300, pytest.approx(150), pytest.approx(37.5), 12)


def test_only_the_loads_own_time_counts() -> None:
    """Samples well before and after a load do not enter its figures."""
    samples = [sample(1, 999), sample(10, 100), sample(12, 200, 2.0), sample(20, 999, 50.0)]
    found = usage(samples, 10.0, 12.0, cpus=2)
    assert (found.peak_rss_bytes, found.cpu_percent) == (200, pytest.approx(100))


def test_too_few_samples_are_not_zero() -> None:
    """Without samples nothing is known; with one, memory but no CPU share."""
    assert usage([], 0.0, 1.0, cpus=2) == Usage(None, None, None, None)
    assert usage([sample(0.5, 7)], 0.0, 1.0, cpus=2) == Usage(7, None, None, 0.5)


def test_foreign_share_is_never_negative() -> None:
    """The kernel's clocks are coarse, so the server may seem to use more than the machine did."""
    assert usage([sample(0), sample(1, 0, 2.0, 0.0, 1.5)], 0.0, 1.0, cpus=2).foreign_cpu_percent == 0.0


def test_a_real_process_group_is_sampled() -> None:
    """The group's memory includes its children, and samples stop when the block ends."""
    child = "import subprocess, sys; held = bytearray(30_000_000); subprocess.run([sys.executable, '-c', {inner!r}])"
    inner = "held = bytearray(30_000_000); print('up', flush=True); input()"
    server = subprocess.Popen(
        [sys.executable, "-c", child.format(inner=inner)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with server:
        assert server.stdout is not None
        assert server.stdin is not None
        assert server.stdout.readline() == b"up\n"
        with Sampler(server.pid) as sampler:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and sampler.seen() < 4:
                time.sleep(0.05)
        server.stdin.close()
    assert len(sampler.samples) >= 4
    assert all(a.at_s < b.at_s for a, b in zip(sampler.samples, sampler.samples[1:], strict=False))
    assert max(one.rss_bytes for one in sampler.samples) > 60_000_000


def test_a_server_that_is_gone_is_sampled_as_nothing() -> None:
    """A server that died before the first sample leaves samples of zero memory, not an error."""
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as server:
        server.wait()
    with Sampler(server.pid) as sampler:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and sampler.seen() < 1:
            time.sleep(0.05)
    assert sampler.samples[0].rss_bytes == 0
