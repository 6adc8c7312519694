"""The flags and settings that a release of TensorRT-LLM takes, from a snapshot file; what we generate is held to it.

A snapshot is data: `flags_<release>.json` beside this module, or any file that `snapshot.py` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipelines.config import Strict, find, parse
from pipelines.errors import InputError, Problem, closest

HERE = Path(__file__).resolve().parent
SHIPPED: Mapping[str, Path] = {
    path.stem.removeprefix("flags_").replace("_", "."): path for path in sorted(HERE.glob("flags_*.json"))
}
"""Snapshots that come with the package, by release."""


class Option(Strict):
    """One option of a command. A flag takes no value; `many` takes one or more."""

    type: Literal["str", "int", "float", "flag"]
    default: str | int | float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    many: bool = False
    deprecated: bool = False


class Command(Strict):
    """A command: how many arguments it takes by place, and its options by their first name."""

    positionals: tuple[str, ...] = ()
    options: dict[str, Option]

    def named(self, flag: str) -> Option | None:
        """The option of this name or alias."""
        found = self.options.get(flag)
        return found or next((o for o in self.options.values() if flag in o.aliases), None)


class Node(Strict):
    """A part of a settings schema: a subset of JSON Schema, with `null` for values that may be left unset."""

    type: Literal["object", "array", "string", "integer", "number", "boolean", "any"]
    properties: dict[str, Node] = Field(default={})
    items: Node | None = None
    enum: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    null: bool = False


class Snapshot(Strict):
    """What one release takes."""

    release: str = Field(min_length=1)
    about: str
    sources: dict[str, str]
    commands: dict[str, Command]
    schemas: dict[str, Node]


def load(release: str, path: str | None = None) -> Snapshot:
    """The snapshot of a release: the shipped one, or that of a file made for it.

    Raises:
        InputError: there is none, it cannot be read, or it is of another release.
        ConfigError: it has other keys than a snapshot.
    """
    file = SHIPPED.get(release) if path is None else find(path)
    if file is None:
        raise InputError(
            f"no flag snapshot of TensorRT-LLM {release} is shipped ({closest(release, SHIPPED)}); make one in its "
            "image with `python -m pipelines.engine.trtllm.snapshot` and name it as `flags`"
        )
    try:
        found = parse(Snapshot, json.loads(file.read_text()), str(file))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not a readable flag snapshot ({error})") from None
    if found.release != release:
        raise InputError(f"{file}: is of TensorRT-LLM {found.release}, not {release}")
    return found


def argv_problems(snapshot: Snapshot, name: str, argv: Sequence[str]) -> list[Problem]:
    """Hold a command line, without the command itself, to a release: unknown, repeated or incomplete options, values
    of another type or not among the choices, arguments too many or too few."""
    command = snapshot.commands[name]
    words = list(argv)
    places: list[str] = []
    seen: set[str] = set()
    found: list[Problem] = []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            places.append(word)
            continue
        flag, given, value = word.partition("=")
        option = command.named(flag)
        if option is None:
            message = f"no such option in {snapshot.release}"
            found.append(Problem(f"{name} {flag}", value or None, message, _near(flag, command.options)))
            _values(Option(type="str"), words)
            continue
        if flag in seen:
            found.append(Problem(f"{name} {flag}", value or None, "given twice"))
        seen.add(flag)
        values = [value] if given else _values(option, words)
        found += _value_problems(f"{name} {flag}", option, values)
    if len(places) != len(command.positionals):
        wanted = ", ".join(command.positionals) or "none"
        found.append(Problem(name, places, f"takes {len(command.positionals)} arguments by place ({wanted})"))
    return found


def _near(word: str, allowed: Iterable[str]) -> str:
    """The closest name, without a list of all."""
    said = closest(word, allowed)
    return said.partition(" allowed: ")[0] if said.startswith("did you mean") else ""


def _values(option: Option, words: list[str]) -> list[str]:
    """Take an option's values off the words that follow it."""
    if option.type == "flag":
        return []
    taken: list[str] = []
    while words and not _is_flag(words[0]) and (option.many or not taken):
        taken.append(words.pop(0))
    return taken


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _is_number(word)


def _value_problems(key: str, option: Option, values: Sequence[str]) -> Iterator[Problem]:
    if option.type == "flag":
        if values:
            yield Problem(key, values[0], "takes no value")
        return
    if not values:
        yield Problem(key, None, "needs a value")
    for value in values:
        if option.choices and value not in option.choices:
            yield Problem(key, value, "not among its choices", closest(value, option.choices))
        elif (option.type == "int" and not value.lstrip("-").isdigit()) or (
            option.type == "float" and not _is_number(value)
        ):
            yield Problem(key, value, f"is no {option.type}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def settings_problems(snapshot: Snapshot, schema: str, settings: Mapping[str, Any]) -> list[Problem]:
    """Hold settings, as they would be written to YAML, to a release's own model of them."""
    return list(_node_problems(schema, snapshot.schemas[schema], dict(settings), snapshot.release))


def _node_problems(key: str, node: Node, value: Any, release: str) -> Iterator[Problem]:
    if value is None:
        if not node.null:
            yield Problem(key, None, "cannot be null")
    elif not _fits(node.type, value):
        yield Problem(key, value, f"is no {node.type}")
    elif node.enum and value not in node.enum:
        yield Problem(key, value, "not among its choices", closest(str(value), node.enum))
    elif node.minimum is not None and value < node.minimum:
        yield Problem(key, value, f"is below {node.minimum:g}")
    elif node.maximum is not None and value > node.maximum:
        yield Problem(key, value, f"is above {node.maximum:g}")
    elif isinstance(value, Mapping) and node.properties:
        for name, inner in value.items():
            if name not in node.properties:
                message = f"no such setting in {release}"
                yield Problem(f"{key}.{name}", inner, message, _near(name, node.properties))
            else:
                yield from _node_problems(f"{key}.{name}", node.properties[name], inner, release)
    elif isinstance(value, (list, tuple)) and node.items is not None:
        for place, inner in enumerate(value):
            yield from _node_problems(f"{key}[{place}]", node.items, inner, release)


def _fits(kind: str, value: Any) -> bool:
    match kind:
        case "object":
            return isinstance(value, Mapping)
        case "array":
            return isinstance(value, (list, tuple))
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
    return True
