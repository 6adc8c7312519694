"""Pieces of Markdown: tables, bullets, numbers that may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.decide.interval import Interval


@dataclass(frozen=True, slots=True)
class Table:
    """A table under a heading, with what is to be said before it."""

    heading: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    told: str = ""

    @property
    def section(self) -> tuple[str, str]:
        """The heading, and the rest as Markdown."""
        lines = table(self.head, self.rows)
        return self.heading, f"{self.told}\n\n{lines}" if self.told else lines


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under a head; "None." where there are no rows."""
    if not rows:
        return "None."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def bullets(lines: Sequence[str]) -> str:
    """One line each."""
    return "\n".join("- " + " ".join(line.split()) for line in lines)


def pairs(given: Mapping[str, str]) -> str:
    """Names and values, one line each."""
    return bullets([f"**{key}**: {value}" for key, value in given.items()])


def number(value: float | None, form: str) -> str:
    """A number in a form, or a dash."""
    return "–" if value is None else format(value, form)


def between(interval: Interval | None, form: str) -> str:
    """Both ends of an interval in a form, or a dash."""
    return "–" if interval is None else f"{interval.lower:{form}} to {interval.upper:{form}}"
