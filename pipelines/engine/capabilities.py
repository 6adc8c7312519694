"""What an engine's server can do, as its target declares it; scoring and probing ask nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server declares: `top_logprobs` is how many alternatives per token it can rank.

    prompt_logprobs: it echoes a prompt with a log-probability for each token. context_logits: it cannot, but it gives
    all logits of a prompt, from which the same numbers are computed here. logprob_start: it takes `logprob_start_len`
    and spares the work on earlier tokens. prompt_ranks: it takes `prompt_logprobs` and answers with log-probabilities
    by token id, which is then read instead of an echo. token_ids: asked for `return_token_ids`, its events carry the
    ids of generated tokens. keeps_connections: it takes another request over the connection of a streamed answer; where
    it does not, each has one of its own. metrics: path of its Prometheus text ("/metrics"), "" where it has none.
    """

    token_prompts: bool = True
    stream: bool = True
    prompt_logprobs: bool = True
    context_logits: bool = False
    logprob_start: bool = False
    prompt_ranks: bool = False
    top_logprobs: int = 20
    ignore_eos: bool = True
    token_ids: bool = False
    keeps_connections: bool = True
    metrics: str = ""

    @property
    def scores_prompts(self) -> bool:
        """Whether log-probabilities of a prompt can be had, one way or the other."""
        return self.prompt_logprobs or self.prompt_ranks or self.context_logits
