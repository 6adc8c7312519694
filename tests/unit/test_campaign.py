"""Campaigns: what is asked for becomes steps; what is wrong is told at once, before any step runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipelines.assembly import assemble
from pipelines.campaign import Campaign, open_campaign
from pipelines.compose import compose
from pipelines.errors import ConfigError
from pipelines.flow.plan import Plan, in_order
from pipelines.flow.stage import Step
from pipelines.release.champion import Champion
from pipelines.stages import Assembled
from pipelines.track.config import TrackingConfig
from pipelines.track.connection import absolute_uri
from pipelines.track.opening import look
from pipelines.verbs.memory import footprints

Open = Callable[..., Campaign]
FAR = ("engine.remote.url=https://host/v1", "engine.remote.model=m", "engine.remote.revision=1")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of one layer with the shapes that matter: width 576, as the demo's base has."""
    path = tmp_path / "base"
    path.mkdir()
    wide = {name: np.zeros((64, 576), np.float16) for name in ("q_proj", "k_proj", "v_proj")}
    tensors = {f"model.layers.0.self_attn.{name}.weight": value for name, value in wide.items()}
    tensors |= {
        "model.layers.0.mlp.down_proj.weight": np.zeros((64, 1536), np.float16),
        "model.embed_tokens.weight": np.zeros((16, 576), np.float16),
    }
    save_file(tensors, path / "model.safetensors")
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}
    (path / "config.json").write_text(json.dumps(about))
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def opened(checkpoint: Path, tmp_path: Path) -> Open:
    """Open a campaign on that checkpoint, with a store of its own."""

    def open_with(*overrides: str, **changes: Any) -> Campaign:
        given = [f"checkpoint.source={checkpoint}", f"paths.store={tmp_path / 'store'}", *overrides]
        return open_campaign(compose(given) | changes)

    return open_with


def problems(opened: Open, *overrides: str, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        opened(*overrides, **changes)
    return [str(p) for p in caught.value.problems]


def assembled(campaign: Campaign, failures: dict[str, str] | None = None) -> Assembled:
    return assemble(campaign, failures or {}, {})


def test_the_shipped_configuration_is_valid(opened: Open) -> None:
    """Defaults and both experiments open without a problem."""
    for overrides in ([], ["experiment=demo"], ["experiment=smoke"]):
        assert opened(*overrides).variants


def test_every_shipped_option_of_every_group_is_valid(opened: Open) -> None:
    """All variants, engines and gates in conf/ parse; all that is said is what does not go together here."""
    conf = Path(__file__).resolve().parents[2] / "conf"
    names = {group: sorted(p.stem for p in (conf / group).glob("*.yaml")) for group in ("variant", "engine", "gate")}
    every = f"variant=[{','.join(names['variant'])}]", f"engine=[{','.join(names['engine'])}]"
    told = problems(opened, *every, *FAR)
    misfits = " in engine.", "does not divide both sides", "an image is pinned by its digest"
    assert [] == [p for p in told if not any(misfit in p for misfit in misfits)]
    for gate in names["gate"]:
        assert opened(f"gate={gate}").config.gate


def test_what_all_variants_have_against_an_engine_is_told_once(opened: Open) -> None:
    """A machine without a GPU is one problem, not one for each variant; each variant's own come besides."""
    told = problems(opened, "variant=[baseline,rtn_w4a16_g64]", "engine=[trtllm_pytorch]")
    no_gpu = [p for p in told if p.startswith("engine.gpu ")]
    assert 1 == len(no_gpu) and "(variant.baseline, variant.rtn_w4a16_g64 in engine.trtllm_pytorch)" in no_gpu[0]
    assert any(p.startswith("variant.scheme (variant.rtn_w4a16_g64 in engine.trtllm_pytorch)") for p in told)


def test_problems_of_all_parts_are_told_at_once(opened: Open) -> None:
    """A wrong option, an unknown quantizer, a group size that does not fit and a missing text come together."""
    found = problems(
        opened,
        "+variant.baseline.typo=1",
        "variant.awq_w4a16_g64.quantizer=llmcompressor_aqw",
        "variant.gptq_w4a16_g64.scheme=W4A16_G128",
        "held_out.text=nowhere.jsonl",
        "reference=basline",
    )
    assert any("variant.baseline.typo" in p for p in found)
    assert any("did you mean 'llmcompressor_awq'" in p for p in found)
    assert any("variant.gptq_w4a16_g64.scheme" in p and "would fit all: G16, G32, G64" in p for p in found)
    assert any(p.startswith("held_out.text") for p in found)
    assert any("did you mean 'baseline'" in p for p in found)


def test_an_ignore_entry_that_names_nothing_is_told(opened: Open) -> None:
    """A typo in a pattern is a problem of its variant, with the closest names, before anything runs."""
    (found,) = problems(opened, "variant.gptq_w4a16_g64.ignore=[lm_head,model.layers.0.mlp.down_prj]")
    assert found.startswith("variant.gptq_w4a16_g64.ignore='model.layers.0.mlp.down_prj': names no linear layer")
    assert "did you mean 'model.layers.0.mlp.down_proj'" in found


def test_a_block_that_does_not_fit_names_its_layers(opened: Open) -> None:
    """FP8 in blocks of 128 needs both sides of a layer to be multiples of 128; 576 is none."""
    (found,) = problems(opened, "variant.fp8_dynamic.scheme=W8A8_FP8_BLOCK128")
    assert "128 does not divide both sides of 4 layers: model.layers.{0}.mlp.down_proj (64)" in found


def test_estimates_follow_the_method_and_what_it_is_shown(opened: Open) -> None:
    """Calibration takes time where a method reads it; what a stage took here scales its guess."""

    def step(samples: int, name: str, timings: dict[str, float]) -> Step:
        campaign = opened(f"calibration.samples={samples}")
        found = assemble(campaign, {}, timings).candidates
        return next(c.quantized for c in found if c.variant.name == name)

    few, many = step(8, "gptq_w4a16_g64", {}), step(256, "gptq_w4a16_g64", {})
    assert (True, True) == (many.seconds > few.seconds, few.memory_bytes > 0)
    assert step(8, "rtn_w4a16_g64", {}).seconds == step(256, "rtn_w4a16_g64", {}).seconds
    paced = step(8, "gptq_w4a16_g64", {"variant.llmcompressor_gptq pace": 2.0})
    assert (2 * few.seconds, few.guess) == (paced.seconds, paced.guess)


def test_a_broken_eval_set_is_told_with_its_line(opened: Open, tmp_path: Path) -> None:
    """The file and line of a broken item reach the user."""
    copy = tmp_path / "mine"
    source = Path(__file__).resolve().parents[2] / "evalsets" / "support_intent"
    copy.mkdir()
    for file in source.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    with (copy / "items.jsonl").open("a") as f:
        f.write("{broken\n")
    lines = len((copy / "items.jsonl").read_text().splitlines())
    (found,) = problems(opened, f"evalset.support_intent.path={copy}")
    assert f"items.jsonl:{lines}: is not JSON" in found


def test_a_look_takes_the_items_it_was_planned_for(opened: Open) -> None:
    """Half of 320 items are the first of two looks; another number is told with the limit to set, none is not half."""
    plan = ("evalset=[support_intent]", "variant=[baseline]", "gate.looks.at=[0.5,1.0]")
    assert opened(*plan, "evalset.support_intent.limit=160").evalsets
    assert opened(*plan, "gate.looks.number=2").evalsets
    (found,) = problems(opened, *plan, "evalset.support_intent.limit=80")
    assert "evalset.support_intent.limit=80: look 1 of 2 is planned at 160 of 320 items, not 80" in found
    (found,) = problems(opened, *plan, "gate.looks.number=3")
    assert "look 3 of 2; the plan made beforehand has no such look" in found


def test_calibration_text_that_an_eval_set_holds_is_refused(opened: Open, tmp_path: Path) -> None:
    """A calibration set made of eval items is a leak, named before anything runs."""
    items = Path(__file__).resolve().parents[2] / "evalsets" / "passage_qa" / "items.jsonl"
    rows = [json.loads(line)["passage"] for line in items.read_text().splitlines()]
    (tmp_path / "leaky.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    (found,) = problems(opened, f"calibration.source={tmp_path / 'leaky.jsonl'}")
    assert "passage_qa" in found


def test_leaking_calibration_rows_may_be_left_out_and_are_told(opened: Open, tmp_path: Path) -> None:
    """With leaks=exclude the row goes, and the decision's conditions name it; the second plan knows it from cache."""
    items = Path(__file__).resolve().parents[2] / "evalsets" / "passage_qa" / "items.jsonl"
    leak = json.loads(items.read_text().splitlines()[0])["passage"]
    source = tmp_path / "leaky.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("nothing of the kind", leak)))
    given = ("variant=[gptq_w4a16_g64]", "reference=gptq_w4a16_g64", f"calibration.source={source}")
    campaign = opened(*given, "calibration.leaks=exclude")
    assert (1,) == campaign.calibration.excluded
    told = assembled(campaign).decision.config.base["calibration"]
    assert "leaky.jsonl: rows 2 left out, which share text with eval items" == told
    assert opened(*given, "calibration.leaks=exclude").calibration == campaign.calibration  # the second time from cache


def test_a_held_out_file_that_is_missing_is_told_even_after_a_proof(opened: Open) -> None:
    """The proof that nothing leaks, kept from a run without the file, does not stand in for looking at it."""
    assert opened("variant=[baseline]").variants
    (found,) = problems(opened, "variant=[baseline]", "calibration.held_out=[nowhere.jsonl]")
    assert "nowhere.jsonl" in found


def test_steps_run_upstream_first_and_shared_work_is_shared(opened: Open) -> None:
    """One checkpoint, one calibration, one probe; a step for each variant, engine and score."""
    campaign = opened("variant=[baseline,gptq_w4a16_g64,awq_w4a16_g64]")
    kinds = [s.stage.kind for s in in_order([assembled(campaign).track])]
    sets = len(campaign.evalsets)
    expected = {
        "checkpoint": 1, "calibration": 1, "variant": 3, "reference": 6, "engine": 3, "scores": 3 * sets,
        "divergence": 3, "noise": sets, "latency": 1, "decision": 1, "report": 1, "track": 1,
    }  # fmt: skip
    assert expected == {kind: kinds.count(kind) for kind in expected}
    assert len(kinds) == sum(expected.values())
    assert kinds.index("checkpoint") < kinds.index("variant") < kinds.index("engine") < kinds.index("scores")


def test_variants_that_need_no_calibration_do_not_wait_for_it(opened: Open) -> None:
    """Rounding and dynamic FP8 look at weights alone."""
    campaign = opened("variant=[baseline,rtn_w4a16_g64,fp8_dynamic]")
    assert "calibration" not in {s.stage.kind for s in in_order([assembled(campaign).track])}


def test_an_engine_that_would_change_nothing_is_left_out(opened: Open) -> None:
    """int8 activations make no difference to a baseline, so only the quantized variant gets that engine."""
    campaign = opened("variant=[baseline,rtn_w4a16_g64]", "engine=[ort_genai,ort_genai_int8act]")
    labels = [c.label for c in assembled(campaign).candidates]
    assert ["baseline@ort_genai", "rtn_w4a16_g64@ort_genai", "rtn_w4a16_g64@ort_genai_int8act"] == labels


def test_an_engine_that_nothing_serves_is_built_and_not_judged(opened: Open) -> None:
    """It comes from a graph of its own and goes into the decision with its reason; no score or probe waits for it."""
    made = assembled(opened("variant=[baseline]", "engine=[tensorrt_rtx,ort_genai]"))
    compiled, served = made.candidates
    graph = compiled.graph
    assert graph is not None and made.latency is not None
    assert ("baseline@tensorrt_rtx", {}) == (compiled.label, compiled.scores)
    assert {"variant": compiled.quantized, "reference": compiled.checked, "graph": graph} == compiled.built.inputs
    assert ("current", "tensorrt_rtx") == (graph.runs_in.name, compiled.built.runs_in.name)
    assert (served.built,) == made.latency.inputs["engines"]
    assert "baseline@ort_genai" == made.decision.config.reference
    told = {c.label: (c.status, bool(c.unjudged)) for c in made.decision.config.candidates}
    assert {"baseline@tensorrt_rtx": ("ok", True), "baseline@ort_genai": ("ok", False)} == told


def test_one_graph_serves_engines_for_several_gpus(opened: Open) -> None:
    """Other compute capabilities are another engine of the same graph."""
    one, other = (
        assembled(
            opened("variant=[baseline]", "engine=[tensorrt_rtx]", f"engine.tensorrt_rtx.compute_capabilities={sms}")
        ).candidates[0]
        for sms in ("[89]", "[80,120]")
    )
    assert one.graph is not None and other.graph is not None
    assert (one.graph.key, True) == (other.graph.key, one.built.key != other.built.key)


def test_a_failed_variant_is_decided_on_as_failed(opened: Open) -> None:
    """Its scores and engine leave the decision's inputs, its reason enters; the others keep their keys."""
    campaign = opened("variant=[baseline,rtn_w4a16_g64]")
    before = assembled(campaign)
    lost = before.candidates[1].quantized
    after = assembled(campaign, {lost.key: "no luck"})
    (failed,) = [c for c in after.decision.config.candidates if c.status == "failed"]
    assert ("rtn_w4a16_g64", "variant rtn_w4a16_g64: no luck") == (failed.label, failed.failure)
    assert before.candidates[0].built.key == after.candidates[0].built.key
    assert 1 == len(after.decision.inputs["engines"])
    assert before.decision.key != after.decision.key


def test_a_champion_is_scored_on_the_same_items(opened: Open) -> None:
    """Its engine is read as it lies in the store; where a candidate is the champion, its own scores serve; where
    scoring it failed the decision says so and goes on."""
    campaign = replace(opened("variant=[baseline]"), champion=Champion("3", "c" * 64))
    made = assembled(campaign)
    config = made.decision.config
    assert ("3", "c" * 64, len(campaign.evalsets)) == (
        config.champion.version, config.champion.engine_key, len(config.champion.scores)
    )  # fmt: skip
    assert {s.key for s in made.champion.values()} <= {s.key for s in made.decision.inputs["scores"]}
    (engine,) = {s.inputs["engine"].key for s in made.champion.values()}
    assert "c" * 64 == engine
    own = replace(campaign, champion=Champion("3", made.candidates[0].built.key))
    assert {s.key for s in made.candidates[0].scores.values()} == {s.key for s in assembled(own).champion.values()}
    lost = assembled(campaign, {next(iter(made.champion.values())).key: "no server"}).decision.config.champion
    assert ((), "score the champion on support_intent: no server") == (lost.scores, lost.note)


def test_a_limit_changes_scores_and_nothing_before_them(opened: Open) -> None:
    """Scoring fewer items makes no engine again, and leaves the other sets' scores."""
    one, other = (assembled(opened("variant=[baseline]", f"evalset.support_intent.limit={n}")) for n in (10, 20))
    assert one.candidates[0].built.key == other.candidates[0].built.key
    assert one.candidates[0].scores["support_intent"].key != other.candidates[0].scores["support_intent"].key
    assert one.candidates[0].scores["ticket_json"].key == other.candidates[0].scores["ticket_json"].key


def test_a_licence_stated_later_makes_nothing_again_but_the_decision(opened: Open) -> None:
    """What a base may be used under is no part of what is made from it."""
    before, after = (assembled(opened("variant=[baseline]", *given)) for given in ([], ["checkpoint.licence=MIT"]))
    assert before.base.key == after.base.key
    assert before.candidates[0].built.key == after.candidates[0].built.key
    assert before.decision.key != after.decision.key
    said = [a.decision.config.base for a in (before, after)]
    assert [("unknown", ""), ("MIT", "stated")] == [(b["licence"], b["licence source"]) for b in said]


def test_the_same_text_elsewhere_gives_the_same_keys(opened: Open, checkpoint: Path, tmp_path: Path) -> None:
    """A copied checkpoint is the same checkpoint."""
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    here, there = opened("variant=[baseline]"), opened("variant=[baseline]", f"checkpoint.source={copy}")
    assert assembled(here).base.key == assembled(there).base.key


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://mlflow:5000", "http://mlflow:5000"),
        ("sqlite:////abs/mlflow.db", "sqlite:////abs/mlflow.db"),
        ("sqlite:///mlruns/mlflow.db", f"sqlite:///{Path.cwd() / 'mlruns' / 'mlflow.db'}"),
    ],
)
def test_a_relative_database_becomes_absolute(given: str, expected: str) -> None:
    """Every process means the same database, wherever it stands; a server's address is left alone."""
    assert expected == absolute_uri(given)


def test_eval_prompts_make_no_engine_again(opened: Open) -> None:
    """Other prompts are other divergences; variants, their check on held-out text and engines stay."""
    one, other = (assembled(opened("variant=[baseline]", f"divergence.seed={n}")).candidates[0] for n in (0, 1))
    assert (one.checked.key, one.built.key) == (other.checked.key, other.built.key)
    assert one.asked is not None and other.asked is not None and one.read is not None and other.read is not None
    assert (one.asked.key, one.read.key) != (other.asked.key, other.read.key)
    none = assembled(opened("variant=[baseline]", "divergence.prompts=0")).candidates[0]
    assert (None, {"engine", "checked"}) == (none.asked, set(none.read.inputs if none.read else ()))


def test_every_engine_is_compared_with_the_reference_engine(opened: Open) -> None:
    """Whatever the order of variants; where the reference cannot be had, the others are read without it."""
    campaign = opened("variant=[rtn_w4a16_g64,baseline]")
    made = assembled(campaign)
    variant, reference = made.candidates
    assert variant.read is not None and reference.read is not None
    assert (reference.read, "against" in reference.read.inputs) == (variant.read.inputs["against"], False)
    alone = assembled(campaign, {reference.built.key: "no luck"}).candidates[0]
    assert alone.read is not None
    assert "against" not in alone.read.inputs
    assert alone.failure({reference.built.key: "no luck"}) is None


def test_the_reference_engine_is_scored_twice_on_part_of_the_items(opened: Open) -> None:
    """No more items than asked, on the engine that was scored before; a key turns it off, a failure leaves it out."""
    campaign = opened("variant=[baseline,rtn_w4a16_g64]", "items_per_set=20", "noise_floor.items_per_set=8")
    made = assembled(campaign)
    reference = made.candidates[0]
    names = [e.name for e in campaign.evalsets]
    assert names == [s.config.evalset.path.rpartition("/")[2] for s in made.noise]
    for name, step in zip(names, made.noise, strict=True):
        assert (reference.built, reference.scores[name]) == (step.inputs["engine"], step.inputs["scores"])
        assert step.config.evalset.limit is not None and step.config.evalset.limit <= 8
    assert made.noise == made.decision.inputs["noise"]
    assert () == assembled(opened("variant=[baseline]", "noise_floor.run=false")).noise
    lost = assembled(campaign, {made.noise[0].key: "no luck"})
    assert (made.noise[1:], None) == (lost.noise, lost.candidates[0].failure({made.noise[0].key: "no luck"}))


def test_a_remote_engine_is_for_its_variant_alone(opened: Open) -> None:
    """Beside an engine of ours it adds one candidate, and takes no memory that could be told."""
    variants = "variant=[baseline,rtn_w4a16_g64]"
    campaign = opened(variants, "engine=[ort_genai,remote]", *FAR)
    made = assembled(campaign)
    labels = ["baseline@ort_genai", "baseline@remote", "rtn_w4a16_g64@ort_genai"]
    assert labels == [c.label for c in made.candidates]
    assert {"baseline@ort_genai", "rtn_w4a16_g64@ort_genai"} == footprints(campaign, made).keys()
    told = problems(opened, variants, "engine=[ort_genai,remote]", "engine.remote.url=host/v1")
    assert ["engine.remote.model", "engine.remote.revision"] == [p.partition("=")[0] for p in told[:2]]


def test_what_changes_at_a_remote_is_another_engine(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its revision enters the key; where its key is kept, and how long it may take, do not."""
    monkeypatch.setenv("ACME_KEY", "sk-1")

    def key(*overrides: str) -> str:
        made = assembled(opened("variant=[baseline]", "engine=[remote]", *FAR, *overrides))
        assert "sk-1" not in json.dumps(made.candidates[0].built.config_data)
        return made.candidates[0].built.key

    assert key() == key("engine.remote.api_key_env=ACME_KEY", "engine.remote.timeout_s=5")
    assert 3 == len({key(), key("engine.remote.revision=2"), key("engine.remote.served_on=H100")})


def test_the_run_opened_before_the_work_is_known_whatever_fails(opened: Open) -> None:
    """Its key is the one the decision has if nothing fails; what was known at the opening changes no step's key."""
    campaign = opened("variant=[baseline,rtn_w4a16_g64]")
    whole = assembled(campaign)
    lost = assembled(campaign, {whole.candidates[1].quantized.key: "killed"})
    configs = [made.track.config for made in (whole, lost)]
    assert isinstance(configs[0], TrackingConfig) and isinstance(configs[1], TrackingConfig)
    assert lost.decision.key != whole.decision.key
    assert whole.decision.key[:16] == configs[0].plan_key == configs[1].plan_key
    told = configs[0].model_copy(update={"opening": look(Plan(()), Path.cwd()), "plan_key": ""})
    assert whole.track.key == replace(whole.track, config=told).key


def test_a_secret_that_a_manifest_would_hold_is_refused_and_not_shown(opened: Open) -> None:
    """In a toolchain's variables, a note, an address; the tracking URI's password is masked in every step instead."""
    with pytest.raises(ConfigError, match=r"checkpoint\.note='\*\*\*': holds a secret.*environment") as caught:
        opened("checkpoint.note='https://ada:s3cr3t@hub/x'")
    assert "s3cr3t" not in str(caught.value)
    campaign = opened("tracking.uri='postgresql://ada:s3cr3t@db/x'")
    steps = in_order([assembled(campaign).track])
    assert not [step.label for step in steps if "s3cr3t" in json.dumps(step.config_data)]
    assert "postgresql://***@db/x" in json.dumps(steps[-1].config_data)


def test_where_files_go_is_settled_before_a_step_runs_elsewhere(opened: Open, tmp_path: Path) -> None:
    """Beside a sqlite database, under mlruns/ here for another database, as a server wants, or as was chosen."""
    expected = {
        f"sqlite:///{tmp_path}/db/mlflow.db": f"{tmp_path}/db/artifacts",
        "postgresql://db/x": str(Path("mlruns/artifacts").resolve()),
        "http://h:5000": "",
    }
    for uri, root in expected.items():
        config = assembled(opened(f"tracking.uri='{uri}'")).track.config
        assert isinstance(config, TrackingConfig)
        assert root == config.artifact_root
    config = assembled(opened("tracking.uri='http://h:5000'", "tracking.artifacts=s3://b/x")).track.config
    assert isinstance(config, TrackingConfig)
    assert "s3://b/x" == config.artifact_root
