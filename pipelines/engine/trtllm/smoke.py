"""A build's own server, asked once: does it start on this GPU, answer, and still predict what the variant predicts?

Standard library and numpy only: this runs in the library's toolchain. Scoring and probing have their own client.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.engine import context_logits
from pipelines.engine.trtllm.options import Checks
from pipelines.engine.trtllm.running import last_words
from pipelines.errors import EnvironmentProblem, StageFailed
from pipelines.flow.progress import report
from pipelines.flow.store import Fact, facts
from pipelines.quantize.reference import load_tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

POLL_S = 0.25
GRACE_S = 20.0
ANSWER_S = 600.0
HOST = "127.0.0.1"
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is behind no proxy


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def served(argv: Sequence[str], env: Mapping[str, str], port: int, log: Path, timeout_s: float) -> Iterator[float]:
    """Run a server until the block ends; gives the seconds to its first healthy answer.

    Raises:
        EnvironmentProblem: the command is not there.
        StageFailed: it died or was not healthy in time, with its last words.
    """
    began = time.monotonic()
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, **env}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise EnvironmentProblem(f"{argv[0]}: cannot be started ({error.strerror})") from None
        try:
            while not _healthy(port):
                if process.poll() is not None:
                    raise StageFailed(f"{argv[0]} ended with {process.returncode}{last_words(log)}")
                if time.monotonic() - began > timeout_s:
                    raise StageFailed(f"{argv[0]}: not healthy after {timeout_s:g} s{last_words(log)}")
                time.sleep(POLL_S)
            yield time.monotonic() - began
        finally:
            _stop(process)


def check(model: str, port: int, config: Checks, reference: Path, *, scores: bool) -> dict[str, Fact]:
    """Ask for answers, and where prompts can be scored for the perplexity of held-out windows.

    Raises:
        StageFailed: no answer, fewer tokens than asked, or a perplexity out of bounds.
    """
    ids, logprobs = load_tokens(reference)
    told: dict[str, Fact] = {"smoke_answers": _answers(model, port, config, ids)}
    if not scores:
        return told
    length = min(config.scored_tokens or ids.shape[1], ids.shape[1])
    found = []
    for done, row in enumerate(ids):
        report(done, len(ids), "windows scored by the engine")
        found += _scored(model, port, [int(i) for i in row[:length]])
    report(len(ids), len(ids), "windows scored by the engine")
    return told | _perplexities(config, found, logprobs[:, : length - 1], reference, length == ids.shape[1])


def _answers(model: str, port: int, config: Checks, ids: NDArray[np.int32]) -> int:
    shown = ids[: config.prompts, : max(2, ids.shape[1] // 4)]
    for row in shown:
        body = {"model": model, "prompt": [int(i) for i in row], "max_tokens": config.max_tokens,
                "temperature": 0, "ignore_eos": True}  # fmt: skip
        answer = json.loads(_post(port, body))
        try:
            text, count = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
        except (KeyError, IndexError, TypeError):
            raise StageFailed(f"the server's answer cannot be used: {str(answer)[:200]}") from None
        if not isinstance(text, str) or count != config.max_tokens:
            raise StageFailed(f"{config.max_tokens} tokens were asked for, {count} came: {text!r:.200}")
    return len(shown)


def _scored(model: str, port: int, ids: list[int]) -> list[float]:
    body = _post(port, {"model": model, "prompt": ids, **context_logits.REQUEST})
    try:
        _, logits = context_logits.read(body)
        if logits is None:
            raise ValueError("no context_logits came; was the engine built with gather_context_logits?")
        logprobs, _ = context_logits.score(ids, logits)
    except ValueError as error:
        raise StageFailed(f"prompts cannot be scored: {error}") from None
    return [value for value in logprobs if value is not None]


def _perplexities(
    config: Checks, found: list[float], variant: NDArray[np.float32], reference: Path, whole: bool
) -> dict[str, Fact]:
    """Hold the engine to its variant on the same tokens, and to the base; figures of part of the windows are not told
    as theirs."""
    import numpy as np

    ours, theirs = float(np.exp(-np.mean(found))), float(np.exp(-variant.astype(np.float64).mean()))
    base = float(facts(reference)["base_perplexity"] or 0)
    shown = (
        f"perplexity {ours:.4g} of the engine, {theirs:.4g} of the variant on the same tokens, {base:.4g} of the base"
    )
    if not 1 / config.max_ppl_drift <= ours / theirs <= config.max_ppl_drift:
        bound = f"they differ by more than a factor {config.max_ppl_drift:g} (bound: engine.checks.max_ppl_drift)"
        raise StageFailed(f"{shown}: {bound}")
    if whole and not ours <= config.max_ppl_ratio * base:
        raise StageFailed(f"{shown}: more than {config.max_ppl_ratio:g} times it (bound: engine.checks.max_ppl_ratio)")
    told: dict[str, Fact] = {"ppl_drift": ours / theirs}
    return told | ({"perplexity": ours, "base_perplexity": base} if whole else {})


def _post(port: int, body: Mapping[str, Any]) -> bytes:
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with _opener.open(request, timeout=ANSWER_S) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as error:
        raise StageFailed(f"the server refused a request ({error.code}): {error.read()[:300]!r}") from None
    except OSError as error:
        raise StageFailed(f"the server did not answer: {error}") from None


def _healthy(port: int) -> bool:
    try:
        with _opener.open(f"http://{HOST}:{port}/health", timeout=5) as response:
            ok: bool = response.status == 200
            return ok
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server's whole group; its workers hold the GPU's memory."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sig)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
