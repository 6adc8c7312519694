"""What somebody else serves, behind gateways of every kind: asked what it can do, and held to the variant."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.engine import remote
from pipelines.engine.card import read_card
from pipelines.engine.serving import serve
from pipelines.engine.table import TARGETS
from pipelines.errors import EndpointError, EnvironmentProblem, InputError, StageFailed
from pipelines.flow.store import Manifest
from pipelines.probe import stage
from pipelines.quantize.reference import TOKENS
from tests.byte_model import byte_tokenizer
from tests.fake_gateway import MODEL, Gateway, running, variant
from tests.unit.probe_configs import probe_config

KEY = "sk-live-0123456789"
Start = Callable[..., Gateway]
Build = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start gateways."""
    with ExitStack() as stack:
        yield lambda reply="yes", **kind: stack.enter_context(running(Gateway(**kind), tmp_path, reply))


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """Two held-out windows, as a model reads them that gives every token the log-probability of minus its id."""
    directory = tmp_path / "reference"
    directory.mkdir()
    ids = np.array([[1, 2, 3, 4], [5, 1, 2, 1]], np.int32)
    np.savez(directory / TOKENS, ids=ids, logprobs=-ids[:, 1:].astype(np.float32))
    manifest = Manifest(
        kind="reference", stage="reference", version=1, key="0" * 64, config={}, inputs={}, toolchain={}, device=None,
        facts={"base_perplexity": 9.5}, files={}, started="2026-01-01T00:00:00+00:00", seconds=1.0, peak_rss=1,
    )  # fmt: skip
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return directory


@pytest.fixture
def build(tmp_path: Path, reference: Path) -> Build:
    """Write an engine's directory for a gateway."""
    checkpoint = variant(tmp_path / "variant")

    def make(gateway: Gateway, **given: Any) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / f"engine-{len(list(tmp_path.glob('engine-*')))}"
        out.mkdir()
        known = {"url": gateway.url, "model": MODEL, "revision": "1", "max_length": 128, "timeout_s": 5}
        config = remote.RemoteConfig.model_validate(known | given)
        return out, dict(remote.build(config, out, variant=checkpoint, reference=reference))

    return make


def ids_of(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text).ids)


def test_a_server_is_asked_what_it_can_do(start: Start, build: Build) -> None:
    """Of our own host behind a gateway that lets everything through, everything is found."""
    engine, facts = build(start())
    able = {"token_prompts": True, "prompt_logprobs": True, "top_logprobs": 20, "stream": True, "ignore_eos": True}
    assert able == {name: facts[name] for name in able}
    assert "" == facts["notes"]
    card = read_card(engine)
    assert (MODEL, 128, [0]) == (card.model_id, card.max_length, card.eos_token_ids)


def test_its_latency_is_no_evidence_unless_the_device_is_stated(start: Start, build: Build) -> None:
    """By default such an engine is marked like one that emulates its format; a stated device lifts that."""
    gateway = start()
    engine, facts = build(gateway)
    assert (False, "not stated") == (facts["native"], facts["served_on"])
    assert "latency includes the network" in facts["native_note"]
    assert not read_card(engine).native
    _, stated = build(gateway, served_on="1x H100, eu-1")
    assert (True, "", "1x H100, eu-1") == (stated["native"], stated["native_note"], stated["served_on"])


def test_it_is_served_without_a_process(start: Start, build: Build) -> None:
    """Scores and answers come from there, of the very ids that were sent; nothing is started, and no command could."""
    gateway = start("ab")
    engine, _ = build(gateway)
    with serve(engine, threads=1) as served:
        assert served.pid is None
        assert gateway.url == served.endpoint.base_url
        assert "ab" == served.endpoint.generate([5, 6], max_tokens=9).text
        (score,) = served.endpoint.score([[3, 4, 9]])
        assert (None, -4.0, -9.0) == score.logprobs
    assert [5, 6] in [body["prompt"] for body in gateway.seen]
    with pytest.raises(InputError, match="no command of ours starts it"):
        TARGETS["remote"].serve(engine, 1, 1)


def test_a_key_is_sent_and_written_nowhere(start: Start, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable's name is all that stays: no file has it, nor facts, nor the error of a gateway that repeats it."""
    gateway = start(key=KEY)
    monkeypatch.setenv("ACME_KEY", KEY)
    engine, facts = build(gateway, api_key_env="ACME_KEY")
    assert all(KEY not in file.read_text(errors="replace") for file in engine.iterdir())
    assert KEY not in json.dumps(facts)
    assert KEY not in repr(remote.elsewhere(engine))
    with serve(engine, threads=1) as served:
        assert "yes" == served.endpoint.generate([5], max_tokens=9).text
    wrong = "sk-wrong-987"
    monkeypatch.setenv("ACME_KEY", wrong)
    with pytest.raises(EndpointError, match=r"status 401: Authentication Error. Received=\*\*\*") as told:
        build(gateway, api_key_env="ACME_KEY")
    assert wrong not in str(told.value)
    with pytest.raises(EndpointError, match="401"), serve(engine, threads=1):
        pass
    monkeypatch.delenv("ACME_KEY")
    with pytest.raises(EnvironmentProblem, match="ACME_KEY"), serve(engine, threads=1):
        pass
    with pytest.raises(EnvironmentProblem, match="ACME_KEY"):
        build(gateway, api_key_env="ACME_KEY")


def test_a_server_of_texts_has_to_be_declared(start: Start, build: Build) -> None:
    """Token ids refused are an error that says how to go on; declared, the same ids go out as text and are counted."""
    gateway = start(text_only=True)
    with pytest.raises(EndpointError, match=r"expected a string .*engine.capabilities.token_prompts=false"):
        build(gateway)
    engine, facts = build(gateway, capabilities={"token_prompts": False})
    assert not facts["token_prompts"]
    with serve(engine, threads=1) as served:
        assert len("é漢") == 2
        done = served.endpoint.generate(ids_of("é漢"), max_tokens=9)
        assert ("yes", 5) == (done.text, done.tokens_in)
        assert "é漢" == gateway.seen[-1]["prompt"]
        with pytest.raises(EndpointError, match="no text is read as these 1 token ids"):
            served.endpoint.generate(ids_of("é")[:1], max_tokens=9)


@pytest.mark.parametrize(
    ("kind", "able", "said"),
    [
        ({"ignores": ("ignore_eos",)}, "ignore_eos", ""),
        ({"refuses": ("ignore_eos",)}, "ignore_eos", "ignore_eos: .*unknown field ignore_eos"),
        ({"refuses": ("echo",)}, "prompt_logprobs", "prompt_logprobs: .*unknown field echo.*was not checked"),
        ({"ignores": ("echo",)}, "prompt_logprobs", "prompt_logprobs: .*"),
        ({"refuses": ("stream_options",)}, "stream", "stream: a streamed request has status 400"),
        ({"ignores": ("stream_options",)}, "stream", "stream: a stream of .* events has no usage"),
        ({"ignores": ("stream",)}, "stream", "stream: a stream of 0 events has no text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_gateway_drops_or_refuses_is_not_counted_on(
    start: Start, build: Build, kind: dict[str, Any], able: str, said: str
) -> None:
    """An option that is taken and does nothing is found out as well as one that is refused; the rest stays."""
    _, facts = build(start(**kind))
    others = {"token_prompts", "prompt_logprobs", "stream", "ignore_eos"} - {able}
    assert not facts[able] and all(facts[name] for name in others)
    assert re.search(said, facts["notes"]) if said else facts["notes"] == ""


def test_what_is_declared_must_hold(start: Start, build: Build) -> None:
    """Declared log-probabilities that do not come are an error, not a note."""
    with pytest.raises(
        EndpointError, match=r"engine.capabilities.prompt_logprobs is declared, but .*unknown field echo"
    ):
        build(start(refuses=("echo",)), capabilities={"prompt_logprobs": True})


def test_a_server_of_something_else_is_found_out(start: Start, build: Build, reference: Path) -> None:
    """Its perplexity on the held-out windows is the variant's, or it is not that variant."""
    _, facts = build(start())
    assert np.exp(13 / 6) == pytest.approx(facts["perplexity"])
    assert 9.5 == facts["base_perplexity"]
    ids = np.array([[1, 2, 3, 4], [5, 1, 2, 1]], np.int32)
    np.savez(reference / TOKENS, ids=ids, logprobs=np.full((2, 3), -2.0, np.float32))
    with pytest.raises(StageFailed, match=r"perplexity of 8.729 .* the variant 7.389: 1.181 times.*something else"):
        build(start())
    _, loose = build(start(), max_ppl_drift=1.2)
    assert np.exp(13 / 6) == pytest.approx(loose["perplexity"])


def test_a_model_that_is_not_there_is_told_with_the_closest(start: Start, build: Build) -> None:
    """The server's own list says what it has; nothing is waited for."""
    with pytest.raises(EndpointError, match=r"no model 'acme-7' there; did you mean 'acme-7b'"):
        build(start(), model="acme-7")


def test_a_server_that_starts_late_is_waited_for(start: Start, build: Build) -> None:
    """503 of a gateway means not yet; it has timeout_s, and no more."""
    _, facts = build(start(busy=1))
    assert facts["ready_s"] >= 0.5
    with pytest.raises(EndpointError, match=r"no answer within engine.timeout_s=0.6.*no server yet"):
        build(start(busy=99), timeout_s=0.6)


def test_a_url_that_nobody_answers_is_given_up(start: Start, build: Build) -> None:
    """A refused connection is told as such."""
    with pytest.raises(EndpointError, match=r"timeout_s=0.1: ConnectError"):
        build(Gateway(url="http://127.0.0.1:9/v1"), timeout_s=0.1)


def test_it_is_probed_like_any_other(
    start: Start, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a gateway with a key that takes text only: every request is answered, the server's count of what it read
    is ours, and of a server that is not ours no memory is measured."""
    monkeypatch.setenv("ACME_KEY", KEY)
    gateway = start(key=KEY, text_only=True)
    engine, _ = build(gateway, api_key_env="ACME_KEY", capabilities={"token_prompts": False})
    (tmp_path / "requests.jsonl").write_text('{"text": "one"}\n{"text": "and two"}\n')
    out = tmp_path / "latency"
    out.mkdir()
    config = probe_config(prompts=str(tmp_path / "requests.jsonl"), rounds=1)
    stage.measure(config, out, [engine], serve, array_bytes=2**20)
    requests = pq.read_table(out / "requests.parquet").to_pylist()
    assert 10 == len(requests)
    assert {True} == {row["ok"] for row in requests}
    assert all(row["usage_input_tokens"] == row["input_tokens"] and row["output_tokens"] == 6 for row in requests)
    assert {None} == {row["peak_rss_bytes"] for row in pq.read_table(out / "blocks.parquet").to_pylist()}
    streamed = [body["prompt"] for body in gateway.seen if body.get("stream")]
    assert len(streamed) >= 12 and all(isinstance(prompt, str) for prompt in streamed)


def test_a_server_that_does_not_stream_is_not_measured(start: Start, build: Build, tmp_path: Path) -> None:
    """Whole answers have no first token; the reason is told, not a broken stream for every request."""
    engine, facts = build(start(refuses=("stream_options",)))
    assert not facts["stream"]
    (tmp_path / "requests.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "latency").mkdir()
    config = probe_config(prompts=str(tmp_path / "requests.jsonl"), rounds=1)
    with pytest.raises(StageFailed, match="it streams no answers with usage"):
        stage.measure(config, tmp_path / "latency", [engine], serve, array_bytes=2**20)


def test_a_server_that_admits_less_than_was_said_is_told(start: Start, build: Build) -> None:
    """Its own list says 256 tokens, so a campaign that counts on 257 ends before anything is scored or cut."""
    with pytest.raises(EndpointError, match=r"engine.max_length=257, but the server admits 256 \(max_model_len\)"):
        build(start(), max_length=257)
    _, facts = build(start(), max_length=256)
    assert facts["token_prompts"]
