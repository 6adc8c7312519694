"""An eval set's card: what it measures and what a gate must know of it. Strict: an unknown key is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from pipelines.config import Strict, problems_of

M = TypeVar("M", bound=BaseModel)
Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where it is built
Family = Literal["strict", "standard", "loose", "perplexity"]


class BaseScore(Strict):
    """What the small reference model scores, and under which conditions it was measured."""

    score: float
    stderr: float = Field(ge=0)
    items: int = Field(ge=1)
    model: str
    conditions: str
    chance: float | None = Field(default=None, description="score of guessing; null where guessing scores nothing")


class Card(Strict):
    """card.yaml of an eval set."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    version: str = Field(pattern=r"^\d+(\.\d+)*$", description="raised when an item, a prompt or the metric changes")
    description: str
    licence: str
    provenance: str
    metric: str = Field(description="the task's metric that is gated, one value for each item")
    higher_is_better: bool
    binary: bool = Field(description="every item scores 0 or 1, so paired counts are compared")
    family: Family = Field(description="which of the gate's margins applies")
    filter: str | None = Field(default=None, description="of a task with several filters: the one that is gated")
    reference: str = Field(description="the field every item must have: the answer it is scored against")
    slices: dict[str, str] = Field(default_factory=dict, description="every value of `slice`, and what it stands for")
    clusters: str | None = Field(default=None, description="what items of one `cluster` share; null: they stand alone")
    quick: int = Field(ge=1, description="items of the subset meant for a first look")
    base_score: BaseScore | None = None
    min_score_note: str = Field(default="", description="below which score the set can no longer show a loss, and why")

    @property
    def judged(self) -> dict[str, object]:
        """What decides about scores and verdicts; the rest is prose, and may be mended without scoring again."""
        return self.model_dump(include={"name", "version", "metric", "higher_is_better", "binary", "family", "filter"})


@dataclass(frozen=True, slots=True)
class ItemRules:
    """What a card says about items, also where the rest of the card is wrong."""

    reference: str | None
    slices: tuple[str, ...]
    clustered: bool
    binary: bool


def read_card(path: Path, problems: list[str]) -> tuple[Card | None, ItemRules]:
    """Read and check a card; what is wrong is added to `problems`, one line for each."""
    data = read_yaml(path, problems) or {}
    reference, slices = data.get("reference"), data.get("slices")
    rules = ItemRules(
        reference if isinstance(reference, str) else None,
        tuple(map(str, slices)) if isinstance(slices, dict) else (),
        data.get("clusters") is not None,
        data.get("binary") is True,
    )
    return (checked(Card, data, path, problems) if data else None), rules


def read_yaml(path: Path, problems: list[str], loader: type[yaml.SafeLoader] = Loader) -> dict[str, object] | None:
    """Read a YAML mapping; a syntax error is told with its line."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except FileNotFoundError:
        problems.append(f"{path}: no such file; an eval set holds task.yaml, items.jsonl and card.yaml")
        return None
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = re.sub(r"\s+", " ", str(getattr(error, "problem", None) or error))
        problems.append(f"{path}{line}: is not YAML: {what}")
        return None
    if not isinstance(data, dict):
        problems.append(f"{path}: holds {type(data).__name__}, not keys with values")
        return None
    return data


def checked(model: type[M], data: object, path: Path, problems: list[str]) -> M | None:
    """Validate, adding each problem as a line that begins with the file."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems += [f"{path}: {p}" for p in problems_of(error, model)]
        return None
