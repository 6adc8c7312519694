"""The host over real HTTP on loopback, with a scripted decoder: what clients rely on, and what they must not suffer."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from pipelines.engine.card import EngineCard
from pipelines.engine.endpoint import Capabilities, Endpoint, TokenScore
from pipelines.engine.host.__main__ import main
from pipelines.engine.host.app import Server
from pipelines.engine.host.decoder import DecodeFailed
from pipelines.engine.host.desk import Desk
from pipelines.engine.host.engine import Engine
from pipelines.engine.host.metrics import Metrics
from tests.byte_model import EOS, Scripted, byte_tokenizer

TOKENIZER = byte_tokenizer()
CARD = EngineCard(
    target="scripted",
    native=True,
    native_note="",
    max_length=64,
    eos_token_ids=[EOS],
    bos_token_id=None,
    vocab_size=257,
    model_id="scripted",
)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
Json = dict[str, Any]


@dataclass(frozen=True)
class Running:
    """A host on a port, and the decoder behind it."""

    url: str
    decoder: Scripted
    desk: Desk
    client: httpx.Client

    def post(self, path: str = "completions", **body: Any) -> httpx.Response:
        return self.client.post(f"{self.url}/{path}", json=body, timeout=10)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url.removesuffix("/v1") + path, timeout=5)

    def stream(self, path: str = "completions", **body: Any) -> list[Json]:
        """The events of a stream; its end mark is checked and left out."""
        response = self.post(path, stream=True, **body)
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert "[DONE]" == lines.pop()
        return [json.loads(line) for line in lines]


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start hosts; each gets a reply to say over and over."""
    stops: list[Callable[[], None]] = []
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)

    def begin(reply: str = "ok", *, ends: bool = False, max_batch: int = 2, max_queue: int = 2) -> Running:
        decoder = Scripted(TOKENIZER, reply, ends)
        desk = Desk(decoder, TOKENIZER, [EOS], max_batch, max_queue)
        engine = Engine(tmp_path, CARD, TOKENIZER)
        server = uvicorn.Server(
            uvicorn.Config(Server(engine, desk, Metrics()).app(), log_level="error", lifespan="off", ws="none")
        )
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        desk.start()
        thread.start()

        client = httpx.Client(verify=False, trust_env=False)

        def stop() -> None:
            client.close()
            decoder.gate.set()
            server.should_exit = True
            thread.join(10)
            desk.close()
            listener.close()

        stops.append(stop)
        return Running(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", decoder, desk, client)

    yield begin
    for stop in stops:
        stop()


def eventually(true: Callable[[], bool]) -> None:
    """Wait a short while for something another thread does."""
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_completion_has_text_reason_and_counts(start: Start) -> None:
    """Text, finish reason and usage are those of the tokens generated; all sampling fields reach the decoder."""
    host = start("abcdef")
    body = host.post(prompt="hey", max_tokens=4, temperature=0.5, top_p=0.9, top_k=7, seed=3, user="ignored").json()
    assert [("abcd", "length", 0)] == [(c["text"], c["finish_reason"], c["index"]) for c in body["choices"]]
    assert {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7} == body["usage"]
    assert ("text_completion", "scripted") == (body["object"], body["model"])
    sampling = host.decoder.turns[0].sampling
    assert (0.5, 0.9, 7, 3) == (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)


def test_token_ids_reach_the_decoder_as_they_were_sent(start: Start) -> None:
    """Prompts of ids are not re-tokenized; several prompts answer in order."""
    host = start("ab")
    body = host.post(prompt=[[5, 6], [7]], max_tokens=1).json()
    assert [(5, 6), (7,)] == [turn.ids for turn in host.decoder.turns]
    assert [0, 1] == [c["index"] for c in body["choices"]]


def test_end_of_text_stops_and_may_be_ignored(start: Start) -> None:
    """The end token has no text and counts as generated; with ignore_eos the text goes on to its length."""
    host = start("hi", ends=True)
    body = host.post(prompt="x", max_tokens=9).json()
    assert ("hi", "stop", 3) == (
        body["choices"][0]["text"],
        body["choices"][0]["finish_reason"],
        body["usage"]["completion_tokens"],
    )
    longer = host.post(prompt="x", max_tokens=7, ignore_eos=True).json()
    assert ("hihih", "length") == (longer["choices"][0]["text"], longer["choices"][0]["finish_reason"])


def test_a_stream_has_one_event_per_token_and_no_broken_characters(start: Start) -> None:
    """An event comes for every token, empty inside a character of several; ids come when asked for."""
    text = "aé漢👍"
    events = start(text).stream(prompt="x", max_tokens=10, return_token_ids=True)
    pieces = [event["choices"][0]["text"] for event in events]
    assert ["a", "", "é", "", "", "漢", "", "", "", "👍"] == pieces
    assert TOKENIZER.encode(text).ids == [i for event in events for i in event["choices"][0]["token_ids"]]
    assert [None] * 9 + ["length"] == [event["choices"][0]["finish_reason"] for event in events]


def test_stop_strings_are_cut_across_tokens(start: Start) -> None:
    """No event shows any of a stop string, although it spans tokens; the answer ends where it begins."""
    host = start("one\n\ntwo")
    events = host.stream(prompt="x", max_tokens=30, stop=["\n\n"])
    assert "one" == "".join(event["choices"][0]["text"] for event in events)
    assert "stop" == events[-1]["choices"][0]["finish_reason"]
    assert 5 == len(events)
    whole = host.post(prompt="x", max_tokens=30, stop="\n\n").json()["choices"][0]
    assert ("one", "stop") == (whole["text"], whole["finish_reason"])


def test_a_stream_may_end_with_usage(start: Start) -> None:
    """include_usage adds one last event without choices."""
    events = start("ab").stream(prompt="xyz", max_tokens=2, stream_options={"include_usage": True})
    assert [1, 1, 0] == [len(event["choices"]) for event in events]
    assert {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5} == events[-1]["usage"]


def test_chat_renders_the_models_template(start: Start) -> None:
    """Messages, text parts included, become the template's prompt; the role comes with the first text."""
    host = start("hi", ends=True)
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    body = host.post("chat/completions", messages=messages, max_completion_tokens=5).json()
    assert {"role": "assistant", "content": "hi"} == body["choices"][0]["message"]
    assert "[user]ab>" == TOKENIZER.decode(list(host.decoder.turns[0].ids))
    deltas = [e["choices"][0]["delta"] for e in host.stream("chat/completions", messages=messages, max_tokens=2)]
    assert [{"role": "assistant", "content": "h"}, {"content": "i"}] == deltas


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_the_prompt(start: Start, max_tokens: int) -> None:
    """Prompt tokens carry log-probabilities, alternatives that include the token itself, offsets and exact ids."""
    ids = TOKENIZER.encode("ab").ids
    body = start().post(prompt=[[*ids, 7]], max_tokens=max_tokens, echo=True, logprobs=1, temperature=0).json()
    choice = body["choices"][0]
    scores = choice["logprobs"]
    length = 3 + max_tokens
    assert [*ids, 7, 7][:length] == scores["token_ids"]
    assert [None, -float(ids[1]), -0.25, -0.25][:length] == scores["token_logprobs"]
    seven = TOKENIZER.decode([7])
    assert [None, {seven: -0.25, "b": -float(ids[1])}, {seven: -0.25}, {seven: -0.25}][:length] == scores[
        "top_logprobs"
    ]
    assert [0, 1, 2, 3][:length] == scores["text_offset"]
    assert "ab" + seven * (1 + max_tokens) == choice["text"]
    assert ("length", max_tokens) == (choice["finish_reason"], body["usage"]["completion_tokens"])


def test_echo_without_scores_repeats_the_prompt(start: Start) -> None:
    """Echo alone puts the prompt's text first, in a stream as an event of its own."""
    host = start("ok")
    assert "héok" == host.post(prompt="hé", max_tokens=2, echo=True).json()["choices"][0]["text"]
    assert ["hé", "o", "k"] == [e["choices"][0]["text"] for e in host.stream(prompt="hé", max_tokens=2, echo=True)]
    nothing = host.post(prompt="hé", max_tokens=0, echo=True).json()["choices"][0]
    assert ("hé", "length") == (nothing["text"], nothing["finish_reason"])


def test_scores_then_generates_more_than_one_token(start: Start) -> None:
    """With echo, logprobs and several tokens, both the prompt and the answer carry log-probabilities."""
    scores = start("ok").post(prompt="ab", max_tokens=2, echo=True, logprobs=1).json()["choices"][0]["logprobs"]
    assert ["a", "b", "o", "k"] == scores["tokens"]
    assert [-0.5, -0.5] == scores["token_logprobs"][2:]
    events = start("ok").stream(prompt="ab", max_tokens=2, echo=True, logprobs=1)
    assert [["a", "b"], ["o"], ["k"]] == [e["choices"][0]["logprobs"]["tokens"] for e in events]
    assert [0, 2, 3] == [e["choices"][0]["logprobs"]["text_offset"][0] for e in events]


def test_the_endpoint_client_reads_the_hosts_scores(start: Start) -> None:
    """Our client and our server agree about ids, order and greedy flags."""
    with closing(Endpoint(start("ok", ends=True).url, "scripted", Capabilities(logprob_start=True))) as endpoint:
        late = endpoint.score([(1, 2, 7), (2, 3)], [2, 1])
        assert TokenScore((1, 2, 7), (None, None, -0.25), (None, None, True)) == late[0]
        scores = endpoint.score([(1, 7), (2, 3)])
        assert TokenScore((1, 7), (None, -0.25), (None, True)) == scores[0]
        assert TokenScore((2, 3), (None, -3.0), (None, False)) == scores[1]
        done = endpoint.generate((1, 2, 3), max_tokens=9)
        assert ("ok", "stop", 3, 3) == (done.text, done.finish_reason, done.tokens_in, done.tokens_out)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "prompt", "expected a string"),
        ({"prompt": 5}, "prompt", "expected a string"),
        ({"prompt": []}, "prompt", "expected a string"),
        ({"prompt": ["a", 3]}, "prompt", r"prompt\[1\]"),
        ({"prompt": [[1, True]]}, "prompt", r"prompt\[0\]"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": [257]}, "prompt", "from 0 to 256"),
        ({"prompt": [-1]}, "prompt", "from 0 to 256"),
        ({"prompt": "x" * 65, "max_tokens": 1}, "prompt", "exceed the 64"),
        ({"prompt": "x", "max_tokens": 64}, "max_tokens", "exceed the 64"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"prompt": "x", "temperature": -0.5}, "temperature", "greater than or equal to 0"),
        ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
        ({"prompt": "x", "stop": ""}, "stop", "must not be empty"),
        ({"prompt": "x", "stop": [1]}, "stop", "valid string"),
        ({"prompt": "x", "stream": "yes"}, "stream", "valid boolean"),
        ({"prompt": "x", "logprob_start_len": -1}, "logprob_start_len", "greater than or equal to 0"),
        (
            {"prompt": "x", "logprob_start_len": [0, 1], "echo": True, "logprobs": 0},
            "logprob_start_len",
            "2 numbers for 1",
        ),
        ({"prompt": "x", "logprobs": 99}, "logprobs", "less than or equal to 20"),
        ({"prompt": "x", "n": 2}, "n", "n=2 is not supported"),
        ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty", "not supported"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong(start: Start, body: Json, param: str, said: str) -> None:
    """A 400 in OpenAI's form names the field and the reason."""
    host = start()
    response = host.post(**body)
    error = response.json()["error"]
    assert (400, "invalid_request_error", param) == (response.status_code, error["type"], error["param"])
    assert re.search(said, error["message"])
    assert [] == host.decoder.turns


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    ],
)
def test_wrong_chats_are_refused(start: Start, body: Json) -> None:
    """Chats without messages, roles or text, and features not on offer, are a 400."""
    assert 400 == start().post("chat/completions", **body).status_code


def test_what_is_neutral_or_unknown_is_let_through(start: Start) -> None:
    """Defaults that clients send along, and fields nobody knows, change nothing."""
    body = {"n": 1, "best_of": 1, "presence_penalty": 0.0, "logit_bias": None, "suffix": None, "metadata": {"a": 1}}
    assert 200 == start().post(prompt="x", max_tokens=1, **body).status_code


def test_bodies_that_are_not_json_objects_and_other_models_are_refused(start: Start) -> None:
    """Not JSON or not an object: 400; another model's name: 404."""
    host = start()
    assert [400, 400, 400] == [
        host.client.post(f"{host.url}/completions", content=c).status_code for c in (b"{", b"[1]", b"\xff")
    ]
    assert 404 == host.post(prompt="x", model="another").status_code


def test_a_full_house_answers_429_and_then_serves_again(start: Start) -> None:
    """Beyond batch and queue a request is turned away at once with Retry-After; those inside are served."""
    host = start("ab", max_batch=1, max_queue=1)
    host.decoder.gate.clear()
    answers: list[int] = []
    inside = [
        threading.Thread(target=lambda: answers.append(host.post(prompt="x", max_tokens=2).status_code))
        for _ in range(2)
    ]
    for thread in inside:
        thread.start()
    eventually(lambda: host.desk.open_tickets == 2)
    refused = [host.post(prompt="x"), host.post(prompt="x", stream=True)]
    assert [429, 429] == [response.status_code for response in refused]
    assert ["1", "1"] == [response.headers["Retry-After"] for response in refused]
    host.decoder.gate.set()
    for thread in inside:
        thread.join(10)
    assert [200, 200] == answers
    assert 200 == host.post(prompt="x", max_tokens=1).status_code


@pytest.mark.parametrize("stream", [True, False])
def test_work_stops_when_the_client_leaves(start: Start, stream: bool) -> None:
    """A client that hangs up, streaming or not, frees its place; the decoder drops its sequence."""
    host = start("a")
    host.decoder.gate.clear()
    body = {"prompt": "x", "max_tokens": 60, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        host.client.post(f"{host.url}/completions", json=body, timeout=0.3)
    eventually(lambda: host.desk.open_tickets == 0)
    host.decoder.gate.set()
    eventually(lambda: [1] == host.decoder.dropped)
    eventually(lambda: host.desk.running == 0)


def test_work_stops_when_a_client_leaves_in_the_middle_of_a_stream(start: Start) -> None:
    """A client that has read some events and leaves does not cost the rest."""
    host = start("a")
    host.decoder.gate.clear()
    body = {"prompt": "x", "max_tokens": 60, "stream": True}
    threading.Timer(0.1, host.decoder.gate.set).start()
    with host.client.stream("POST", f"{host.url}/completions", json=body) as response:
        next(response.iter_lines())
        host.decoder.gate.clear()
    eventually(lambda: host.desk.open_tickets == 0)
    host.decoder.gate.set()
    eventually(lambda: host.desk.running == 0)


def test_a_queued_client_that_leaves_is_never_started(start: Start) -> None:
    """Work that nobody waits for any more does not reach the decoder."""
    host = start("a", max_batch=1)
    host.decoder.gate.clear()
    first = threading.Thread(target=lambda: host.post(prompt="x", max_tokens=1))
    first.start()
    eventually(lambda: len(host.decoder.turns) == 1)
    with pytest.raises(httpx.ReadTimeout):
        host.client.post(f"{host.url}/completions", json={"prompt": "y", "max_tokens": 1}, timeout=0.2)
    eventually(lambda: host.desk.open_tickets == 1)
    host.decoder.gate.set()
    first.join(10)
    assert 200 == host.post(prompt="z", max_tokens=1).status_code
    assert ["x", "z"] == [TOKENIZER.decode(list(turn.ids)) for turn in host.decoder.turns]


def test_a_failure_of_the_model_is_a_500_and_the_host_lives(start: Start) -> None:
    """Requests in the failed step get an error, in a stream as an event; the next request works."""
    host = start("ab")
    host.decoder.fails = DecodeFailed((), "no memory")
    failed = host.post(prompt="x")
    assert (500, "server_error") == (failed.status_code, failed.json()["error"]["type"])
    assert "no memory" in failed.json()["error"]["message"]
    host.decoder.fails = DecodeFailed((), "no memory")
    assert '{"error"' in host.post(prompt="x", stream=True).text
    assert 200 == host.post(prompt="x", max_tokens=1).status_code


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_program_ends_the_host_instead_of_hanging_it(start: Start) -> None:
    """Should the decode thread ever die, clients get an error, health says so, and whoever runs the host is told."""
    host, told = start("ab"), threading.Event()
    host.desk.on_death = told.set
    host.decoder.breaks = True
    assert 500 == host.post(prompt="x").status_code
    assert told.wait(5)
    eventually(lambda: not host.desk.alive)
    assert 503 == host.get("/health").status_code


def test_health_models_and_metrics(start: Start) -> None:
    """The host says that it lives, what it serves and what it has done."""
    host = start("ab")
    assert {"status": "ok"} == host.get("/health").json()
    model = host.get("/v1/models").json()["data"][0]
    assert ("scripted", 64) == (model["id"], model["max_model_len"])
    host.post(prompt="xyz", max_tokens=2)
    host.post(prompt=[])
    metrics = host.get("/metrics").text
    assert 'quantgate_host_responses_total{route="completions",status="200"} 1.0' in metrics
    assert 'quantgate_host_responses_total{route="completions",status="400"} 1.0' in metrics
    assert "quantgate_host_prompt_tokens_total 3.0" in metrics
    assert "quantgate_host_generated_tokens_total 2.0" in metrics
    assert "quantgate_host_time_to_first_token_seconds_count 1.0" in metrics


def test_the_event_loop_stays_free_while_the_model_works(start: Start) -> None:
    """A step that takes long delays no other route."""
    host = start("ab")
    host.decoder.gate.clear()
    thread = threading.Thread(target=lambda: host.post(prompt="x", max_tokens=1))
    thread.start()
    eventually(lambda: host.desk.open_tickets == 1)
    assert 200 == host.get("/health").status_code
    host.decoder.gate.set()
    thread.join(10)


def test_a_taken_port_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 6, before anything is loaded, with the option to change."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert 6 == main([str(tmp_path), "--port", str(port)])
    assert f"error: --port={port}: taken by another process on 127.0.0.1; choose another\n" == capsys.readouterr().err


def test_a_directory_that_is_no_engine_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the file that is missing."""
    assert 2 == main([str(tmp_path), "--port", "0"])
    assert f"error: {tmp_path}: no engine.json: not an engine directory\n" == capsys.readouterr().err
