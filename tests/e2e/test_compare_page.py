"""The page of `quantgate compare` in a real browser, as a person sees it. QUANTGATE_SCREENSHOTS keeps the pictures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from pipelines.release.comparison import compare
from pipelines.release.subjects import Known
from pipelines.track import comparepage
from tests.browser import PROGRAM, Browser
from tests.contract.test_compare import FAKE, NEW, OLD
from tests.shop import Shop, spread

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")]
LONG = replace(NEW, label="awq_w4a16_g64_asym_quick")
WILD = replace(NEW, label="rtn_w3", times=spread(9, 60.0, rounds=2, count=4), right=NEW.right[:40] + OLD.right[40:])
SIDES = (OLD, LONG, WILD, FAKE)
LINK = f"http://127.0.0.1:5000/#/compare-runs?runs={'%22abc' * 40}&experiments=%5B%221%22%5D"
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
    """A comparison of four: one with a long name, one that was hardly measured, one emulated, compared all the same."""
    made = Shop(tmp_path_factory.mktemp("compare"))
    made.campaign("demo", SIDES)
    known = Known(made.store, "demo", f"sqlite:///{made.root}/none.db", "", made.root / "ledger.jsonl")
    compared, shown = compare(known, [one.label for one in SIDES], anyway=True)
    path = made.root / "page.html"
    comparepage.write(path, comparepage.page(compared, shown, made="2026-11-30 12:00 UTC", links={0: LINK}))
    return path


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
    """A curve and a name each; the emulated one is dashed."""
    tab.look(1280)
    assert tab.open(page.as_uri())
    drawn = tab.run(
        "[...document.querySelectorAll('.curves .wide svg')].map(s => [s.querySelectorAll('polyline').length, "
        "s.querySelectorAll('polyline[stroke-dasharray]').length, s.textContent])"
    )
    assert 3 == len(drawn)
    for curves, dashed, text in drawn:
        assert (len(SIDES), 1) == (curves, dashed)
        assert all(one.label in text for one in SIDES)


def test_the_page_prints(page: Path, tab: Browser, shots: Path) -> None:
    """On A4 it is a handful of sheets, on white whatever the screen's scheme."""
    tab.look(1280, "dark", media="print")
    assert tab.open(page.as_uri())
    assert "rgb(255, 255, 255)" == tab.run("getComputedStyle(document.body).backgroundColor")
    tab.print(shots / "compare.pdf")
    sheets = len(re.findall(rb"/Type\s*/Page\b", (shots / "compare.pdf").read_bytes()))
    assert 2 <= sheets <= 12
