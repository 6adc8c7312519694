"""Whether a campaign's requests, its scores, and the weights fit the limits and the machine. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.engine.memory import GIB, WIDTHS, Storage, weights_of
from pipelines.engine.traffic import prompt_too_long, queued, too_long
from pipelines.engine.trtllm import rules
from pipelines.engine.trtllm.case import Case
from pipelines.errors import Problem


def lengths(case: Case) -> Iterator[Problem]:
    """Prompts, requests and concurrency of the campaign."""
    asked, limits, longest = case.pairing.workload, case.limits, case.max_seq_len
    known = case.pairing.number("max_positions")
    if known is not None and limits.max_seq_len is not None and limits.max_seq_len > known:
        yield Problem("engine.max_seq_len", limits.max_seq_len, f"the model knows {known} positions")
    yield from queued(asked, limits.max_batch_size, "engine.max_batch_size")
    if longest is None:
        return
    if limits.max_input_len is not None and limits.max_input_len > longest:
        message = f"is more than max_seq_len {longest}, so the builder would cut it"
        yield Problem("engine.max_input_len", limits.max_input_len, message)
    yield from too_long(asked, longest, "engine.max_seq_len")
    most, setting = limits.longest_prompt(longest)
    chunks = "or enable_chunked_prefill=true" if setting == "max_num_tokens" else ""
    yield from prompt_too_long(asked, most, f"engine.{setting}", chunks)


def scoring(case: Case, key: str, *, reuse: bool) -> Iterator[Problem]:
    """Log-probabilities of prompts come from context logits, whole or not at all; `key` names the setting for them."""
    asked = case.pairing.workload.scored
    if asked and not case.scores_prompts:
        message = f"{', '.join(asked)} ask for log-probabilities of prompts, which this engine would not give"
        allowed = "true, with kv_cache.enable_block_reuse=false; or choose eval sets that generate"
        yield Problem(f"engine.{key}", False, message, allowed)
    if case.scores_prompts and reuse:
        message = "context logits of reused blocks are left out without a word (ModelOpt #1577): scores would be wrong"
        yield Problem("engine.kv_cache.enable_block_reuse", True, message, f"false, or {key}=false")
    if case.scores_prompts and case.limits.chunked:
        message = "context logits of a prompt in chunks are not known to be whole"
        yield Problem("engine.enable_chunked_prefill", True, message, f"false, or {key}=false")


def memory(case: Case) -> Iterator[Problem]:
    """GPUs, host and disk, by an estimate that leaves out activations and cache."""
    weights = weights_of(case.pairing, Storage("gpu"))
    yield from _gpu_memory(case, weights)
    if case.backend == "pytorch":
        return  # a bundle only links, and loads shard by shard
    host = float(case.pairing.device.get("memory_gib", "inf"))
    needed = (rules.BUILDER_HOST_BYTES + weights * min(case.workers, case.ranks)) / GIB
    if needed > host and not case.claimed:
        message = f"building takes about {needed:.1f} GiB of host memory, and this machine has {host:g}"
        yield Problem("engine.workers", case.workers, message, "fewer workers" if case.workers > 1 else "")
    free, copies = case.pairing.free_bytes, 2  # a converted checkpoint, for a while, and the engine
    if free is not None and copies * weights > free:
        message = (
            f"checkpoint and engine take about {copies * weights / GIB:.1f} GiB, and {free / GIB:.1f} are free there"
        )
        yield Problem("paths.store", None, message)


def _gpu_memory(case: Case, weights: int) -> Iterator[Problem]:
    if case.gpu is None:
        return
    share, logits = weights / case.ranks / GIB, _logits_bytes(case) / GIB
    if share + logits > case.gpu.memory_gib * rules.GPU_SHARE:
        told = f"about {share:.1f} GiB of weights" + (f" and {logits:.1f} GiB of context logits" if logits else "")
        message = f"{told} on each of {case.ranks} ranks leave no room on a GPU of {case.gpu.memory_gib:g} GiB"
        yield Problem("engine.tp", case.tp, message, "more ranks, fewer bits, or a smaller max_num_tokens")


def _logits_bytes(case: Case) -> int:
    """Context logits of one full batch of prompt tokens."""
    words = case.pairing.number("vocab_size")
    return case.limits.max_num_tokens * words * rules.LOGITS_BYTES if case.scores_prompts and words else 0


def cache(case: Case, dtype: str) -> Iterator[Problem]:
    """The format of the cache, by the engine's setting or else the variant's scheme."""
    stored = case.scheme.kv if case.scheme is not None else None
    wanted = (stored or "auto").lower() if dtype == "auto" else dtype
    sms = {"fp8": rules.FP8_CACHE, "nvfp4": rules.NVFP4_CACHE}.get(wanted, rules.EVERY)
    if case.gpu is not None and case.gpu.sm in rules.EVERY - sms:
        allowed = f"SM {', '.join(map(str, sorted(sms)))}"
        yield Problem("engine.kv_cache.dtype", wanted, f"has no kernels for SM {case.gpu.sm}", allowed)
    if wanted == "nvfp4" and case.algo != "NVFP4":
        message = "an NVFP4 cache needs a ModelOpt checkpoint that was calibrated for it"
        yield Problem("engine.kv_cache.dtype", wanted, message, "auto or fp8")


def storage(case: Case, dtype: str) -> Storage:
    """How the runtime keeps weights and cache; `dtype` is the engine's setting of the cache."""
    stored = case.scheme.kv if case.scheme is not None else None
    wanted = (stored or "auto").lower() if dtype == "auto" else dtype
    return Storage(
        "gpu", cache=WIDTHS.get(wanted, 2), slots=case.limits.max_batch_size, ranks=case.ranks,
        device_gib=None if case.gpu is None else case.gpu.memory_gib,
    )  # fmt: skip
