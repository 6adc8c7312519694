"""A build's own server, asked once: does it start on this machine, answer, and still predict what the variant predicts?

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from pipelines.config import Strict
from pipelines.engine import context_logits, prompt_ranks
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
TAIL_LINES = 15
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is behind no proxy


class Checks(Strict):
    """What a server of the result must show before it counts as built."""

    prompts: int = Field(default=2, ge=1, description="held-out windows whose starts are given as prompts")
    max_tokens: int = Field(default=16, ge=1, description="tokens each has to be answered with")
    scored_tokens: int | None = Field(
        default=None,
        ge=2,
        description="where prompts can be scored: tokens of each held-out window that are; null: all. A server that "
        "gives logits only writes a row for each as JSON, some 19 bytes for every word of the vocabulary",
    )
    max_ppl_ratio: float = Field(
        default=3.0, gt=1, description="perplexity beyond this multiple of the base's is noise"
    )
    max_ppl_drift: float = Field(
        default=1.1, gt=1, description="perplexity may differ by this factor from the variant's own"
    )
    startup_timeout_s: float = Field(default=1800, gt=0, description="for the server to answer after its start")


@dataclass(frozen=True, slots=True)
class Asker:
    """How a server is asked to score a prompt: what goes into the request, and how log-probabilities of all its tokens
    but the first are read from the answer; ValueError where they are not all there."""

    request: Mapping[str, Any]
    read: Callable[[Sequence[int], bytes], Sequence[float | None]]


def _read_logits(ids: Sequence[int], body: bytes) -> Sequence[float | None]:
    _, logits = context_logits.read(body)
    if logits is None:
        raise ValueError("no context_logits came; was the engine built with gather_context_logits?")
    return context_logits.score(ids, logits)[0]


def _read_ranks(ids: Sequence[int], body: bytes) -> Sequence[float | None]:
    try:
        choice = json.loads(body)["choices"][0]
    except (KeyError, IndexError, TypeError):
        raise ValueError("no choices came") from None
    return [place.logprob for place in prompt_ranks.read(ids, 1, 1, choice)]


BY_LOGITS = Asker(context_logits.REQUEST, _read_logits)
BY_RANKS = Asker({**prompt_ranks.REQUEST, "prompt_logprobs": 1}, _read_ranks)


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
        StageFailed: it died, was not healthy in time, or failed what the block asked, with its last words.
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
            ready_s = time.monotonic() - began
            try:
                yield ready_s
            except StageFailed as error:
                raise StageFailed(f"{error}{last_words(log)}") from None
        finally:
            _stop(process)


def check(model: str, port: int, config: Checks, reference: Path, scoring: Asker | None) -> dict[str, Fact]:
    """Ask for answers, and where prompts can be scored for the perplexity of held-out windows.

    Raises:
        StageFailed: no answer, fewer tokens than asked, or a perplexity out of bounds.
    """
    ids, logprobs = load_tokens(reference)
    told: dict[str, Fact] = {"smoke_answers": _answers(model, port, config, ids)}
    if scoring is None:
        return told
    length = min(config.scored_tokens or ids.shape[1], ids.shape[1])
    found = []
    for done, row in enumerate(ids):
        report(done, len(ids), "windows scored by the engine")
        found += _scored(model, port, scoring, [int(i) for i in row[:length]])
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


def _scored(model: str, port: int, scoring: Asker, ids: list[int]) -> list[float]:
    body = _post(port, {"model": model, "prompt": ids, **scoring.request})
    try:
        logprobs = scoring.read(ids, body)
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


def last_words(log: Path) -> str:
    """The end of what a tool said, for an error message."""
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "; its last words:\n" + "\n".join(lines) if lines else "; it said nothing"
