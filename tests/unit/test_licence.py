"""What a base may be used under: read where it is told, unknown where it is not told for certain, and then a veto."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipelines.config import Strict, parse
from pipelines.decide import licences
from pipelines.decide.gate import Constraints
from pipelines.decide.model import Decision
from pipelines.errors import ConfigError, EvidenceError, LicenceUnknown
from pipelines.flow.executor import execute
from pipelines.flow.plan import plan
from pipelines.flow.stage import Stage, Step
from pipelines.flow.store import Fact, Store, manifest
from pipelines.intake import licence, spdx
from pipelines.intake.checkpoint import CheckpointConfig
from pipelines.intake.licence import Licence
from pipelines.release.licence import check
from tests import decisions

MIT = """MIT License

Copyright (c) 2024 Somebody

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
ADDED = "Our only change is that whoever has more than 100 million monthly users must show our name on every page. "
BSD = """Copyright 2024 Somebody. Redistribution and use are permitted provided that the following conditions are met:
1. Redistributions of source code must retain the above copyright notice.
2. Redistributions in binary form must reproduce the above copyright notice.
"""
ENDORSE = "3. Names of contributors may not be used to endorse or promote products derived from this software."


def apache() -> str:
    """The licence of this project, which is the text as published."""
    return (Path(__file__).resolve().parents[2] / "LICENSE").read_text()


def base(where: Path, card: str = "", **files: str) -> Path:
    """A checkpoint directory as far as its licence goes; the card is its front matter."""
    where.mkdir(parents=True, exist_ok=True)
    if card:
        (where / "README.md").write_text(f"---\n{card}\n---\n# A model\n\nlicense: not here\n")
    for name, text in files.items():
        (where / name.replace("__", ".")).write_text(text)
    return where


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("apache-2.0", "Apache-2.0"), ("MIT", "MIT"), ("bsd-3-clause", "BSD-3-Clause"),
        ("cc-by-nc-4.0", "CC-BY-NC-4.0"),
        ("llama3.1", "LicenseRef-llama3.1"), ("gemma", "LicenseRef-gemma"), ("odc-by", "ODC-By-1.0"),
        ("openrail++", "LicenseRef-openrail-plus-plus"), ("LicenseRef-Ours", "LicenseRef-Ours"),
        ("apache-2.0 or mit", "Apache-2.0 OR MIT"),
        ("other", ""), ("unknown", ""), ("", ""), ("bsd", ""), ("cc", ""), ("Apache 2", ""), ("free to use", ""),
    ],
)  # fmt: skip
def test_names_become_spdx_or_nothing(given: str, expected: str) -> None:
    """Hugging Face's lower-case ids are SPDX's in its own spelling; a family, or what says nothing, is no licence."""
    assert expected == spdx.canonical(given)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3", "LicenseRef-llama3"), ("qwen-research", "LicenseRef-qwen-research"), ("mit", "MIT"),
        ("tongyi-qianwen-license-agreement", "LicenseRef-tongyi-qianwen"),
        ("Our Model License", "LicenseRef-our-model"),
        ("nvidia-open-model-license", "LicenseRef-nvidia-open-model"), ("other", ""), ("license", "LicenseRef-license"),
    ],
)  # fmt: skip
def test_a_licence_of_its_authors_own_is_called_by_its_name(name: str, expected: str) -> None:
    """What stands in `license_name` beside `license: other`."""
    assert expected == spdx.own(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MIT, "MIT"),
        (MIT + ADDED * 3, ""),
        ("MIT\n", "MIT"),
        ("SPDX-License-Identifier: BSD-3-Clause\n\nwhatever", "BSD-3-Clause"),
        (BSD, "BSD-2-Clause"),
        (BSD + ENDORSE, "BSD-3-Clause"),
        (BSD + ENDORSE + " All advertising materials must say so.", ""),
        ("LLAMA 2 COMMUNITY LICENSE AGREEMENT\nLlama 2 Version Release Date: July 18, 2023", "LicenseRef-llama2"),
        ("META LLAMA 3 COMMUNITY LICENSE AGREEMENT\nMeta Llama 3 Version Release Date", "LicenseRef-llama3"),
        ("LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\nLlama 3.1 Version Release Date: July 23", "LicenseRef-llama3.1"),
        ("**LLAMA 3.2** COMMUNITY LICENSE AGREEMENT\nLlama 3.2 Version Release Date: ", "LicenseRef-llama3.2"),
        ("LLAMA 3.3 COMMUNITY LICENSE AGREEMENT Llama 3.3 Version Release Date:    ", "LicenseRef-llama3.3"),
        ("# Gemma Terms of Use\n\nLast modified: February 21, 2024. By using, reproducing, ...", "LicenseRef-gemma"),
        (
            "Qwen RESEARCH LICENSE AGREEMENT\n\nQwen RESEARCH LICENSE AGREEMENT Release Date:",
            "LicenseRef-qwen-research",
        ),
        (
            "Tongyi Qianwen LICENSE AGREEMENT\n\nTongyi Qianwen Release Date: August 3, 2023",
            "LicenseRef-tongyi-qianwen",
        ),
        ("Attribution-NonCommercial 4.0 International\n\n=====\n\nCreative Commons Corporation", "CC-BY-NC-4.0"),
        ("Attribution 4.0 International\n\n=====\n\nCreative Commons Corporation is not a law firm", "CC-BY-4.0"),
        ("You may do with this model as you like, as long as you do no harm to anybody with it at all.", ""),
        ("LLAMA 3.1 COMMUNITY LICENSE AGREEMENT and GEMMA TERMS OF USE apply to the models listed below.", ""),
    ],
)
def test_texts_are_recognised_by_their_titles(text: str, expected: str) -> None:
    """A text with terms added, of two licences, or of one that is not known here, is none of those known."""
    assert expected == licence.recognise(text)


def test_the_apache_licence_is_recognised_whole_and_not_with_a_page_of_terms_added() -> None:
    """Taken from this project's own file."""
    assert "Apache-2.0" == licence.recognise(apache())
    assert "" == licence.recognise(apache() + ADDED * 50)


@pytest.mark.parametrize(
    ("card", "files", "expected"),
    [
        ("license: apache-2.0", {}, ("Apache-2.0", "card", "")),
        ("", {"LICENSE": MIT}, ("MIT", "file", "")),
        ("license: mit", {"LICENSE": MIT}, ("MIT", "card", "")),
        ("license: other\nlicense_name: llama3", {}, ("LicenseRef-llama3", "card", "")),
        ("license: other", {"COPYING__txt": MIT}, ("MIT", "file", "")),
        ("license: other\nlicense_name: ours", {"LICENSE": "Our terms, which nobody else has. " * 9},
         ("LicenseRef-ours", "card", "")),
        ("license: mit", {"LICENSE": apache()},
         ("", "", "its sources differ: README.md says mit; LICENSE is Apache-2.0")),
        ("license: mit", {"LICENSE": MIT + ADDED * 3},
         ("", "", "its sources differ: README.md says mit; LICENSE is no text that is known here")),
        ("license: gpl-3.0-only", {"LICENSE": "GNU GENERAL PUBLIC LICENSE\nVersion 3, 29 June 2007\n\nEveryone may."},
         ("GPL-3.0-only", "card", "")),
        ("license: other", {}, ("", "", "README.md says other")),
        ("license: [mit, apache-2.0]", {}, ("", "", "README.md names several licences (mit, apache-2.0)")),
        ("", {}, ("", "", "neither a card nor a licence file names one")),
        ("license: [", {}, ("", "", "neither a card nor a licence file names one")),
        ("license: mit", {"LICENSE-CODE": apache()}, ("MIT", "card", "")),
    ],
)  # fmt: skip
def test_a_directorys_card_and_files_are_read(
    tmp_path: Path, card: str, files: Mapping[str, str], expected: tuple[str, str, str]
) -> None:
    """The card and the files agree, or it is unknown and they are named."""
    found = licence.of_directory(base(tmp_path, card, **files))
    assert expected == (found.id, found.source, found.note)


def test_a_statement_stands_above_what_was_found_and_the_difference_is_kept(tmp_path: Path) -> None:
    """Whoever states it settles what differs; what is overruled is told."""
    found = licence.of_directory(base(tmp_path, "license: mit", LICENSE=apache()), "Apache-2.0")
    assert ("Apache-2.0", "stated", "README.md says mit") == (found.id, found.source, found.note)
    assert "" == licence.of_directory(base(tmp_path), "Apache-2.0").told["licence link"]


def test_licence_and_policy_files_are_known_by_their_digests(tmp_path: Path) -> None:
    """Use policies and notices too, and the card where it says something."""
    where = base(
        tmp_path, "license: mit\nlicense_link: https://a/b", LICENSE=MIT, USE_POLICY__md="Do no harm.", NOTICE="n"
    )
    found = licence.of_directory(where)
    assert {"LICENSE", "USE_POLICY.md", "NOTICE", "README.md"} == found.files.keys()
    assert hashlib.sha256(b"Do no harm.").hexdigest() == found.files["USE_POLICY.md"]
    assert f"USE_POLICY.md sha256:{found.files['USE_POLICY.md']}" in found.told["licence files"]
    assert "https://a/b" == found.told["licence link"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("apache-2.0", "", ""), ("Apache-2.0", "gguf")),
        (("other", "llama3.1", "https://l"), ("LicenseRef-llama3.1", "gguf")),
        (("", "", ""), ("", "")),
        (("other", "", ""), ("", "")),
    ],
)
def test_a_gguf_says_so_in_its_metadata(given: tuple[str, str, str], expected: tuple[str, str]) -> None:
    """general.license, or general.license.name where that is `other`."""
    found = licence.of_gguf(*given)
    assert expected == (found.id, found.source)


def test_what_is_stated_must_be_a_licence() -> None:
    """A key, its value, and the nearest that there is."""
    assert "Apache-2.0" == CheckpointConfig(source="x", licence="apache-2.0").licence
    with pytest.raises(ConfigError, match=r"licence='apache2'.*did you mean 'Apache-2\.0'"):
        parse(CheckpointConfig, {"source": "x", "licence": "apache2"})
    with pytest.raises(ConfigError, match=r"licences=.*'MTI' is no SPDX id .did you mean 'MIT'"):
        parse(Constraints, {"licences": ["MTI"]})


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True), ("mit", True), ("GPL-3.0-only", False), ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False), ("(MIT OR GPL-3.0-only) AND Apache-2.0", True),
        ("MIT AND (GPL-3.0-only OR BSD-2-Clause)", False), ("MIT OR GPL-3.0-only AND BSD-2-Clause", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", True), ("GPL-2.0-only", False), ("", False),
    ],
)  # fmt: skip
def test_an_allow_list_covers_expressions(expression: str, expected: bool) -> None:
    """Of OR one side is enough, of AND both are needed, and an exception makes another licence."""
    allowed = ["MIT", "Apache-2.0", "GPL-2.0-only WITH Classpath-exception-2.0"]
    assert expected is spdx.permitted(expression, allowed)


def test_unknown_is_refused_and_how_to_state_it_is_said() -> None:
    """Without a list too; and a list restricts what is known."""
    assert "checkpoint.licence=Apache-2.0" in licences.refusal(Licence().told, None)
    assert "answers for it" in licences.refusal({"licence": "not stated"}, ("MIT",))
    assert "" == licences.refusal(Licence("MIT", "card", "").told, None)
    assert "allowed (gate.constraints.licences): none" in licences.refusal({"licence": "MIT"}, ())


def made(base: Mapping[str, str], allowed: object = None) -> Decision:
    """A decision to promote, about this base, by a gate that allows these licences."""
    found = decisions.decision()
    gate = {**found.gate, "constraints": {"licences": allowed}}
    return found.model_copy(update={"base": dict(base), "gate": gate})


def engine(where: Path, **facts: str) -> Path:
    return decisions.artifact(where / "engine", "engine", "e" * 64, facts)


CARD = {"licence": "MIT", "licence source": "card"}
STATED = {"licence": "MIT", "licence source": "stated"}


@pytest.mark.parametrize(
    ("base", "allowed", "facts"),
    [
        (CARD, None, {"licence": "MIT", "licence_source": "card"}),
        (CARD, ["MIT"], {"licence": "mit", "licence_source": "gguf"}),
        (CARD, None, {}),
        (CARD, None, {"licence": "unknown", "licence_source": ""}),
        (STATED, None, {"licence": "Apache-2.0", "licence_source": "card"}),
        (CARD, None, {"licence": "Apache-2.0", "licence_source": "stated"}),
        ({"licence": "MIT"}, None, {}),
    ],
)
def test_what_is_known_allowed_and_told_alike_may_be_released(
    tmp_path: Path, base: Mapping[str, str], allowed: object, facts: Mapping[str, str]
) -> None:
    """An engine from before licences were handed on contradicts nobody; a person's statement stands above findings."""
    decision = made(base, allowed)
    assert "MIT" == check(decision, decision.candidates[1], engine(tmp_path, **facts))


@pytest.mark.parametrize(
    ("base", "allowed", "facts", "told", "kind"),
    [
        ({}, None, {}, "licence is unknown: nothing states it", LicenceUnknown),
        ({"licence": "not stated"}, None, {}, "licence is unknown", LicenceUnknown),
        ({"licence": "unknown", "licence note": "its sources differ: a; b"}, ["MIT"], {"licence": "MIT"},
         "its sources differ: a; b", LicenceUnknown),
        (CARD, ["Apache-2.0"], {}, r"MIT \(its card\), allowed", EvidenceError),
        (CARD, None, {"licence": "Apache-2.0", "licence_source": "card"}, "was made it was under Apache-2.0",
         EvidenceError),
    ],
)  # fmt: skip
def test_what_is_unknown_not_allowed_or_told_differently_is_refused(
    tmp_path: Path, base: Mapping[str, str], allowed: object, facts: Mapping[str, str], told: str, kind: type[Exception]
) -> None:
    """Only what is unknown has an error of its own: no override stands for it."""
    decision = made(base, allowed)
    with pytest.raises(EvidenceError, match=told) as caught:
        check(decision, decision.candidates[1], engine(tmp_path, **facts))
    assert kind is type(caught.value)


class Says(Strict):
    """What a stage of these tests says of licences, if anything."""

    licence: str = ""


def toy(config: Says, out: Path, *, source: Path | None = None, other: Path | None = None) -> dict[str, Fact]:
    """A stage that finds a licence, or nothing."""
    del out, source, other
    return {"licence": config.licence, "licence_source": "card"} if config.licence else {"found": 1}


TOY = Stage("toy", "toy", 1, "tests.unit.test_licence:toy", "tests.unit.test_licence:Says")


def test_what_is_made_from_a_base_says_what_the_base_says(tmp_path: Path) -> None:
    """Down the whole chain by the first input that says it, unless a stage says otherwise."""
    store = Store(tmp_path / "store")
    store.prepare()
    base, silent = Step(TOY, "base", Says(licence="MIT"), batch="b"), Step(TOY, "silent", Says(), batch="b")
    variant = Step(TOY, "variant", Says(), {"source": silent, "other": base}, batch="b")
    engine = Step(TOY, "engine", Says(), {"source": variant, "other": silent}, batch="b")
    decision = Step(TOY, "decision", Says(licence="Apache-2.0"), {"source": engine}, batch="b")
    root = str(Path(__file__).resolve().parents[2])
    execute(plan([decision, silent], store), store, lambda _: None, {"PYTHONPATH": root})
    facts = {s.label: manifest(store.path("toy", s.key)).facts for s in (base, silent, variant, engine, decision)}
    assert {"base": "MIT", "silent": None, "variant": "MIT", "engine": "MIT", "decision": "Apache-2.0"} == {
        label: found.get("licence") for label, found in facts.items()
    }
    assert "card" == facts["engine"]["licence_source"]
