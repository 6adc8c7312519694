"""Bundles: what is in one, that its scripts say what the target says, and which engines are never put into one."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.decide.model import Candidate
from pipelines.engine.card import EngineCard
from pipelines.engine.table import target
from pipelines.engine.trtllm import record
from pipelines.errors import ConfigError, EvidenceError
from pipelines.flow.store import Manifest, Store, hash_tree
from pipelines.flow.toolchain import ContainerConfig, Toolchain
from pipelines.release import bundle as bundles
from pipelines.release import deploy
from pipelines.release.ledger import Change, Ledger
from tests import decisions

CONTAINER = ContainerConfig(
    kind="container", image="nvcr.io/nvidia/tensorrt-llm/release:1.2.1", digest=f"sha256:{'a' * 64}"
)
KNOWN = {"trtllm": Toolchain("trtllm", CONTAINER)}
GPU = {"gpu": "NVIDIA L40S, 580.95", "gpu_sm": "89"}
LABEL = "gptq_w4a16_g64"


@dataclass(frozen=True)
class Shop:
    """A store with one engine and the decision to promote it, and a ledger."""

    root: Path
    one: Candidate
    decision: Path

    @property
    def store(self) -> Store:
        return Store(self.root / "store")

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.root / "ledger.jsonl")

    @property
    def engine(self) -> Path:
        return self.store.path("engine", self.one.keys["engine"])

    def promote(self) -> None:
        """Commit a promotion, as `quantgate promote` does."""
        change = Change(
            action="promote", model="demo", version="3", champion_before=None, previous_before=None, actor="ada",
            override_reason=None, decision_key=self.decision.name, engine_key=self.engine.name,
        )  # fmt: skip
        self.ledger.append("t1", "committed", change)

    def change(self, kind: str, **fields: Any) -> None:
        """Change what a manifest says."""
        path = self.store.path(kind, self.one.keys[kind]) / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    def bundle(self, out: Path) -> bundles.BundleCard:
        """Bundle the champion."""
        return bundles.bundle(bundles.promoted(self.ledger, "demo", self.store), self.store, KNOWN, out)


def artifact(where: Path, kind: str, key: str, **fields: Any) -> None:
    """Close a directory with a manifest."""
    given: dict[str, Any] = {
        "kind": kind, "stage": kind, "version": 1, "key": key, "config": {}, "inputs": {}, "toolchain": {},
        "device": None, "facts": {}, "files": hash_tree(where), "started": "2026-11-30T12:00:00+00:00", "seconds": 1.0,
        "peak_rss": 0,
    }  # fmt: skip
    (where / "manifest.json").write_text(Manifest.model_validate(given | fields).model_dump_json())


@pytest.fixture
def shop(tmp_path: Path) -> Callable[..., Shop]:
    """Open a shop; `changes` are to the candidate, `fill` writes the engine's files, `fields` go into its manifest."""

    def opened(
        changes: Mapping[str, object] | None = None,
        fill: Callable[[Path], None] = plain_engine,
        fields: Mapping[str, Any] | None = None,
    ) -> Shop:
        store = Store(tmp_path / "store")
        keys = {
            kind: decisions.key_of(kind, LABEL) for kind in ("variant", "engine", "scores/support_intent", "latency")
        }
        given = {"keys": keys, **dict(changes or {})}
        made = decisions.decision()
        one = next(c for c in made.candidates if c.label == LABEL).model_copy(update=given)
        made = made.model_copy(update={"candidates": (one,)})
        for name, key in keys.items():
            where = store.path(name.partition("/")[0], key)
            where.mkdir(parents=True)
            about = dict(fields or {}) if name == "engine" else {"device": GPU} if name == "latency" else {}
            {"variant": plain_variant, "engine": fill}.get(name, lambda _: None)(where)
            artifact(where, name.partition("/")[0], key, **about)
        return Shop(tmp_path, one, decisions.decided(store.root, made))

    return opened


def plain_variant(where: Path) -> None:
    """The files of a variant that a bundle looks at, and one that it does not."""
    for name in ("LICENSE", "USE_POLICY.md", "NOTICE.txt", "config.json"):
        (where / name).write_text(f"{name} of the base\n")


def card(where: Path, kind: str, model_id: str) -> None:
    """Write an engine's card."""
    found = EngineCard(
        target=kind, native=True, native_note="", max_length=2048, eos_token_ids=[2], bos_token_id=1, vocab_size=9,
        model_id=model_id,
    )  # fmt: skip
    (where / "engine.json").write_text(found.model_dump_json())


def plain_engine(where: Path) -> None:
    """An embedded engine, as far as a bundle looks at it."""
    card(where, "ort_genai", "llama-1")
    (where / "model.onnx").write_bytes(b"graph")


def pytorch_engine(where: Path) -> None:
    """What the PyTorch backend of TensorRT-LLM serves: a linked checkpoint and its settings."""
    card(where, "trtllm_pytorch", "llama-2")
    served = record.Record(
        kind="bundle", release="1.2.1", backend="pytorch", model="llama-2", tp=2, pp=1, max_batch_size=64,
        max_num_tokens=8192, max_seq_len=4096, max_beam_width=1, context_logits=True,
    )  # fmt: skip
    record.write(where, served)
    (where / record.SETTINGS).write_text("enable_chunked_prefill: false\nkv_cache_config:\n  dtype: fp8\n")
    (where / "llama-2").mkdir()
    weights = where.parents[1] / "weights.safetensors"
    weights.write_bytes(b"weights")
    (where / "llama-2" / "model.safetensors").symlink_to(weights)


IN_IMAGE = {
    "toolchain": {"toolchain": "trtllm", "image": CONTAINER.digest, "tensorrt_llm": "1.2.1"},
    "device": GPU,
    "facts": {"tp": 2, "pp": 1, "gpu_name": "NVIDIA L40S", "deserialized": True, "smoke_answers": 2},
}


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_bundle_holds_engine_evidence_and_licence(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """Everything one needs to serve it and to know why it may be served, and sums that the usual tool accepts."""
    here = shop()
    here.promote()
    made = here.bundle(tmp_path / "out")
    found = contents(tmp_path / "out")
    assert {
        "README.md", "SHA256SUMS", "bundle.json", "serve.sh", "kubernetes.yaml", "requirements.txt",
        "engine/engine.json", "engine/model.onnx", "engine/manifest.json",
        "licence/LICENSE", "licence/USE_POLICY.md", "licence/NOTICE.txt", "licence/ORIGIN.md",
        "evidence/decision.json", "evidence/decision.md", "evidence/decision.manifest.json", "evidence/promotion.json",
        "evidence/engine.manifest.json", "evidence/variant.manifest.json", "evidence/latency.manifest.json",
        "evidence/scores-support_intent.manifest.json",
    } == found.keys()  # fmt: skip
    assert (True, "ada", "3") == (
        made.promoted,
        made.promotion and made.promotion.change.actor,
        made.promotion.change.version,
    )  # type: ignore[union-attr]
    checked = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=tmp_path / "out", capture_output=True, text=True, check=False
    )
    assert (0, len(found) - 1) == (checked.returncode, checked.stdout.count(": OK"))
    assert "NOT PROMOTED" not in found["README.md"].decode() + found["serve.sh"].decode()
    assert os.access(tmp_path / "out" / "serve.sh", os.X_OK) and not os.access(tmp_path / "out" / "README.md", os.X_OK)


def test_a_base_without_a_licence_text_is_said_to_have_none(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """Which licence, who says so and where its text is published stand in its place; nothing is made up."""
    here = shop()
    here.promote()
    for name in ("LICENSE", "USE_POLICY.md", "NOTICE.txt"):
        (here.store.path("variant", here.one.keys["variant"]) / name).unlink()
    made = here.bundle(tmp_path / "out")
    found = contents(tmp_path / "out")
    assert ((), ["licence/ORIGIN.md"]) == (made.licence_files, [p for p in found if p.startswith("licence/")])
    told = found["licence/ORIGIN.md"].decode()
    assert "- licence: Apache-2.0" in told and "https://spdx.org/licenses/Apache-2.0.html" in told
    assert "came without a licence text" in found["README.md"].decode()


@pytest.mark.parametrize(
    ("base", "files", "expected", "without"),
    [
        ({"licence": "LicenseRef-llama3.1", "licence source": "card", "licence link": "https://a/b"}, (),
         "It is published: https://a/b.", "spdx.org"),
        ({"licence": "LicenseRef-ours", "licence source": "stated"}, (), "It is published: at the base's source.",
         "overruled"),
        ({"licence": "MIT OR Apache-2.0", "licence source": "stated", "licence note": "README.md says other"},
         ("LICENSE",), "- overruled: README.md says other", "It is published"),
        ({"licence": "unknown", "licence note": "its sources differ"}, (), "- said by: its sources differ", "Apache"),
        ({"licence": "MIT", "licence files": "LICENSE sha256:ab"}, ("LICENSE",),
         "- files in the base: LICENSE sha256:ab", "It is published"),
    ],
)  # fmt: skip
def test_the_origin_of_a_licence_is_what_the_decision_knew(
    base: dict[str, str], files: tuple[str, ...], expected: str, without: str
) -> None:
    """Its name, who said so, what that overruled, its link and the digests of the base's own files."""
    told = deploy.origin(base, files)
    assert expected in told and without not in told


def test_the_same_engine_gives_the_same_bytes(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """A directory twice, and an archive twice, whose contents are the directory's."""
    here = shop()
    here.promote()
    for name in ("a", "b", "one/x.tar", "two/x.tar"):
        here.bundle(tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert (tmp_path / "one/x.tar").read_bytes() == (tmp_path / "two/x.tar").read_bytes()
    with tarfile.open(tmp_path / "one/x.tar") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert contents(tmp_path / "a") == contents(tmp_path / "unpacked" / "x")
    assert os.access(tmp_path / "unpacked" / "x" / "serve.sh", os.X_OK)


def test_what_nobody_promoted_is_refused_unless_asked_for_and_then_says_so(
    shop: Callable[..., Shop], tmp_path: Path
) -> None:
    """Without a promotion there is no champion; a candidate that is named carries the warning wherever it is read."""
    here = shop()
    with pytest.raises(EvidenceError, match="nothing was promoted yet"):
        here.bundle(tmp_path / "out")
    subject = bundles.named(here.decision, here.store, LABEL)
    made = bundles.bundle(subject, here.store, KNOWN, tmp_path / "out")
    found = contents(tmp_path / "out")
    assert (False, None) == (made.promoted, made.promotion)
    assert "evidence/promotion.json" not in found
    for name in ("README.md", "serve.sh", "kubernetes.yaml"):
        assert "NOT PROMOTED" in found[name].decode()


def test_a_candidate_that_is_not_there_is_answered_with_the_closest(shop: Callable[..., Shop]) -> None:
    """A typo, and a decision without a winner, are configuration errors."""
    here = shop()
    with pytest.raises(ConfigError, match=f"did you mean '{LABEL}'"):
        bundles.named(here.decision, here.store, "gptq_w4a16_g46")


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({"unjudged": "it has no server"}, {}, "was built, not judged"),
        ({"simulated": True}, {}, "made by a simulated container"),
        ({}, {"simulated": True}, "made by a simulated container"),
        ({}, {"facts": {"simulated": True}}, "made by a simulated container"),
        ({}, {"facts": {"deserialized": False}}, "never loaded and asked on its device"),
        ({}, {"facts": {"smoke_answers": 0}}, "never loaded and asked on its device"),
        ({}, {"device": {"gpu": "NVIDIA H100", "gpu_sm": "90"}}, "built for gpu 'NVIDIA H100', probed on 'NVIDIA L40S"),
    ],
)
def test_an_engine_that_never_answered_on_its_device_is_never_bundled(
    shop: Callable[..., Shop], tmp_path: Path, changes: dict[str, object], fields: dict[str, Any], message: str
) -> None:
    """Promoted or not, and nothing is written."""
    here = shop(changes, fields=fields)
    here.promote()
    before = set(tmp_path.iterdir())
    with pytest.raises(EvidenceError, match=message):
        here.bundle(tmp_path / "out")
    with pytest.raises(EvidenceError, match=message):
        bundles.bundle(bundles.named(here.decision, here.store, LABEL), here.store, KNOWN, tmp_path / "out")
    assert before == set(tmp_path.iterdir())


def test_an_engine_that_was_never_scored_is_never_bundled(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """Answers to eval items are what shows that its server works; they must still be there."""
    here = shop()
    here.promote()
    scored = here.store.path("scores", here.one.keys["scores/support_intent"])
    (scored / "manifest.json").rename(scored / "gone")
    with pytest.raises(EvidenceError, match="scores that show that it answered are gone"):
        here.bundle(tmp_path / "out")


def test_a_changed_engine_is_never_bundled(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """One byte that is not what was measured stops it."""
    here = shop()
    here.promote()
    (here.engine / "model.onnx").write_bytes(b"other")
    with pytest.raises(EvidenceError, match="not the engine that was measured"):
        here.bundle(tmp_path / "out")


def test_nothing_is_left_half_written(
    shop: Callable[..., Shop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills midway leaves neither a bundle nor its remains; what stands there is never replaced."""
    here = shop()
    here.promote()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = set(tmp_path.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(bundles, "_sum", full)
        with pytest.raises(OSError, match="No space left"):
            here.bundle(tmp_path / "out")
    assert before == set(tmp_path.iterdir())
    here.bundle(tmp_path / "out")
    kept = contents(tmp_path / "out")
    with pytest.raises(ConfigError, match="something stands there already"):
        here.bundle(tmp_path / "out")
    assert kept == contents(tmp_path / "out")


def test_the_script_runs_the_targets_own_command(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """From a place with a space in its name, on the port and host given, every flag is the one serving here has."""
    here = shop(fill=pytorch_engine, fields=IN_IMAGE)
    here.promote()
    out = tmp_path / "a place" / "bundle"
    here.bundle(out)
    stub = tmp_path / "bin" / "trtllm-serve"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\n')
    stub.chmod(0o755)
    env = {"PATH": f"{stub.parent}:/usr/bin:/bin", "SERVE_HOST": "0.0.0.0", "SERVE_PORT": "9000", "SERVE_THREADS": "5"}
    said = subprocess.run([out / "serve.sh"], env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    argv, wanted = target("trtllm_pytorch").serve(out / "engine", 9000, 5)
    assert [wanted["OMP_NUM_THREADS"], *(w.replace("127.0.0.1", "0.0.0.0") for w in argv[1:])] == said


def test_a_bundle_for_the_pytorch_backend_has_settings_for_both_servers(
    shop: Callable[..., Shop], tmp_path: Path
) -> None:
    """llm.yaml for trtllm-serve, model.yaml for Triton, the image by its digest, and weights instead of links."""
    here = shop(fill=pytorch_engine, fields=IN_IMAGE)
    here.promote()
    here.bundle(tmp_path / "out")
    found = contents(tmp_path / "out")
    assert b"weights" == found["engine/llama-2/model.safetensors"]
    assert not (tmp_path / "out/engine/llama-2/model.safetensors").is_symlink()
    triton = yaml.safe_load(found["triton/model.yaml"])
    assert ("/bundle/engine/llama-2", "/bundle/engine", "pytorch") == (
        triton["model"],
        triton["tokenizer"],
        triton["backend"],
    )
    assert ({"dtype": "fp8"}, {"max_batch_size": 0, "decoupled": False}) == (
        triton["kv_cache_config"], triton["triton_config"],
    )  # fmt: skip
    assert "kv_cache_config" in yaml.safe_load(found["engine/llm.yaml"])
    script = found["serve-in-container.sh"].decode()
    image = f"nvcr.io/nvidia/tensorrt-llm/release@sha256:{'a' * 64}"
    assert image in script and "--gpus all" in script and "requirements.txt" not in found
    subprocess.run(["sh", "-n", tmp_path / "out/serve-in-container.sh"], check=True)
    deployment, service = yaml.safe_load_all(found["kubernetes.yaml"])
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    assert (image, {"nvidia.com/gpu": 2}, ["/bundle/serve.sh"]) == (
        server["image"], server["resources"]["limits"], server["command"],
    )  # fmt: skip
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]


def test_an_engine_in_our_own_environment_says_what_it_needs(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """The versions it was made and measured with, and an image that is left to whoever deploys it."""
    here = shop(fields={"toolchain": {"python": "3.11", "onnxruntime-genai": "0.18.0"}})
    here.promote()
    here.bundle(tmp_path / "out")
    pins = (tmp_path / "out/requirements.txt").read_text().splitlines()
    assert ["onnxruntime-genai==0.18.0"] == [line for line in pins if not line.startswith("#")]
    deployment, _ = yaml.safe_load_all((tmp_path / "out/kubernetes.yaml").read_text())
    assert "REGISTRY/IMAGE@sha256:DIGEST" == deployment["spec"]["template"]["spec"]["containers"][0]["image"]


def test_the_newest_promotion_counts(shop: Callable[..., Shop]) -> None:
    """After a rollback the engine of before is the champion again, and of other models nothing is said."""
    here = shop()
    here.promote()
    assert "3" == here.ledger.champion("demo")
    assert here.ledger.committed("other") is None
    entry = here.ledger.committed("demo")
    assert entry is not None and here.engine.name == entry.change.engine_key
