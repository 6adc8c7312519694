"""Which calibration rows share text with which eval items: listed one by one, then refused or left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.intake.leaks import Leak, leaks, near_duplicates, texts_of

NAMED = 20


@dataclass(frozen=True, slots=True)
class Shared:
    """A calibration row (from 0) and the eval item it shares text with."""

    row: int
    set: str
    item: str
    text: str
    near: bool

    def __str__(self) -> str:
        kind = "nearly the same text" if self.near else "the words"
        return f"{self.set}/{self.item}: row {self.row + 1} of the calibration set, {kind} “{self.text}”"


def shared(rows: Sequence[Sequence[str]], held_out: Sequence[str], ngram: int, similarity: float) -> list[Shared]:
    """Find every pair; `rows` are the texts of each calibration row. Runs of words come before near-duplicates."""
    shown = [(number, text) for number, texts in enumerate(rows) for text in texts]
    asked = [
        (_name(path), str(item.get("id", f"line {k + 1}")), text)
        for path in held_out
        for k, item in enumerate(_items(Path(path)))
        for text in texts_of({key: value for key, value in item.items() if key not in ("id", "cluster")})
    ]
    ours, theirs = [text for _, text in shown], [text for *_, text in asked]
    found: list[Leak] = [*leaks(ours, theirs, ngram), *near_duplicates(ours, theirs, similarity)]
    pairs: dict[tuple[int, str, str], Shared] = {}
    for leak in found:
        row, (name, item, _) = shown[leak.calibration_text][0], asked[leak.eval_text]
        pairs.setdefault((row, name, item), Shared(row, name, item, leak.text, leak.near))
    return list(pairs.values())


def listed(found: Iterable[Shared]) -> str:
    """Name every item, a line each, up to a number nobody would read on from."""
    lines = [str(one) for one in found]
    more = [f"and {len(lines) - NAMED} more"] if len(lines) > NAMED else []
    return "\n".join(f"  {line}" for line in [*lines[:NAMED], *more])


def _items(path: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row for row in rows if isinstance(row, dict)]


def _name(path: str) -> str:
    """An eval set's items lie in a directory of its name; any other file has its own."""
    file = Path(path)
    return file.parent.name if file.stem == "items" else file.stem
