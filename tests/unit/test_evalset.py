"""Eval sets: loading tells every problem at once, draws keep clusters whole, the shipped sets are sound."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import find, parse
from pipelines.errors import ConfigError, InputError
from pipelines.evaluate.evalset import EvalsetConfig, Item, digest, load, subset

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ["support_intent", "ticket_json", "passage_qa", "gsm8k_choice", "heldout_text"]
CARD = {
    "name": "tiny", "version": "1.0", "description": "two choices", "licence": "CC0-1.0", "provenance": "this test",
    "metric": "acc", "higher_is_better": True, "binary": True, "family": "strict", "reference": "gold",
    "slices": {"even": "", "odd": ""}, "quick": 2,
}  # fmt: skip
TASK = "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: choices\ndoc_to_target: gold\ntest_split: test\n"

Write = Callable[..., EvalsetConfig]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write an eval set of six items; the arguments replace lines of items.jsonl, keys of the card, or the task."""

    def _write(
        lines: dict[int, str] | None = None, card: dict[str, object] | None = None, task: str = TASK
    ) -> EvalsetConfig:
        rows = [json.dumps(row(k)) for k in range(6)]
        for number, line in (lines or {}).items():
            rows[number - 1] = line
        (tmp_path / "items.jsonl").write_text("\n".join(rows) + "\n")
        (tmp_path / "card.yaml").write_text(yaml.safe_dump(CARD | (card or {})))
        (tmp_path / "task.yaml").write_text(task)
        return EvalsetConfig.model_validate({"path": str(tmp_path)})

    return _write


def row(k: int, **changes: object) -> dict[str, object]:
    return {
        "id": f"t{k}",
        "slice": ("even", "odd")[k % 2],
        "q": f"{k}?",
        "choices": ["a", "b"],
        "gold": k % 2,
    } | changes


def items(*clusters: str | None) -> list[Item]:
    return [Item(k, f"i{k}", "all", cluster, "") for k, cluster in enumerate(clusters)]


def problems_of(config: EvalsetConfig) -> list[str]:
    with pytest.raises(InputError) as caught:
        load(config)
    return str(caught.value).splitlines()


def test_a_sound_set_loads(write: Write) -> None:
    """Items keep their order; the card and the task come along."""
    loaded = load(write())
    assert [f"t{k}" for k in range(6)] == [item.id for item in loaded.items]
    assert ("tiny", 6, (6, None)) == (loaded.name, loaded.size, loaded.sizes["all"])
    expected = {"family": "strict", "metric": "acc", "higher_is_better": True, "binary": True, "filter": None}
    assert expected == loaded.gate_card()


def test_every_problem_is_told_at_once_with_its_line(write: Write) -> None:
    """A broken line, a double id, a missing reference and an unknown card key come in one error."""
    wrong = {4: json.dumps(row(3, gold=None)), 6: json.dumps(row(5, slice="prime"))}
    said = "\n".join(problems_of(write({2: '{"id": "t1", ', 3: json.dumps(row(0))} | wrong, {"metrik": "acc"})))
    assert "items.jsonl:2: is not JSON" in said
    assert "items.jsonl:3: has the id 't0' of line 1" in said
    assert "card.yaml: metrik='acc': unknown key (did you mean 'metric'?" in said
    assert "items.jsonl:4: item 't3' has no reference: `gold` is missing or empty" in said
    assert "items.jsonl:6: item 't5' has the slice 'prime'" in said


def test_a_card_gates_a_metric_that_the_task_has(write: Write) -> None:
    """A metric that no score will carry is told before any scoring; a task that lists none is left to its type."""
    listed = TASK + "metric_list:\n  - {metric: acc_norm}\n  - {metric: f1}\n"
    (problem,) = problems_of(write(card={"metric": "acc_nrm"}, task=listed))
    assert "card.yaml: metric='acc_nrm': not in the task's metric_list (did you mean 'acc_norm'?" in problem
    load(write(card={"metric": "f1"}, task=listed))
    load(write(card={"metric": "bits_per_byte"}))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "is empty"),
        ("[1]", "holds no object"),
        (json.dumps({"slice": "odd", "gold": 0}), "has no id"),
        (json.dumps(row(1, gold="")), "has no reference"),
        (json.dumps(row(1, gold=2)), "none of its 2 choices"),
        (json.dumps(row(1, gold=True)), "none of its 2 choices"),
        (json.dumps(row(1, gold="c")), "none of its 2 choices"),
    ],
)
def test_a_bad_item_is_named(write: Write, line: str, expected: str) -> None:
    """One bad line gives one problem, which names its line."""
    (problem,) = problems_of(write({2: line}))
    assert "items.jsonl:2: " in problem
    assert expected in problem


def test_items_that_must_stay_right_need_a_set_of_right_and_wrong(write: Write) -> None:
    """must_pass is true or false, and only where items score 0 or 1."""
    assert load(write({2: json.dumps(row(1, must_pass=True))})).size == 6
    (found,) = problems_of(write({2: json.dumps(row(1, must_pass="yes"))}))
    assert "items.jsonl:2: item 't1' has must_pass='yes'; it is true or false" in found
    (found,) = problems_of(write({2: json.dumps(row(1, must_pass=True))}, {"binary": False}))
    assert "item 't1' is marked must_pass, but only items that are right or wrong can be" in found


def test_a_set_of_one_class_is_refused(write: Write) -> None:
    """Where every item has the same choices and the same right one, a constant answer is always right."""
    (found,) = problems_of(write({k + 1: json.dumps(row(k, gold=1)) for k in range(6)}))
    assert "all 6 items have the one reference 1, so a constant answer is always right" in found


def test_a_reference_may_be_a_choice_by_its_text(write: Write) -> None:
    """As in lm-eval, the right choice is a number or the choice itself."""
    assert load(write({2: json.dumps(row(1, gold="b"))})).size == 6


def test_missing_files_are_all_told(write: Write, tmp_path: Path) -> None:
    """An empty directory lacks three files; a path that is none says what belongs there."""
    config = write()
    for file in tmp_path.iterdir():
        file.unlink()
    said = problems_of(config)
    assert ["card.yaml", "task.yaml", "items.jsonl"] == [re.search(r"(\w+\.\w+):", line).group(1) for line in said]  # type: ignore[union-attr]
    (problem,) = problems_of(EvalsetConfig.model_validate({"path": str(tmp_path / "nowhere")}))
    assert "no such directory" in problem


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("output_type: multiple_choise\n", "did you mean 'multiple_choice'?"),
        ("a: [1\nb: 2\n", "task.yaml:2: is not YAML"),
        ("- 1\n", "holds list"),
        (TASK + "process_results: !function scorring.f\n", "there is no module 'scorring'"),
        (TASK + "include: other.yaml\n", "include: is not read here"),
    ],
)
def test_a_bad_task_file_is_explained(write: Write, task: str, expected: str) -> None:
    """Each mistake of a task file is one line without a traceback."""
    (problem,) = problems_of(write(task=task))
    assert expected in problem


def test_many_problems_are_cut(write: Write, tmp_path: Path) -> None:
    """A file that is wrong on every line doesn't fill the screen."""
    config = write()
    (tmp_path / "items.jsonl").write_text("x\n" * 100)
    said = problems_of(config)
    assert 21 == len(said)
    assert "and 80 more problems" == said[-1]


def test_a_config_names_one_source() -> None:
    """Neither or both of path and task is a configuration error."""
    for given_data in ({}, {"path": "x", "task": "y"}):
        with pytest.raises(ConfigError, match="either path"):
            parse(EvalsetConfig, given_data)


def test_a_stock_task_needs_no_files() -> None:
    """An lm-eval task by name carries what a card would say, and is handed on by name."""
    loaded = load(
        EvalsetConfig.model_validate({"task": "arc_easy", "limit": 40, "metric": "acc_norm", "family": "loose"})
    )
    assert ("arc_easy", 40, {"all": (40, None)}, None) == (loaded.name, loaded.size, loaded.sizes, loaded.items_path)
    assert "acc_norm" == loaded.gate_card()["metric"]
    assert "arc_easy" == loaded.lm_eval_task(Path("unused"))


# --- draws and digests -------------------------------------------------------------------------------------------


def test_a_draw_is_random_but_repeatable(write: Write) -> None:
    """The same seed gives the same items, another seed others, and the first ones are not preferred."""
    given_items = items(*[None] * 200)
    drawn = subset(given_items, 50, 3)
    assert drawn == subset(given_items, 50, 3)
    assert drawn != subset(given_items, 50, 4)
    assert drawn != [item.id for item in given_items[:50]]
    assert [int(i[1:]) for i in drawn] == sorted(int(i[1:]) for i in drawn)


@given(
    st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(0, 9),
)
def test_draws_keep_clusters_whole_and_grow(clusters: list[str | None], limit: int, seed: int) -> None:
    """A cluster is in or out; a larger limit only adds; the limit is passed only by a first cluster larger than it."""
    given_items = items(*clusters)
    drawn = set(subset(given_items, limit, seed))
    for name in {c for c in clusters if c is not None}:
        members = {item.id for item in given_items if item.cluster == name}
        assert members <= drawn or not members & drawn
    assert drawn <= set(subset(given_items, limit + 5, seed))
    assert drawn
    assert len(drawn) <= limit or len({clusters[int(i[1:])] for i in drawn}) == 1


def test_no_limit_takes_all() -> None:
    """Without a limit nothing is left out."""
    assert ["i0", "i1", "i2"] == subset(items("a", None, "a"), None, 0)


def test_a_digest_follows_content_not_place(write: Write, tmp_path: Path) -> None:
    """Items, task, draw and judged card fields change it; prose of the card and the directory do not."""
    first = digest(write())
    assert first == digest(write(card={"description": "other words", "min_score_note": "x"}))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("card.yaml", "task.yaml", "items.jsonl"):
        (copy / name).write_bytes((tmp_path / name).read_bytes())
    assert first == digest(EvalsetConfig.model_validate({"path": str(copy)}))
    others = [
        digest(write({1: json.dumps(row(0, q="else"))})),
        digest(write(card={"higher_is_better": False})),
        digest(write(task=TASK + "num_fewshot: 1\n")),
        digest(write().model_copy(update={"limit": 3})),
        digest(write().model_copy(update={"limit": 3, "seed": 1})),
        digest(write().model_copy(update={"chat_template": True})),
    ]
    (tmp_path / "scoring.py").write_text("x = 1\n")
    others.append(digest(write()))
    assert 8 == len({first, *others})


def test_a_task_is_made_with_functions_and_drawn_items(write: Write, tmp_path: Path) -> None:
    """lm-eval gets real functions, one of them from beside the task, and only the items of the draw."""
    (tmp_path / "scoring.py").write_text("def score(doc, results):\n    return {'acc': 1.0}\n")
    task = (
        TASK
        + "process_results: !function scoring.score\nprocess_docs: !function pipelines.evaluate.metrics.json_fields\n"
    )
    loaded = load(write(task=task).model_copy(update={"limit": 2}))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    made = loaded.lm_eval_task(scratch)
    assert isinstance(made, dict)
    assert {"acc": 1.0} == made["process_results"](None, None)  # type: ignore[operator]
    assert "json_fields" == made["process_docs"].__name__  # type: ignore[attr-defined]
    assert "tiny" == made["task"]
    data = Path(made["dataset_kwargs"]["data_files"]["test"])  # type: ignore[index]
    assert [item.id for item in loaded.drawn] == [json.loads(line)["id"] for line in data.read_text().splitlines()]


def test_a_missing_function_is_named(write: Write, tmp_path: Path) -> None:
    """A module without the function is an input error, not an AttributeError."""
    loaded = load(write(task=TASK + "process_results: !function pipelines.evaluate.metrics.nope\n"))
    with pytest.raises(InputError, match="no function 'nope'"):
        loaded.lm_eval_task(tmp_path)


# --- shipped sets ------------------------------------------------------------------------------------------------


def shipped(name: str, **changes: object) -> EvalsetConfig:
    return EvalsetConfig.model_validate({"path": str(ROOT / "evalsets" / name)} | changes)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_set_is_sound(name: str) -> None:
    """It loads, its card names a metric of its task, its size is what is promised, and no two items are alike."""
    loaded = load(shipped(name))
    assert name == loaded.name == loaded.task["task"]
    metrics = loaded.task["metric_list"]
    assert isinstance(metrics, list)
    assert loaded.card.metric in [m["metric"] for m in metrics]
    assert len(loaded.items) >= (40 if name == "heldout_text" else 300)
    assert loaded.card.base_score is not None
    bodies = {json.dumps({k: v for k, v in json.loads(i.line).items() if k != "id"}) for i in loaded.items}
    assert len(bodies) == len(loaded.items)
    assert set(loaded.card.slices) == {item.slice for item in loaded.items}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_set_has_a_conf_file(name: str) -> None:
    """conf/evalset/<name>.yaml is a valid config of that set, packaged under its name."""
    text = (ROOT / "conf" / "evalset" / f"{name}.yaml").read_text()
    assert text.startswith(f"# @package evalset.{name}\n")
    config = EvalsetConfig.model_validate(yaml.safe_load(text))
    assert ROOT / "evalsets" / name == find(str(config.path))


def test_passages_stay_whole() -> None:
    """Twenty drawn questions are those on four passages."""
    loaded = load(shipped("passage_qa", limit=20))
    assert (20, (20, 4)) == (loaded.size, loaded.sizes["all"])


def test_items_are_made_again_byte_for_byte(tmp_path: Path) -> None:
    """The generator gives the committed files, so that what is in them can be traced to its sources."""
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import make_items as m;"
        "source = m.HERE / 'sources'; m.HERE = pathlib.Path(sys.argv[2]); (m.HERE / 'sources').symlink_to(source);"
        "[m.write(name, make()) for name, make in m.OWN.items()]"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT / "evalsets"), str(tmp_path)], check=True, timeout=60)
    for name in ("support_intent", "ticket_json", "passage_qa", "heldout_text", "calibration"):
        made = (tmp_path / name / "items.jsonl").read_bytes()
        assert (ROOT / "evalsets" / name / "items.jsonl").read_bytes() == made, name


def test_gsm8k_items_are_sound() -> None:
    """Four different choices, which differ in one number, and the right one holds the result of its own sum."""
    for line in (ROOT / "evalsets" / "gsm8k_choice" / "items.jsonl").read_text().splitlines():
        item = json.loads(line)
        assert 4 == len(set(item["choices"]))
        shapes = {re.sub(r"(?<=\d),(?=\d{3})", "", choice) for choice in item["choices"]}
        assert 1 == len({re.sub(r"\d+", "#", shape) for shape in shapes})


def test_calibration_shares_no_text_with_eval_sets() -> None:
    """No thirteen words in a row of a calibration text stand in an eval item, and there are enough texts."""
    texts = [
        " ".join(turn["content"] for turn in json.loads(line)["messages"])
        for line in (ROOT / "evalsets" / "calibration" / "items.jsonl").read_text().splitlines()
    ]
    assert len(set(texts)) == len(texts) >= 256
    shown = {gram for text in texts for gram in grams(text)}
    for name in SHIPPED:
        for line in (ROOT / "evalsets" / name / "items.jsonl").read_text().splitlines():
            held_out = " ".join(str(value) for value in json.loads(line).values())
            assert not shown & set(grams(held_out)), line


def grams(text: str, n: int = 13) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return [tuple(words[k : k + n]) for k in range(len(words) - n + 1)]
