"""Eval sets: a directory with task.yaml (lm-eval's format), items.jsonl and card.yaml, or the name of an lm-eval task.

Loading checks everything and tells every problem at once; it needs no heavy library, so that planning can do it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from pipelines.config import Strict, find
from pipelines.errors import InputError, closest
from pipelines.evaluate import taskfile
from pipelines.evaluate.card import Card, Family, ItemRules, read_card

TASK, ITEMS, CARD = taskfile.NAME, "items.jsonl", "card.yaml"
SHOWN = 20


class EvalsetConfig(Strict):
    """One eval set of a campaign: a directory by `path`, or an lm-eval task by name with what a card would say."""

    unkeyed: ClassVar[frozenset[str]] = frozenset({"path"})

    path: str | None = Field(None, description="directory with task.yaml, items.jsonl and card.yaml")
    task: str | None = Field(None, description="instead of path: the name of a task that lm-eval ships")
    limit: int | None = Field(None, ge=1, description="items drawn at random, whole clusters; null means all of them")
    seed: int = Field(0, ge=0, description="of the draw; a larger limit with the same seed adds items to it")
    chat_template: bool = Field(False, description="wrap prompts in the model's chat template")
    metric: str = Field("acc", description="with task: the metric that is gated")
    higher_is_better: bool = Field(True, description="with task: its direction")
    binary: bool = Field(True, description="with task: every item scores 0 or 1")
    family: Family = Field("standard", description="with task: which of the gate's margins applies")

    @model_validator(mode="after")
    def _one_source(self) -> EvalsetConfig:
        if (self.path is None) == (self.task is None):
            raise ValueError("give either path (a directory) or task (an lm-eval task's name)")
        return self


@dataclass(frozen=True, slots=True)
class Item:
    """One item: where it stands in the data, its id, and what it is grouped by."""

    position: int
    id: str
    slice: str
    cluster: str | None
    line: str


@dataclass(frozen=True, slots=True)
class Evalset:
    """A checked eval set. `items` are all it has, `drawn` those that `limit` leaves; a stock task has neither."""

    config: EvalsetConfig
    name: str
    card: Card
    task: Mapping[str, object]
    items: tuple[Item, ...]
    drawn: tuple[Item, ...]
    digest: str
    directory: Path | None

    @property
    def items_path(self) -> Path | None:
        return None if self.directory is None else self.directory / ITEMS

    @property
    def size(self) -> int:
        """Items that are scored; of lm-eval's own tasks only `limit` is known, and 0 without one."""
        return len(self.drawn) if self.items else self.config.limit or 0

    @property
    def sizes(self) -> dict[str, tuple[int, int | None]]:
        """Items that are scored and the clusters they form (None where each stands alone), of "all" and each slice."""
        parts: dict[str, list[Item]] = {}
        for item in self.drawn:
            parts.setdefault(item.slice, []).append(item)
        return {name: (len(items), _clusters(items)) for name, items in parts.items()} | {
            "all": (self.size, _clusters(self.drawn))
        }

    @property
    def template_id(self) -> str:
        """Names the prompt an item was put into, so that scores of two prompts are never compared."""
        return f"{self.name}@{self.card.version}" + ("+chat" if self.config.chat_template else "")

    def gate_card(self) -> dict[str, object]:
        """What a gate must know of the set."""
        return self.card.model_dump(include={"family", "metric", "higher_is_better", "binary", "filter"})

    def lm_eval_task(self, scratch: Path) -> dict[str, object] | str:
        """The task for lm-eval: its name, or a task file's content over the drawn items, written to `scratch`."""
        if self.directory is None:
            return self.name
        data = scratch / ITEMS
        data.write_text("".join(item.line + "\n" for item in self.drawn), encoding="utf-8")
        # `datasets` would leave a copy of every draw in its cache for ever
        source = {"data_files": {"test": str(data)}, "cache_dir": str(scratch / "cache")}
        made = taskfile.resolved(self.task, self.directory)
        return made | {"task": self.name, "dataset_path": "json", "dataset_kwargs": source}


def load(config: EvalsetConfig) -> Evalset:
    """Read and check an eval set.

    Raises:
        InputError: every problem of its files, one a line, each with the file and where it applies the line number.
    """
    if config.path is None:
        stock = _card_of_task(config)
        return Evalset(config, stock.name, stock, {}, (), (), digest(config), None)
    directory = _directory(config.path)
    problems: list[str] = []
    card, rules = read_card(directory / CARD, problems)
    task = taskfile.read(directory, problems)
    items = tuple(_items(directory / ITEMS, rules, task or {}, problems))
    problems += [f"{directory / ITEMS}: {p}" for p in _one_class(items, rules, task or {})]
    metrics = taskfile.metrics(task or {})
    if card is not None and metrics and card.metric not in metrics:
        known = closest(card.metric, metrics)
        problems.append(f"{directory / CARD}: metric={card.metric!r}: not in the task's metric_list ({known})")
    if problems or card is None or task is None:
        more = [f"and {len(problems) - SHOWN} more problems"] if len(problems) > SHOWN else []
        raise InputError("\n".join([*problems[:SHOWN], *more]))
    chosen = set(subset(items, config.limit, config.seed))
    drawn = tuple(item for item in items if item.id in chosen)
    given = config.model_copy(update={"path": str(directory)})
    return Evalset(given, card.name, card, task, items, drawn, digest(given), directory)


def subset(items: Sequence[Item], limit: int | None, seed: int) -> list[str]:
    """Draw ids at random, in the order of the data: whole clusters, as many as fit in `limit`, at least one."""
    if limit is None:
        return [item.id for item in items]
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(_group(item), []).append(item)
    order = sorted(groups)
    random.Random(seed).shuffle(order)
    chosen: list[Item] = []
    for group in order:
        if chosen and len(chosen) + len(groups[group]) > limit:
            break
        chosen += groups[group]
    return [item.id for item in sorted(chosen, key=lambda item: item.position)]


def digest(config: EvalsetConfig) -> str:
    """Fingerprint everything a score depends on but the engine: files, draw, prompt. Prose of a card is left out."""
    draw = {"limit": config.limit, "seed": config.seed, "chat_template": config.chat_template}
    if config.path is None:
        parts: dict[str, object] = {"card": _card_of_task(config).judged, "lm_eval": _lm_eval_version()}
    else:
        directory = _directory(config.path)
        card, _ = read_card(directory / CARD, [])
        parts = {"card": card.judged if card else None}
        parts |= {name: _sha256(file) for name, file in _files(directory)}
    return hashlib.sha256(json.dumps({**draw, **parts}, sort_keys=True).encode()).hexdigest()


def _directory(path: str) -> Path:
    directory = find(path)
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; an eval set is a directory with {TASK}, {ITEMS} and {CARD}")
    return directory


def _clusters(items: Sequence[Item]) -> int | None:
    found = {_group(item) for item in items}
    return len(found) if len(found) < len(items) else None


def _group(item: Item) -> str:
    """The cluster's name, or for an item without one a name of its own that no cluster can have."""
    return f"item\0{item.id}" if item.cluster is None else f"cluster\0{item.cluster}"


def _card_of_task(config: EvalsetConfig) -> Card:
    """What stands in for a card where lm-eval ships the task."""
    return Card(
        name=str(config.task),
        version="1",
        description="a task that lm-eval ships",
        licence="see the task",
        provenance=f"lm-eval {_lm_eval_version()}",
        metric=config.metric,
        higher_is_better=config.higher_is_better,
        binary=config.binary,
        family=config.family,
        reference="target",
        quick=config.limit or 1,
    )


def _lm_eval_version() -> str:
    try:
        return version("lm-eval")
    except PackageNotFoundError:
        return "not installed"


# --- files -------------------------------------------------------------------------------------------------------


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    """The files whose content decides about scores: task, items, code beside them and code the task names."""
    present = (directory / TASK, directory / ITEMS, *sorted(directory.glob("*.py")))
    yield from ((file.name, file) for file in present if file.is_file())
    yield from taskfile.code(taskfile.read(directory, []) or {})


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _items(path: Path, rules: ItemRules, task: Mapping[str, object], problems: list[str]) -> Iterator[Item]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")
        return
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        at = f"{path}:{number}"
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            problems.append(f"{at}: is not JSON: {error}")
            continue
        if not isinstance(row, dict):
            problems.append(f"{at}: {'is empty' if row is None else 'holds no object'}; each line is one JSON object")
            continue
        item_id = row.get("id")
        if not isinstance(item_id, str | int) or item_id == "":
            problems.append(f"{at}: has no id; every item needs an `id` of its own")
            continue
        first = seen.setdefault(str(item_id), number)
        if first != number:
            problems.append(f"{at}: has the id {item_id!r} of line {first}; ids must differ")
        problems += [f"{at}: item {item_id!r} {what}" for what in _row_problems(row, rules, task)]
        yield _item(len(seen) - 1, row, line)
    if not lines:
        problems.append(f"{path}: holds no items")


def _must_pass_problems(row: Mapping[str, object], rules: ItemRules) -> Iterator[str]:
    marked = row.get("must_pass", False)
    if not isinstance(marked, bool):
        yield f"has must_pass={marked!r}; it is true or false"
    elif marked and not rules.binary:
        yield f"is marked must_pass, but only items that are right or wrong can be ({CARD}: binary)"


def _one_class(items: Sequence[Item], rules: ItemRules, task: Mapping[str, object]) -> Iterator[str]:
    """A choice whose right answer is always the same one is won by whoever always says it."""
    if rules.reference is None or task.get("output_type") != "multiple_choice" or len(items) < 2:
        return
    named = task.get("doc_to_choice")
    rows = [json.loads(item.line) for item in items]
    pairs = {json.dumps([row.get(rules.reference), row.get(named) if isinstance(named, str) else None]) for row in rows}
    if len(pairs) == 1:
        shown = rows[0].get(rules.reference)
        yield f"all {len(items)} items have the one reference {shown!r}, so a constant answer is always right"


def _item(position: int, row: Mapping[str, object], line: str) -> Item:
    cluster = row.get("cluster")
    group = None if cluster is None else str(cluster)
    return Item(position, str(row["id"]), str(row.get("slice") or "all"), group, line)


def _row_problems(row: Mapping[str, object], rules: ItemRules, task: Mapping[str, object]) -> Iterator[str]:
    yield from _must_pass_problems(row, rules)
    if rules.reference is None:
        return
    value = row.get(rules.reference)
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        yield f"has no reference: `{rules.reference}` is missing or empty"
        return
    if rules.slices and row.get("slice") not in rules.slices:
        yield f"has the slice {row.get('slice')!r}, which {CARD} does not describe (it has {', '.join(rules.slices)})"
    if rules.clustered and row.get("cluster") is None:
        yield f"has no cluster, though {CARD} says that items are clustered"
    named = task.get("doc_to_choice")
    choices = row.get(named) if isinstance(named, str) else named
    if not isinstance(choices, list):
        return
    inside = 0 <= value < len(choices) if isinstance(value, int) and not isinstance(value, bool) else value in choices
    if not inside:
        yield f"has the reference {value!r}, which is none of its {len(choices)} choices (numbers count from 0)"
