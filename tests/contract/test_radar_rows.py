"""The shipped radar speaks of every row of both tables, so that it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pipelines import radar
from pipelines.cli import main
from pipelines.config import CONF_DIR
from pipelines.engine.table import TARGETS
from pipelines.entries import ALWAYS
from pipelines.quantize.table import QUANTIZERS
from tests.unit import test_campaign as campaigns

checkpoint = campaigns.checkpoint  # a fixture
SHIPPED = radar.of_campaigns(None)
KNOWN = {(one.kind, one.name) for one in SHIPPED.entries}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_quantizer_has_an_entry(name: str) -> None:
    """A new row of the table is judged before it is shipped."""
    assert ("quantizer", name) in KNOWN


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_an_entry(name: str) -> None:
    """A new row of the table is judged before it is shipped."""
    assert ("target", name) in KNOWN


def test_no_entry_speaks_of_a_row_that_is_gone() -> None:
    """Quantizers and targets of the radar are rows of the tables."""
    rows = {"quantizer": QUANTIZERS, "target": TARGETS}
    assert [] == [(kind, name) for kind, name in KNOWN if kind in rows and name not in rows[kind]]


def test_the_library_that_does_a_rows_work_has_an_entry() -> None:
    """The first distribution that each row names, and those under every campaign."""
    first = {row.packages[0] for row in (*QUANTIZERS.values(), *TARGETS.values()) if row.packages}
    assert set() == (first | ALWAYS) - {name for kind, name in KNOWN if kind == "library"} - {"tokenizers"}


def test_the_date_of_the_review_is_in_the_file() -> None:
    """It is written, not defaulted; and no entry of the shipped file was stale on that day."""
    assert SHIPPED.reviewed == yaml.safe_load((CONF_DIR / radar.FILE).read_text())["reviewed"]
    assert [] == [one.name for one in SHIPPED.entries if SHIPPED.reviewed - one.since > radar.FRESH]


def test_the_sources_inside_the_repository_exist() -> None:
    """An entry that cites a page of ours cites one that is there."""
    ours = {one.source for one in SHIPPED.entries if one.source.startswith(("docs/", "conf/", "pyproject"))}
    assert [] == [source for source in sorted(ours) if not (CONF_DIR.parent / source).is_file()]


def test_archived_libraries_are_avoided() -> None:
    """AutoAWQ and AutoGPTQ: their rows and the libraries under them."""
    rings = {(one.kind, one.name): one.ring for one in SHIPPED.entries}
    archived = (("quantizer", "autoawq"), ("quantizer", "autogptq"), ("library", "autoawq"), ("library", "auto_gptq"))
    assert {"avoid"} == {rings[one] for one in archived}


def test_plan_warns_of_what_is_to_be_avoided(
    capsys: pytest.CaptureFixture[str],
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    """A campaign with AutoAWQ is told of the row and of the library, and of nothing else that it uses."""
    places = [f"checkpoint.source={checkpoint}", f"paths.store={tmp_path / 'store'}"]
    assert 0 == main(["plan", *places, "variant=[baseline,awq_w4a16_g64_autoawq]", "--json"])
    out, _ = capsys.readouterr()
    told = json.loads(out.splitlines()[-1])["radar"]
    assert ["library autoawq", "quantizer autoawq"] == [t.partition(" is to be avoided (")[0] for t in told]
    assert all(f"warning: {line}" in out for line in told)
