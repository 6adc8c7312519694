"""What differs between configurations, versions and data, as dotted keys; what is the same is counted. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipelines.decide.compared import Change


def flat(data: object, prefix: str = "") -> dict[str, str]:
    """Plain data as dotted keys and texts; of a list of things that have names, each stands under its own."""
    return dict(_flat(data, prefix))


def _flat(data: object, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(data, list | tuple) and data and all(isinstance(one, Mapping) and "name" in one for one in data):
        for one in data:
            inside = {name: value for name, value in one.items() if name != "name"}
            yield from _flat(inside, f"{prefix}.{one['name']}" if prefix else str(one["name"]))
    else:
        yield prefix, _text(data)


def _text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(one) for one in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_text(one)}' for name, one in value.items())}}}"
    return str(value)


def changes(section: str, sides: Sequence[Mapping[str, str]]) -> tuple[list[Change], int]:
    """List what is not the same on all sides, by key, and count what is."""
    found, same = [], 0
    for key in sorted({key for side in sides for key in side}):
        values = tuple(side.get(key) for side in sides)
        if len(set(values)) > 1:
            found.append(Change(section=section, key=key, values=values))
        else:
            same += 1
    return found, same


def unlike(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The keys on which two differ, with both values, in one line; empty where they do not."""
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    return ", ".join(f"{key} {ours.get(key, 'none')} and {theirs.get(key, 'none')}" for key in keys)
