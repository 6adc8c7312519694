"""Options and settings as the tools themselves tell them: argparse's and click's `--help`, and a pydantic schema. Pure.

Help says names, choices and defaults, but not types: what is unknown is guessed from the default or the metavar, and
left as text otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pipelines.engine.trtllm.flags import Command, Node, Option

Kind = Literal["str", "int", "float", "flag"]
_CLICK_TYPES: Mapping[str, Kind] = {"INTEGER": "int", "FLOAT": "float", "TEXT": "str", "PATH": "str"}
_ENTRY = re.compile(r"^ {2,6}(?P<names>-\S.*?)(?: {2,}(?P<help>\S.*))?$")
_HELP_NAMES = frozenset({"-h", "--help"})


def of_argparse(text: str) -> Command:
    """Read argparse's help, with or without defaults; both ways of writing several names of one option are known."""
    options = {}
    for names, told in _entries(text):
        option = _argparse_option(names, told)
        if option is not None:
            options[option[0]] = option[1]
    return Command(options=options)


def of_click(text: str) -> Command:
    """Read click's help."""
    usage = re.search(r"^Usage: .*?\[OPTIONS\](?P<places>.*)$", text, re.MULTILINE)
    places = tuple(word for word in usage["places"].split() if word.isupper()) if usage else ()
    options = {}
    for names, told in _entries(text):
        option = _click_option(names, told)
        if option is not None:
            options[option[0]] = option[1]
    return Command(positionals=places, options=options)


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Each option's names with metavars, and its help on one line."""
    names, told = "", ""
    for line in text.splitlines():
        found = _ENTRY.match(line)
        if found:
            if names:
                yield names, told
            names, told = found["names"], found["help"] or ""
        elif names and line.startswith(" " * 8) and line.strip():
            told = f"{told} {line.strip()}"
        elif names and line.strip():  # the heading of the next group
            yield names, told
            names, told = "", ""
    if names:
        yield names, told


def _argparse_option(names: str, told: str) -> tuple[str, Option] | None:
    flags = tuple(dict.fromkeys(re.findall(r"(?<![\w-])--?[A-Za-z]\w*(?:-\w+)*", re.sub(r"\{.*?\}", "", names))))
    if _HELP_NAMES & set(flags):
        return None
    first = next((f for f in flags if f.startswith("--")), flags[0])
    others = tuple(f for f in flags if f != first)
    choices = re.search(r"\{(.*?)\}", names)
    default = re.search(r"\(default: (.*?)\)", told)
    given = None if default is None or default[1] in ("None", "==SUPPRESS==") else default[1]
    metavar = re.sub(r"--?[A-Za-z][\w-]*|,", " ", names).strip()
    many = metavar.endswith("...]")
    if choices is None and not metavar:
        return first, Option(type="flag", aliases=others)
    if choices is not None:
        return first, Option(type="str", choices=tuple(choices[1].split(",")), default=given, aliases=others, many=many)
    kind = _guessed(given)
    return first, Option(type=kind, default=_typed(kind, given), aliases=others, many=many)


def _click_option(names: str, told: str) -> tuple[str, Option] | None:
    flags = tuple(re.findall(r"--?[A-Za-z][\w-]*", re.sub(r"\[.*?\]", "", names)))
    if not flags or _HELP_NAMES & set(flags):
        return None
    longest = [f for f in flags if f.startswith("--")] or list(flags)
    first, others = longest[0], tuple(f for f in flags if f != longest[0])
    choices = re.search(r"\[(.*?)\]", names)
    default = re.search(r"\[default: ?(.*?)\]", told)
    given = None if default is None else default[1].strip()
    if choices is not None:
        return first, Option(type="str", choices=tuple(choices[1].split("|")), default=given, aliases=others)
    metavar = re.sub(r"--?[A-Za-z][\w-]*|[,/]", " ", names).split()
    if not metavar:
        return first, Option(type="flag", aliases=others)
    kind = _CLICK_TYPES.get(metavar[0], "str")
    return first, Option(type=kind, default=_typed(kind, given), aliases=others)


def _guessed(default: str | None) -> Kind:
    if default is None:
        return "str"
    if re.fullmatch(r"-?\d+", default):
        return "int"
    return "float" if re.fullmatch(r"-?\d*\.\d+(?:[eE]-?\d+)?", default) else "str"


def _typed(kind: Kind, text: str | None) -> str | int | float | None:
    if text is None or kind not in ("int", "float"):
        return text
    return int(text) if kind == "int" else float(text)


def of_schema(schema: Mapping[str, Any]) -> Node:
    """Reduce a pydantic model's JSON schema to types, choices and bounds; references are followed."""
    return _node(schema, schema.get("$defs", {}), ())


def _node(part: Mapping[str, Any], defs: Mapping[str, Any], inside: tuple[str, ...]) -> Node:
    if "$ref" in part:
        name = str(part["$ref"]).rpartition("/")[2]
        # A model that holds itself ends here, as anything.
        return Node(type="any") if name in inside else _node(defs.get(name, {}), defs, (*inside, name))
    branches = part.get("anyOf") or part.get("oneOf") or part.get("allOf")
    if branches:
        rest = [b for b in branches if b.get("type") != "null"]
        nullable = len(rest) < len(branches)
        node = _node(rest[0], defs, inside) if len(rest) == 1 else Node(type="any")
        return node.model_copy(update={"null": nullable or node.null})
    if "enum" in part or "const" in part:
        values = part.get("enum", [part.get("const")])
        texts = tuple(str(v) for v in values if v is not None)
        return Node(type="string", enum=texts, null=None in values)
    kind = part.get("type", "any")
    if kind == "object":
        inner = {name: _node(p, defs, inside) for name, p in part.get("properties", {}).items()}
        return Node(type="object", properties=inner)
    if kind == "array":
        return Node(type="array", items=_node(part.get("items", {}), defs, inside))
    if kind not in ("string", "integer", "number", "boolean"):
        return Node(type="any", null=kind == "null")
    return Node(type=kind, minimum=part.get("minimum"), maximum=part.get("maximum"))
