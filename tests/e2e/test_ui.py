"""The printed link in a real browser: MLflow's own page and the report, as a person sees them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from pipelines.track import report, runs, ui
from pipelines.track.runs import TrackingConfig
from tests import decisions

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]
BROWSER = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--allow-file-access-from-files", "--window-size=1920,1400",
)  # fmt: skip
SHOWN = ("baseline", "gptq_w4a16_g64", "awq_w4a16_g64", "rtn_w4a16_g64", "fp8_dynamic")


class Texts(HTMLParser):
    """The texts of a page, outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.marks = 0
        self._skip = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skip += tag in ("script", "style")
        self.marks += tag == "path" and "point" in (dict(attrs).get("class") or "").split()

    def handle_endtag(self, tag: str) -> None:
        self._skip -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._skip and data.strip():
            self.found.append(data.strip())


def browse(url: str, profile: Path, wait_ms: int = 0, until: tuple[str, ...] = ()) -> str:
    """A page's document after its scripts ran for `wait_ms` of their own time.

    That time may pass before a busy machine has drawn everything: a page without all of `until` is opened again.
    """
    assert BROWSER is not None
    page = ""
    for longer in (1, 2, 4, 8):
        budget = (f"--virtual-time-budget={longer * wait_ms}",) if wait_ms else ()
        command = [BROWSER, *FLAGS, *budget, f"--user-data-dir={profile}", "--dump-dom", url]
        page = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
        if all(text in page for text in until):
            break
    return page


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recorded campaign."""
    root = tmp_path_factory.mktemp("campaign")
    made = decisions.decision()
    store, out, told = root / "store", root / "out", root / "report"
    out.mkdir()
    told.mkdir()
    decision, latency = decisions.decided(store, made), decisions.requests(store, made)
    report.run(report.ReportConfig(), told, decision=decision, latency=latency)
    where = f"sqlite:///{root}/mlruns/mlflow.db"
    runs.run(
        TrackingConfig(tracking_uri=where), out, decision=decision, report=told, latency=latency,
        engines=decisions.engines(store, made), variants=decisions.variants(store, made),
        scores=decisions.scores(store, made),
    )  # fmt: skip
    return where


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_link_opens_on_the_scatter_with_every_variant(uri: str, tmp_path: Path) -> None:
    """The run list holds this campaign's variants, and the chart has a point for each that has both figures."""
    (link,) = ui.links(uri, "demo")
    port, scatter = free_port(), "latency/closed-4/ttft_p99_ms vs. quality/mean_score"
    drawn = (scatter, "Parallel Coordinates", *SHOWN)
    with ui.server(uri, port):
        page = Texts(browse(f"http://127.0.0.1:{port}/{link.fragment}", tmp_path / "profile", 30_000, until=drawn))
    for name in SHOWN:
        assert name in page.found
    assert scatter in page.found
    assert "Parallel Coordinates" in page.found
    assert 4 <= page.marks


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server_and_all_it_started(uri: str, sign: signal.Signals) -> None:
    """The link is printed once the server answers; after Ctrl-C the exit is clean and the port is free."""
    port = free_port()
    code = "import sys; from pipelines.track.ui import serve_ui; serve_ui(sys.argv[1], int(sys.argv[2]))"
    command = [sys.executable, "-u", "-c", code, uri, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        said = [next(lines)]
        while "Ctrl-C" not in said[-1]:
            said.append(next(lines))
        assert f"http://127.0.0.1:{port}/#/experiments/1/runs?" in "".join(said)
        os.kill(process.pid, sign)
        assert process.wait(timeout=30) == 0
    with pytest.raises(URLError):
        urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
    time.sleep(0.2)
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(port) in _arguments(p)]


def _arguments(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [400, 1280, 1920])
def test_the_report_fits_the_window(width: int, tmp_path: Path) -> None:
    """At no width does the page itself scroll sideways; wide tables scroll inside their own box."""
    made = decisions.decision()
    html, _ = report.render(made, report.ReportConfig(), decisions.requests(tmp_path, made, 60))
    (tmp_path / "report.html").write_text(html)
    measure = "const d=f.contentDocument.documentElement;document.title=`${d.scrollWidth} of ${d.clientWidth}`"
    frame = f'<iframe id=f src="report.html" style="width:{width}px;height:900px;border:0"></iframe>'
    (tmp_path / "frame.html").write_text(f"{frame}<script>f.onload=()=>{{{measure}}}</script>")
    profile = tmp_path / "profile"
    dom = browse(f"file://{tmp_path}/frame.html", profile, 3000)
    assert re.search(r"<title>(\d+) of \1</title>", dom), dom[:60]
