"""`quantgate compare` as a user meets it: table, document, page and exit codes, on a made-up store."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.cli import main
from tests.pages import Page
from tests.shop import Engine, Shop, spread

NIGHT, DAWN = "2026-11-29T22:00:00+00:00", "2026-11-30T06:00:00+00:00"
OLD = Engine("baseline", [n % 4 > 0 for n in range(80)], [n % 5 / 4 for n in range(60)], spread(1, 80.0, count=120))
NEW = Engine(
    "gptq_w4a16", [n % 4 > 0 and n % 16 != 5 for n in range(80)], [n % 6 / 5 for n in range(60)],
    spread(2, 31.0, count=120), size_bytes=26_000_000,
)  # fmt: skip
FAKE = replace(NEW, label="fp8_dynamic", native=False, times=spread(4, 82.0, count=120))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    made = Shop(tmp_path)
    made.campaign("demo", [OLD, NEW, FAKE])
    return made


def compare(shop: Shop, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    places = (f"paths.store={shop.store.root}", f"paths.ledger={shop.root / 'ledger.jsonl'}", "campaign=demo")
    code = main(["compare", *argv, *places, f"tracking.uri=sqlite:///{shop.root / 'none.db'}"])
    out, err = capsys.readouterr()
    return code, out, err


def test_what_may_be_compared_is_and_ends_with_0(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    """Score, latency, rate, memory and size; what differs is a table, what is the same a count."""
    code, out, _ = compare(shop, capsys, "baseline", "gptq_w4a16")
    assert 0 == code
    for said in ("gptq_w4a16 against baseline", "intent (acc)", "qa (f1)", "TTFT p99", "output tokens/s",
                 "engine on disk", "What differs", "the same: "):  # fmt: skip
        assert said in out
    assert "refused" not in out


def test_what_may_not_be_compared_is_refused_and_ends_with_7(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    """Emulated against native: times are refused with the reason, scores are compared all the same."""
    code, out, _ = compare(shop, capsys, "baseline", "fp8_dynamic", "--json")
    document = json.loads(out.splitlines()[-1])
    (found,) = document["comparisons"]
    assert (7, 7) == (code, document["exit_code"])
    assert {"score", "size"} == {d["kind"] for d in found["deltas"]}
    assert [["baseline is native; fp8_dynamic is emulated"]] == [r["reasons"] for r in found["refusals"]]
    assert "refused: load closed_1, fp8_dynamic: baseline is native; fp8_dynamic is emulated" in out


def test_anyway_compares_and_marks(shop: Shop, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In the table, in the document and on the page, and on no figure that needs no mark."""
    page = tmp_path / "out" / "page.html"
    names = ("baseline", "gptq_w4a16", "fp8_dynamic")
    code, out, _ = compare(shop, capsys, *names, "--anyway", "--json", "--html", str(page))
    document = json.loads(out.splitlines()[-1])
    (found,) = document["comparisons"]
    reason = "baseline is native; fp8_dynamic is emulated"
    assert 0 == code
    assert {("fp8_dynamic", reason)} == {(d["side"], mark) for d in found["deltas"] for mark in d["marks"]}
    assert {False, True} == {bool(d["marks"]) for d in found["deltas"] if d["side"] == "fp8_dynamic"}
    assert f"not like with like: {reason}" in out
    assert f"not like with like: {reason}" in Page(page.read_text()).text


def test_the_page_needs_nothing_else(shop: Shop, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No script, no link, no import: differences, distributions, what differs and formulas in one file."""
    page = tmp_path / "page.html"
    compare(shop, capsys, "baseline", "gptq_w4a16", "--html", str(page))
    html = page.read_text()
    found = Page(html)
    assert (0, []) == (found.scripts, found.links)
    assert not re.search(r"url\(|@import", html)
    for said in ("gptq_w4a16 against baseline", "What differs", "Latency distributions", "Scores", "closed_1", "Tango"):
        assert said in found.text
    # a forest of scores and one of latencies, three distributions, each drawn for wide and for narrow windows
    assert 2 * (2 + 3) == html.count("<svg xmlns")


def test_campaigns_have_a_section_for_each_label(
    shop: Shop, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two nights: scores of each label are compared, times are not, and what has no counterpart is named."""
    shop.campaign("nightly", [OLD, NEW], started=DAWN, night="second")
    page = tmp_path / "page.html"
    code, out, _ = compare(shop, capsys, "demo", "nightly", "--html", str(page))
    assert 7 == code
    assert "nightly/gptq_w4a16 against demo/gptq_w4a16" in out
    assert "not compared: fp8_dynamic: not in nightly" in out
    assert "2 refused, since conditions differ; --anyway compares and marks them" in out
    assert "Without a counterpart: fp8_dynamic (not in nightly)." in Page(page.read_text()).text


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["baseline"], 2, "two names or more"),
        (["baseline", "gptq_w4a61"], 2, "did you mean 'gptq_w4a16'"),
        (["baseline", "baseline"], 2, "nothing to compare"),
        (["baseline", "@champion"], 2, "nobody has the alias 'champion' of model 'demo'"),
        (["baseline", "gptq_w4a16", "--confidence", "95"], 2, "95 is not 0.5 or more, and below 1"),
    ],
)
def test_a_wrong_name_is_one_message(
    shop: Shop, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, said: str
) -> None:
    """One error, no traceback, the nearest first."""
    found, out, err = compare(shop, capsys, *argv)
    assert code == found
    assert said in err
    assert err.startswith("error: ")
    assert "Traceback" not in out + err
