"""Load profiles as they reach a server: what is in flight, when requests are due, what they begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipelines.probe import search
from pipelines.probe.profiles import Search
from tests.contract.test_probe import Fleet, TimedServer, probe, shared_server
from tests.unit.probe_configs import profile

__all__ = ["shared_server"]

Row = dict[str, Any]


def loads(
    server: TimedServer, tmp_path: Path, given: dict[str, Any], *names: str, **more: object
) -> tuple[Fleet, list[Row]]:
    """Probe engines in one round with one profile; the rows of its requests as they were planned."""
    fleet, _, out = probe(server, tmp_path, names, rounds=1, profiles=[given], **more)
    rows: list[Row] = pq.read_table(out / "requests.parquet").to_pylist()
    return fleet, rows


def in_flight(row: Row, rows: list[Row]) -> int:
    """Requests under way when one was sent, itself included."""
    return sum(one["sent_s"] <= row["sent_s"] < one["sent_s"] + one["e2e_ms"] / 1e3 for one in rows)


def test_a_spike_rises_to_its_peak_and_falls_back(shared_server: TimedServer, tmp_path: Path) -> None:
    """Two in flight, then nine while there are requests of the peak to send, then no more than two again."""
    given = {"name": "spike", "mode": "spike", "base": 2, "peak": 9, "requests": 18}
    _, rows = loads(shared_server, tmp_path, given, "slow-a", max_tokens=8)
    assert [row["phase"] for row in rows] == [0] * 18 + [1] * 18 + [2] * 18
    assert [row["concurrency"] for row in rows] == [2] * 18 + [9] * 18 + [2] * 18
    assert all(row["ok"] for row in rows)
    most = [max(in_flight(row, rows) for row in rows if row["phase"] == phase) for phase in range(3)]
    assert most == [2, 9, 2]


def test_a_replay_sends_at_the_traces_times_what_the_trace_asks(shared_server: TimedServer, tmp_path: Path) -> None:
    """At twice the speed every request is due at half its time; its own prompt and output length go with it."""
    lines = [
        {"timestamp": 50.0, "text": "w5 w6", "output_length": 3},
        {"timestamp": 50.1, "input_length": 9},
        {"timestamp": 50.5, "output_length": 4},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"name": "r", "mode": "replay", "trace": str(tmp_path / "t.jsonl"), "speed": 2.0}
    fleet, rows = loads(shared_server, tmp_path, given, "plain-a", "plain-b")
    for engine in ("plain-a", "plain-b"):
        mine = [row for row in rows if row["engine"] == engine]
        assert [row["scheduled_s"] for row in mine] == pytest.approx([0.0, 0.05, 0.25])
        assert [row["sent_s"] >= row["scheduled_s"] for row in mine] == [True] * 3
        assert [row["output_tokens"] for row in mine] == [row["asked_tokens"] for row in mine] == [3, 6, 4]
        assert [row["input_tokens"] for row in mine] == [3, 9, 4]
    sent = {name: [served["prompt"] for served in log[-3:]] for name, log in fleet.logs.items()}
    assert sent["plain-a"] == sent["plain-b"]
    assert sent["plain-a"][0][1:] == [7, 8]


def test_steps_follow_each_other_without_a_pause(shared_server: TimedServer, tmp_path: Path) -> None:
    """Requests of a step are due within its time, and rows say its rate."""
    steps = [{"rate": 10.0, "seconds": 0.6}, {"rate": 60.0, "seconds": 0.3}]
    _, rows = loads(shared_server, tmp_path, {"name": "s", "mode": "steps", "steps": steps}, "plain-a", max_tokens=2)
    assert {row["phase"] for row in rows} == {0, 1}
    for row in rows:
        begin, end = ((0.0, 0.6), (0.6, 0.9))[row["phase"]]
        assert begin <= row["scheduled_s"] < end
        assert row["rate"] == (10.0, 60.0)[row["phase"]]
        assert row["ttft_ms"] >= (row["sent_s"] - row["scheduled_s"]) * 1e3


def test_a_search_tries_the_rates_that_its_results_ask_for(shared_server: TimedServer, tmp_path: Path) -> None:
    """Against a server of one slot: bisection says which rates are tried; 80/s is too much."""
    given: dict[str, Any] = {
        "low": 5, "high": 80, "resolution": 1.0, "requests": 15, "slo": {"ttft_ms": 250, "share": 0.9}
    }  # fmt: skip
    asked = profile("search", **given)
    assert isinstance(asked, Search)
    _, rows = loads(shared_server, tmp_path, {"name": "search", "mode": "search"} | given, "queueing-a", max_tokens=2)
    visited = list(dict.fromkeys(row["phase"] for row in rows))
    met: dict[int, bool] = {}
    for phase in visited:
        assert phase == search.next_phase(len(asked.grid), met)
        mine = [row for row in rows if row["phase"] == phase]
        kept = sum(row["ok"] and row["ttft_ms"] <= 250 for row in mine)
        met[phase] = kept >= 0.9 * 15
        assert {row["rate"] for row in mine} == {asked.grid[phase]}
        assert sorted(row["request"] for row in mine) == list(range(15 * phase, 15 * phase + 15))
        assert [row["prompt_id"] for row in mine] == [row["prompt_id"] for row in rows[:15]]
    assert search.next_phase(len(asked.grid), met) is None
    assert not met.get(4, False)


def test_a_shared_prefix_is_what_requests_begin_with(shared_server: TimedServer, tmp_path: Path) -> None:
    """Twelve tokens are the same in every request of the profile, the thirteenth in none; warm-up does not begin so."""
    given = {"name": "c", "mode": "closed", "concurrency": 2, "requests": 6, "prefix": "shared", "shared_tokens": 12}
    fleet, rows = loads(shared_server, tmp_path, given, "plain-a")
    sent = [served["prompt"] for served in fleet.logs["plain-a"]]
    warmup, load = sent[:-6], sent[-6:]
    assert len({tuple(prompt[:12]) for prompt in load}) == 1
    assert len({prompt[12] for prompt in load}) == 6
    assert warmup[0][0] not in {prompt[0] for prompt in load}
    assert {row["input_tokens"] for row in rows} == {len(load[0])} == {12 + 1 + 3}
