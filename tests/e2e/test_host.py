"""The host on a real engine, against transformers on the same checkpoint and with the clients that people use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pipelines.engine.serving import Served, serve
from pipelines.errors import EndpointError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who every morning",
    "def fibonacci(n):\n    if n <",
    "Water boils at",
]
QUESTIONS = [
    {"q": "The capital of Italy is", "choices": [" Rome", " Berlin", " a river", " Paris"], "gold": 0},
    {"q": "Two plus two equals", "choices": [" five", " four"], "gold": 1},
    {"q": "The opposite of hot is", "choices": [" cold", " very warm indeed", " blue"], "gold": 0},
]
TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_target: gold
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def engine(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base checkpoint in float32, exported by the library's own builder."""
    out = tmp_path_factory.mktemp("engine")
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(base_checkpoint), "-o", str(out)]
    cache = str(tmp_path_factory.mktemp("cache"))
    subprocess.run([*builder, "-e", "cpu", "-p", "fp32", "-c", cache], check=True, capture_output=True)
    eos = json.loads((base_checkpoint / "generation_config.json").read_text())["eos_token_id"]
    card = {
        "target": "ort_genai",
        "native": True,
        "native_note": "",
        "max_length": 2048,
        "eos_token_ids": [eos],
        "bos_token_id": 1,
        "vocab_size": json.loads((base_checkpoint / "config.json").read_text())["vocab_size"],
        "model_id": "small",
    }
    (out / "engine.json").write_text(json.dumps(card))
    return out


@pytest.fixture(scope="module")
def served(engine: Path) -> Iterator[Served]:
    """The engine's server."""
    with serve(engine, threads=2) as running:
        yield running


@pytest.fixture(scope="module")
def reference(base_checkpoint: Path) -> Any:
    """transformers' model in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base_checkpoint, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(base_checkpoint)


def exact(model: Any, ids: list[int]) -> list[float]:
    """Log-probabilities of ids[1:] by transformers."""
    import torch

    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    return [float(rows[i - 1, ids[i]]) for i in range(1, len(ids))]


def test_scores_are_those_of_transformers(served: Served, reference: Any) -> None:
    """Log-probabilities of prompts with and without a shared prefix differ from transformers' by less than 1e-3."""
    model, tokenizer = reference
    prompts = [tokenizer(q["q"] + c).input_ids for q in QUESTIONS for c in q["choices"]]
    for ids, score in zip(prompts, served.endpoint.score(prompts), strict=True):
        assert exact(model, ids) == pytest.approx(score.logprobs[1:], abs=1e-3)


def test_a_batch_says_what_transformers_says(served: Served, reference: Any) -> None:
    """Four requests at once, of different lengths, each give transformers' greedy continuation."""
    import torch

    model, tokenizer = reference
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]

    def greedy(prompt: list[int]) -> str:
        with torch.no_grad():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=2)
        return str(tokenizer.decode(out[0][len(prompt) :], skip_special_tokens=True))

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda p: served.endpoint.generate(p, max_tokens=16).text, ids))
    assert [greedy(prompt) for prompt in ids] == together


def test_seeds_repeat_whatever_else_is_running(served: Served, reference: Any) -> None:
    """A sampled answer depends on its seed, not on its neighbours."""
    ids = reference[1](PROMPTS[1]).input_ids

    def sample(seed: int) -> str:
        return served.endpoint.generate(ids, max_tokens=12, temperature=1.0, seed=seed).text

    alone = sample(1)
    with ThreadPoolExecutor(4) as pool:
        crowd = list(pool.map(sample, [1, 2, 3, 4]))
    assert alone == crowd[0]
    assert 4 == len(set(crowd))


def test_lm_eval_gets_transformers_likelihoods(
    served: Served, reference: Any, base_checkpoint: Path, tmp_path: Path
) -> None:
    """lm-eval's local-completions works unchanged: each choice's log-likelihood and greedy flag is transformers'."""
    pytest.importorskip("tenacity", reason="lm-eval's API models need tenacity (lm-eval[api])")
    import lm_eval
    from lm_eval.tasks import TaskManager

    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    (tmp_path / "task.yaml").write_text(TASK.replace("DATA", str(data)))
    args = {
        "base_url": f"{served.endpoint.base_url}/completions",
        "model": "small",
        "tokenizer": str(base_checkpoint),
        "tokenizer_backend": "huggingface",
    }
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate("local-completions", model_args=args, tasks=["capitals"], task_manager=manager)
    samples = sorted(found["samples"]["capitals"], key=lambda s: s["doc_id"])
    model, tokenizer = reference
    for question, sample in zip(QUESTIONS, samples, strict=True):
        context = tokenizer(question["q"]).input_ids
        for choice, (likelihood, _) in zip(question["choices"], sample["filtered_resps"], strict=True):
            ids = tokenizer(question["q"] + choice).input_ids
            assert sum(exact(model, ids)[len(context) - 1 :]) == pytest.approx(float(likelihood), abs=1e-3)


def test_the_openai_client_works_unchanged(served: Served) -> None:
    """Completions and chat, streamed and whole, say the same; usage counts the streamed ids."""
    from openai import BadRequestError, OpenAI

    with OpenAI(base_url=served.endpoint.base_url, api_key="none", max_retries=0) as client:
        assert ["small"] == [model.id for model in client.models.list()]
        asked = {"model": "small", "max_tokens": 12, "temperature": 0}
        whole = client.completions.create(prompt=PROMPTS[0], **asked)
        parts = list(client.completions.create(prompt=PROMPTS[0], stream=True, **asked))
        assert whole.choices[0].text == "".join(part.choices[0].text for part in parts)
        assert " Paris" == whole.choices[0].text[:6]
        messages = [{"role": "user", "content": "Name three colours."}]
        chat = client.chat.completions.create(messages=messages, **asked)
        options = {"stream_options": {"include_usage": True}, "extra_body": {"return_token_ids": True}}
        chunks = list(client.chat.completions.create(messages=messages, stream=True, **asked, **options))
        said = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert chat.choices[0].message.content == "".join(choice.delta.content or "" for choice in said)
        assert chunks[-1].usage.completion_tokens == sum(len(choice.token_ids) for choice in said)
        with pytest.raises(BadRequestError, match="not supported"):
            client.completions.create(prompt="x", n=2, model="small")


def test_a_long_answer_ends_when_its_client_leaves(served: Served) -> None:
    """After a hang-up in mid-stream nothing runs any more, long before the answer would have ended."""
    root = served.endpoint.base_url.removesuffix("/v1")
    body = {"prompt": PROMPTS[1], "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{root}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 10
    while "quantgate_host_sequences_running 0.0" not in httpx.get(f"{root}/metrics", timeout=30).text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_idle_server_burns_no_cpu(served: Served) -> None:
    """Two seconds without requests cost less than a tenth of one second of CPU."""
    process = psutil.Process(served.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(2)
    assert sum(process.cpu_times()[:2]) - before < 0.1


def test_the_server_is_gone_after_the_block(engine: Path, tmp_path: Path) -> None:
    """Its process has ended when the block has, also when the block fails; its log is kept where asked."""
    log = tmp_path / "server.log"
    with pytest.raises(KeyError), serve(engine, threads=1, log=log) as running:
        pid = running.pid
        raise KeyError
    assert not psutil.pid_exists(pid)
    assert "serving small on http://127.0.0.1:" in log.read_text()


def test_the_server_dies_with_its_parent(engine: Path) -> None:
    """kill -9 of whoever serves leaves no server behind."""
    program = (
        "import sys, time; from pathlib import Path; from pipelines.engine.serving import serve\n"
        "with serve(Path(sys.argv[1]), threads=1) as s: print(s.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(engine)], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_dies_at_start_says_why(engine: Path, tmp_path: Path) -> None:
    """The error carries the server's last lines."""
    broken = tmp_path / "engine"
    broken.mkdir()
    for name in ("engine.json", "tokenizer.json", "genai_config.json"):
        (broken / name).write_bytes((engine / name).read_bytes())
    (broken / "model.onnx").write_bytes(b"not a graph")
    with (
        pytest.raises(EndpointError, match=r"(?s)ended with 2; its last words:.*model\.onnx"),
        serve(broken, threads=1),
    ):
        pass
