"""Decode speed of every engine as served, beside transformers in bfloat16 and, where its toolchain is, llama.cpp Q4_0.

A decoded token reads all weights once, so tokens/s times bytes per token over memory bandwidth says how near the limit
an engine is. The bandwidth is measured beside every figure, because it moves on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from engines import Built, build
from outcome import conclude, conditions

from pipelines.campaign import open_campaign
from pipelines.compose import compose
from pipelines.engine.serving import serve
from pipelines.flow.inspection import look
from pipelines.probe.bandwidth import BandwidthProbe
from pipelines.quantize.gguf import FILE as GGUF

VARIANTS = ("baseline", "awq_w4a16_g64_quick", "gptq_w4a16_g64_quick", "gptq_w4a16_g64_head")
HF, LLAMA = "transformers bf16", "llama.cpp Q4_0"
PEER = (
    "experiment=demo", "engine=[llama_cpp]", "evalset=[ticket_json]", "variant=[baseline,gguf_q4_k_m]",
    "variant.gguf_q4_k_m.scheme=Q4_0",
)  # fmt: skip
Decode = Callable[[list[int], int], float]


@dataclass(slots=True)
class Runner:
    """Something that decodes: tokens/s of one answer, what it reads per token, and its samples."""

    decode: Decode
    bytes_per_token: float
    rates: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)


def main() -> None:
    """Take turns over all runners for some rounds; report medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds, three engines")
    quick = parser.parse_args().quick
    variants = VARIANTS[2:] if quick else VARIANTS
    built, threads = build(
        ["experiment=demo", f"variant=[baseline,{','.join(v for v in variants if v != 'baseline')}]",
         "engine=[ort_genai,ort_genai_int8act]"]
    )  # fmt: skip
    peer = _llama()
    os.environ.update(HF_HUB_OFFLINE="1")
    tokens, rounds = (24, 2) if quick else (64, 3)
    ids = _prompt(next(iter(built.values())).engine)
    with ExitStack() as stack:
        bandwidth = stack.enter_context(BandwidthProbe(threads))
        runners = dict(_runners(built, peer, threads, stack))
        for number in range(rounds):
            for name in list(runners)[:: 1 if number % 2 == 0 else -1]:
                runner = runners[name]
                runner.limits.append(bandwidth.measure_gb_s())
                runner.rates.append(runner.decode(ids, tokens))
    _report(runners, built, threads, tokens, rounds)


def _report(runners: dict[str, Runner], built: dict[str, Built], threads: int, tokens: int, rounds: int) -> None:
    rate = {name: statistics.median(r.rates) for name, r in runners.items()}
    share = {n: rate[n] * r.bytes_per_token / 1e9 / statistics.median(r.limits) for n, r in runners.items()}
    print(f"{'engine':<44} {'MB/token':>8} {'tokens/s':>8} {'x bf16':>6} {'GB/s limit':>10} {'of limit':>8}")
    for name, r in runners.items():
        print(
            f"{name:<44} {r.bytes_per_token / 1e6:>8.1f} {rate[name]:>8.1f} {rate[name] / rate[HF]:>6.2f} "
            f"{statistics.median(r.limits):>10.1f} {share[name]:>8.0%}"
        )
    quantized = {n: v / rate[HF] for n, v in rate.items() if n in built and not n.startswith("baseline")}
    whole = {n: v for n, v in quantized.items() if "_head" not in n}
    exact = max(v for n, v in whole.items() if not n.endswith("int8act"))
    rounded = max(v for n, v in whole.items() if n.endswith("int8act"))
    fastest = max(rate[n] for n in quantized)
    packages = ("onnxruntime", "torch", "transformers")
    spread = {n: (min(r.rates), max(r.rates)) for n, r in runners.items()}
    conclude(
        "decode_roofline",
        conditions(packages, threads=threads, tokens=tokens, rounds=rounds),
        {"tokens_per_s": rate, "share_of_bandwidth": share, "spread": spread},
        {
            "W4A16 engine, exact, over transformers bf16": (exact, ">=", 3.0),
            "W4A16 engine, int8 activations, over transformers bf16": (rounded, ">=", 4.5),
            "fastest scheme over llama.cpp Q4_0": (fastest / rate[LLAMA] if LLAMA in rate else None, ">=", 1.0),
        },
    )


def _prompt(engine: Path, length: int = 128) -> list[int]:
    from tokenizers import Tokenizer

    text = (Path("evalsets/heldout_text/items.jsonl")).read_text().splitlines()
    joined = " ".join(json.loads(line)["text"] for line in text[:4])
    return list(Tokenizer.from_file(str(engine / "tokenizer.json")).encode(joined).ids[:length])


def _llama() -> dict[str, Built]:
    """llama.cpp's Q4_0 of the same base, by its own quantization and server; none where its toolchain is not made."""
    campaign = open_campaign(compose(PEER))
    (toolchain,) = {engine.toolchain for engine in campaign.engines}
    found = look(toolchain)
    if found.state != "ready":
        print(f"{LLAMA}: not run; toolchain {found.name}: {found.what} ({found.to_do})")
        return {}
    built, _ = build(PEER)
    return {LLAMA: next(b for label, b in built.items() if label.startswith("gguf"))}


def _runners(
    built: dict[str, Built], peer: dict[str, Built], threads: int, stack: ExitStack
) -> Iterator[tuple[str, Runner]]:
    baseline = next(b for label, b in built.items() if label.startswith("baseline"))
    size = sum(f.stat().st_size for f in baseline.checkpoint.glob("*.safetensors"))
    yield HF, Runner(_transformers(baseline.checkpoint, threads), float(size))
    for label, b in (built | peer).items():
        served = stack.enter_context(serve(b.engine, threads=threads))
        read = b.facts["bytes_per_token"] if label in built else (b.checkpoint / GGUF).stat().st_size
        yield label, Runner(_endpoint(served.endpoint.base_url, served.endpoint.model), float(read or 0))


def _endpoint(base_url: str, model: str) -> Decode:
    """Tokens after the first, over the time from the first event to the last, as a client of the server sees them."""

    def decode(ids: list[int], tokens: int) -> float:
        body = {
            "model": model,
            "prompt": ids,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        stamps = []
        with (
            httpx.Client(timeout=600, trust_env=False) as client,
            client.stream("POST", f"{base_url}/completions", json=body) as answer,
        ):
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    stamps.append(time.perf_counter())
        return (tokens - 1) / (stamps[tokens - 1] - stamps[0])

    return decode


def _transformers(checkpoint: Path, threads: int) -> Decode:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def decode(ids: list[int], tokens: int) -> float:
        out = model(torch.tensor([ids]), use_cache=True)
        token, began = out.logits[:, -1:].argmax(-1), time.perf_counter()
        for _ in range(tokens - 1):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return (tokens - 1) / (time.perf_counter() - began)

    return decode


if __name__ == "__main__":
    main()
