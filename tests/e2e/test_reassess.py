"""A champion on the real model, judged again: nothing new, new items, and its recipe made anew."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipelines.decide.model import Decision
from pipelines.decide.reassessment import Reassessment
from pipelines.flow.store import manifest

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1500)]
QUANTGATE = [sys.executable, "-c", "from pipelines.cli import entry; entry()"]
ROOT = Path(__file__).resolve().parents[2]
CHAMPION = "rtn_w4a16_g64"
CODES = {"still holds": 0, "in doubt": 3, "no longer holds": 4}


@dataclass(frozen=True)
class Place:
    """A campaign's own store, database, ledger and eval set."""

    root: Path
    checkpoint: Path

    def call(self, verb: str, *more: str) -> tuple[int, dict[str, Any], str]:
        argv = [*QUANTGATE, verb, "campaign=held", *self.where, *more, "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ)
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr

    @property
    def where(self) -> list[str]:
        return [
            f"paths.store={self.root / 'store'}",
            f"paths.ledger={self.root / 'ledger.jsonl'}",
            f"tracking.uri=sqlite:///{self.root / 'mlflow.db'}",
        ]

    @property
    def items(self) -> Path:
        return self.root / "intents" / "items.jsonl"

    def artifacts(self) -> set[tuple[str, str]]:
        """Kinds and names of all that is in the store."""
        return {(p.parent.parent.name, p.parent.name) for p in (self.root / "store").glob("*/*/manifest.json")}


@pytest.fixture(scope="module")
def place(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A finished campaign on eight items of a set and four of another, whose variant a person has promoted."""
    found = Place(tmp_path_factory.mktemp("held"), base_checkpoint)
    shutil.copytree(ROOT / "evalsets" / "support_intent", found.items.parent)
    found.items.write_text("".join(lines()[:8]))
    code, _, stderr = found.call(
        "run", "experiment=smoke", "campaign=held", "items_per_set=null", "evalset=[support_intent,passage_qa]",
        f"evalset.support_intent.path={found.items.parent}", "evalset.passage_qa.limit=4",
        f"checkpoint.source={base_checkpoint}", "checkpoint.licence=Apache-2.0",
    )  # fmt: skip
    assert code in (0, 3, 4), stderr
    code, _, stderr = found.call("promote", "--candidate", CHAMPION, "--override", "to have a champion here")
    assert 0 == code, stderr
    return found


def lines() -> list[str]:
    """Items of the shipped set in an order that mixes its classes."""
    every = (ROOT / "evalsets" / "support_intent" / "items.jsonl").read_text().splitlines(keepends=True)
    return random.Random(0).sample(every, 12)


def test_where_nothing_changed_nothing_is_done(place: Place) -> None:
    """It says so, with how the champion stood then; not an artifact more. No override but the campaign's name."""
    before = place.artifacts()
    code, document, _ = place.call("reassess")
    assert [] == document["changes"]
    assert CODES[document["outcome"]] == code
    assert "nothing changed since" in document["headline"]
    assert before == place.artifacts()


def test_new_items_are_scored_by_the_engines_as_they_are(place: Place) -> None:
    """Four more items of one set: two scores and the reassessment are made, and nothing else; aliases stay."""
    before, ledger = place.artifacts(), (place.root / "ledger.jsonl").read_bytes()
    place.items.write_text("".join(lines()[:12]))
    code, document, stderr = place.call("reassess")
    assert CODES[document["outcome"]] == code, stderr
    made = sorted(kind for kind, _ in place.artifacts() - before)
    assert ["reassessment", "scores", "scores"] == made
    assert [("data", "eval set support_intent")] == [(c["what"], c["where"]) for c in document["changes"]]
    assert ledger == (place.root / "ledger.jsonl").read_bytes()
    told = Reassessment.model_validate_json(Path(document["reassessment"]).read_bytes())
    one = next(c for c in told.comparisons if (c.eval_set, c.slice) == ("support_intent", "all"))
    assert one.then and one.now and one.known and one.new and one.moved
    assert (8, 12, 8, 4) == (one.then.items, one.now.items, one.known.items, one.new.items)
    assert (one.then.loss, 0.0) == (one.known.loss, one.moved.loss)  # the same engine on the same prompts
    assert told.latency.startswith("measured 20") and told.rebuilt is None


def test_an_answer_that_was_given_is_given_again(place: Place) -> None:
    """Asked once more it makes nothing; asked to measure again it scores and probes both engines anew."""
    before = place.artifacts()
    first = place.call("reassess")[1]
    assert before == place.artifacts()
    second = place.call("reassess", "--again")[1]
    made = [kind for kind, _ in place.artifacts() - before]
    assert {"scores": 4, "latency": 1, "reassessment": 1} == {kind: made.count(kind) for kind in made}
    assert first["reassessment"] != second["reassessment"]
    assert "measured for this reassessment" == second["latency"]


def test_the_recipe_made_anew_is_held_against_the_champions_own_engine(place: Place) -> None:
    """With activations in 8 bits the engine is another: built, scored and probed beside the champion's, its loss to its
    own checkpoint above the champion's, and it has a decision of its own, which `promote` would take."""
    before = place.artifacts()
    code, document, stderr = place.call("reassess", "engine.ort_genai.accuracy_level=4")
    assert CODES[document["outcome"]] == code, stderr
    told = Reassessment.model_validate_json(Path(document["reassessment"]).read_bytes())
    rebuilt = told.rebuilt
    assert rebuilt is not None and "recipe" == rebuilt.of
    assert any(c.what == "recipe" and "accuracy_level" in c.where for c in told.changes)
    then, now = rebuilt.engine_kl
    assert then is not None and now is not None and then < 1e-6 < now
    assert rebuilt.speed is not None and rebuilt.speed.ratio is not None
    assert {"reference", "champion"} == {v.against for v in rebuilt.verdicts}
    decision = place.root / "store" / "decision" / rebuilt.decision_key
    made = Decision.model_validate_json((decision / "decision.json").read_bytes())
    mine = next(c for c in made.candidates if c.label == rebuilt.label)
    assert (rebuilt.outcome, rebuilt.engine_key) == (mine.outcome, mine.keys["engine"])
    probes = [k for k in place.artifacts() - before if k[0] == "latency"]
    assert 1 == len(probes)
    engines = manifest(place.root / "store" / "latency" / probes[0][1]).inputs["engines"]
    assert {told.engine_key, rebuilt.engine_key} < set(engines)


def test_what_is_gone_is_one_clear_error(place: Place) -> None:
    """Without the champion's engine there is nothing to judge, and the error names the store."""
    engine = next(p for p in (place.root / "store" / "engine").iterdir() if p.name == champion(place))
    engine.rename(engine.with_name("gone"))
    try:
        code, document, _ = place.call("reassess")
    finally:
        engine.with_name("gone").rename(engine)
    assert (7, "EvidenceError") == (code, document["error"])
    assert "its engine is not in" in document["message"]


def champion(place: Place) -> str:
    return str(json.loads((place.root / "ledger.jsonl").read_text().splitlines()[-1])["change"]["engine_key"])
