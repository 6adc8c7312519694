"""The gate on the real small model: broken scales are rejected, a copy never fails, swapped items are invalid."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelines.config import parse
from pipelines.decide import stage
from pipelines.decide.model import Candidate, Decision
from pipelines.errors import StageFailed
from pipelines.evaluate import harness
from pipelines.evaluate.evalset import EvalsetConfig, load
from pipelines.flow.store import manifest
from tests.decisions import artifact, key_of
from tests.e2e.test_divergence import Lab, _multiply, rounded

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # the libraries' own
]
SETS = {"support_intent": 80, "passage_qa": 20, "heldout_text": None}
BROKEN = "model.layers.2."
LOOSE = 100.0  # lets what reloading refuses go on to the gate
AXES = {"speed": {"profile": "closed_1"}, "latency": {"profile": "closed_1"}, "require_speed": False}


@dataclass
class Scored:
    """A variant's engine and its scores by eval set."""

    variant: Path
    engine: Path
    scores: dict[str, Path]


@dataclass
class Bench:
    """Three engines of one rounded checkpoint: as it is, built again under another name, and with broken scales."""

    lab: Lab
    base: Path
    plain: Scored
    copy: Scored
    broken: Scored

    def decide(self, candidate: Scored, name: str) -> tuple[Decision, Candidate]:
        """The decision on one candidate against the plain engine, without a probe."""
        pair = {"plain": self.plain, name: candidate}
        given = [
            {"label": label, "variant": label, "engine": "ort", "variant_key": manifest(s.variant).key,
             "engine_key": manifest(s.engine).key, "scores": [manifest(p).key for p in s.scores.values()]}
            for label, s in pair.items()
        ]  # fmt: skip
        cards = {n: load(EvalsetConfig(path=f"evalsets/{n}")).gate_card() for n in SETS}
        config = parse(
            stage.DecisionConfig,
            {
                "campaign": name,
                "reference": "plain",
                "candidates": given,
                "gate": AXES,
                "eval_sets": cards,
                "base": {"licence": "Apache-2.0"},
            },
        )
        out = self.lab.root / "decided" / name
        out.mkdir(parents=True)
        sides = list(pair.values())
        stage.run(
            config, out, scores=[p for s in sides for p in s.scores.values()], engines=[s.engine for s in sides],
            variants=[s.variant for s in sides],
        )  # fmt: skip
        made = Decision.model_validate_json((out / "decision.json").read_bytes())
        return made, made.candidates[1]


def _named(lab: Lab, kind: str, name: str, source: Path, facts: dict[str, object]) -> Path:
    """The directory under the name that its key has in a store, closed."""
    key = key_of(kind, name)
    where = lab.root / "store" / kind / key[:16]
    shutil.copytree(source, where, ignore=shutil.ignore_patterns("manifest.json"))
    return artifact(where, kind, key, facts)


def _scored(lab: Lab, name: str, checkpoint: Path, reference: Path) -> Scored:
    engine = lab.engine(name, checkpoint, reference, LOOSE)
    scores = {}
    for eval_set, limit in SETS.items():
        given = EvalsetConfig(path=f"evalsets/{eval_set}", limit=limit)
        loaded = load(given)
        out = lab.root / "scores" / f"{name}_{eval_set}"
        out.mkdir(parents=True)
        facts = harness.run(harness.ScoresConfig(evalset=loaded.config, digest=loaded.digest), out, engine=engine)
        scores[eval_set] = _named(lab, "scores", f"{name}/{eval_set}", out, dict(facts))
    facts = dict(manifest(engine).facts)
    return Scored(
        _named(lab, "variant", name, checkpoint, {"quantizer": "rtn"}),
        _named(lab, "engine", name, engine, facts),
        scores,
    )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, base_checkpoint: Path) -> Iterator[Bench]:
    lab = Lab(tmp_path_factory.mktemp("gate"))
    base = lab.reference("base", base_checkpoint)
    plain = rounded(base_checkpoint, lab.root / "plain", ["lm_head"])
    broken = lab.root / "broken"
    shutil.copytree(plain, broken)
    for tensor in _scales(broken):
        _multiply(broken, tensor, 1.5)
    checked = {name: lab.reference(name, path, base, LOOSE) for name, path in (("plain", plain), ("broken", broken))}
    yield Bench(
        lab,
        base,
        _scored(lab, "plain", plain, checked["plain"]),
        _scored(lab, "copy", plain, checked["plain"]),
        _scored(lab, "broken", broken, checked["broken"]),
    )
    harness._server._open.close()


def _scales(checkpoint: Path) -> list[str]:
    """The scales of every matrix of one layer."""
    from safetensors import safe_open

    (path,) = checkpoint.glob("*.safetensors")
    with safe_open(path, "np") as tensors:
        names = tensors.keys()
    found = [name for name in names if name.startswith(BROKEN) and name.endswith("weight_scale")]
    assert 7 == len(found)
    return found


def test_a_broken_variant_is_noise_when_it_is_read_back(bench: Bench) -> None:
    """One layer's scales times 1.5 do not even get as far as an engine: the stage that reloads it fails."""
    with pytest.raises(StageFailed, match="loads as noise"):
        bench.lab.reference("refused", bench.broken.variant, bench.base)


def test_a_broken_variant_fails_or_is_vetoed(bench: Bench) -> None:
    """One layer's scales times 1.5, against the same rounding with whole scales: rejected, and it says on what."""
    made, broken = bench.decide(bench.broken, "broken")
    assert "reject" == broken.outcome
    assert {"fail", "veto"} & {v.verdict for v in broken.verdicts if v.gates}
    assert made.headline.startswith("REJECT")


def test_a_copy_under_another_name_never_fails(bench: Bench) -> None:
    """Built and scored apart: every comparison passes or is inconclusive, and nothing vetoes it."""
    _, copy = bench.decide(bench.copy, "copy")
    assert {v.verdict for v in copy.verdicts} <= {"pass", "inconclusive"}
    assert ((), ()) == (copy.vetoes, copy.undecided)
    assert 0 == sum(v.flips or 0 for v in copy.verdicts if v.binary)


def test_two_swapped_items_are_invalid(bench: Bench) -> None:
    """The ids of two items exchanged in one run: no verdict on that set, and the first differing item is named."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = bench.copy.scores["support_intent"]
    swapped = bench.lab.root / "store" / "scores" / ("5" * 16)
    shutil.copytree(source, swapped, ignore=shutil.ignore_patterns("manifest.json"))
    rows = pq.read_table(swapped / "items.parquet").to_pylist()
    rows[3]["item_id"], rows[9]["item_id"] = rows[9]["item_id"], rows[3]["item_id"]
    first = min(rows[3]["item_id"], rows[9]["item_id"])
    pq.write_table(pa.Table.from_pylist(rows), swapped / "items.parquet")
    artifact(swapped, "scores", "5" * 64, {"eval_set": "support_intent"})
    candidate = Scored(bench.copy.variant, bench.copy.engine, {**bench.copy.scores, "support_intent": swapped})
    _, judged = bench.decide(candidate, "swapped")
    invalid = [v for v in judged.verdicts if v.verdict == "invalid"]
    assert ["support_intent"] == [v.eval_set for v in invalid]
    assert invalid[0].note.startswith(f"item {first}: prompt_hash differs")
    assert "hold" == judged.outcome
