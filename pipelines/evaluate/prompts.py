"""Eval prompts whose tokens are predicted one by one: a bounded draw over all sets, each with its right answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from pipelines.config import Strict
from pipelines.evaluate import lengths
from pipelines.evaluate.evalset import Evalset


class DivergenceConfig(Strict):
    """What is compared token by token beside the held-out windows: prompts over all eval sets, the end of each."""

    prompts: int = Field(default=12, ge=0, description="prompts drawn over all eval sets; 0: held-out text only")
    tail: int = Field(default=48, ge=1, description="tokens predicted at the end of each, its right answer included")
    seed: int = Field(default=0, ge=0, description="of the draw")


def draw(evalsets: Sequence[Evalset], config: DivergenceConfig) -> tuple[str, ...]:
    """Draw prompts evenly over the sets that have any to show; the same seed gives the same prompts of a set.

    Rendered as the task file says, without few-shot examples or a chat template.
    """
    shown = [e for e in evalsets if e.drawn and lengths.answered(e, e.drawn[0].line) is not None]
    found = []
    for place, evalset in enumerate(shown):
        count = config.prompts // len(shown) + (place < config.prompts % len(shown))
        some = random.Random(f"{config.seed} {evalset.name}").sample(evalset.drawn, min(count, len(evalset.drawn)))
        found += [text for item in some if (text := lengths.answered(evalset, item.line))]
    return tuple(found)
