"""`trtllm.json`: what a built directory needs to be served again, and what its server can do; and the files beside it.

<artifact>/
  engine.json      our card, as every target has one
  trtllm.json      this record
  llm.yaml         settings of the server
  tokenizer.json … tokenizer, chat template and licences, as transformers 4 reads them
  <model id>/      what the library loads: an engine with its ranks, or a checkpoint
  logs/            what the tools said
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pipelines.config import Strict
from pipelines.config import read as read_model
from pipelines.engine.capabilities import Capabilities
from pipelines.engine.card import EngineCard, end_tokens
from pipelines.engine.trtllm.deploy import BOUND, mismatches
from pipelines.engine.trtllm.rules import Backend
from pipelines.errors import Problem
from pipelines.flow.device import describe
from pipelines.flow.store import manifest
from pipelines.flow.toolchain import CURRENT, told_of
from pipelines.quantize.carry import carry_over

RECORD, SETTINGS, LOGS = "trtllm.json", "llm.yaml", "logs"
NEWER_CLASS, CLASS_FOR_ALL = "TokenizersBackend", "PreTrainedTokenizerFast"
"""What transformers 5 calls every fast tokenizer, and what transformers 4, which the library pins, knows as well."""


class Record(Strict):
    """How to serve it: all but the port."""

    kind: Literal["engine", "bundle"]
    release: str
    backend: Backend
    model: str
    tp: int
    pp: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_beam_width: int
    context_logits: bool


def write(out: Path, record: Record) -> None:
    """Write the record."""
    (out / RECORD).write_text(record.model_dump_json(indent=2) + "\n")


def read(artifact: Path) -> Record:
    """Read the record of an artifact.

    Raises:
        InputError: there is none, or it is not JSON.
        ConfigError: it has other keys or types.
    """
    return read_model(Record, artifact / RECORD, "not a readable record of a TensorRT-LLM build")


def serve(artifact: Path, port: int, threads: int) -> tuple[list[str], dict[str, str]]:
    """The command of the library's own OpenAI-compatible server on loopback; it names the model by its directory."""
    return argv(read(artifact), artifact, port), {"OMP_NUM_THREADS": str(threads)}


def misplaced(artifact: Path) -> list[Problem]:
    """What of GPUs, driver, image and TensorRT is not as it was when this was built."""
    made = manifest(artifact)
    return mismatches(made, describe(), told_of(made.toolchain.get("toolchain", CURRENT.name)).versions(BOUND))


def argv(record: Record, artifact: Path, port: int) -> list[str]:
    """The same command line of a record that is at hand, its files at `artifact`."""
    return [
        "trtllm-serve", str(artifact / record.model), "--backend", record.backend, "--host", "127.0.0.1",
        "--port", str(port), "--tokenizer", str(artifact), "--tp_size", str(record.tp), "--pp_size", str(record.pp),
        "--max_batch_size", str(record.max_batch_size), "--max_num_tokens", str(record.max_num_tokens),
        "--max_seq_len", str(record.max_seq_len), "--max_beam_width", str(record.max_beam_width),
        "--extra_llm_api_options", str(artifact / SETTINGS),
    ]  # fmt: skip


def capabilities(artifact: Path) -> Capabilities:
    """What that server can do. It echoes no log-probabilities of prompts; context logits are whole or not offered."""
    record = read(artifact)
    return Capabilities(
        prompt_logprobs=False, context_logits=record.context_logits, top_logprobs=0, metrics="/prometheus/metrics"
    )


def model_id(architecture: str, variant: Path) -> str:
    """The directory's name, which the server has no option to change."""
    return f"{architecture.removesuffix('ForCausalLM').lower()}-{variant.name}"


def copy_tokenizer(variant: Path, out: Path) -> None:
    """Bring tokenizer, chat template, generation settings and licences, as both versions of transformers read them."""
    carry_over(variant, out)
    path = out / "tokenizer_config.json"
    told = json.loads(path.read_text()) if path.is_file() else {}
    if told.get("tokenizer_class", NEWER_CLASS) == NEWER_CLASS:
        told["tokenizer_class"] = CLASS_FOR_ALL
        path.write_text(json.dumps(told, indent=2) + "\n")


def write_card(
    out: Path,
    target: str,
    variant: Path,
    record: Record,
    native_note: str,
    *,
    max_prompt: int,
    startup_timeout_s: float,
) -> None:
    """Write engine.json. A prompt must fit one step's tokens, unless it is taken in chunks."""
    about = json.loads((variant / "config.json").read_text())
    card = EngineCard(
        target=target,
        native=not native_note,
        native_note=native_note,
        max_length=record.max_seq_len,
        eos_token_ids=end_tokens(variant),
        bos_token_id=about.get("bos_token_id"),
        vocab_size=int(about["vocab_size"]),
        model_id=record.model,
        max_prompt=max_prompt,
        startup_timeout_s=startup_timeout_s,
    )
    (out / "engine.json").write_text(card.model_dump_json(indent=2) + "\n")
