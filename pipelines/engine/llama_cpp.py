"""llama.cpp: a GGUF file, served by its own `llama-server`.

A variant that is a GGUF file is served as it is; the base is converted, not quantized. Either is held to the checkpoint
it came from, by llama.cpp's library, before it counts as built: its server tells no log-probabilities of prompts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveInt

from pipelines.config import Strict, read
from pipelines.divergence import figures, reading
from pipelines.divergence.figures import Arithmetic, Row, summarize
from pipelines.divergence.reading import Reading, Window
from pipelines.engine.capabilities import Capabilities
from pipelines.engine.card import EngineCard, end_tokens
from pipelines.engine.llama_preflight import preflight
from pipelines.errors import Problem, StageFailed
from pipelines.flow.progress import report
from pipelines.flow.store import Fact, facts
from pipelines.flow.toolchain import version_of
from pipelines.quantize.carry import carry_over
from pipelines.quantize.gguf import FILE, METHOD
from pipelines.quantize.gguf_convert import convert
from pipelines.quantize.scheme import Scheme
from pipelines.quantize.shards import quantization_config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from pipelines.divergence.reading import Ranks

__all__ = ["LlamaCppConfig", "build", "capabilities", "misplaced", "preflight", "redundant", "serve"]

RECORD = "llama_server.json"
HTTP_THREADS = 256
"""A stream occupies a thread of the server for as long as it lasts; with fewer, health and metrics would wait too."""


class LlamaCppConfig(Strict):
    """What the server is told, and how close the file must stay to its checkpoint."""

    target: Literal["llama_cpp"] = "llama_cpp"
    base_type: Literal["f16", "bf16", "f32"] = Field(
        default="f16", description="what a base that is not quantized is stored in; kernels are fastest in f16"
    )
    max_length: int = Field(default=2048, ge=16, description="tokens of a prompt with its answer")
    parallel: PositiveInt = Field(default=4, description="requests answered at once; more wait. Each has its own cache")
    cache_type: Literal["f16", "f32", "q8_0"] = Field(default="f16", description="of keys and values")
    cache_prompt: bool = Field(default=True, description="reuse what a request shares with the one before it")
    threads: PositiveInt | None = Field(default=None, description="of the checks at build time; null: every core")
    max_ppl_ratio: float = Field(
        default=3.0, gt=1, description="perplexity beyond this multiple of the base's is noise"
    )
    max_ppl_drift: float = Field(
        default=1.1, gt=1, description="perplexity may differ by this factor, either way, from the checkpoint's own"
    )


class Record(Strict):
    """How to serve it: all but the port and the threads."""

    model_id: str
    max_length: int
    parallel: int
    cache_type: str
    cache_prompt: bool


def redundant(config: LlamaCppConfig, scheme: Scheme) -> str | None:
    """Every scheme is an engine of its own."""
    del config, scheme
    return None


def serve(engine: Path, port: int, threads: int) -> tuple[list[str], dict[str, str]]:
    """The command of llama.cpp's OpenAI-compatible server.

    It would fit settings to the machine, and keep idle caches in up to 8 GiB of memory: neither is left to it.
    """
    record = _record(engine)
    argv = [
        "llama-server", "--model", str(engine / FILE), "--alias", record.model_id, "--host", "127.0.0.1",
        "--port", str(port), "--threads", str(threads), "--threads-http", str(HTTP_THREADS),
        "--ctx-size", str(record.parallel * record.max_length), "--parallel", str(record.parallel),
        "--cache-type-k", record.cache_type, "--cache-type-v", record.cache_type, "--cache-ram", "0", "--fit", "off",
        "--repeat-penalty", "1.0", "--metrics", "--no-ui", "--offline",
        "--cache-prompt" if record.cache_prompt else "--no-cache-prompt",
    ]  # fmt: skip
    return argv, {}


def misplaced(engine: Path) -> list[Problem]:
    """The file runs wherever its toolchain does."""
    del engine
    return []


def capabilities(engine: Path) -> Capabilities:
    """It takes token ids and streams; asked to echo a prompt, it answers with a token of its own: it scores none."""
    del engine
    return Capabilities(prompt_logprobs=False, top_logprobs=0, keeps_connections=False, metrics="/metrics")


def build(config: LlamaCppConfig, out: Path, *, variant: Path, reference: Path) -> dict[str, Fact]:
    """Bring or make the file, then hold llama.cpp's predictions with it to the checkpoint's.

    Raises:
        StageFailed: the variant is neither unquantized nor a GGUF file, or perplexity is out of bounds.
    """
    method = quantization_config(variant).get("quant_method", "")
    if method not in ("", METHOD):
        raise StageFailed(f"{variant}: llama.cpp cannot keep codes of method {method!r}; it would quantize them again")
    report(0, 1, "engine")
    if method == METHOD:
        (out / FILE).symlink_to((variant / FILE).resolve())
    else:
        convert(variant, out / FILE, config.base_type)
    precision = str(facts(variant)["scheme"]) if method == METHOD else config.base_type
    arithmetic: Arithmetic = "int8_activations" if method == METHOD else _unquantized(config)
    card = _describe(config, out, variant)
    row = _hold(config, out / FILE, reading.read(reference), arithmetic)
    figures.write(out, [row])
    base = facts(reference)["base_perplexity"]
    _refuse_noise(config, row, float(base or 0))
    report(1, 1, "engine")
    return {
        "target": config.target,
        "library": "llama.cpp, by llama_cpp_python",
        "library_version": version_of("llama_cpp_python"),
        "native": card.native,
        "native_note": card.native_note,
        "precision": precision,
        "arithmetic": arithmetic,
        "perplexity": row.figures.perplexity,
        "base_perplexity": base,
        "kl_mean": row.figures.kl_mean,
        "top1": row.figures.same_top,
        "size_bytes": sum(p.stat().st_size for p in out.iterdir() if p.is_file()),
    }


def _unquantized(config: LlamaCppConfig) -> Arithmetic:
    return "float32" if config.base_type == "f32" else "half"


def _describe(config: LlamaCppConfig, out: Path, variant: Path) -> EngineCard:
    """Write engine.json, the server's settings and the tokenizer."""
    about = json.loads((variant / "config.json").read_text())
    note = "keys and values are cached in q8_0, though the scheme does not ask for it"
    card = EngineCard(
        target=config.target,
        native=config.cache_type != "q8_0",
        native_note=note if config.cache_type == "q8_0" else "",
        max_length=config.max_length,
        eos_token_ids=end_tokens(variant),
        bos_token_id=about.get("bos_token_id"),
        vocab_size=int(about["vocab_size"]),
        model_id=f"{about.get('model_type', 'model')}-{variant.name}",
    )
    (out / "engine.json").write_text(card.model_dump_json(indent=2) + "\n")
    record = Record(
        model_id=card.model_id,
        max_length=config.max_length,
        parallel=config.parallel,
        cache_type=config.cache_type,
        cache_prompt=config.cache_prompt,
    )
    (out / RECORD).write_text(record.model_dump_json(indent=2) + "\n")
    carry_over(variant, out)
    return card


def _record(engine: Path) -> Record:
    return read(Record, engine / RECORD, "cannot be read")


def _hold(config: LlamaCppConfig, model: Path, checkpoint: Reading, arithmetic: Arithmetic) -> Row:
    """Compare what llama.cpp predicts of the checkpoint's windows with what the checkpoint predicts."""
    found = reading.joined(checkpoint.windows, list(_ranks(config, model, checkpoint.windows)))
    return Row(
        loss="engine",
        text="held_out",
        between="variant checkpoint, dequantized, transformers float32, and llama.cpp's library with the file",
        arithmetic=arithmetic,
        figures=summarize(reading.positions(checkpoint, found), exact=False),
    )


def _ranks(config: LlamaCppConfig, model: Path, windows: Sequence[Window]) -> Iterator[Ranks]:
    import llama_cpp
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.parent / "tokenizer.json"))
    longest = max(len(window.ids) for window in windows)
    given: dict[str, Any] = {"n_ctx": longest, "n_batch": longest, "n_ubatch": longest, "logits_all": True}
    threads = config.threads or len(os.sched_getaffinity(0))
    loaded = llama_cpp.Llama(str(model), n_threads=threads, n_threads_batch=threads, verbose=False, **given)
    with closing(loaded):
        for done, window in enumerate(windows):
            report(done, len(windows), "windows read")
            _refuse_other_words(loaded, window.ids, tokenizer)
            loaded.reset()
            loaded.eval(list(window.ids))
            logits: NDArray[np.float32] = loaded.scores[window.start - 1 : len(window.ids) - 1]
            yield reading.rank(logits, window.true)
    report(len(windows), len(windows), "windows read")


def _refuse_other_words(loaded: Any, ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """A converter that takes one kind of tokenizer for another writes a file that predicts well and speaks nonsense."""
    ours = tokenizer.decode(list(ids), skip_special_tokens=False)
    theirs = loaded.detokenize(list(ids), special=True).decode(errors="replace")
    if "".join(ours.split()) != "".join(theirs.split()):
        raise StageFailed(
            f"{FILE} writes other texts than the checkpoint's tokenizer for the same ids: {theirs[:60]!r}, not "
            f"{ours[:60]!r}; answers would be garbled"
        )


def _refuse_noise(config: LlamaCppConfig, row: Row, base: float) -> None:
    engine, variant = row.figures.perplexity, row.figures.perplexity_reference
    shown = f"perplexity {engine:.4g} of the engine, {variant:.4g} of the variant, {base:.4g} of the base"
    if not engine <= config.max_ppl_ratio * base:
        raise StageFailed(f"{shown}: more than {config.max_ppl_ratio:g} times the base's (bound: engine.max_ppl_ratio)")
    if not max(engine / variant, variant / engine) <= config.max_ppl_drift:
        raise StageFailed(
            f"{shown}: engine and variant differ by more than a factor {config.max_ppl_drift:g} "
            "(bound: engine.max_ppl_drift)"
        )
