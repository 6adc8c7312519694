"""An engine started once more before it is promoted: does it run in its toolchain here, answer, and predict as before?

It is asked to continue held-out text that its variant was read on, so what it should find probable is known.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.engine.card import EngineCard, read_card
from pipelines.engine.serving import serve
from pipelines.errors import EndpointError, EnvironmentProblem, EvidenceError
from pipelines.flow.store import Store, manifest
from pipelines.flow.toolchain import CARRIED, Toolchain, carried
from pipelines.quantize.reference import TOKENS, load_tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipelines.engine.endpoint import Completion, Endpoint

PROMPT, ANSWER = 32, 16
"""Tokens of held-out text that are shown, and tokens asked for."""
ENOUGH = 8
"""Tokens of a prompt that is worth asking, where a server of texts cannot be given more."""
WINDOWS = 4
MOST = 700.0  # exp of more is no float
NOISE = 2.0
"""A perplexity this many times the variant's own, on the same few tokens, is noise and no drift."""


def ask(engine: Path, store: Store, toolchains: Iterable[Toolchain]) -> str:
    """Start an engine in the toolchain that it was built in, or reach it where it is served, have it answer greedily,
    and say what came.

    Raises:
        EvidenceError: it did not start or answer, or answered nothing, or finds the text improbable that its variant
            does not.
        EnvironmentProblem: it cannot run on this machine, so nothing can be known here.
    """
    card = read_card(engine)
    ids, logprobs = _held_out(engine, store)
    try:
        with _told(toolchains), serve(engine, threads=len(os.sched_getaffinity(0))) as served:
            return f"ready in {served.ready_s:.1f} s; " + _asked(served.endpoint, card, ids, logprobs)
    except EndpointError as error:
        raise EvidenceError(f"{engine}: not promoted, it does not answer: {error}") from None
    except EnvironmentProblem as error:
        raise EnvironmentProblem(f"not promoted, whether the engine answers cannot be seen here: {error}") from None


def _held_out(engine: Path, store: Store) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The held-out windows that the engine was checked on when it was built, with its variant's log-probabilities."""
    key = manifest(engine).inputs.get("reference")
    reference = store.path("reference", key) if isinstance(key, str) else None
    if reference is None or not (reference / TOKENS).is_file():
        raise EvidenceError(f"{engine}: the held-out text it was checked on is gone from {store.root}; build it again")
    return load_tokens(reference)


@contextmanager
def _told(toolchains: Iterable[Toolchain]) -> Iterator[None]:
    """Let this process know toolchains as a stage does."""
    before = os.environ.get(CARRIED)
    os.environ.update(carried(toolchains))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(CARRIED, None)
        else:
            os.environ[CARRIED] = before


def _asked(endpoint: Endpoint, card: EngineCard, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> str:
    room = min(card.max_length, card.max_prompt or card.max_length, PROMPT + ANSWER)
    length = max(2, min(room - 1, PROMPT, ids.shape[1]))
    asked = min(ANSWER, card.max_length - length)
    answer, seconds = _answer(endpoint, [[int(i) for i in row[:length]] for row in ids[:WINDOWS]], asked)
    said = f"{answer.tokens_out} tokens in {seconds:.2f} s: {answer.text[:60]!r}"
    if not endpoint.capabilities.scores_prompts:
        return f"{said}; it scores no prompts, so its predictions were not compared"
    its, ours = _perplexities(endpoint, ids, logprobs, length)
    if not its <= NOISE * ours:
        raise EvidenceError(
            f"{endpoint.model}: not promoted, it answers {answer.text[:40]!r} and held-out text is noise to it: "
            f"perplexity {its:.4g} on {length} tokens, its variant {ours:.4g}"
        )
    return f"{said}; perplexity {its:.4g} on {length} held-out tokens, its variant {ours:.4g}"


def _answer(endpoint: Endpoint, prompts: Sequence[list[int]], tokens: int) -> tuple[Completion, float]:
    """The first answer that is not empty: text may end by chance, but not everywhere."""
    began = time.monotonic()
    for prompt in prompts:
        answer = endpoint.generate(_readable(endpoint, prompt), max_tokens=tokens)
        if answer.tokens_out > 0 and answer.text.strip():
            return answer, time.monotonic() - began
    raise EndpointError(f"{endpoint.model}: nothing but empty answers to {len(prompts)} prompts")


def _readable(endpoint: Endpoint, prompt: list[int]) -> list[int]:
    """As much of a prompt as the server can be given: a server of texts reads no half characters."""
    for length in range(len(prompt), ENOUGH, -1):
        try:
            endpoint.prompt(prompt[:length])
        except EndpointError:
            continue
        return prompt[:length]
    return prompt


def _perplexities(
    endpoint: Endpoint, ids: NDArray[np.int32], logprobs: NDArray[np.float32], length: int
) -> tuple[float, float]:
    """The server's and the variant's own, on the same tokens."""
    prompt = _readable(endpoint, [int(i) for i in ids[0, :length]])
    (score,) = endpoint.score([prompt])
    found = [value for value in score.logprobs if value is not None]
    if not found or not all(math.isfinite(value) for value in found):
        raise EndpointError(f"{endpoint.model}: log-probabilities of a prompt are missing or not finite: {found[:4]}")
    ours = logprobs[0, : len(prompt) - 1]
    return _perplexity(math.fsum(found) / len(found)), _perplexity(float(ours.mean()))


def _perplexity(mean_logprob: float) -> float:
    return math.exp(min(-mean_logprob, MOST))
