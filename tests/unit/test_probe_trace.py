"""Traces: what a line may say, and that a file with mistakes names all of them at once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from pipelines.errors import ConfigError
from pipelines.probe import trace


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def problems(path: Path, sha256: str = "") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        trace.read(path, "probe.profiles.0.trace", sha256)
    return [str(p) for p in caught.value.problems]


def test_a_line_says_what_is_asked_in_one_of_four_ways(tmp_path: Path) -> None:
    """A prompt by any name, messages, or a length; other keys of a log are left alone."""
    file = write(
        tmp_path / "t.jsonl",
        {"timestamp": 10, "prompt": "a", "status": 200},
        {"timestamp": 10.5, "text": "b", "output_length": 7},
        {"timestamp": 10.5, "messages": [{"role": "user", "content": "c"}]},
        {"timestamp": 11, "input_length": 300},
        {"timestamp": 12},
    )
    found = trace.read(file, "k")
    assert [one.item.text if one.item else None for one in found] == ["a", "b", None, None, None]
    assert found[2].item is not None
    assert found[2].item.messages[0].content == "c"
    assert [one.input_length for one in found] == [None, None, None, 300, None]
    assert [one.output_length for one in found] == [None, 7, None, None, None]
    assert len(trace.read(file, "k", most=2)) == 2


def test_every_mistake_is_told_with_its_line(tmp_path: Path) -> None:
    """Not JSON, no object, no timestamp, time running back, two prompts: five problems, each with key and line."""
    file = write(
        tmp_path / "t.jsonl",
        {"timestamp": 5.0},
        "{broken",
        "[1]",
        {"prompt": "x"},
        {"timestamp": 4.0},
        {"timestamp": 6.0, "prompt": "x", "input_length": 4},
    )
    found = problems(file)
    assert len(found) == 5
    assert all(p.startswith("probe.profiles.0.trace, line ") for p in found)
    for said in (
        "line 2",
        "line 3",
        "line 4.timestamp",
        "line 5=4.0: is before line 1 (5.0)",
        "line 6=prompt, input_length",
    ):
        assert any(said.replace("=prompt, input_length", "") in p for p in found), said


def test_missing_empty_and_changed_files(tmp_path: Path) -> None:
    """Each is one problem that says which file."""
    assert "No such file" in problems(tmp_path / "absent.jsonl")[0]
    assert "holds no requests" in problems(write(tmp_path / "e.jsonl", ""))[0]
    file = write(tmp_path / "t.jsonl", {"timestamp": 1})
    assert "the file has changed" in problems(file, "0" * 64)[0]
    assert trace.read(file, "k", hashlib.sha256(file.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    "line", [{"timestamp": "soon"}, {"timestamp": 1, "output_length": 0}, {"timestamp": 1, "input_length": 1}]
)
def test_values_that_mean_nothing_are_refused(tmp_path: Path, line: dict[str, object]) -> None:
    """A time that is no number, an answer of no tokens, a prompt with no room behind its opening token."""
    assert len(problems(write(tmp_path / "t.jsonl", line))) == 1


def test_many_mistakes_are_cut_short(tmp_path: Path) -> None:
    """A file of another format does not fill the screen."""
    found = problems(write(tmp_path / "t.jsonl", *({"arrived": k} for k in range(50))))
    assert len(found) == 21
    assert "and 30 more problems" in found[-1]
