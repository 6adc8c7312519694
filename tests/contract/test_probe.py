"""The probe against a server whose timing is known.

Times are compared as relations (the client can never see a token before it was written), so that a busy machine
cannot break a test.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipelines.engine.capabilities import Capabilities
from pipelines.engine.endpoint import Endpoint
from pipelines.engine.serving import Served
from pipelines.errors import EndpointError, InputError, StageFailed
from pipelines.flow import progress
from pipelines.probe import ended, latency, rows, selftest, stage, tables
from pipelines.probe.arrivals import Arrival
from pipelines.probe.client import Address, Client, Exchange, Request, completion_body
from pipelines.probe.known import Timing
from pipelines.probe.profiles import Closed, Open
from pipelines.probe.prompts import Prompt
from pipelines.probe.selftest import known_server
from tests.unit.probe_configs import probe_config, write_tokenizer

SERVER = Path(__file__).with_name("timed_server.py")
REQUEST_COLUMNS = [
    "engine",
    "profile",
    "mode",
    "concurrency",
    "rate",
    "round",
    "block",
    "position",
    "request",
    "prompt_id",
    "input_tokens",
    "output_tokens",
    "scheduled_s",
    "sent_s",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "itl_ms",
    "ok",
    "error",
    "phase",
    "bucket",
    "asked_tokens",
    "usage_input_tokens",
    "usage_output_tokens",
    "counted_tokens",
    "cached_tokens",
    "finish_reason",
]
BLOCK_COLUMNS = [
    "engine",
    "profile",
    "round",
    "block",
    "position",
    "started",
    "wall_s",
    "requests",
    "failed",
    "requests_per_s",
    "output_tokens_per_s",
    "peak_rss_bytes",
    "cpu_percent",
    "load_average",
    "foreign_cpu_percent",
    "threads",
    "bandwidth_gb_s",
    "ready_s",
    "steady",
    "warmup_requests",
    "disturbed",
    "partial",
    "idle_rss_bytes",
    "loaded_rss_bytes",
    "gpu_memory_idle_bytes",
    "gpu_memory_loaded_bytes",
    "gpu_memory_peak_bytes",
    "gpu_utilisation_percent",
    "gpu_power_w",
    "energy_j",
    "gpu_temperature_c",
    "gpu_clock_mhz",
    "kv_usage_peak",
    "queue_peak",
    "prefix_hit_rate",
]


class TimedServer:
    """The server of timed_server.py, running."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.pid = process.pid
        self.root = f"http://127.0.0.1:{port}"

    @property
    def alive(self) -> bool:
        return not ended.how(self.pid)

    def address(self, model: str, ignore_eos: bool = True) -> Address:
        return Address(f"{self.root}/v1", model, ignore_eos)

    def log(self, model: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.root}/log") as answer:
            return [served for served in json.load(answer) if served["model"] == model]


@contextmanager
def timed_server() -> Iterator[TimedServer]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield TimedServer(process, int(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.wait(30)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[TimedServer]:
    with timed_server() as server:
        yield server


@pytest.fixture
def server() -> Iterator[TimedServer]:
    with timed_server() as server:
        yield server


def send(
    address: Address,
    due: Sequence[float | None],
    *,
    concurrency: int | None = None,
    timeout_s: float = 30.0,
    tokens: int = 8,
) -> tuple[float, list[Exchange]]:
    requests = [Request(completion_body(address, [k, 1, 2], tokens), due_s, concurrency) for k, due_s in enumerate(due)]
    with Client(address.base_url, timeout_s=timeout_s) as client:
        sent = client.run(requests)
    return sent.started_s, list(sent.exchanges)


def row_of(exchange: Exchange, profile: Closed | Open) -> rows.RequestRow:
    place = rows.Place("engine", 0, 0, 0)
    return rows.request_row(place, profile, Arrival(0, 0, None, 0, 8), Prompt("p", (1, 2)), exchange)


CLOSED = Closed(name="c", mode="closed", concurrency=1, requests=1)
OPEN = Open(name="o", mode="open", rate=1.0, requests=1)


@pytest.mark.parametrize("model", ["plain", "burst", "uncounted", "role"])
def test_tokens_are_seen_after_they_were_written(shared_server: TimedServer, model: str) -> None:
    """TTFT and E2E are at least what the server really took, and tokens are counted right however they are sent."""
    before = len(shared_server.log(model))
    started_s, exchanges = send(shared_server.address(model), [None] * 3, concurrency=1)
    truth = shared_server.log(model)[before:]
    for exchange, served in zip(exchanges, truth, strict=True):
        row = row_of(exchange, CLOSED)
        assert (row.ok, row.error, row.output_tokens) == (True, None, 8)
        assert row.ttft_ms is not None and row.e2e_ms is not None
        sent_s = started_s + exchange.sent_s
        assert sent_s + row.ttft_ms / 1e3 >= served["written_s"][0] - 1e-9
        assert sent_s + row.e2e_ms / 1e3 >= served["written_s"][-1] - 1e-9
        assert sent_s <= served["received_s"]
        assert len(row.itl_ms) == len(served["written_s"]) - 1


def test_medians_are_near_the_truth(shared_server: TimedServer) -> None:
    """The median error of TTFT and TPOT, measured against what the server wrote, is small beside the figures."""
    before = len(shared_server.log("plain"))
    _, exchanges = send(shared_server.address("plain"), [None] * 15, concurrency=1)
    truth = shared_server.log("plain")[before:]
    measured = [row_of(exchange, CLOSED) for exchange in exchanges]
    ttft = latency.percentile([row.ttft_ms or 0.0 for row in measured], 50)
    tpot = latency.percentile([row.tpot_ms or 0.0 for row in measured], 50)
    true_ttft = latency.percentile([(s["written_s"][0] - s["received_s"]) * 1e3 for s in truth], 50)
    true_tpot = latency.percentile([(s["written_s"][-1] - s["written_s"][0]) * 1e3 / 7 for s in truth], 50)
    assert ttft == pytest.approx(true_ttft, abs=60)
    assert tpot == pytest.approx(true_tpot, abs=8)


def test_several_tokens_an_event_do_not_flatter_tpot(shared_server: TimedServer) -> None:
    """Four tokens every 80 ms are 20 ms a token; dividing by n - 1 would say 80 / 7."""
    _, exchanges = send(shared_server.address("burst"), [None] * 3, concurrency=1)
    assert all((row_of(exchange, CLOSED).tpot_ms or 0.0) > 15 for exchange in exchanges)


def test_a_role_chunk_is_not_the_first_token(shared_server: TimedServer) -> None:
    """A first event without text, sent at once by a server with a TTFT of 200 ms, does not set TTFT."""
    _, exchanges = send(shared_server.address("role"), [None], concurrency=1)
    assert (row_of(exchanges[0], CLOSED).ttft_ms or 0.0) >= 195


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("refusing", "4xx"),
        ("overloaded", "5xx"),
        ("cut", "broken_stream"),
        ("silent", "empty"),
        ("hanging", "timeout"),
    ],
)
def test_error_classes(shared_server: TimedServer, model: str, error: str) -> None:
    """Every way to fail has its class, and a failed request has no latency."""
    _, exchanges = send(shared_server.address(model), [None, None], concurrency=2, timeout_s=1.0)
    found = [row_of(exchange, CLOSED) for exchange in exchanges]
    assert [(row.ok, row.error, row.ttft_ms, row.e2e_ms, row.tpot_ms) for row in found] == [
        (False, error, None, None, None)
    ] * 2


def test_nobody_listening_is_refused() -> None:
    """A server that is gone refuses connections."""
    with timed_server() as gone:
        address = gone.address("plain")
    _, exchanges = send(address, [None], concurrency=1)
    assert row_of(exchanges[0], CLOSED).error == "refused"


def test_a_server_that_dies_leaves_what_was_answered(server: TimedServer) -> None:
    """Requests answered before the server died keep their figures; those after it fail at once."""
    _, exchanges = send(server.address("dying"), [None] * 12, concurrency=1)
    errors = [row_of(exchange, CLOSED).error for exchange in exchanges]
    assert errors[:6] == [None] * 6
    assert set(errors[6:]) <= {"broken_stream", "refused"}
    assert errors[-1] == "refused"


def test_one_failure_does_not_lose_the_others(shared_server: TimedServer) -> None:
    """Requests that hang leave those beside them untouched."""
    requests = [
        Request(completion_body(shared_server.address(model), [k], 4), 0.0)
        for k, model in enumerate(["plain", "hanging", "plain"])
    ]
    with Client(f"{shared_server.root}/v1", timeout_s=2.0) as client:
        exchanges = client.run(requests).exchanges
    assert [row_of(exchange, OPEN).error for exchange in exchanges] == [None, "timeout", None]


def test_a_stalled_server_is_charged_from_the_due_time(server: TimedServer) -> None:
    """Requests due while the server is frozen wait until it thaws, and all of that wait is in their latency."""
    started_s, exchanges = send(server.address("stalling"), [k / 20 for k in range(14)])
    stall_start, stall_end = next(served["stall_s"] for served in server.log("stalling") if served["stall_s"])
    waiting = [e for e in exchanges if stall_start < started_s + e.scheduled_s < stall_end]
    assert waiting, "the schedule reaches into the stall"
    for exchange in waiting:
        row = row_of(exchange, OPEN)
        assert started_s + exchange.scheduled_s + (row.ttft_ms or 0.0) / 1e3 >= stall_end


def test_a_stalled_client_is_charged_from_the_due_time(shared_server: TimedServer) -> None:
    """When the client itself is late, the lag is on record and inside the latency: no coordinated omission."""
    readings = itertools.count()

    def clock() -> float:
        if next(readings) == 30:
            time.sleep(0.3)
        return time.monotonic()

    address = shared_server.address("plain")
    requests = [Request(completion_body(address, [k], 4), k / 20) for k in range(20)]
    with Client(address.base_url, timeout_s=30.0, clock=clock) as client:
        exchanges = client.run(requests).exchanges
    found = [row_of(exchange, OPEN) for exchange in exchanges]
    assert max(row.sent_s - row.scheduled_s for row in found) > 0.15
    for row in found:
        assert row.ttft_ms is not None
        assert row.ttft_ms >= (row.sent_s - row.scheduled_s) * 1e3 + 29


def test_nothing_is_sent_early(shared_server: TimedServer) -> None:
    """The open loop sends at or after the due time, to the last request."""
    _, exchanges = send(shared_server.address("plain"), [k / 50 for k in range(25)], tokens=2)
    assert [exchange.scheduled_s for exchange in exchanges] == pytest.approx([k / 50 for k in range(25)])
    assert all(exchange.sent_s >= exchange.scheduled_s for exchange in exchanges)


def test_open_loop_does_not_wait_for_answers(shared_server: TimedServer) -> None:
    """A hundred and fifty requests are in flight at once: nothing caps the connections."""
    _, exchanges = send(shared_server.address("slow"), [0.0] * 150, tokens=40)
    assert all(exchange.failure is None for exchange in exchanges)
    assert max(exchange.sent_s for exchange in exchanges) < min(exchange.ended_s for exchange in exchanges)


def test_closed_loop_keeps_its_concurrency(shared_server: TimedServer) -> None:
    """At no time are more requests in flight than asked, and the second wave waits for the first."""
    _, exchanges = send(shared_server.address("plain"), [None] * 9, concurrency=3)
    for exchange in exchanges:
        at = exchange.sent_s
        assert sum(other.sent_s <= at < other.ended_s for other in exchanges) <= 3
    assert exchanges[3].sent_s >= min(exchange.ended_s for exchange in exchanges[:3])


def test_a_spike_goes_from_one_concurrency_to_another_without_a_pause(shared_server: TimedServer) -> None:
    """The peak's requests start while the base's are still on their way, and afterwards there are few again."""
    address, among = shared_server.address("slow"), [2] * 4 + [8] * 12 + [2] * 4
    requests = [Request(completion_body(address, [k], 4), among=most) for k, most in enumerate(among)]
    with Client(address.base_url, timeout_s=30.0) as client:
        exchanges = client.run(requests).exchanges
    beside = [sum(o.sent_s <= e.sent_s < o.ended_s for o in exchanges[: k + 1]) for k, e in enumerate(exchanges)]
    assert all(seen <= most for seen, most in zip(beside, among, strict=True))
    assert max(beside[4:16]) == 8
    assert exchanges[4].sent_s < exchanges[3].ended_s


def test_options_are_asked_only_where_they_are_known() -> None:
    """A server without an option is not sent it, for it may refuse unknown keys."""
    every, none = Address("u", "m", True, token_ids=True), Address("u", "m", False)
    bodies = [json.loads(completion_body(address, [1], 4)) for address in (every, none)]
    assert (bodies[0]["ignore_eos"], bodies[0]["return_token_ids"]) == (True, True)
    assert not {"ignore_eos", "return_token_ids"} & bodies[1].keys()


def test_connections_that_lay_idle_are_not_trusted(shared_server: TimedServer) -> None:
    """After a while new connections are made, and the old ones are let go; by a clock that jumps ten seconds."""
    ahead = [0.0]
    address = shared_server.address("plain")
    requests = [Request(completion_body(address, [k], 2), 0.0) for k in range(12)]
    with Client(address.base_url, timeout_s=30.0, clock=lambda: time.monotonic() + ahead[0]) as client:
        found = []
        for _ in range(3):
            found += client.run(requests).exchanges
            ahead[0] += 10.0
    assert [None] * 36 == [row_of(exchange, OPEN).error for exchange in found]


def test_headers_are_sent_and_not_shown(shared_server: TimedServer) -> None:
    """A key goes with every request and is in no text that an address is shown by."""
    address = replace(shared_server.address("guarded"), headers={"Authorization": "Bearer sesame"})
    found = []
    for headers in (address.headers, {}):
        with Client(address.base_url, timeout_s=30.0, headers=headers) as client:
            found.append(row_of(client.run([Request(completion_body(address, [1], 4))]).exchanges[0], CLOSED).error)
    assert [None, "4xx"] == found
    assert "sesame" not in repr(address)


@pytest.mark.parametrize("value", ["a\r\nX-More: 1", "é"])
def test_a_header_that_would_break_the_request_is_refused(value: str) -> None:
    """Nothing but a header can be put where a header goes."""
    with pytest.raises(InputError, match="X-Key"):
        Client("http://127.0.0.1:1/v1", timeout_s=1.0, headers={"X-Key": value})


def test_an_interruption_keeps_what_was_answered(shared_server: TimedServer) -> None:
    """Ctrl-C ends a load at once: answers that are whole stay, the others are interrupted, sent or not."""
    pressed: list[float] = []

    def clock() -> float:
        """Press Ctrl-C as the first piece of the third answer comes, which is long."""
        now_s = time.monotonic()
        if not pressed and len(shared_server.log("slow")) > before:
            pressed.append(now_s)
            signal.raise_signal(signal.SIGINT)
        return now_s

    before = len(shared_server.log("slow"))
    plain, slow = shared_server.address("plain"), shared_server.address("slow")
    asked = [(plain, 4, 0.0), (plain, 4, 0.1), (slow, 64, 0.9), (plain, 4, 60.0)]
    requests = [Request(completion_body(to, [k], tokens), at_s) for k, (to, tokens, at_s) in enumerate(asked)]
    with Client(plain.base_url, timeout_s=30.0, clock=clock) as client:
        sent = client.run(requests)
        after = client.run([Request(completion_body(plain, [9], 4))])
    assert sent.interrupted
    assert [None, None, "interrupted", "interrupted"] == [row_of(e, OPEN).error for e in sent.exchanges]
    assert (False, [None]) == (after.interrupted, [row_of(e, CLOSED).error for e in after.exchanges])


def test_the_client_measures_a_server_of_known_timing() -> None:
    """Every request is answered, none is seen before it was written, and the figures have their place in the JSON."""
    (found,) = selftest.measure([40.0], 1.0)
    assert (40, 0) == (found.requests, found.failed)
    assert found.ttft_error_ms[0] > 0
    assert found.true_ttft_ms[0] >= 50
    assert {"ttft_ratio", "tpot_ratio", "lag_p99_ms", "cpu_ms", "delivered", "off"} <= found.document().keys()


@pytest.mark.parametrize(
    "timing",
    [Timing(burst=4), Timing(role=True), Timing(usage="late"), Timing(usage="none"), Timing(burst=4, usage="none")],
    ids=str,
)
def test_odd_servers_are_measured_right(timing: Timing) -> None:
    """However tokens and usage are sent, count, TTFT and TPOT are those of the server's own log."""
    with known_server(timing) as server, Client(server.address.base_url, timeout_s=30.0) as client:
        sent = client.run([Request(completion_body(server.address, [k, 1], 16), k / 40) for k in range(30)])
        truth = {one.first_id: one for one in server.truth()}
    found = [row_of(exchange, OPEN) for exchange in sent.exchanges]
    assert [(None, 16, 16)] * 30 == [(row.error, row.output_tokens, row.counted_tokens) for row in found]
    for k, row in enumerate(found):
        written = truth[k].written_s
        true_tpot = (written[-1] - written[0]) * 1e3 / (16 - timing.burst)
        assert row.ttft_ms is not None and row.tpot_ms is not None
        due_s = sent.started_s + sent.exchanges[k].scheduled_s
        assert row.ttft_ms >= (written[0] - due_s) * 1e3
        assert row.tpot_ms == pytest.approx(true_tpot, abs=5)
    assert latency.percentile([row.tpot_ms or 0.0 for row in found], 50) == pytest.approx(10.0, abs=1)


class Fleet:
    """Stands in for servers of engines; an engine's directory is named by what its model does, then a dash."""

    def __init__(self, server: TimedServer) -> None:
        self.server = server
        self.starts: list[str] = []
        self.logs: dict[str, list[dict[str, Any]]] = {}

    @contextmanager
    def serve(self, engine_dir: Path, *, threads: int, log: Path | None) -> Iterator[Any]:
        model = engine_dir.name.split("-")[0]
        self.starts.append(engine_dir.name)
        if model == "dead":
            raise EndpointError("the server ended with code 3")
        before = len(self.server.log(model)) if self.server.alive else 0
        with closing(Endpoint(f"{self.server.root}/v1", model, Capabilities(metrics="/metrics"))) as endpoint:
            yield Served(endpoint, self.server.pid, 0.5)
        if self.server.alive:
            self.logs.setdefault(engine_dir.name, []).extend(self.server.log(model)[before:])


def probe(
    server: TimedServer, tmp_path: Path, names: Sequence[str], **changes: object
) -> tuple[Fleet, stage.Facts, Path]:
    prompts = tmp_path / "requests.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{k}", "text": f"w{k} w1 w2"}) + "\n" for k in range(3)))
    engines = [tmp_path / name for name in names]
    for engine in engines:
        write_tokenizer(engine)
    out = tmp_path / "out"
    out.mkdir()
    fleet = Fleet(server)
    facts = stage.measure(
        probe_config(**({"prompts": str(prompts)} | changes)), out, engines, fleet.serve, array_bytes=2**20
    )
    return fleet, facts, out


def test_two_engines_under_one_schedule(shared_server: TimedServer, tmp_path: Path) -> None:
    """Both engines get the same ids at the same due times, in alternating order, and every row is there."""
    fleet, facts, out = probe(shared_server, tmp_path, ["plain-a", "plain-b"])
    assert fleet.starts == ["plain-a", "plain-b", "plain-b", "plain-a"]
    sent = {name: sorted(tuple(served["prompt"]) for served in log) for name, log in fleet.logs.items()}
    assert sent["plain-a"] == sent["plain-b"]
    assert len({prompt[0] for prompt in sent["plain-a"]}) == len(sent["plain-a"]) == 24
    assert {served["max_tokens"] for served in fleet.logs["plain-a"]} == {6}
    table = pq.read_table(out / "requests.parquet").to_pylist()
    assert len(table) == facts["requests"] == 40

    def plan_of(engine: str) -> list[tuple[object, ...]]:
        mine = [row for row in table if row["engine"] == engine]
        due = [round(row["scheduled_s"], 6) if row["mode"] == "open" else None for row in mine]
        keys = [(row["profile"], row["round"], row["request"], row["prompt_id"], row["input_tokens"]) for row in mine]
        return sorted((*key, at) for key, at in zip(keys, due, strict=True))

    assert plan_of("plain-a") == plan_of("plain-b")
    assert {row["position"] for row in table if row["engine"] == "plain-a" and row["round"] == 1} == {1}
    assert all(row["ok"] and row["output_tokens"] == 6 and len(row["itl_ms"]) == 5 for row in table)


def test_progress_reaches_its_total(
    shared_server: TimedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever watches is told of every load, also of those that could not be run, up to the total."""
    told: list[tuple[int, int, str, float | None]] = []
    monkeypatch.setattr(progress, "_sink", [lambda *report: told.append(report)])
    probe(shared_server, tmp_path, ["plain-a", "dead-x"], rounds=1)
    assert [done for done, *_ in told] == [4, 10, 14, 20]
    assert {(total, what) for _, total, what, _ in told} == {(20, "requests")}
    left = [left_s for *_, left_s in told]
    assert all(isinstance(left_s, float) for left_s in left)
    assert left[-1] == 0.0


def test_blocks_hold_what_the_machine_did(shared_server: TimedServer, tmp_path: Path) -> None:
    """One row per load and engine, with throughput by the formula, and the conditions beside it."""
    _, facts, out = probe(shared_server, tmp_path, ["plain-a"], rounds=1)
    blocks = pq.read_table(out / "blocks.parquet").to_pylist()
    assert [(b["profile"], b["requests"], b["failed"], b["threads"]) for b in blocks] == [
        ("closed_2", 4, 0, 1),
        ("open_40", 6, 0, 1),
    ]
    for block in blocks:
        assert block["requests_per_s"] == pytest.approx(block["requests"] / block["wall_s"])
        assert block["output_tokens_per_s"] == pytest.approx(6 * block["requests"] / block["wall_s"])
        assert block["bandwidth_gb_s"] > 0
        assert block["started"].endswith("+00:00")
    assert facts["rounds"] == 1
    assert facts["profiles"] == "closed_2,open_40"
    assert facts["failed_engines"] == ""
    assert facts["schedule_lag_max_ms"] is not None


def test_columns_are_the_agreed_ones(tmp_path: Path) -> None:
    """Column names and types do not depend on what was measured, so that tables of probes can be joined."""
    tables.write(tmp_path, [], [], [])
    requests, blocks = (pq.read_schema(tmp_path / f"{name}.parquet") for name in ("requests", "blocks"))
    assert requests.names == REQUEST_COLUMNS
    assert blocks.names == BLOCK_COLUMNS
    assert str(requests.field("concurrency").type) == "int64"
    assert str(requests.field("itl_ms").type).startswith("list<")


@pytest.mark.parametrize(
    ("name", "error", "starts"),
    [("dead-x", "not_started", 1), ("overloaded-x", "5xx", 2)],
)
def test_a_failing_engine_does_not_lose_the_others_rows(
    shared_server: TimedServer, tmp_path: Path, name: str, error: str, starts: int
) -> None:
    """Rows of an engine that fails say so, the other engine's are whole, and one that cannot start is tried once."""
    fleet, facts, out = probe(shared_server, tmp_path, ["plain-a", name])
    table = pq.read_table(out / "requests.parquet").to_pylist()
    assert {row["error"] for row in table if row["engine"] == name} == {error}
    assert all(row["ok"] for row in table if row["engine"] == "plain-a")
    assert (facts["failed_engines"], facts["failed_requests"], facts["requests"]) == (name, 20, 40)
    assert fleet.starts.count(name) == starts
    blocks = pq.read_table(out / "blocks.parquet").to_pylist()
    assert {(b["failed"], b["wall_s"]) for b in blocks if b["engine"] == name} == {(4, 0.0), (6, 0.0)}


def test_no_engine_answering_fails_the_stage(shared_server: TimedServer, tmp_path: Path) -> None:
    """When nothing was measured there is no result, and the error says what the servers said."""
    with pytest.raises(StageFailed, match=r"no engine answered.*dead-x: the server ended with code 3"):
        probe(shared_server, tmp_path, ["dead-x"])


def test_prompts_that_do_not_fit_are_refused_before_anything_runs(shared_server: TimedServer, tmp_path: Path) -> None:
    """A prompt longer than the engine holds is an error that names both, not a truncated measurement."""
    with pytest.raises(InputError, match=r"prompt 'p.' takes 4 tokens and its answer 61 more.*holds 64"):
        probe(shared_server, tmp_path, ["plain-a"], max_tokens=61)
