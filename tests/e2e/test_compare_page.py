"""The page of `quantgate compare` in a real browser, as a person sees it. QUANTGATE_SCREENSHOTS keeps the pictures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from pipelines.release.comparison import compare
from pipelines.release.subjects import Known
from pipelines.track import comparepage
from tests.browser import PROGRAM, Browser, browser
from tests.contract.test_compare import FAKE, NEW, OLD
from tests.shop import Shop

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")]
CLIPPED = """[...document.querySelectorAll('svg.chart')].filter(s => s.getClientRects().length).flatMap(s => {
  const box = s.getBoundingClientRect();
  return [...s.querySelectorAll('text')].filter(t => {
    const r = t.getBoundingClientRect();
    return r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1;
  }).map(t => t.textContent);
})"""
"""Texts of the drawings that are shown which reach beyond them."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three, one of them emulated and compared all the same."""
    made = Shop(tmp_path_factory.mktemp("compare"))
    made.campaign("demo", [OLD, NEW, FAKE])
    known = Known(made.store, "demo", f"sqlite:///{made.root}/none.db", "", made.root / "ledger.jsonl")
    compared, shown = compare(known, [OLD.label, NEW.label, FAKE.label], anyway=True)
    path = made.root / "page.html"
    comparepage.write(path, comparepage.page(compared, shown, made="2026-11-30 12:00 UTC", links={}))
    return path


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures are left."""
    asked = os.environ.get("QUANTGATE_SCREENSHOTS")
    where = Path(asked) if asked else tmp_path_factory.mktemp("screenshots")
    where.mkdir(parents=True, exist_ok=True)
    return where


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_the_page_fits_the_window(
    page: Path, tab: Browser, shots: Path, width: int, scheme: Literal["light", "dark"]
) -> None:
    """The page never scrolls sideways, no drawing cuts its texts off, and the paper is that of the scheme."""
    tab.look(width, scheme)
    assert tab.open(page.as_uri(), "document.querySelectorAll('svg.chart').length > 9")
    tab.shoot(shots / f"compare-{width}-{scheme}.png")
    assert [width, width] == tab.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert [] == tab.run(CLIPPED)
    paper = tab.run("getComputedStyle(document.querySelector('section')).backgroundColor")
    assert {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 26, 33)"}[scheme] == paper


def test_each_side_is_named_in_every_distribution(page: Path, tab: Browser) -> None:
    """Three curves and three names a drawing; the emulated one is dashed."""
    tab.look(1280)
    assert tab.open(page.as_uri())
    drawn = tab.run(
        "[...document.querySelectorAll('.curves .wide svg')].map(s => [s.querySelectorAll('polyline').length, "
        "s.querySelectorAll('polyline[stroke-dasharray]').length, s.textContent])"
    )
    assert 3 == len(drawn)
    for curves, dashed, text in drawn:
        assert (3, 1) == (curves, dashed)
        assert all(one.label in text for one in (OLD, NEW, FAKE))


def test_the_page_prints(page: Path, tab: Browser, shots: Path) -> None:
    """On A4 it is a handful of sheets, on white whatever the screen's scheme."""
    tab.look(1280, "dark", media="print")
    assert tab.open(page.as_uri())
    assert "rgb(255, 255, 255)" == tab.run("getComputedStyle(document.body).backgroundColor")
    tab.print(shots / "compare.pdf")
    sheets = len(re.findall(rb"/Type\s*/Page\b", (shots / "compare.pdf").read_bytes()))
    assert 2 <= sheets <= 12
