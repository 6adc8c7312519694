"""The technology radar: read strictly, shown by what a campaign uses, stale after a year."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from pipelines import radar
from pipelines.errors import ConfigError
from pipelines.track.report import ReportConfig, render
from tests.decisions import decision

TODAY = date(2026, 11, 30)
AVOIDED = """
  - {name: oldlib, ring: avoid, kind: library, since: 2026-03-01, reason: archived, source: its page, instead: newlib}
"""
FILE = f"""
reviewed: 2026-11-30
entries:
  - {{name: newlib, ring: adopted, kind: library, since: 2026-11-30, reason: works, source: docs}}
  - {{name: oldform, ring: watch, kind: format, since: 2025-11-29, reason: young, source: docs}}
  - {{name: yearold, ring: proven, kind: format, since: 2025-11-30, reason: works, source: docs}}
  - {{name: unused, ring: proven, kind: target, since: 2020-01-01, reason: works, source: docs}}
{AVOIDED}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "radar.yaml"
    path.write_text(text)
    return path


def used(tmp_path: Path) -> tuple[radar.RadarEntry, ...]:
    known = radar.read(written(tmp_path, FILE))
    return radar.used(known, {"library": {"oldlib", "newlib"}, "format": {"oldform", "yearold"}}, TODAY)


def test_what_a_campaign_uses_comes_with_what_needs_attention_first(tmp_path: Path) -> None:
    """Avoid, then watch, proven, adopted; entries of other names and kinds are left out."""
    assert ["oldlib", "oldform", "yearold", "newlib"] == [one.name for one in used(tmp_path)]


def test_an_entry_is_stale_after_a_year(tmp_path: Path) -> None:
    """366 days ago is stale, 365 is not."""
    assert {"oldlib": False, "oldform": True, "yearold": False, "newlib": False} == {
        one.name: one.stale for one in used(tmp_path)
    }


def test_what_is_to_be_avoided_is_said_with_what_to_use(tmp_path: Path) -> None:
    """One warning for each such entry, one for all that are stale."""
    assert [
        "library oldlib is to be avoided (archived); use newlib",
        "nobody has confirmed these entries of the radar for a year: oldform",
    ] == list(radar.warnings(used(tmp_path)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("ring: adopted", "entries.0.ring='adoptd'"),
        ("since: 2026-11-30, reason: works", "entries.0.since='soon'"),
        ("kind: library, since: 2026-11-30", "entries.0.kind='libary'"),
        (", source: docs}", "entries.0.sauce='docs': unknown key"),
    ],
)
def test_problems_name_the_entry(tmp_path: Path, wrong: str, said: str) -> None:
    """A ring, kind or date that there is not, and a key that nobody knows."""
    mended = {
        "ring: adopted": "ring: adoptd",
        "since: 2026-11-30, reason: works": "since: soon, reason: works",
        "kind: library, since: 2026-11-30": "kind: libary, since: 2026-11-30",
        ", source: docs}": ", source: docs, sauce: docs}",
    }[wrong]
    path = written(tmp_path, FILE.replace(wrong, mended, 1))
    with pytest.raises(ConfigError, match=rf"radar.yaml.{said}"):
        radar.read(path)


def test_two_entries_of_one_name_and_a_date_after_the_review_are_told_at_once(tmp_path: Path) -> None:
    """Both problems of one file come in one error."""
    later = AVOIDED.replace("2026-03-01", "2026-12-01")
    with pytest.raises(ConfigError) as told:
        radar.read(written(tmp_path, FILE + later))
    assert ["'oldlib': there is another library of this name", "'2026-12-01': later than reviewed, 2026-11-30"] == [
        str(p).partition("=")[2] for p in told.value.problems
    ]


@pytest.mark.parametrize("ring", ["avoid", "proven"])
def test_what_to_use_instead_is_named_for_what_is_to_be_avoided_and_nothing_else(ring: str) -> None:
    """avoid without a way out, and a way out of nothing, are both refused."""
    instead = "" if ring == "avoid" else "other"
    with pytest.raises(ValueError, match="instead"):
        radar.Entry.model_validate(
            {"name": "x", "ring": ring, "kind": "library", "since": TODAY, "reason": "r", "source": "s"}
            | {"instead": instead}
        )


@pytest.mark.parametrize(("text", "said"), [("a: [", "is not YAML"), (None, "cannot be read: No such file")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    """No YAML, and no file."""
    path = tmp_path / "radar.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"radar.yaml: {said}"):
        radar.read(path)


def test_a_conf_directory_of_ones_own_has_its_own_radar(tmp_path: Path) -> None:
    """Where it holds none, the shipped one stands."""
    shipped = radar.of_campaigns(None)
    assert shipped == radar.of_campaigns(tmp_path)
    written(tmp_path, FILE)
    assert "oldlib" in {one.name for one in radar.of_campaigns(tmp_path).entries}


def test_the_report_shows_the_entries_of_its_campaign(tmp_path: Path) -> None:
    """Name, ring, reason, what to use instead, and that an entry is stale; nothing where there are none."""
    html, _ = render(decision(), ReportConfig(radar=used(tmp_path)))
    section = html.partition("<h2>Technology radar</h2>")[2].partition("</section>")[0]
    rows = [row for row in section.split("<tr>") if 'scope="row"' in row]
    assert 4 == len(rows)
    assert "oldlib" in rows[0] and ">avoid<" in rows[0] and "archived; use newlib" in rows[0]
    assert [False, True, False, False] == ["stale" in row for row in rows]
    assert "Technology radar" not in render(decision(), ReportConfig())[0]
