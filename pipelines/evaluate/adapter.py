"""lm-eval's model interface over an endpoint: text becomes token ids here, once, and every engine gets the same ids.

Only `harness` imports this module; it needs lm-eval.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pipelines.engine.endpoint import Endpoint, TokenScore
from pipelines.errors import EvidenceError
from pipelines.evaluate.answers import looping
from pipelines.flow import progress

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from pipelines.engine.host.engine import Engine

DEFAULT_MAX_NEW = 256  # lm-eval's own default for generate_until


@dataclass(frozen=True, slots=True)
class Pace:
    """How requests are sent: prompts scored in one call, generations under way at once, and in which order.

    Answers are told apart by item, so none of it should change them: `shuffle` (a seed) shows whether it does.
    """

    together: int = 128
    in_flight: int = 4
    shuffle: int | None = None

    def order(self, count: int) -> list[int]:
        """The places of `count` requests in the order they are sent."""
        places = list(range(count))
        if self.shuffle is not None:
            random.Random(self.shuffle).shuffle(places)
        return places


USUAL = Pace()


@dataclass(slots=True)
class Trace:
    """What was really sent and received for one item, over all its requests."""

    ids: list[list[int]] = field(default_factory=list)
    tokens_out: int = 0
    finish_reason: str | None = None
    truncated: bool = False
    empty: bool = False
    looping: bool = False
    not_finite: bool = False

    @property
    def tokens_in(self) -> int:
        return sum(map(len, self.ids))

    @property
    def prompt_hash(self) -> str:
        """sha256 over the token ids of every request, so that two engines provably saw the same."""
        text = ";".join(",".join(map(str, ids)) for ids in self.ids)
        return hashlib.sha256(text.encode()).hexdigest()


class EndpointLM(TemplateLM):  # type: ignore[misc]
    """An engine behind an endpoint, as lm-eval sees it. `traces` holds the evidence by item id."""

    def __init__(self, endpoint: Endpoint, engine: Engine, pace: Pace = USUAL) -> None:
        super().__init__()
        card = engine.card
        self._endpoint = endpoint
        self._engine = engine
        self._pace = pace
        self._encoder = engine.tokenizer
        self._max_length = card.max_length
        self._max_prompt = min(card.max_length, card.max_prompt or card.max_length)
        self._window = card.max_length if card.max_prompt is None else card.max_prompt - 1  # lm-eval sends one more
        self._eos = card.eos_token_ids[0]
        self._prefix = self._eos if card.bos_token_id is None else card.bos_token_id
        self.traces: dict[str, Trace] = {}

    @property
    def tokenizer_name(self) -> str:
        return self._engine.card.model_id

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """lm-eval keeps this text with its results; the template itself is rendered by `apply_chat_template`."""
        return self._engine.card.model_id if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Render a conversation with the engine's own template, up to where the answer begins."""
        if not add_generation_prompt:
            raise EvidenceError(
                "tasks that begin the model's answer for it (gen_prefix) cannot use a chat template here"
            )
        return self._engine.render(chat_history)

    @property
    def eot_token_id(self) -> int:
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        ids: list[int] = self._encoder.encode(string, add_special_tokens=add_special_tokens is not False).ids
        return ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations, many prompts a call: choices share their context and items their instructions, and a
        server that computes a shared prefix once can only do so for what it sees together."""
        del disable_tqdm
        self._require_scores()
        prompts, together = [self._prompt(request) for request in requests], self._pace.together
        places, answers = self._pace.order(len(prompts)), dict[int, tuple[float, bool]]()
        for start in range(0, len(places), together):
            now = places[start : start + together]
            some = [prompts[place] for place in now]
            scores = self._endpoint.score([ids for ids, _ in some], [len(ids) - count for ids, count in some])
            tails = (_tail(score, count) for score, (_, count) in zip(scores, some, strict=True))
            answers.update(zip(now, tails, strict=True))
            for place in now:
                self._note(requests[place], answers[place][0])
            progress.report(len(answers), len(requests), "requests scored")
        return [answers[place] for place in range(len(prompts))]

    def _prompt(self, request: Instance) -> tuple[list[int], int]:
        """A request's token ids and how many of them are its answer; both go on record."""
        trace = self.traces.setdefault(item_of(request), Trace())
        context, continuation = self._pair(*request.args)
        ids = context + continuation
        if len(ids) > self._max_prompt:
            ids, trace.truncated = ids[-self._max_prompt :], True
        trace.ids.append(ids)
        return ids, len(continuation)

    def _note(self, request: Instance, likelihood: float) -> None:
        """Put a log-likelihood that is no number on record."""
        if not math.isfinite(likelihood):
            self.traces[item_of(request)].not_finite = True

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context == "":
            return [self._prefix], self.tok_encode(continuation, add_special_tokens=False)
        left, right = self._encode_pair(context, continuation)
        if not right:
            raise EvidenceError(
                f"the answer {continuation!r} has no token of its own: it merges with the end of its context "
                f"{context[-40:]!r}; begin answers with a space or end contexts at a word"
            )
        return left, right

    def _require_scores(self) -> None:
        """Say that this engine cannot be scored so, before a request is sent that would be answered about nothing."""
        if not self._endpoint.capabilities.scores_prompts:
            raise EvidenceError(
                f"{self._engine.card.model_id} ({self._engine.card.target}) gives no log-probabilities of prompts, and "
                "this eval set is scored by them; choose one that generates answers, or build the engine so that it "
                "can score (`quantgate plan` names the setting)"
            )

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: object) -> list[tuple[float, bool]]:
        prompts = [context + continuation for _, context, continuation in requests]
        counts = [len(continuation) for _, _, continuation in requests]
        scores = self._endpoint.score(prompts, [len(context) for _, context, _ in requests])
        return [_tail(score, count) for score, count in zip(scores, counts, strict=True)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Sum the log-likelihood of whole texts, in windows that leave no token out."""
        del disable_tqdm
        self._require_scores()
        sums: dict[int, float] = {}
        for place in self._pace.order(len(requests)):
            request = requests[place]
            ids = self.tok_encode(request.args[0])
            pairs = [
                make_disjoint_window(w)
                for w in get_rolling_token_windows(ids, self._prefix, max_seq_len=self._window, context_len=1)
            ]
            prompts = [context + continuation for context, continuation in pairs]
            trace = self.traces.setdefault(item_of(request), Trace())
            trace.ids += prompts
            scores = self._endpoint.score(prompts, [len(context) for context, _ in pairs])
            sums[place] = sum(_tail(s, len(c))[0] for s, (_, c) in zip(scores, pairs, strict=True))
            self._note(request, sums[place])
            progress.report(len(sums), len(requests), "texts scored")
        return [sums[place] for place in range(len(requests))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate answers, greedily unless the task says otherwise, a few at a time so that the server can batch."""
        del disable_tqdm
        places, texts = self._pace.order(len(requests)), dict[int, str]()
        with ThreadPoolExecutor(self._pace.in_flight) as pool:
            for place, text in zip(places, pool.map(self._answer, [requests[p] for p in places]), strict=True):
                texts[place] = text
                progress.report(len(texts), len(requests), "answers generated")
        return [texts[place] for place in range(len(requests))]

    def _answer(self, request: Instance) -> str:
        prompt, options = request.args
        return self._generate(item_of(request), prompt, dict(options))

    def _generate(self, item: str, prompt: str, options: Mapping[str, Any]) -> str:
        max_new = int(options.get("max_gen_toks", DEFAULT_MAX_NEW))
        trace = self.traces.setdefault(item, Trace())
        ids = self.tok_encode(prompt)
        room = min(self._max_length - max_new, self._max_prompt)
        if len(ids) > room:
            ids, trace.truncated = ids[-room:], True
        sample = bool(options.get("do_sample", False))
        done = self._endpoint.generate(
            ids,
            max_tokens=max_new,
            stop=_stops(options.get("until", ())),
            temperature=float(options.get("temperature", 1.0)) if sample else 0.0,
        )
        trace.ids.append(ids)
        trace.tokens_out += done.tokens_out
        trace.finish_reason = done.finish_reason
        trace.empty = trace.empty or not done.text.strip()
        trace.looping = trace.looping or looping(done.text)
        return done.text


def item_of(request: Instance) -> str:
    """The item's id where the data has one, else its place in the task's data."""
    return str(request.doc["id"]) if "id" in request.doc else str(request.doc_id)


def _stops(until: str | Iterable[str]) -> list[str]:
    return [until] if isinstance(until, str) else [s for s in until if s]


def _tail(score: TokenScore, count: int) -> tuple[float, bool]:
    """Log-likelihood of the last `count` tokens, and whether each was the most likely one."""
    tail = [value for value in score.logprobs[-count:] if value is not None]
    if len(tail) != count:
        raise EvidenceError(f"the engine gave {len(tail)} log-probabilities for {count} answer tokens")
    return sum(tail), all(bool(g) for g in score.greedy[-count:])
