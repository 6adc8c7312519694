"""`quantgate probe --self-test`: the client's own error, from the command line."""

from __future__ import annotations

import json

import pytest

from pipelines.cli import main


def test_each_rate_has_its_line_and_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """The table names the rates; the document has measured and true figures of each, with their conditions."""
    assert 0 == main(["probe", "--self-test", "--rates", "40,80", "--seconds", "0.5", "--json"])
    table, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    document = json.loads(last)
    assert "probe" == document["verb"]
    assert [(40, 20, 0), (80, 40, 0)] == [(r["rate"], r["requests"], r["failed"]) for r in document["rates"]]
    for figures in document["rates"]:
        assert figures["true_ttft_ms_p50"] >= 50
        assert figures["ttft_ms_p50"] > figures["true_ttft_ms_p50"]
        assert figures["cpu_ms"] > 0
    assert {"ttft_ms", "itl_ms", "real_time", "load_average"} <= document["conditions"].keys()
    assert "what is off" in table


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--self-test", "variant=baseline"], "leave out variant=baseline"),
        (["--rates", "20"], "belong to --self-test"),
    ],
)
def test_a_campaign_and_a_self_test_are_not_mixed(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What belongs to one is refused with the other, before anything runs."""
    assert 2 == main(["probe", *arguments])
    assert said in capsys.readouterr().err
