"""What an eval set will send, as far as its task file alone tells: enough to see that an engine is too short for it.

Rendered as lm-eval does, without few-shot examples or a chat template, so a lower bound. Pure; loads no lm-eval.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipelines.evaluate.evalset import Evalset

SCORED = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
DEFAULT_MAX_NEW = 256  # lm-eval's own for generate_until
DEFAULT_DELIMITER = " "
Render = Callable[[Mapping[str, Any]], str]


def scores_prompts(evalset: Evalset) -> bool:
    """Whether the set asks for log-probabilities of prompts; of tasks that lm-eval ships this is not known here."""
    return evalset.task.get("output_type") in SCORED


def requests(evalset: Evalset) -> Iterator[tuple[str, int]]:
    """Each prompt with the tokens its answer may take; nothing where a function makes the prompts, or windows fit."""
    task = evalset.task
    kind, context = task.get("output_type"), _renderer(task.get("doc_to_text"))
    if context is None or kind not in ("generate_until", "multiple_choice", "loglikelihood"):
        return
    answers = _answers(task, str(kind))
    most = _max_new(task) if kind == "generate_until" else 0
    delimiter = str(task.get("target_delimiter", DEFAULT_DELIMITER))
    for item in evalset.drawn:
        doc = json.loads(item.line)
        text = context(doc)
        for answer in answers(doc):
            yield (text if answer is None else f"{text}{delimiter}{answer}"), most


def question(evalset: Evalset, line: str) -> str | None:
    """What is asked of an item before any answer, or a whole text that is only read; None where a function makes it."""
    task, doc = evalset.task, json.loads(line)
    rolling = task.get("output_type") == "loglikelihood_rolling"
    render = _renderer(task.get("doc_to_target" if rolling else "doc_to_text"))
    return None if render is None else render(doc)


def answered(evalset: Evalset, line: str) -> str | None:
    """An item's prompt with its right answer behind it, or alone where the task file does not tell the answer; None
    where it tells no prompt."""
    task = evalset.task
    context, target = _renderer(task.get("doc_to_text")), _renderer(task.get("doc_to_target"))
    if context is None or task.get("output_type") not in ("generate_until", "multiple_choice", "loglikelihood"):
        return None
    doc = json.loads(line)
    text, answer = context(doc), None if target is None else target(doc)
    if answer is not None and task.get("output_type") == "multiple_choice":
        offered = _answers(task, "multiple_choice")(doc)
        place = int(answer) if answer.isdecimal() else offered.index(answer) if answer in offered else len(offered)
        answer = offered[place] if place < len(offered) else None
    return text if answer is None else f"{text}{task.get('target_delimiter', DEFAULT_DELIMITER)}{answer}"


def _max_new(task: Mapping[str, object]) -> int:
    given = task.get("generation_kwargs")
    asked = given.get("max_gen_toks") if isinstance(given, Mapping) else None
    return asked if isinstance(asked, int) else DEFAULT_MAX_NEW


def _answers(task: Mapping[str, object], kind: str) -> Callable[[Mapping[str, Any]], list[str | None]]:
    """The answers that are sent behind a prompt: none where they are generated, or not to be known."""
    if kind == "multiple_choice":
        choices = task.get("doc_to_choice")
        if isinstance(choices, list):
            return lambda _: list(choices)
        if isinstance(choices, str):
            return lambda doc: found if isinstance(found := doc.get(choices), list) else [None]
    target = _renderer(task.get("doc_to_target")) if kind == "loglikelihood" else None
    return (lambda _: [None]) if target is None else (lambda doc: [target(doc)])


def _renderer(template: object) -> Render | None:
    """lm-eval's reading of a text: the name of a field, else a Jinja template."""
    if not isinstance(template, str):
        return None
    from jinja2 import Environment

    compiled = Environment(keep_trailing_newline=True).from_string(template)
    return lambda doc: str(doc[template]) if template in doc else compiled.render(**doc)
