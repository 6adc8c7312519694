"""The target of what somebody else serves: any OpenAI-compatible URL. Nothing is built; that it answers is checked.

Its device and its network are not ours, and it can change without a word. So its latency is no evidence unless the user
states what serves it, and only against what the same serves.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from pipelines.config import Strict, read
from pipelines.engine import address
from pipelines.engine.asking import Declared, Found, Questions, ask
from pipelines.engine.capabilities import Capabilities
from pipelines.engine.card import EngineCard, end_tokens
from pipelines.engine.chat import ChatTemplate
from pipelines.engine.pairing import Pairing
from pipelines.engine.table import Elsewhere
from pipelines.engine.traffic import too_long
from pipelines.engine.wording import Wording
from pipelines.errors import EndpointError, EnvironmentProblem, InputError, Problem, StageFailed
from pipelines.flow.progress import report
from pipelines.flow.store import Fact, facts
from pipelines.quantize.carry import carry_over
from pipelines.quantize.reference import load_tokens

if TYPE_CHECKING:
    from pipelines.engine.endpoint import Endpoint
    from pipelines.quantize.scheme import Scheme

RECORD = "remote.json"
STEPS = 3
POLL_S = 0.5
NOT_OURS = "it is served from elsewhere: latency includes the network, and nobody states its device (engine.served_on)"


class RemoteConfig(Strict):
    """Where the server is, and what is known of it."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"api_key_env", "timeout_s"})

    target: Literal["remote"] = "remote"
    url: str = Field(default="", description="the API's address, its version included: https://host/v1")
    model: str = Field(min_length=1, description="the name the server has for the model")
    revision: str = Field(
        min_length=1, coerce_numbers_to_str=True,
        description="what it serves now, in your words; change it when the server changes",
    )  # fmt: skip
    api_key_env: str = Field(default="", description="environment variable that holds the key; empty: none is sent")
    max_length: int = Field(ge=16, description="tokens of a prompt with its answer that the deployment admits")
    served_on: str = Field(
        default="", description="the device, if nothing else runs on it; empty: latency is no evidence"
    )
    capabilities: Declared = Declared()
    timeout_s: float = Field(default=60.0, gt=0, description="how long it may take to answer at all")
    max_ppl_drift: float = Field(
        default=1.1, gt=1, description="perplexity may differ by this factor from the variant's; checked where it can"
    )


class Record(Strict):
    """`remote.json`: the address, which variable has the key, and what was found out."""

    url: str
    api_key_env: str
    begins: int | None
    capabilities: dict[str, bool | int | str]


def preflight(config: RemoteConfig, pairing: Pairing) -> list[Problem]:
    """Find what would make the campaign fail, without asking the server."""
    known = pairing.number("max_positions")
    found = [
        *address.url_problems(config.url, "engine.url"),
        *address.key_problems(config.api_key_env, "engine.api_key_env"),
        *too_long(pairing.workload, config.max_length, "engine.max_length"),
    ]
    if known is not None and config.max_length > known:
        found.append(Problem("engine.max_length", config.max_length, f"the model knows {known} positions"))
    if pairing.workload.scored and config.capabilities.prompt_logprobs is False:
        message = f"{', '.join(pairing.workload.scored)} ask for log-probabilities of prompts"
        found.append(Problem("engine.capabilities.prompt_logprobs", False, message, "eval sets that generate"))
    return found


def redundant(config: RemoteConfig, scheme: Scheme) -> str | None:
    """Which variant it serves is said by the configuration, not by the scheme."""
    del config, scheme
    return None


def serve(engine: Path, port: int, threads: int) -> tuple[list[str], dict[str, str]]:
    """There is no command that starts it.

    Raises:
        InputError: always.
    """
    del port, threads
    raise InputError(f"{engine}: is served at {_record(engine).url} by somebody else; no command of ours starts it")


def misplaced(engine: Path) -> list[Problem]:
    """The key must be in the environment of whoever asks."""
    return list(address.key_problems(_record(engine).api_key_env, "engine.api_key_env"))


def capabilities(engine: Path) -> Capabilities:
    """What was declared or found out when the card was written."""
    return Capabilities(**_record(engine).capabilities)  # type: ignore[arg-type]


def elsewhere(engine: Path) -> Elsewhere:
    """Where it is, and with which key; the key is read from the environment each time and kept nowhere."""
    record = _record(engine)
    text_of = None if capabilities(engine).token_prompts else Wording.of(engine, record.begins).text_of
    return Elsewhere(record.url, address.headers(record.api_key_env), text_of)


def build(config: RemoteConfig, out: Path, *, variant: Path, reference: Path) -> dict[str, Fact]:
    """Ask the server what it can do, hold it to the variant where it tells log-probabilities, and write the card.

    Raises:
        EnvironmentProblem: the key is not in the environment.
        EndpointError: it does not answer, or not as a server of this model would.
        StageFailed: it serves something else.
    """
    if unset := list(address.key_problems(config.api_key_env, "engine.api_key_env")):
        raise EnvironmentProblem("; ".join(map(str, unset)))
    carry_over(variant, out)
    report(0, STEPS, "server")
    wording = Wording.of(out)
    with closing(_client(config, Capabilities(), None, wording)) as anyone:
        ready_s = _wait(anyone, config.timeout_s)
        if anyone.admits is not None and anyone.admits < config.max_length:
            told = f"engine.max_length={config.max_length}, but the server admits {anyone.admits} (max_model_len)"
            raise EndpointError(f"{config.url}: {told}; longer requests would be refused or cut")
    report(1, STEPS, "server")
    found = _asked(config, variant, wording)
    record = Record(
        url=config.url.rstrip("/"), api_key_env=config.api_key_env, begins=found.begins,
        capabilities=asdict(found.capabilities),
    )  # fmt: skip
    (out / RECORD).write_text(record.model_dump_json(indent=2) + "\n")
    _write_card(config, out, variant)
    report(2, STEPS, "server")
    with closing(_client(config, found.capabilities, found.begins, wording)) as endpoint:
        compared, why = _perplexities(config, endpoint, reference)
    report(STEPS, STEPS, "server")
    able = {name: value for name, value in record.capabilities.items() if name != "metrics"}
    return {
        "target": config.target,
        "native": bool(config.served_on),
        "native_note": "" if config.served_on else NOT_OURS,
        "served_on": config.served_on or "not stated",
        "url": record.url,
        "model": config.model,
        "revision": config.revision,
        "ready_s": round(ready_s, 3),
        **compared,
        "notes": "; ".join(filter(None, (*found.notes, why))),
        **able,
    }


def _client(config: RemoteConfig, able: Capabilities, begins: int | None, wording: Wording) -> Endpoint:
    from pipelines.engine.endpoint import Endpoint

    text_of = Wording(wording.tokenizer, begins).text_of
    return Endpoint(config.url, config.model, able, headers=address.headers(config.api_key_env), text_of=text_of)


def _wait(endpoint: Endpoint, allowed_s: float) -> float:
    """Wait until the server answers; give the seconds it took."""
    began = time.monotonic()
    while refused := endpoint.not_ready():
        if time.monotonic() - began > allowed_s:
            raise EndpointError(f"{endpoint.base_url}: no answer within engine.timeout_s={allowed_s:g}: {refused}")
        time.sleep(POLL_S)
    return time.monotonic() - began


def _asked(config: RemoteConfig, variant: Path, wording: Wording) -> Found:
    """What the server can do, asked in this model's tokens."""
    read, template = wording.tokenizer.encode, ChatTemplate.of(variant)
    question = "Answer with one word: is water wet?"
    short = question if template is None else template.render([{"role": "user", "content": question}])
    plain, begun = (read("The capital of France is", add_special_tokens=add).ids for add in (False, True))
    begins = begun[0] if begun[1:] == plain else None
    questions = Questions(
        lambda able, first: _client(config, able, first, wording), plain, read(short, add_special_tokens=False).ids,
        begins,
    )  # fmt: skip
    return ask(questions, config.capabilities)


def _perplexities(config: RemoteConfig, endpoint: Endpoint, reference: Path) -> tuple[dict[str, Fact], str]:
    """On the held-out windows, as the variant was read here; nothing, and why, where the server cannot tell.

    Raises:
        StageFailed: it is too far from the variant's to be the same model.
    """
    ids, wanted = load_tokens(reference)
    if not endpoint.capabilities.scores_prompts:
        return {}, "that it serves this variant was not checked: it gives no log-probabilities of prompts"
    if ids.shape[1] > config.max_length:
        return {}, f"that it serves this variant was not checked: windows have {ids.shape[1]} tokens"
    scores = [endpoint.score([window.tolist()])[0] for window in ids]
    losses = [-value for score in scores for value in score.logprobs if value is not None]
    ours, its = math.exp(-float(wanted.mean())), math.exp(math.fsum(losses) / len(losses))
    if (drift := max(its / ours, ours / its)) > config.max_ppl_drift:
        raise StageFailed(
            f"{config.model} at {config.url} has a perplexity of {its:.3f} on held-out text, the variant {ours:.3f}: "
            f"{drift:.3f} times, allowed engine.max_ppl_drift={config.max_ppl_drift:g}; it serves something else"
        )
    return {"perplexity": its, "base_perplexity": _number(facts(reference), "base_perplexity")}, ""


def _number(known: Mapping[str, Fact], name: str) -> float | None:
    value = known.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _write_card(config: RemoteConfig, out: Path, variant: Path) -> None:
    about = json.loads((variant / "config.json").read_text())
    card = EngineCard(
        target=config.target,
        native=bool(config.served_on),
        native_note="" if config.served_on else NOT_OURS,
        max_length=config.max_length,
        eos_token_ids=end_tokens(variant),
        bos_token_id=about.get("bos_token_id"),
        vocab_size=int(about["vocab_size"]),
        model_id=config.model,
        startup_timeout_s=config.timeout_s,
    )
    (out / "engine.json").write_text(card.model_dump_json(indent=2) + "\n")


def _record(engine: Path) -> Record:
    return read(Record, engine / RECORD, "not a readable record of a remote server")
