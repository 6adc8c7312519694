"""What a person sees: the printed link in MLflow's own page, and the report, in a real browser.

Pictures of each page are left in the directory that QUANTGATE_SCREENSHOTS names, to be looked at.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.error import URLError
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import pytest

from pipelines.errors import EnvironmentProblem
from pipelines.flow.store import manifest
from pipelines.track import report, runs, ui, views
from tests import decisions
from tests.browser import PROGRAM, Browser

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
SHOWN = ("baseline", "gptq_w4a16_g64", "awq_w4a16_g64", "rtn_w4a16_g64", "fp8_dynamic")
POINTS = ("baseline", "gptq_w4a16_g64", "awq_w4a16_g64", "fp8_dynamic")
"""Those that have both figures."""
SCATTER = "latency/closed-4/ttft_p99_ms vs. quality/mean_score"
Scheme = Literal["light", "dark"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Recorded:
    """A recorded campaign: where, its report, and its parent run."""

    uri: str
    report: Path
    run_id: str
    headline: str


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    root = tmp_path_factory.mktemp("campaign")
    made = decisions.decision()
    store, out, told = root / "store", root / "out", root / "report"
    out.mkdir()
    told.mkdir()
    decision, latency = decisions.decided(store, made), decisions.requests(store, made)
    variants = decisions.variants(store, made)
    report.run(report.ReportConfig(), told, decision=decision, latency=latency, variants=variants)
    where = f"sqlite:///{root}/mlruns/mlflow.db"
    facts = runs.run(
        runs.TrackingConfig(tracking_uri=where), out, decision=decision, report=told, latency=latency,
        engines=decisions.engines(store, made), variants=variants, scores=decisions.scores(store, made),
    )  # fmt: skip
    return Recorded(where, told / "report.html", str(facts["run_id"]), made.headline)


@dataclass(frozen=True)
class Served:
    """MLflow's server on that campaign."""

    address: str
    port: int
    link: str


@pytest.fixture(scope="module")
def served(recorded: Recorded) -> Iterator[Served]:
    port = free_port()
    with ui.server(recorded.uri, port):
        (link,) = ui.links(recorded.uri, "demo")
        yield Served(f"http://127.0.0.1:{port}", port, f"http://127.0.0.1:{port}/{link.fragment}")


def has(*texts: str) -> str:
    """JavaScript that says whether the page shows all of these."""
    return f"{list(texts)!r}.every(t => document.body.innerText.includes(t))"


@needs_browser
def test_the_link_opens_on_the_scatter_with_every_variant(served: Served, tab: Browser, shots: Path) -> None:
    """The list names this campaign's variants; the chart has a point for each that has both figures."""
    tab.look(1920, height=1400)
    points = "document.querySelectorAll('.scatterlayer path.point').length"
    assert tab.open(served.link, f"{has(SCATTER, 'Parallel Coordinates', *SHOWN)} && {points} >= 4"), tab.run(
        "document.body.innerText"
    )
    tab.shoot(shots / "link-1920.png", whole=False)
    assert 4 == tab.run(points)
    leaves = "[...document.querySelectorAll('*')].filter(e => !e.children.length).map(e => e.textContent.trim())"
    words = tab.run(leaves)
    assert all(2 <= words.count(name) for name in POINTS)  # in the list, and in the legend beside the same colour
    shades = tab.run("[...document.querySelectorAll('.scatterlayer path.point')].map(p => getComputedStyle(p).fill)")
    assert len(POINTS) == len(set(shades))
    assert tab.run(has("Report with the named chart"))
    tab.look(1280, height=1000)
    time.sleep(1.0)
    tab.shoot(shots / "link-1280.png", whole=False)


@needs_browser
def test_a_view_that_mlflow_does_not_understand_leads_to_the_runs(
    recorded: Recorded, served: Served, tab: Browser, shots: Path
) -> None:
    """A key that is not there: MLflow says so and shows the experiment, whose runs are the campaign's."""
    tab.look(1280)
    link = f"{served.address}/{views.fragment('1', 'gone')}"
    assert tab.open(link, has("does not exist", "demo")), tab.run("document.body.innerText")
    tab.shoot(shots / "link-unknown-view.png", whole=False)
    searched = f"{served.address}/{views.searched('1', decision_key(recorded), 'quality/mean_score')}"
    assert tab.open(searched, has(*SHOWN)), tab.run("document.body.innerText")
    tab.shoot(shots / "link-searched.png", whole=False)


def decision_key(recorded: Recorded) -> str:
    (link,) = ui.links(recorded.uri, "demo")
    return parse_qs(urlsplit(link.fragment).fragment.partition("?")[2])["viewStateShareKey"][0]


@needs_browser
def test_the_campaigns_run_says_the_decision_first_and_holds_the_named_chart(
    recorded: Recorded, served: Served, tab: Browser, shots: Path
) -> None:
    """The headline is in sight before "Show more"; among the run's files are the report and each chart twice."""
    tab.look(1280)
    page = f"{served.address}/#/experiments/1/runs/{recorded.run_id}"
    assert tab.open(page, has(recorded.headline[:60])), tab.run("document.body.innerText")
    tab.shoot(shots / "run-1280.png", whole=False)
    assert tab.open(f"{page}/artifacts/charts/pareto.svg", has("report.html", "pareto.svg", "pareto.png"))
    time.sleep(1.0)
    tab.shoot(shots / "run-artifacts-1280.png", whole=False)


@needs_browser
def test_the_reports_scatter_has_one_label_for_each_point_clear_of_the_others(recorded: Recorded, tab: Browser) -> None:
    """As drawn by a browser: every variant with both figures is named once, inside the drawing, on no other name."""
    for width, shown in ((1280, "wide"), (390, "narrow")):
        tab.look(width)
        assert tab.open(recorded.report.as_uri())
        boxes = tab.run(
            f"(() => {{const svg = document.querySelector('.{shown} svg'), f = svg.getBoundingClientRect();"
            f"return [...svg.querySelectorAll('text')].filter(t => {list(POINTS)!r}.includes(t.textContent)).map(t => "
            "{const b = t.getBoundingClientRect(); return [t.textContent, b.left - f.left, b.top - f.top, "
            "b.right - f.left, b.bottom - f.top, f.width, f.height]})})()"
        )
        assert sorted(POINTS) == sorted(box[0] for box in boxes)
        for n, (name, left, top, right, bottom, wide, high) in enumerate(boxes):
            assert left >= 0 and top >= 0 and right <= wide and bottom <= high, name
            for other, l2, t2, r2, b2, _, _ in boxes[n + 1 :]:
                assert right <= l2 or r2 <= left or bottom <= t2 or b2 <= top, (name, other)
        points = tab.run(f"document.querySelectorAll('.{shown} svg')[0].querySelectorAll('circle').length")
        assert len(POINTS) == points


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_the_report_fits_the_window_in_both_schemes(
    width: int, scheme: Scheme, recorded: Recorded, tab: Browser, shots: Path
) -> None:
    """At no width does the page itself scroll sideways; texts of every chart stand out from what is behind them."""
    tab.look(width, scheme)
    assert tab.open(recorded.report.as_uri())
    tab.shoot(shots / f"report-{width}-{scheme}.png")
    assert width == tab.run("document.documentElement.scrollWidth")
    faint = tab.run(CONTRAST)
    assert [] == faint
    cut = tab.run(
        "[...document.querySelectorAll('svg.chart')].filter(s => s.getBoundingClientRect().width > 0).flatMap(s => "
        "{const f = s.getBoundingClientRect(); return [...s.querySelectorAll('text')].filter(t => {const b = "
        "t.getBoundingClientRect(); return b.left < f.left - 1 || b.right > f.right + 1 || b.bottom > f.bottom + 1})"
        ".map(t => t.textContent)})"
    )
    assert [] == cut


CONTRAST = """
(() => {
  const light = c => {const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126*r + 0.7152*g + 0.0722*b};
  const behind = e => {for (; e; e = e.parentElement) {const c = getComputedStyle(e).backgroundColor;
    if (!/rgba\\(.*, 0\\)|transparent/.test(c)) return c} return 'rgb(255,255,255)'};
  const words = [...document.querySelectorAll('p,dt,dd,td,th,li,h1,h2,h3,small,figcaption,summary,svg.chart text')]
    .filter(e => e.textContent.trim() && e.getBoundingClientRect().width > 0);
  return words.flatMap(e => {const s = getComputedStyle(e), ink = light(e.tagName === 'text' ? s.fill : s.color);
    const paper = light(behind(e)), ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    return ratio < 4.5 ? [`${e.textContent.slice(0, 40)}: ${ratio.toFixed(2)}`] : []}).slice(0, 10)
})()
"""


@needs_browser
def test_the_report_prints_light_with_no_chart_cut(recorded: Recorded, tab: Browser, shots: Path) -> None:
    """Also from a dark screen: dark ink, the wide drawings, none taller than a sheet, no table beyond its width."""
    tab.look(718, "dark", "print")  # the width between the margins of A4
    assert tab.open(recorded.report.as_uri())
    tab.shoot(shots / "report-print.png")
    assert "rgb(0, 0, 0)" == tab.run("getComputedStyle(document.body).color")
    kinds = "['wide', 'narrow'].map(k => document.querySelector('.' + k).getBoundingClientRect().height > 0)"
    assert [True, False] == tab.run(kinds)
    tallest = (
        "Math.max(...[...document.querySelectorAll('figure svg.chart')].map(s => s.getBoundingClientRect().height))"
    )
    assert tab.run(tallest) < 273 / 25.4 * 96
    kept = "[...document.querySelectorAll('figure')].every(f => getComputedStyle(f).breakInside === 'avoid')"
    assert tab.run(kept)
    assert tab.run("document.documentElement.scrollWidth") <= 718
    tab.print(shots / "report.pdf")
    sheets = len(re.findall(rb"/Type\s*/Page[^s]", (shots / "report.pdf").read_bytes()))
    assert 2 <= sheets <= 20


def test_a_port_that_serves_this_database_is_used_and_another_databases_is_not(
    recorded: Recorded, served: Served, tmp_path: Path
) -> None:
    """The second `ui` starts nothing and gives the same link; a database of its own has no server there."""
    said: list[str] = []
    assert served.link == ui.serve_ui(recorded.uri, served.port, say=said.append)
    assert f"port {served.port} serves this database already" == said[0]
    other = f"sqlite:///{tmp_path}/mlflow.db"
    source = Path(recorded.uri.removeprefix("sqlite:///"))
    (tmp_path / "mlflow.db").write_bytes(source.read_bytes())
    import sqlite3

    with sqlite3.connect(tmp_path / "mlflow.db") as copied:
        copied.execute("UPDATE experiments SET creation_time = creation_time + 1")
    with pytest.raises(EnvironmentProblem, match="cannot listen"):
        ui.serve_ui(other, served.port, say=said.append)


def test_where_a_view_cannot_be_saved_the_link_searches_for_the_same_runs() -> None:
    """A server that refuses the tag, as a later MLflow may, costs the charts' axes and nothing else."""
    from mlflow.exceptions import MlflowException

    class Refusing:
        def set_experiment_tag(self, *_: str) -> None:
            raise MlflowException("no such tags any more")

    state = views.state("abc", "x", "quality/mean_score", [])
    link = views.save(Refusing(), "7", "abc", "name", 0, state)  # type: ignore[arg-type]
    query = parse_qs(urlsplit(link).fragment.partition("?")[2])
    assert ["tags.kind = 'variant' and tags.campaign_key = 'abc'"] == query["searchFilter"]
    assert "viewStateShareKey" not in query
    assert (["metrics.`quality/mean_score`"], ["false"]) == (query["orderByKey"], query["orderByAsc"])


def test_the_note_on_the_experiment_is_renewed_but_never_a_persons_own() -> None:
    """The newest decision stands there; what somebody wrote instead stays, and a refusal is no failure."""
    from types import SimpleNamespace

    from mlflow.exceptions import MlflowException

    tags: dict[str, str] = {}

    class Kept:
        def get_experiment(self, _: str) -> SimpleNamespace:
            return SimpleNamespace(tags=dict(tags))

        def set_experiment_tag(self, _: str, key: str, value: str) -> None:
            if value == "refused":
                raise MlflowException("no")
            tags[key] = value

    for text in ("first", "second", "refused"):
        views.describe(Kept(), "7", text)  # type: ignore[arg-type]
    assert "second" == tags[views.NOTE]
    tags[views.NOTE] = "ours: see the wiki"
    views.describe(Kept(), "7", "third")  # type: ignore[arg-type]
    assert "ours: see the wiki" == tags[views.NOTE]


def _interrupt(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGINT)


def _terminate(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGTERM)


def _hang_up(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGHUP)


def _kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (_interrupt, 0),
        pytest.param(_terminate, 0, marks=pytest.mark.long),
        pytest.param(_hang_up, 0, marks=pytest.mark.long),
        (_kill, -signal.SIGKILL),
    ],
)
def test_however_it_ends_the_server_and_all_it_started_end(
    end: Callable[[subprocess.Popen[str]], None], code: int, recorded: Recorded
) -> None:
    """The link is printed once the server answers; afterwards the port is free and no process is left."""
    port = free_port()
    program = "import sys; from pipelines.track.ui import serve_ui; serve_ui(sys.argv[1], int(sys.argv[2]))"
    command = [sys.executable, "-u", "-c", program, recorded.uri, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        said = [next(lines)]
        while "Ctrl-C" not in said[-1]:
            said.append(next(lines))
        assert f"http://127.0.0.1:{port}/#/experiments/1/runs?" in "".join(said)
        end(process)
        assert code == process.wait(timeout=30)
    deadline = time.monotonic() + 20
    while (left := _about(port)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [] == left
    with pytest.raises(URLError):
        urlopen(f"http://127.0.0.1:{port}/health", timeout=2)


def _about(port: int) -> list[list[str]]:
    """Processes that have the port in their command."""
    found = (_arguments(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
    return [arguments for arguments in found if str(port) in arguments]


def _arguments(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


@needs_browser
@pytest.mark.skipif(
    "QUANTGATE_STORE" not in os.environ, reason="QUANTGATE_STORE names a finished store, whose report is looked at"
)
def test_the_report_of_a_real_store_is_looked_at(tab: Browser, shots: Path, tmp_path: Path) -> None:
    """The newest decision of a real campaign, rendered again: it fits, and pictures of it are left."""
    store = Path(os.environ["QUANTGATE_STORE"])
    decision = max((store / "decision").iterdir(), key=lambda p: manifest(p).started)
    latency = next((store / "latency").iterdir(), None)
    variants = sorted((store / "variant").iterdir())
    report.run(report.ReportConfig(), tmp_path, decision=decision, latency=latency, variants=variants)
    for width in (390, 1280, 1920):
        for scheme in ("light", "dark"):
            tab.look(width, scheme)
            assert tab.open((tmp_path / "report.html").as_uri())
            tab.shoot(shots / f"real-{width}-{scheme}.png")
            assert width == tab.run("document.documentElement.scrollWidth")
    tab.print(shots / "real.pdf")
