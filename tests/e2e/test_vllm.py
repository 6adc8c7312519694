"""vLLM in its own toolchain, on processors: the base and a quantized variant built, served, scored and probed for real.

The steps are run as a campaign runs them: each in its interpreter, from a store. The model is the whole small real one:
its first layers alone predict noise, on which two correct implementations differ too much to be held to each other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow.parquet
import pytest

from pipelines import stages
from pipelines.compose import compose
from pipelines.config import CONF_DIR
from pipelines.engine import vllm_bundle
from pipelines.engine.serving import Served, serve
from pipelines.engine.table import TARGETS
from pipelines.engine.vllm import VllmConfig
from pipelines.errors import EndpointError, Problem
from pipelines.flow import venvs
from pipelines.flow.device import vectors
from pipelines.flow.executor import execute
from pipelines.flow.plan import plan
from pipelines.flow.stage import Stage, Step, resolve
from pipelines.flow.store import Fact, Store, manifest
from pipelines.flow.toolchain import CURRENT, Toolchain, VenvConfig, carried, toolchains
from pipelines.intake.checkpoint import CheckpointConfig, inspect
from pipelines.intake.digests import DigestCache, text_sha256
from pipelines.probe import stage as probe
from pipelines.probe.config import ProbeConfig
from pipelines.quantize.reference import ReferenceConfig, load_tokens
from pipelines.quantize.table import QUANTIZERS

pytestmark = [
    pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # the libraries' own
]  # fmt: skip

TEXTS = CONF_DIR.parent / "evalsets"
HOME = Path(os.environ.get("QUANTGATE_TEST_TOOLCHAINS", CONF_DIR.parent / "toolchains"))
TARGET = TARGETS["vllm"]
PROMPT = [504, 3575, 282, 4649, 314]


@dataclass(frozen=True)
class Made:
    """The bundles of the base and of its quantized variant, by name, and what each variant itself predicts."""

    engines: dict[str, Path]
    references: dict[str, Path]

    def facts(self, name: str) -> dict[str, Fact]:
        return dict(manifest(self.engines[name]).facts)


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    """The toolchain of vLLM on processors, if it has been made."""
    problems: list[Problem] = []
    found = toolchains(compose([])["toolchain"], HOME, problems)["vllm_cpu"]
    assert [] == problems
    if not isinstance(found.spec, VenvConfig) or not venvs.venv(found, found.spec).made:
        pytest.skip("needs the toolchain `vllm_cpu`: `quantgate toolchain sync vllm_cpu` makes it (2 GB)")
    return found


def step(stage: Stage, config: Any, *, runs_in: Toolchain = CURRENT, batch: str | None = None, **inputs: Step) -> Step:
    return Step(stage, stage.kind, config, inputs, runs_in.versions(stage.packages), batch=batch, runs_in=runs_in)


def variant(quantizer: str, settings: dict[str, Any], **inputs: Step) -> Step:
    row = QUANTIZERS[quantizer]
    config = resolve(row.config_type).model_validate({"quantizer": quantizer, **settings})  # type: ignore[attr-defined]
    return step(Stage("variant", row.name, row.version, row.function, row.config_type, row.packages), config, **inputs)


@pytest.fixture(scope="module")
def made(base_checkpoint: Path, toolchain: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Everything that is looked at, made once."""
    store = Store(tmp_path_factory.mktemp("store"))
    store.prepare()
    inspected = inspect(CheckpointConfig(source=str(base_checkpoint)), DigestCache(store.root / "digests.json"))
    base = step(stages.CHECKPOINT, inspected.config)
    scheme = "W8A8_INT8" if vectors() == "avx2" else "W4A16_G64"  # 4 bits take AVX-512
    variants = {
        "baseline": variant("baseline", {}, checkpoint=base),
        "rounded": variant("llmcompressor_rtn", {"scheme": scheme}, checkpoint=base),
    }
    text = TEXTS / "heldout_text" / "items.jsonl"
    asked = ReferenceConfig(text_path=str(text), text_sha256=text_sha256(text), windows=2, length=128)
    known = step(stages.REFERENCE, asked, batch="build", variant=variants["baseline"])
    checked = {
        "baseline": known,
        "rounded": step(stages.REFERENCE, asked, batch="build", variant=variants["rounded"], base=known),
    }
    stage = Stage("engine", TARGET.name, TARGET.version, TARGET.build, TARGET.config_type, TARGET.packages)
    config = VllmConfig(max_model_len=256, max_num_seqs=16, kv_cache_gib=0.25, enforce_eager=True)
    engines = {
        name: step(stage, config, runs_in=toolchain, batch="vllm", variant=one, reference=checked[name])
        for name, one in variants.items()
    }
    outcomes = execute(plan(list(engines.values()), store), store, lambda _: None, {"HF_HUB_OFFLINE": "1"})
    assert [] == [o.message for o in outcomes.values() if o.state not in ("made", "reused")]
    return Made(
        {name: store.path("engine", one.key) for name, one in engines.items()},
        {name: store.path("reference", one.key) for name, one in checked.items()},
    )


@pytest.fixture(autouse=True)
def known_here(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are started in the toolchain that made their engines."""
    for name, value in carried([toolchain]).items():
        monkeypatch.setenv(name, value)


def group(leader: int) -> list[psutil.Process]:
    """Who lives in a process group."""
    found = []
    for one in psutil.process_iter():
        try:
            if os.getpgid(one.pid) == leader and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return found


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_a_bundle_predicts_what_its_variant_does(made: Made) -> None:
    """The real server's perplexity of held-out text, in bfloat16, is that of the variant in float32 within 5%."""
    for name in ("baseline", "rounded"):
        facts = made.facts(name)
        assert float(facts["ppl_drift"] or 0) == pytest.approx(1, abs=0.05)
        assert ("bundle", "cpu", True, 2) == tuple(facts[n] for n in ("kind", "device", "native", "smoke_answers"))
        assert "0.32.0" in str(facts["release"])
    assert made.facts("rounded")["size_bytes"] < made.facts("baseline")["size_bytes"]  # type: ignore[operator]
    assert made.facts("rounded")["perplexity"] != made.facts("baseline")["perplexity"]


def test_prompts_are_scored_by_id_and_answers_stream(made: Made, tmp_path: Path) -> None:
    """Scores are those of the variant's own reading of the same ids; a stream carries ids; end tokens can be ignored;
    usage tells cached tokens; and when the block ends, all processes of the server are gone and its memory with them.
    """
    ids, wanted = load_tokens(made.references["rounded"])
    with serve(made.engines["rounded"], threads=2, log=tmp_path / "log") as served:
        assert served.pid is not None
        everyone = group(served.pid)
        assert len(everyone) > 1
        assert sum(p.memory_info().rss for p in everyone) > 300 * 2**20
        score = served.endpoint.score([[int(i) for i in row] for row in ids])[1]
        ours = np.array(score.logprobs[1:], dtype=float)
        assert float(np.abs(ours - wanted[1]).mean()) < 0.1
        (ranking,) = served.endpoint.rank([PROMPT], [2], 5)
        assert [5] * 3 == [len(place) for place in ranking.ids]
        assert all(best[0] == max(best) for best in ranking.values)
        first, again = (served.endpoint.generate(PROMPT, max_tokens=24, ignore_eos=True) for _ in range(2))
        assert (len(PROMPT), 24, "length") == (first.tokens_in, first.tokens_out, first.finish_reason)
        assert first.text == again.text
        assert streams_ids(served) == 6
        root = served.endpoint.base_url.removesuffix("/v1")
        assert "vllm:num_requests_waiting" in httpx.get(f"{root}/metrics", trust_env=False).text
        with pytest.raises(EndpointError, match="status 400"):
            served.endpoint.score([[5] * 256])  # no room for the token that scoring generates
    assert gone(everyone)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{root}/health", trust_env=False)


def streams_ids(served: Served) -> int:
    """How many token ids a stream of six tokens carries, event by event, with usage behind them."""
    body = {
        "model": served.endpoint.model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    url = f"{served.endpoint.base_url}/completions"
    with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    assert 6 == events[-1]["usage"]["completion_tokens"]
    assert "cached_tokens" in events[-1]["usage"]["prompt_tokens_details"]
    return sum(len(choice.get("token_ids") or ()) for event in events for choice in event["choices"])


def broken(engine: Path, out: Path, **changes: Any) -> Path:
    """A copy of a bundle with other settings."""
    shutil.copytree(engine, out, symlinks=True)
    record = json.loads((out / vllm_bundle.RECORD).read_text()) | changes
    (out / vllm_bundle.RECORD).write_text(json.dumps(record))
    return out


def test_a_server_that_cannot_start_says_why(made: Made, tmp_path: Path) -> None:
    """More positions than the model knows end it; the error has its last lines, and the reason is among them."""
    engine = made.engines["baseline"]
    longer = broken(engine, engine.parent / "longer", max_model_len=100_000)
    began = time.monotonic()
    ends = serve(longer, threads=2, log=tmp_path / "log")
    with pytest.raises(EndpointError, match="the server ended with 1; its last words") as raised, ends:
        pass
    assert time.monotonic() - began < 300
    assert "max_model_len" in str(raised.value)


def test_a_wait_for_a_server_is_bounded_and_nothing_of_it_stays(made: Made, tmp_path: Path) -> None:
    """Two seconds are too few to start in; whoever was started by then is gone when the error comes."""
    before = {p.pid for p in psutil.process_iter()}
    began = time.monotonic()
    late = serve(made.engines["rounded"], threads=2, log=tmp_path / "log", startup_timeout_s=2)
    with pytest.raises(EndpointError, match="did not answer in time"), late:
        pass
    assert time.monotonic() - began < 2 + TARGET.grace_s + 20
    named = made.engines["rounded"].name
    left = [p for p in psutil.process_iter() if p.pid not in before and named in " ".join(command(p))]
    assert gone(left)


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def probing(tmp_path: Path, *profiles: dict[str, Any], **more: Any) -> ProbeConfig:
    lines = [{"id": str(n), "text": f"Request number {n} asks for a short story about the sea."} for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    given = {"profiles": profiles, "prompts": str(tmp_path / "prompts.jsonl"), "rounds": 1, "threads": 2}
    return ProbeConfig.model_validate({**given, "warmup_max_requests": 8, "max_tokens": 8, **more})


def table(out: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(out / f"{name}.parquet").to_pylist()
    return found


def test_both_are_probed_by_closed_and_open_loops_and_a_spike(made: Made, tmp_path: Path) -> None:
    """Every request is answered with the tokens it asked for, by the server's count and by ours; what the server tells
    of its cache and its memory is on record."""
    config = probing(
        tmp_path,
        {"name": "closed", "mode": "closed", "concurrency": 2, "requests": 6},
        {"name": "open", "mode": "open", "rate": 2.0, "requests": 6},
        {"name": "spike", "mode": "spike", "base": 1, "peak": 8, "requests": 10},
    )
    out = tmp_path / "out"
    out.mkdir()
    facts = probe.run(config, out, engines=list(made.engines.values()))
    assert 0 == facts["failed_requests"]
    rows, blocks = table(out, "requests"), table(out, "blocks")
    assert {path.name for path in made.engines.values()} == {row["engine"] for row in rows}
    assert {("closed", 12), ("open", 12), ("spike", 60)} == {
        (name, sum(row["profile"] == name for row in rows)) for name in ("closed", "open", "spike")
    }
    assert {(8, 8, 8)} == {(row["asked_tokens"], row["usage_output_tokens"], row["counted_tokens"]) for row in rows}
    assert {0} == {row["cached_tokens"] for row in rows}  # prompts begin with tokens of their own
    for block in blocks:
        assert 0 < block["ready_s"]
        assert block["kv_usage_peak"] is not None
        assert block["loaded_rss_bytes"] > 300 * 2**20


def test_a_server_that_is_killed_under_load_leaves_a_usable_part(made: Made, tmp_path: Path) -> None:
    """What was answered before it counts, and what came after has failed by class; the probe ends, and says which."""
    victim = made.engines["rounded"]

    @contextmanager
    def mortal(engine_dir: Path, *, threads: int, log: Path | None) -> Iterator[Served]:
        with serve(engine_dir, threads=threads, log=log) as served:
            threading.Thread(target=kill_when_busy, args=(served, 6), daemon=True).start()
            yield served

    config = probing(
        tmp_path,
        {"name": "closed", "mode": "closed", "concurrency": 2, "requests": 24},
        max_tokens=16,
        warmup_requests=2,
        warmup_max_requests=2,
    )
    out = tmp_path / "out"
    out.mkdir()
    began = time.monotonic()
    facts = probe.measure(config, out, [victim], mortal)
    assert time.monotonic() - began < 600
    rows = table(out, "requests")
    assert 24 == len(rows)
    assert 0 < sum(row["ok"] for row in rows) < 24
    assert {row["error"] for row in rows if not row["ok"]} <= {"broken_stream", "refused", "not_started", "5xx"}
    assert victim.name in str(facts["failed_engines"])
    assert [True] == [block["partial"] for block in table(out, "blocks")]


def kill_when_busy(served: Served, requests: int) -> None:
    """Kill the server's whole group once it has finished so many requests."""
    url = f"{served.endpoint.base_url.removesuffix('/v1')}/metrics"
    while True:
        lines = httpx.get(url, trust_env=False).text.splitlines()
        done = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:request_success_total"))
        if done >= requests:
            break
        time.sleep(0.05)
    os.killpg(served.pid or 0, signal.SIGKILL)
