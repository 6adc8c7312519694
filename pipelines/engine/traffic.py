"""Whether what a campaign asks fits what an engine admits. Pure; what is unknown raises no problem."""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.engine.pairing import Workload
from pipelines.errors import Problem


def too_long(asked: Workload, longest: int, key: str) -> Iterator[Problem]:
    """The longest request, where it takes more tokens with its answer than an engine holds."""
    if asked.request is not None and asked.request.tokens > longest:
        message = f"the longest request, of {asked.request.whose}, takes {asked.request.tokens} tokens with its answer"
        yield Problem(key, longest, message)


def prompt_too_long(asked: Workload, most: int, key: str, allowed: str = "") -> Iterator[Problem]:
    """The longest prompt, where it takes more tokens than an engine reads."""
    if asked.prompt is not None and asked.prompt.tokens > most:
        message = f"the longest prompt, of {asked.prompt.whose}, takes {asked.prompt.tokens} tokens; it admits {most}"
        yield Problem(key, most, message, allowed)


def queued(asked: Workload, at_once: int, key: str) -> Iterator[Problem]:
    """The probe's concurrency, where an engine would make some of it wait."""
    if asked.in_flight > at_once:
        message = f"the probe keeps {asked.in_flight} requests in flight; the rest would queue"
        yield Problem(key, at_once, message)
