"""Does the champion still hold: its engine judged again on grown data, held against its own decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelines.config import parse
from pipelines.decide import reassessing, reassessment, stage
from pipelines.decide.model import Decision
from pipelines.decide.reassessing import FILE, JUDGED, PAGE, ReassessConfig
from pipelines.decide.reassessment import Moved, Reassessment, Rebuilt
from tests.unit.test_decision import artifact, campaign, candidate, intent, row, table, verdict
from tests.unit.test_gate import column, gate

NEW = 100
GREW = Moved(what="data", where="eval set intent", before="500 items, aa", now="600 items, bb")


def grown(lost_among_new: int, flips: int = 1) -> list[dict[str, object]]:
    """The 500 items of then, so many lost and as many gained, and 100 new ones that the reference answers rightly."""
    added = [row("intent", "acc", n, float(n - 500 >= lost_among_new), None, True) for n in range(500, 500 + NEW)]
    return [*intent(flips, flips), *added]


def then(root: Path) -> tuple[stage.DecisionConfig, Path, Path]:
    """The golden campaign's decision as an artifact: gptq was promoted. With its config and its probe."""
    config, inputs, probe = campaign(root)
    where = artifact(root, "decision", "9", {})
    stage.run(
        config, where, scores=inputs["scores"], latency=probe, engines=inputs["engines"], variants=inputs["variants"]
    )
    return config, where, probe


def again(root: Path, mine: Sequence[Mapping[str, object]], **changes: Any) -> tuple[Reassessment, Path]:
    """Judge gptq again, with these items of intent on its side; the reference answers all new ones rightly."""
    config, where, probe = then(root)
    every = [*intent(0, 0), *(row("intent", "acc", n, 1.0, None, True) for n in range(500, 500 + NEW))]
    now = []
    for name, rows in (("a8", every), ("b8", mine)):
        path = artifact(root, "scores", name, {"eval_set": "intent"})
        table(path / "items.parquet", rows)
        now.append(path)
    kept = {n: root / "scores" / (n * 8) for n in ("a0", "a1", "b0", "b1")}
    sides = [c.model_copy(update={"scores": (n * 8, kept[o].name)})
             for c, n, o in zip(config.candidates[:2], ("a8", "b8"), ("a1", "b1"), strict=True)]  # fmt: skip
    judged = config.model_copy(update={"candidates": tuple(sides)})
    given = {"judged": judged, "label": "gptq", "champion": "7", "changes": (GREW,), "named": "campaign=golden"}
    out = root / "out"
    out.mkdir()
    reassessing.run(
        parse(ReassessConfig, given | changes), out, then=where, scores=[*now, kept["a1"], kept["b1"]],
        before=[kept["a0"], kept["b0"]], engines=[root / "engine" / (x * 16) for x in "ab"],
        variants=[root / "variant" / (x * 16) for x in "ab"], latency=probe,
    )  # fmt: skip
    return Reassessment.model_validate_json((out / FILE).read_bytes()), out


def comparison(made: Reassessment, eval_set: str) -> reassessment.Comparison:
    return next(c for c in made.comparisons if (c.eval_set, c.slice) == (eval_set, "all"))


def test_new_items_that_it_answers_as_well_leave_it_standing(tmp_path: Path) -> None:
    """1 lost and 1 gained of 600: it still holds, and there is nothing to do."""
    made, _ = again(tmp_path, grown(0))
    assert ("still holds", "promote", "promote") == (made.outcome, made.then, made.now)
    assert ("nothing: the champion stays",) == made.to_do
    one = comparison(made, "intent")
    assert one.then and one.now and (500, 600) == (one.then.items, one.now.items)


def test_known_and_new_items_are_told_apart(tmp_path: Path) -> None:
    """Nothing lost on the 500 items of then, 20 of the 100 new ones: 0 and 0.2, and 20/600 in all."""
    made, _ = again(tmp_path, grown(20), previous="6")
    one = comparison(made, "intent")
    assert one.known and one.new and one.now
    assert (500, 0.0) == (one.known.items, one.known.loss)
    assert (NEW, pytest.approx(0.2)) == (one.new.items, one.new.loss)
    assert pytest.approx(20 / 600) == one.now.loss
    assert one.new.interval is not None and one.new.interval.lower < 0.2 < one.new.interval.upper
    assert one.moved is not None and (500, 0.0) == (one.moved.items, one.moved.loss)
    assert None is comparison(made, "passages").known


def test_a_champion_that_lost_more_than_its_margin_no_longer_holds(tmp_path: Path) -> None:
    """60 of 100 new items lost is a tenth of all, five times the margin: a verdict turned, and rollback is the way."""
    made, out = again(tmp_path, grown(60), previous="6")
    assert ("no longer holds", "reject") == (made.outcome, made.now)
    assert "intent: pass then, fail now" in made.reasons
    assert made.headline.startswith("NO LONGER HOLDS: champion gptq, intent: loses more than 0.02")
    assert made.headline.endswith("(changed since: data)")
    assert ("go back to version 6: quantgate rollback campaign=golden --reason 'reassessed: no longer holds'",) == (
        made.to_do
    )
    assert (
        "there is no version to go back to: quantgate run campaign=golden with other variants",
    ) == reassessment.to_do("no longer holds", None, None, "campaign=golden", None)
    assert not (out / "decision.json").exists() and not (out / "decision.md").exists()
    assert "reject" == Decision.model_validate_json((out / JUDGED).read_bytes()).outcome


def test_what_cannot_be_told_is_in_doubt(tmp_path: Path) -> None:
    """20 lost and 20 gained among the known items, 4 of the new ones lost: 1/150 in all, and 44 flips leave the margin
    within the interval, so more items of that set are asked for."""
    made, _ = again(tmp_path, grown(4, flips=20))
    one = comparison(made, "intent").now
    assert "in doubt" == made.outcome and one is not None and "inconclusive" == one.verdict
    assert one.loss == pytest.approx(4 / 600) and one.more_items
    assert made.to_do[0] == f"add {one.more_items} items of intent, then: quantgate reassess campaign=golden"
    assert "measure once more: quantgate reassess campaign=golden --again" == made.to_do[-1]


def test_items_asked_in_another_way_are_not_known(tmp_path: Path) -> None:
    """A changed prompt makes an item new, though its id is the same; both sides have it changed."""
    old, new = column([1.0, 1.0, 0.0]), column([1.0, 1.0, 0.0])
    changed = [new[0], new[1], type(new[2])(**{**_fields(new[2]), "prompt_hash": "other"})]
    assert frozenset({"0000", "0001"}) == reassessment.known_ids(({}, {"qa": old}), ({}, {"qa": changed}), "qa")


def _fields(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in type(item).__slots__}


def test_slices_are_compared_too() -> None:
    """Two slices by turns: of 40 known and 40 new items, the loss is all in the new ones of slice a."""
    known, fresh = column([1.0] * 40), column([1.0] * 80)
    mine = column([1.0] * 40 + [0.0, 1.0] * 20)
    card = stage.EvalCard(family="standard", metric="acc", binary=True)
    found = reassessment.compare(
        (), (), ({"qa": known}, {"qa": known}), ({"qa": fresh}, {"qa": mine}), {"qa": card}, gate()
    )
    assert () == found  # without verdicts of then or now there is no line to put them on
    now = tuple(stage.judge(fresh, mine, "qa", card, gate()))
    found = reassessment.compare(
        (), now, ({"qa": known}, {"qa": known}), ({"qa": fresh}, {"qa": mine}), {"qa": card}, gate()
    )
    losses = {c.slice: (c.known.loss, c.new.loss) for c in found if c.known and c.new}
    assert {"all": (0.0, 0.5), "a": (0.0, 1.0), "b": (0.0, 0.0)} == losses


def test_an_eval_set_that_is_gone_stays_in_the_table() -> None:
    """What was compared then and is not now has its verdict of then, and none of now."""
    found = reassessment.compare((verdict("pass"),), (), ({}, {}), ({}, {}), {}, gate())
    assert [("qa", "pass", None)] == [(c.eval_set, c.then.verdict if c.then else "", c.now) for c in found]


def test_an_override_then_is_said() -> None:
    """A champion that the decision did not promote is told as such, also where nothing changed."""
    held = candidate("v", outcome="hold", reasons=("qa: inconclusive",))
    assert (
        "qa: inconclusive",
        "the decision then was hold; a person promoted it all the same",
        "nothing changed since",
    ) == reassessment.reasons(held, held, ())


def test_a_rebuilt_engine_that_passes_is_the_first_thing_to_do() -> None:
    """Whether the old one holds or not, promotion of the rebuilt one comes first."""
    rebuilt = Rebuilt(label="v", of="toolchain", outcome="promote")
    first = "promote the rebuilt engine: quantgate promote campaign=x"
    assert (first,) == reassessment.to_do("still holds", None, rebuilt, "campaign=x", "3")
    assert first == reassessment.to_do("no longer holds", None, rebuilt, "campaign=x", "3")[0]
    refused = rebuilt.model_copy(update={"outcome": "reject"})
    assert ("nothing: the champion stays",) == reassessment.to_do("still holds", None, refused, "", None)


def test_the_rebuilt_engine_is_shown_with_its_loss_and_its_speed_against_the_champion(tmp_path: Path) -> None:
    """awq stands in for the rebuilt one: as fast as the champion in the same probe, outcome and engine loss from its
    own decision."""
    given = {"label": "awq", "of": "toolchain", "engine_key": "c" * 16}
    config, where, probe = then(tmp_path)
    sides = tuple(config.candidates[:2])
    judged = config.model_copy(update={"candidates": sides})
    out = tmp_path / "out"
    out.mkdir()
    reassessing.run(
        ReassessConfig.model_validate({"judged": judged, "label": "gptq", "champion": "7", "rebuilt": given}), out,
        then=where, scores=[tmp_path / "scores" / (n * 8) for n in ("a0", "a1", "b0", "b1")],
        engines=[tmp_path / "engine" / (x * 16) for x in "abc"], latency=probe, rebuilt=where,
        variants=[tmp_path / "variant" / (x * 16) for x in "ab"],
    )  # fmt: skip
    made = Reassessment.model_validate_json((out / FILE).read_bytes()).rebuilt
    assert made is not None and ("hold", (1e-4, 1e-4)) == (made.outcome, made.engine_kl)
    assert made.speed is not None and made.speed.ratio == pytest.approx(1.0)
    page = (out / PAGE).read_text()
    assert "## The same recipe with what is installed now" in page and "0.0001 -> 0.0001" in page


def test_the_document_begins_with_what_to_do(tmp_path: Path) -> None:
    """Headline, then the command, the champion and its decision; every change is in a table."""
    _, out = again(tmp_path, grown(60), previous="6")
    lines = (out / PAGE).read_text().splitlines()
    assert lines[0].startswith("# NO LONGER HOLDS")
    assert lines[2].startswith("- **Do**: go back to version 6: quantgate rollback")
    assert "| data | eval set intent | 500 items, aa | 600 items, bb |" in lines


def test_scores_of_then_that_are_gone_leave_the_rest(tmp_path: Path) -> None:
    """Without them nothing is known or moved, and the verdicts of then stand all the same."""
    config, where, probe = then(tmp_path)
    judged = config.model_copy(update={"candidates": tuple(config.candidates[:2])})
    for name in ("a0", "b0"):
        path = artifact(tmp_path, "scores", f"{name[0]}8", {"eval_set": "intent"})
        table(path / "items.parquet", intent(0, 0) if name == "a0" else intent(1, 1))
    sides = [c.model_copy(update={"scores": (f"{c.engine_key[0]}8" * 8, f"{c.engine_key[0]}1" * 8)})
             for c in judged.candidates if c.engine_key]  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    reassessing.run(
        ReassessConfig(judged=judged.model_copy(update={"candidates": tuple(sides)}), label="gptq", champion="7"), out,
        then=where, scores=[tmp_path / "scores" / (n * 8) for n in ("a8", "a1", "b8", "b1")],
        engines=[tmp_path / "engine" / (x * 16) for x in "ab"], latency=probe,
        variants=[tmp_path / "variant" / (x * 16) for x in "ab"],
    )  # fmt: skip
    one = comparison(Reassessment.model_validate_json((out / FILE).read_bytes()), "intent")
    assert (None, None, None) == (one.known, one.new, one.moved)
    assert one.then is not None and one.now is not None and "pass" == one.now.verdict


def test_passages_of_then_are_compared_by_themselves(tmp_path: Path) -> None:
    """A set that did not change has the same figures then and now."""
    one = comparison(again(tmp_path, grown(0))[0], "passages")
    assert one.then is not None and one.now is not None
    assert (one.then.loss, one.then.interval) == (one.now.loss, one.now.interval)
