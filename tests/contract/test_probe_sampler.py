"""The sampling process on real processes: what it measures, what it notes, and what it costs."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from pipelines.probe import sampler as sampling
from pipelines.probe.sampler import Sampler
from pipelines.probe.scraper import NO_METRICS

FAKE_NVML = str(Path(__file__).resolve().parents[1] / "fake_nvml")
SERVER = "import sys; held = bytearray({size}); print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds 60 MB and leads a group of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER.format(size=60_000_000)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.stdin.close()


def until(sampler: Sampler, enough: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and not enough():
        time.sleep(0.02)


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
        sampler.wait()
    assert 0 == sampler.samples[0].rss_bytes


def test_a_server_that_is_not_ours_has_no_memory_of_its_own() -> None:
    """Nothing is known of its process; the machine and the client are sampled all the same."""
    with Sampler(None) as sampler:
        until(sampler, lambda: sampler.seen() >= 3)
    assert {(None, None)} == {(one.rss_bytes, one.server_cpu_s) for one in sampler.samples}
    assert sampler.samples[0].busy_cpu_s > 0 < sampler.samples[0].client_cpu_s


def test_gpus_are_sampled_where_nvml_is(server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """With NVML's bindings, each sample has the GPUs' readings and knows which memory is the server's."""
    monkeypatch.setenv("PYTHONPATH", FAKE_NVML, prepend=os.pathsep)
    monkeypatch.setenv("FAKE_NVML_PIDS", f"{server.pid} 4242")
    monkeypatch.setenv("FAKE_NVML_REASONS", "20")
    with Sampler(server.pid) as sampler:
        until(sampler, lambda: sampler.seen() >= 3)
    one = sampler.samples[1]
    assert (1_500_000_000, 70.0, 700.0, 61.0, 1880.0, "thermal slowdown", 1) == (
        one.gpu_memory_bytes, one.gpu_utilisation_percent, one.gpu_power_w, one.gpu_temperature_c, one.gpu_clock_mhz,
        one.gpu_throttled, one.gpu_others,
    )  # fmt: skip
    energies = [sample.gpu_energy_j for sample in sampler.samples]
    assert {20.0} == {round((b or 0.0) - (a or 0.0), 6) for a, b in pairwise(energies)}
    assert ("", NO_METRICS) == (sampler.notes.gpu, sampler.notes.metrics)


def test_without_nvml_the_fields_are_absent_with_a_reason(
    server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that does not answer leaves None in every GPU column, and its words in the note."""
    monkeypatch.setenv("PYTHONPATH", FAKE_NVML, prepend=os.pathsep)
    monkeypatch.setenv("FAKE_NVML_BROKEN", "init")
    with Sampler(server.pid) as sampler:
        sampler.wait()
    one = sampler.samples[0]
    assert {None} == {one.gpu_memory_bytes, one.gpu_power_w, one.gpu_energy_j, one.gpu_clock_mhz, one.gpu_others}
    assert "NVML does not answer: NVML Shared Library Not Found" == sampler.notes.gpu


class _Pages(http.server.BaseHTTPRequestHandler):
    """Metrics of a queue that grows with every look; /broken has none, /silent says nothing known."""

    looks = 0

    def do_GET(self) -> None:
        _Pages.looks += self.path == "/metrics"
        pages = {"/metrics": f"llamacpp:requests_deferred {_Pages.looks}\n", "/silent": "other 1\n"}
        self.send_response(200 if self.path in pages else 503)
        self.end_headers()
        self.wfile.write(pages.get(self.path, "").encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def pages() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


def test_metrics_are_scraped_at_the_start_and_at_the_end(pages: str) -> None:
    """The first look and the last have the server's own figures; in between they come once a second."""
    with Sampler(None, f"{pages}/metrics") as sampler:
        until(sampler, lambda: sampler.seen() >= 8)
    scraped = [one.queue for one in sampler.samples if one.queue is not None]
    assert scraped == sorted(set(scraped))
    assert 2 <= len(scraped) < len(sampler.samples) / 2
    assert sampler.samples[-1].queue == _Pages.looks
    assert "" == sampler.notes.metrics


@pytest.mark.parametrize(
    ("path", "note"),
    [
        ("/broken", "/broken answered with status 503"),
        ("/silent", "/silent tells nothing that is known here"),
    ],
)
def test_metrics_that_cannot_be_had_have_a_reason(pages: str, path: str, note: str) -> None:
    """The columns stay empty, and the note says what the server answered."""
    with Sampler(None, f"{pages}{path}") as sampler:
        sampler.wait()
    assert note == sampler.notes.metrics
    assert {None} == {one.queue for one in sampler.samples}


def test_nobody_at_the_metrics_address_is_a_reason_too() -> None:
    """A refused connection holds nothing up."""
    with Sampler(None, "http://127.0.0.1:9/metrics") as sampler:
        sampler.wait()
    assert sampler.notes.metrics.startswith("/metrics was not answered")


def test_samples_are_never_far_apart_and_cost_little(server: subprocess.Popen[bytes]) -> None:
    """Five samples a second at least, seen on the median so that a busy machine fails nothing; under 2% of a CPU."""
    with Sampler(server.pid) as sampler:
        sampler.wait()
        process = sampler._process
        began, spent = time.monotonic(), _cpu_s(process.pid)
        until(sampler, lambda: time.monotonic() - began > 3)
        share = (_cpu_s(process.pid) - spent) / (time.monotonic() - began)
    gaps = sorted(b.at_s - a.at_s for a, b in pairwise(sampler.samples))
    assert gaps[len(gaps) // 2] <= 0.2
    assert share < 0.02


def _cpu_s(pid: int) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def test_whoever_ends_the_clients_group_lets_the_sampler_finish(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the sampler, which comes with the client's own, costs none of its notes."""
    with Sampler(server.pid) as sampler:
        sampler.wait()
        sampler._process.send_signal(signal.SIGTERM)
        seen = sampler.seen()
        until(sampler, lambda: sampler.seen() > seen + 1)
    assert sampler.notes.gpu != sampling.CUT_SHORT


def test_a_sampler_that_is_killed_leaves_its_samples(server: subprocess.Popen[bytes]) -> None:
    """What it wrote counts, and the notes say that it ended early."""
    with Sampler(server.pid) as sampler:
        sampler.wait()
        sampler._process.kill()
    assert sampler.samples
    assert sampling.CUT_SHORT == sampler.notes.gpu == sampler.notes.metrics
