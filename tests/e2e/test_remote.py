"""A LiteLLM proxy in front of our host with the small real model: scored and probed as what somebody else serves."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.config import CONF_DIR
from pipelines.engine import remote
from pipelines.engine.ending import end
from pipelines.engine.serving import Served, serve
from pipelines.errors import EndpointError
from pipelines.evaluate.evalset import EvalsetConfig, load
from pipelines.evaluate.harness import rows_of
from pipelines.flow.store import Manifest
from pipelines.probe import stage
from pipelines.probe.config import ProbeConfig
from pipelines.quantize.carry import carry_over
from pipelines.quantize.reference import TOKENS

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.filterwarnings("default")]  # the libraries' own warnings

KEY = "sk-of-the-proxy-1234"
STARTS_WITHIN_S = 240.0


@pytest.fixture(scope="module")
def engine(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base checkpoint in float32, exported by the library's own builder."""
    out = tmp_path_factory.mktemp("engine")
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(base_checkpoint), "-o", str(out)]
    cache = str(tmp_path_factory.mktemp("cache"))
    subprocess.run([*builder, "-e", "cpu", "-p", "fp32", "-c", cache], check=True, capture_output=True)
    carry_over(base_checkpoint, out)
    about = json.loads((base_checkpoint / "config.json").read_text())
    card = {
        "target": "ort_genai", "native": True, "native_note": "", "max_length": 1024,
        "eos_token_ids": [about["eos_token_id"]], "bos_token_id": about["bos_token_id"],
        "vocab_size": about["vocab_size"], "model_id": "small",
    }  # fmt: skip
    (out / "engine.json").write_text(json.dumps(card))
    return out


@pytest.fixture(scope="module")
def host(engine: Path) -> Iterator[Served]:
    """Our own host, which the proxy stands before."""
    with serve(engine, threads=2) as served:
        yield served


@pytest.fixture(scope="module")
def proxy(host: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A LiteLLM proxy with a key of its own; it names the model `acme-small`, and `acme-chat` by a route for text."""
    program = os.environ.get("QUANTGATE_TEST_LITELLM") or shutil.which("litellm")
    if program is None:
        pytest.skip("needs LiteLLM's proxy: an environment of tests/e2e/litellm.txt, named by QUANTGATE_TEST_LITELLM")
    where = tmp_path_factory.mktemp("proxy")
    behind = {"api_base": host.endpoint.base_url, "api_key": "none"}
    routes = {"acme-small": "text-completion-openai/small", "acme-chat": "hosted_vllm/small"}
    models = [{"model_name": n, "litellm_params": {"model": m, **behind}} for n, m in routes.items()]
    settings = {"model_list": models, "general_settings": {"master_key": KEY}}
    (where / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    port = _port()
    argv = [program, "--config", str(where / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (where / "log").open("wb") as log:
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait(f"http://127.0.0.1:{port}/health/liveliness", process, where / "log")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            end(process, 10)


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    with httpx.Client(trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-2000:]
            try:
                if client.get(url).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


@pytest.fixture(scope="module")
def reference(host: Served, base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two held-out windows as our own host reads them, without the proxy."""
    from tokenizers import Tokenizer

    out = tmp_path_factory.mktemp("reference")
    lines = (CONF_DIR.parent / "evalsets/heldout_text/items.jsonl").read_text().splitlines()
    words = "\n".join(json.loads(line)["text"] for line in lines[:20])
    ids = Tokenizer.from_file(str(base_checkpoint / "tokenizer.json")).encode(words).ids[:256]
    windows = np.array(ids, np.int32).reshape(2, 128)
    scores = host.endpoint.score(windows.tolist())
    np.savez(out / TOKENS, ids=windows, logprobs=np.array([s.logprobs[1:] for s in scores], np.float32))
    manifest = Manifest(
        kind="reference", stage="reference", version=1, key="0" * 64, config={}, inputs={}, toolchain={}, device=None,
        facts={}, files={}, started="2026-01-01T00:00:00+00:00", seconds=1.0, peak_rss=1,
    )  # fmt: skip
    (out / "manifest.json").write_text(manifest.model_dump_json())
    return out


@pytest.fixture
def built(
    proxy: str, base_checkpoint: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """Write the engine's directory of what the proxy serves; give it with its facts."""
    monkeypatch.setenv("ACME_KEY", KEY)

    def make(**given: Any) -> tuple[Path, dict[str, Any]]:
        out = tmp_path / f"remote-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        known = {"url": proxy, "model": "acme-small", "revision": "1", "max_length": 1024, "api_key_env": "ACME_KEY"}
        config = remote.RemoteConfig.model_validate(known | given)
        return out, dict(remote.build(config, out, variant=base_checkpoint, reference=reference))

    return make


Build = Callable[..., tuple[Path, dict[str, Any]]]


def test_a_proxy_that_passes_ids_on_is_scored_and_probed(built: Build, engine: Path, tmp_path: Path) -> None:
    """Everything our host can do is found behind it, and answers are word for word those without it; latencies are
    measured, and of a server that is not ours no memory is."""
    far, facts = built()
    print(facts)
    assert all(facts[name] for name in ("token_prompts", "prompt_logprobs", "stream", "ignore_eos"))
    assert not facts["native"]
    assert 1 < facts["perplexity"] < 100

    tickets = load(EvalsetConfig(path=str(CONF_DIR.parent / "evalsets/ticket_json"), limit=4))
    through, direct = (rows_of(tickets, one) for one in (far, engine))
    same = ("item_id", "prediction", "prompt_hash", "tokens_in", "tokens_out", "finish_reason", "score")
    assert [{k: row[k] for k in same} for row in direct] == [{k: row[k] for k in same} for row in through]

    config = ProbeConfig.model_validate(
        {
            "profiles": [
                {"name": "closed_2", "mode": "closed", "concurrency": 2, "requests": 6},
                {"name": "open_1", "mode": "open", "rate": 1.0, "requests": 6},
            ],
            "prompts": str(CONF_DIR / "probe/requests.jsonl"), "threads": 2, "rounds": 1, "warmup_requests": 2,
            "warmup_max_requests": 2, "max_tokens": 8,
        }
    )  # fmt: skip
    out = tmp_path / "latency"
    out.mkdir()
    stage.measure(config, out, [far, engine], serve, array_bytes=2**20)
    requests = pq.read_table(out / "requests.parquet").to_pylist()
    assert {True} == {row["ok"] for row in requests}
    assert all(row["usage_input_tokens"] == row["input_tokens"] and row["output_tokens"] == 8 for row in requests)
    blocks = {
        (row["engine"], row["peak_rss_bytes"] is None) for row in pq.read_table(out / "blocks.parquet").to_pylist()
    }
    assert {(far.name, True), (engine.name, False)} == blocks


def test_a_route_of_texts_has_to_be_declared(built: Build, host: Served, base_checkpoint: Path) -> None:
    """LiteLLM's route for vLLM refuses token ids; declared so, the same ids go out as text and are counted the same."""
    with pytest.raises(EndpointError, match=r"engine.capabilities.token_prompts=false"):
        built(model="acme-chat")
    far, facts = built(model="acme-chat", capabilities={"token_prompts": False})
    print(facts)
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(base_checkpoint / "tokenizer.json")).encode("Water boils at").ids
    with serve(far, threads=1) as served:
        assert host.endpoint.generate(ids, max_tokens=8) == served.endpoint.generate(ids, max_tokens=8)


def test_a_wrong_key_is_told_and_not_shown(built: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's refusal is the error, at once, and the key is not in it."""
    wrong = "sk-wrong-0123456789"
    monkeypatch.setenv("ACME_KEY", wrong)
    with pytest.raises(EndpointError, match="status 4") as told:
        built()
    assert wrong not in str(told.value)
