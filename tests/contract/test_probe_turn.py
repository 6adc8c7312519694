"""Turns of a probe on scripted servers: warm-up, what is sampled beside the load, servers that end, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipelines.engine.serving import Served
from pipelines.errors import StageFailed
from pipelines.probe import ended
from tests.contract.test_probe import Fleet, TimedServer, probe, server, shared_server

__all__ = ["server", "shared_server"]


def rows_of(out: Path, table: str, **where: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(out / f"{table}.parquet").to_pylist()
    return [row for row in found if all(row[name] == value for name, value in where.items())]


def test_a_server_that_is_still_warming_is_not_called_steady(shared_server: TimedServer, tmp_path: Path) -> None:
    """Its first token comes a tenth sooner with every request: the warm-up takes all it may, and each block says so."""
    _, facts, out = probe(
        shared_server, tmp_path, ["warming-a"], rounds=1, warmup_requests=1, warmup_max_requests=8, max_tokens=2
    )
    blocks = rows_of(out, "blocks")
    assert {(False, 8)} == {(block["steady"], block["warmup_requests"]) for block in blocks}
    assert 2 == facts["unsteady_blocks"]


def test_the_warm_up_asks_the_same_in_every_batch_and_no_two_requests_are_alike(
    shared_server: TimedServer, tmp_path: Path
) -> None:
    """Batches of two over three prompts: the first two again and again, each request behind an opening of its own."""
    fleet, _, out = probe(shared_server, tmp_path, ["warming_too-b"], rounds=1, warmup_max_requests=8, max_tokens=2)
    taken = rows_of(out, "blocks")[0]["warmup_requests"]
    warmup = [served["prompt"] for served in fleet.logs["warming_too-b"][:taken]]
    assert 8 == taken
    assert {4} == set(Counter(tuple(prompt[1:]) for prompt in warmup).values())
    assert 8 == len({prompt[0] for prompt in warmup})


def test_what_was_sampled_is_kept_beside_the_figures(shared_server: TimedServer, tmp_path: Path) -> None:
    """Samples lie among their loads, never far apart; blocks carry memory, metrics and time to ready."""
    _, facts, out = probe(shared_server, tmp_path, ["plain-a", "plain-b"], rounds=1)
    for number in (0, 1):
        samples = rows_of(out, "resources", block=number)
        assert 0.0 == samples[0]["at_s"] < samples[-1]["at_s"]
        assert {"", "closed_2", "open_40"} == {sample["profile"] for sample in samples}
        assert all(sample["rss_bytes"] > 10_000_000 for sample in samples)
        gaps = sorted(b["at_s"] - a["at_s"] for a, b in pairwise(samples))
        assert gaps[len(gaps) // 2] <= 0.2
    for block in rows_of(out, "blocks"):
        assert 0.5 == block["ready_s"]
        assert 0 < block["idle_rss_bytes"] <= block["peak_rss_bytes"] >= block["loaded_rss_bytes"] > 0
        assert block["prefix_hit_rate"] in (None, pytest.approx(0.1))
        assert not block["partial"]
    assert (False, False, "", "") == (facts["partial"], facts["interrupted"], facts["ended"], facts["metrics_note"])
    last = rows_of(out, "resources")[-1]
    assert (2.0, 0.25) == (last["queue"], last["kv_usage"])


def test_a_disturbed_block_says_what_disturbed_it(shared_server: TimedServer, tmp_path: Path) -> None:
    """A process beside it takes CPU that nobody else may take, which the block says in words."""
    given = {"profiles": [{"name": "closed_2", "mode": "closed", "concurrency": 2, "requests": 24}], "rounds": 1}
    limits = {"foreign_cpu_percent": 0.0}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        _, facts, out = probe(shared_server, tmp_path, ["plain-a"], **given, limits=limits)
        busy.kill()
    (block,) = rows_of(out, "blocks")
    assert block["foreign_cpu_percent"] > 0
    assert f"others took {block['foreign_cpu_percent']:.0f}% of the CPU" in block["disturbed"]
    assert (1, "left_out") == (facts["disturbed_blocks"], facts["disturbed"])


def test_a_server_that_is_not_ours_is_probed_without_its_process(
    shared_server: TimedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latencies are whole; memory and CPU of a server elsewhere are not known, and neither is the others' share."""
    monkeypatch.setattr(
        "tests.contract.test_probe.Served", lambda endpoint, pid, ready_s: Served(endpoint, None, ready_s)
    )
    _, facts, out = probe(shared_server, tmp_path, ["plain-a"], rounds=1)
    assert (0, False) == (facts["failed_requests"], facts["partial"])
    for block in rows_of(out, "blocks"):
        assert {None} == {block[name] for name in ("peak_rss_bytes", "cpu_percent", "foreign_cpu_percent")}
        assert block["load_average"] is not None


def test_a_server_that_ends_in_the_middle_leaves_a_partial_result(server: TimedServer, tmp_path: Path) -> None:
    """Its rows until then keep their figures, those after fail, its block is partial; the facts say how it ended."""
    _, facts, out = probe(server, tmp_path, ["dying-x"], rounds=1, warmup_requests=1, warmup_max_requests=1)
    closed, opened = (rows_of(out, "requests", profile=name) for name in ("closed_2", "open_40"))
    assert [True] * 4 == [row["ok"] for row in closed]
    assert 1 <= sum(row["ok"] for row in opened) + 1 <= 6
    assert {"broken_stream", "refused", None} >= {row["error"] for row in opened}
    assert [False, True] == [block["partial"] for block in rows_of(out, "blocks")]
    assert facts["partial"] is True
    assert "dying-x, round 0: the server ended with exit code 1" == facts["ended"]


def test_loads_after_a_servers_end_are_not_waited_for(server: TimedServer, tmp_path: Path) -> None:
    """A load of a minute that nobody could answer takes no minute: its rows are refused at once, and partial."""
    profiles = [
        {"name": "first", "mode": "closed", "concurrency": 1, "requests": 12},
        {"name": "long", "mode": "open", "rate": 0.1, "requests": 7},
    ]
    began_s = time.monotonic()
    _, facts, out = probe(
        server, tmp_path, ["dying-x"], rounds=1, profiles=profiles, warmup_requests=1, warmup_max_requests=1
    )
    assert time.monotonic() - began_s < 30
    assert {("refused", 0.0)} == {
        (row["error"], row["ttft_ms"] or 0.0) for row in rows_of(out, "requests", profile="long")
    }
    assert {True} == {block["partial"] for block in rows_of(out, "blocks")}
    assert facts["partial"] is True


def test_a_server_that_does_not_start_makes_the_result_partial(shared_server: TimedServer, tmp_path: Path) -> None:
    """It served scores before, so another try is worth it; the others' figures serve meanwhile."""
    _, facts, _ = probe(shared_server, tmp_path, ["plain-a", "dead-x"], rounds=1)
    assert facts["partial"] is True
    assert "dead-x: did not start: the server ended with code 3" == facts["ended"]


@pytest.fixture
def late_ones_do_nothing() -> Iterator[None]:
    """A signal that comes when the probe has ended already must not end the tests."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("late_ones_do_nothing")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_probe_keeps_what_was_measured(
    shared_server: TimedServer, tmp_path: Path, ending: signal.Signals
) -> None:
    """Stopped in the second load: the first is whole, the second's rest is interrupted, there is no third."""
    profiles = [
        {"name": "first", "mode": "closed", "concurrency": 2, "requests": 4},
        {"name": "second", "mode": "open", "rate": 4.0, "requests": 60, "arrivals": "constant"},
        {"name": "third", "mode": "closed", "concurrency": 2, "requests": 4},
    ]
    before = signal.getsignal(ending)
    begun = len(shared_server.log("plain"))

    def stop() -> None:
        while len(shared_server.log("plain")) < begun + 2 + 4 + 6:
            time.sleep(0.02)
        os.kill(os.getpid(), ending)
        for _ in range(8 if ending == signal.SIGTERM else 0):  # an impatient hand, or a parent that died as well
            time.sleep(0.02)
            os.kill(os.getpid(), ending)

    hand = threading.Thread(target=stop, daemon=True)
    hand.start()
    _, facts, out = probe(shared_server, tmp_path, ["plain-a", "plain-b"], rounds=1, profiles=profiles)
    hand.join(10)
    assert before is signal.getsignal(ending)
    assert (True, True) == (facts["partial"], facts["interrupted"])
    assert [("first", False), ("second", True)] == [(b["profile"], b["partial"]) for b in rows_of(out, "blocks")]
    assert all(row["ok"] for row in rows_of(out, "requests", profile="first"))
    second = rows_of(out, "requests", profile="second")
    assert 60 == len(second)
    assert second[0]["ok"]
    assert {None, "interrupted"} == {row["error"] for row in second}
    assert sum(row["error"] == "interrupted" for row in second) > 30, "it did not wait for the schedule's end"
    assert {"first", "second"} < {sample["profile"] for sample in rows_of(out, "resources")}


def test_a_probe_that_is_stopped_before_anything_was_measured_leaves_nothing(
    shared_server: TimedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no table to keep, so it ends as it was told to."""

    def stopped(*_: object, **__: object) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(Fleet, "serve", stopped)
    with pytest.raises(KeyboardInterrupt):
        probe(shared_server, tmp_path, ["plain-a"])


def test_a_dying_server_that_answered_nothing_fails_the_stage(server: TimedServer, tmp_path: Path) -> None:
    """Nothing was measured, so there is no result, and the error says how the server ended."""
    os.kill(server.pid, signal.SIGKILL)
    assert ended.soon(server.pid, 20)
    with pytest.raises(StageFailed, match=r"no engine answered.*plain-x: the server was ended by SIGKILL"):
        probe(server, tmp_path, ["plain-x"], rounds=1)
