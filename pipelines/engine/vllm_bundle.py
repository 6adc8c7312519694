"""`vllm.json`: what a serving bundle of vLLM needs to be served, and what its server can do; and the files beside it.

<artifact>/
  engine.json      our card, as every target has one
  vllm.json        this record: settings of the server
  tokenizer.json … tokenizer, chat template and licences
  <model id>/      the checkpoint: links to the variant's files
  logs/            what the server said when it was tried
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pipelines.config import Strict
from pipelines.config import read as read_model
from pipelines.engine.capabilities import Capabilities
from pipelines.engine.card import EngineCard, end_tokens
from pipelines.errors import Problem
from pipelines.flow.device import describe
from pipelines.flow.store import MANIFEST, manifest
from pipelines.quantize.carry import carry_over

RECORD, LOGS = "vllm.json", "logs"
TOP_LOGPROBS = 20
SERVER = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` starts too; that command asks for its own version by a name that the build for processors lacks."""
Device = Literal["cpu", "cuda"]


class Record(Strict):
    """How to serve it: all but the port and the threads."""

    device: Device
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel_size: int
    kv_cache_dtype: str
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    enforce_eager: bool


def read(artifact: Path) -> Record:
    """Read the record of a bundle.

    Raises:
        InputError: there is none, or it is not JSON.
        ConfigError: it has other keys or types.
    """
    return read_model(Record, artifact / RECORD, "not a readable record of a vLLM bundle")


def link(variant: Path, model: Path) -> None:
    """The variant's files, as links, under the name the server will give it."""
    model.mkdir()
    for file in sorted(p for p in variant.iterdir() if p.is_file() and p.name != MANIFEST):
        (model / file.name).symlink_to(file.resolve())


def write(out: Path, target: str, variant: Path, record: Record, native_note: str, startup_timeout_s: float) -> None:
    """Write record, card and tokenizer. Room for one generated token is kept, without which no prompt is scored."""
    about = json.loads((variant / "config.json").read_text())
    (out / RECORD).write_text(record.model_dump_json(indent=2) + "\n")
    carry_over(variant, out)
    card = EngineCard(
        target=target,
        native=not native_note,
        native_note=native_note,
        max_length=record.max_model_len,
        eos_token_ids=end_tokens(variant),
        bos_token_id=about.get("bos_token_id"),
        vocab_size=int(about["vocab_size"]),
        model_id=record.model,
        max_prompt=record.max_model_len - 1,
        startup_timeout_s=startup_timeout_s,
    )
    (out / "engine.json").write_text(card.model_dump_json(indent=2) + "\n")


def serve(artifact: Path, port: int, threads: int) -> tuple[list[str], dict[str, str]]:
    """The command of vLLM's own server on loopback, and what it adds to the environment.

    Sampling defaults of the model are left out: requests say what they want. Threads are not bound to cores, of which
    vLLM would take all but one; 4-bit layers keep 16-bit activations, which it would round where there is AMX.
    """
    record = read(artifact)
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "NO_COLOR": "1"}
    if record.device == "cpu":
        env |= {
            "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_INT4_W4A8": "0",
        }  # fmt: skip
    return argv(record, artifact, port), env


def argv(record: Record, artifact: Path, port: int) -> list[str]:
    """The command line of a record that is at hand, its files at `artifact`."""
    kept = record.kv_cache_memory_bytes
    memory = ["--kv-cache-memory-bytes", str(kept)] if kept else []
    return [
        "python3", "-m", SERVER, "--model", str(artifact / record.model), "--served-model-name", record.model,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", record.dtype,
        "--max-model-len", str(record.max_model_len), "--max-num-seqs", str(record.max_num_seqs),
        "--max-num-batched-tokens", str(record.max_num_batched_tokens),
        "--tensor-parallel-size", str(record.tensor_parallel_size), "--kv-cache-dtype", record.kv_cache_dtype,
        "--gpu-memory-utilization", str(record.gpu_memory_utilization), *memory,
        "--enable-prefix-caching" if record.enable_prefix_caching else "--no-enable-prefix-caching",
        "--enforce-eager" if record.enforce_eager else "--no-enforce-eager",
        "--generation-config", "vllm", "--max-logprobs", str(TOP_LOGPROBS), "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


def capabilities(artifact: Path) -> Capabilities:
    """It takes token ids, scores prompts by id, and its events carry ids."""
    del artifact
    return Capabilities(prompt_ranks=True, top_logprobs=TOP_LOGPROBS, token_ids=True, metrics="/metrics")


def misplaced(artifact: Path) -> list[Problem]:
    """What keeps a bundle for GPUs from running here: there are none, fewer, or others."""
    record, here = read(artifact), describe()
    if record.device == "cpu":
        return []
    if "gpu_sm" not in here:
        return [Problem("gpu", here["gpu"], "the bundle is for GPUs, and there is none here")]
    found, made = [], manifest(artifact).facts.get("gpu_sm") if (artifact / MANIFEST).is_file() else None
    if int(here.get("gpu_count", "1")) < record.tensor_parallel_size:
        found.append(Problem("gpu_count", here["gpu_count"], f"it has {record.tensor_parallel_size} ranks, a GPU each"))
    if made and str(made) != here["gpu_sm"]:
        found.append(Problem("gpu", here["gpu_sm"], f"it was checked on SM {made}, and kernels are chosen by that"))
    return found
