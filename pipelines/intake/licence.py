"""The licence of a base checkpoint: stated by a person, or read from its card, its licence files or its GGUF header.

What cannot be told for certain is unknown, and so is what two sources tell differently, until a person states it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipelines.flow.store import sha256_of
from pipelines.intake import spdx

UNKNOWN = "unknown"
CARD = "README.md"
FILES = re.compile(r"(licen[cs]e|notice|use_policy|copying).*", re.IGNORECASE)
"""Names of licence, notice and use-policy files, which go with every variant and bundle."""
_TEXTS = re.compile(r"(licen[cs]e|copying)(?!.*(code|third)).*", re.IGNORECASE)  # not of code that lies beside a model
_TITLE = 400
_MARKS = re.compile(r"[*#=_]+")
_TAG = re.compile(r"spdx-license-identifier:\s*([\w.+() -]+)", re.IGNORECASE)

Source = Literal["stated", "card", "file", "gguf", ""]


@dataclass(frozen=True, slots=True)
class Licence:
    """What a base may be used under. `id` is an SPDX expression, "" where it is unknown, and `note` then says why.

    `files` are the SHA-256 of the files that say so and of all licence, notice and use-policy files, by name.
    """

    id: str = ""
    source: Source = ""
    note: str = "nothing states it"
    link: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, str]:
        """As it is written into decisions and shown; empty where there is nothing to say."""
        return {
            "licence": self.id or UNKNOWN,
            "licence source": self.source,
            "licence note": self.note,
            "licence link": self.link,
            "licence files": ", ".join(f"{name} sha256:{digest}" for name, digest in sorted(self.files.items())),
        }


@dataclass(frozen=True, slots=True)
class _Told:
    """What one source says: an id, or "" where it says something that names no licence for certain."""

    source: Source
    id: str
    said: str


@dataclass(frozen=True, slots=True)
class _Text:
    """How a licence's text is known: its title near the beginning, phrases anywhere, none of others, and its length
    with single spaces; one that is longer has terms added."""

    id: str
    title: str
    phrases: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    longest: int = 200_000


_BSD = ("redistributions of source code must retain", "redistributions in binary form must reproduce")
_KNOWN = (
    _Text("Apache-2.0", "apache license version 2.0, january 2004", ("grant of patent license",), longest=13_000),
    _Text("MIT", "permission is hereby granted, free of charge, to any person obtaining a copy of this software and",
          ('the software is provided "as is"',), longest=1_200),
    _Text("BSD-3-Clause", _BSD[0], (*_BSD, "to endorse or promote products derived from"),
          ("all advertising materials", "no express or implied licenses"), 2_200),
    _Text("BSD-2-Clause", _BSD[0], _BSD, ("to endorse or promote", "no express or implied licenses"), 1_900),
    _Text("LicenseRef-llama2", "llama 2 community license agreement"),
    _Text("LicenseRef-llama3", "llama 3 community license agreement"),
    *(_Text(f"LicenseRef-llama{v}", f"llama {v} community license agreement") for v in ("3.1", "3.2", "3.3", "4")),
    _Text("LicenseRef-gemma", "gemma terms of use"),
    _Text("LicenseRef-bigscience-bloom-rail-1.0", "bigscience rail license v1.0"),
    _Text("LicenseRef-bigscience-openrail-m", "bigscience open rail-m"),
    _Text("LicenseRef-bigscience-openrail-m", "bigscience openrail-m"),
    _Text("LicenseRef-bigcode-openrail-m", "bigcode open rail-m"),
    _Text("LicenseRef-bigcode-openrail-m", "bigcode openrail-m"),
    _Text("LicenseRef-creativeml-openrail-m", "creativeml open rail-m"),
    _Text("LicenseRef-creativeml-openrail-m", "creativeml openrail-m"),
    _Text("LicenseRef-qwen-research", "qwen research license agreement"),
    _Text("LicenseRef-qwen", "qwen license agreement"),
    _Text("LicenseRef-tongyi-qianwen", "tongyi qianwen license agreement"),
    _Text("LicenseRef-deepseek", "deepseek license agreement"),
    _Text("LicenseRef-mrl", "mistral ai research license"),
    _Text("LicenseRef-mnpl", "mistral ai non-production license"),
    _Text("LicenseRef-nvidia-open-model", "nvidia open model license"),
    _Text("CC-BY-4.0", "attribution 4.0 international"),
    _Text("CC-BY-SA-4.0", "attribution-sharealike 4.0 international"),
    _Text("CC-BY-NC-4.0", "attribution-noncommercial 4.0 international"),
    _Text("CC-BY-NC-SA-4.0", "attribution-noncommercial-sharealike 4.0 international"),
    _Text("CC-BY-ND-4.0", "attribution-noderivatives 4.0 international"),
    _Text("CC-BY-NC-ND-4.0", "attribution-noncommercial-noderivatives 4.0 international"),
    _Text("CC0-1.0", "cc0 1.0 universal"),
    _Text("AGPL-3.0", "gnu affero general public license version 3"),
    _Text("LGPL-3.0", "gnu lesser general public license version 3"),
    _Text("GPL-3.0", "gnu general public license version 3"),
    _Text("MPL-2.0", "mozilla public license version 2.0"),
)  # fmt: skip


def of_directory(path: Path, stated: str = "") -> Licence:
    """Read a checkpoint directory's card and licence files; a statement stands above both."""
    card = _front_matter(path / CARD)
    texts = sorted(p for p in path.iterdir() if p.is_file() and FILES.fullmatch(p.name))
    told = [*_from_card(card), *(_from_file(p) for p in texts if _TEXTS.fullmatch(p.name))]
    says = [path / CARD] if any(t.source == "card" for t in told) else []
    files = {p.name: sha256_of(p) for p in (*texts, *says)}
    return _settled(told, stated, str(card.get("license_link") or ""), files)


def of_gguf(licence: str, name: str, link: str, stated: str = "") -> Licence:
    """What a GGUF file's metadata says (general.license and its name); files that lie beside it are not asked."""
    given = licence or name
    told = [_Told("gguf", spdx.canonical(licence) or spdx.own(name), f"general.license says {given}")] if given else []
    return _settled(told, stated, link, {})


def recognise(text: str) -> str:
    """The licence whose text this is, "" where it is none that is known here, or has terms of its own added."""
    if tag := _TAG.search(text[:_TITLE]):
        return spdx.canonical(tag[1])
    plain = " ".join(_MARKS.sub("", text.lower().replace("“", '"').replace("”", '"')).split())
    if len(plain) < 60:  # a file that only names its licence
        return spdx.canonical(text)
    found = {one.id for one in _KNOWN if _fits(one, plain)}
    return found.pop() if len(found) == 1 else ""


def _fits(one: _Text, plain: str) -> bool:
    begins = plain[: _TITLE + len(one.title)]
    if one.title not in begins or len(plain) > one.longest:
        return False
    return all(p in plain for p in one.phrases) and not any(p in plain for p in one.without)


def _settled(told: Sequence[_Told], stated: str, link: str, files: Mapping[str, str]) -> Licence:
    if stated:
        note = "; ".join(t.said for t in told if not _agree(t.id, stated))
        return Licence(stated, "stated", note, link, files)
    certain = [t for t in told if t.id]
    if not certain:
        said = "; ".join(t.said for t in told)
        return Licence(note=said or "neither a card nor a licence file names one", link=link, files=files)
    first = certain[0]
    others = [t for t in certain[1:] if not _agree(t.id, first.id)]
    if not others and not first.id.startswith(spdx.REF):  # a listed licence has a text that is known here, or none
        others = [t for t in told if t.source == "file" and not t.id]
    if others:
        differ = "; ".join(t.said for t in (first, *others))
        return Licence(note=f"its sources differ: {differ}", link=link, files=files)
    return Licence(first.id, first.source, "", link, files)


def _agree(one: str, other: str) -> bool:
    """Whether two ids can be of one licence: GNU's texts do not tell whether later versions will do."""
    return spdx.same(*(re.sub(r"-(only|or-later)$", "", name) for name in (one, other)))


def _from_card(card: Mapping[str, Any]) -> Iterator[_Told]:
    given, name = card.get("license"), str(card.get("license_name") or "")
    names = [str(one) for one in (given if isinstance(given, list) else [given] if given else [])]
    if not names and not name:
        return
    if len(names) > 1:
        yield _Told("card", "", f"{CARD} names several licences ({', '.join(names)})")
        return
    said = " ".join(filter(None, (*names, f"({name})" if name else "")))
    yield _Told("card", spdx.canonical("".join(names)) or spdx.own(name), f"{CARD} says {said}")


def _from_file(path: Path) -> _Told:
    found = recognise(path.read_text(encoding="utf-8", errors="replace"))
    return _Told("file", found, f"{path.name} is {found}" if found else f"{path.name} is no text that is known here")


def _front_matter(path: Path) -> dict[str, Any]:
    """The YAML that a model card begins with; nothing where there is none, or it is no YAML."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    parts = re.split(r"^---\s*$", text.lstrip("\ufeff"), maxsplit=2, flags=re.MULTILINE)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        found = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
