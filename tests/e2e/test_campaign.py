"""The main job on the real model, as a user runs it: killed half way, run again, looked at, promoted, collected."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pipelines.decide.model import Decision
from pipelines.flow.store import manifest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]
QUANTGATE = [sys.executable, "-c", "from pipelines.cli import entry; entry()"]
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Place:
    """A campaign's own store, database and ledger."""

    root: Path
    checkpoint: Path

    def call(self, verb: str, *more: str, **env: str) -> tuple[int, dict[str, Any], str]:
        """Run a verb of this campaign; its exit code, document and stderr."""
        argv = [*QUANTGATE, verb, *self.overrides, *more, "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **env})
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr

    @property
    def overrides(self) -> list[str]:
        return [
            "experiment=smoke",
            "items_per_set=5",
            "evalset=[support_intent,passage_qa]",
            f"checkpoint.source={self.checkpoint}",
            "checkpoint.licence=Apache-2.0",
            f"paths.store={self.root / 'store'}",
            f"paths.ledger={self.root / 'ledger.jsonl'}",
            f"tracking.uri=sqlite:///{self.root / 'mlflow.db'}",
        ]


@pytest.fixture(scope="module")
def place(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("campaign"), base_checkpoint)


@pytest.fixture(scope="module")
def finished(place: Place) -> tuple[int, dict[str, Any]]:
    """The campaign, after its parent was killed in the middle of a stage and the same command was given again."""
    argv = [*QUANTGATE, "run", *place.overrides]
    parent = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not list((place.root / "store" / ".tmp").glob("reference-*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    code, document, stderr = place.call("run")
    assert code in (0, 3, 4), stderr
    return code, document


def decision(document: dict[str, Any]) -> Decision:
    return Decision.model_validate_json(Path(document["decision"]).read_bytes())


def test_a_killed_run_goes_on_where_it_stopped(finished: tuple[int, dict[str, Any]]) -> None:
    """What was made before the kill is reused, nothing failed, and the exit code is the outcome's."""
    code, document = finished
    assert document["steps"]["reused"] >= 2
    assert 0 == document["steps"]["failed"]
    assert {"promote": 0, "hold": 3, "reject": 4}[document["outcome"]] == code


def test_every_candidate_has_scores_latency_and_a_verdict(finished: tuple[int, dict[str, Any]]) -> None:
    """The decision holds both candidates with all evidence, and the engine agrees with its checkpoint."""
    made = decision(finished[1])
    assert ["baseline", "rtn_w4a16_g64"] == [c.label for c in made.candidates]
    for one in made.candidates:
        assert {"support_intent", "passage_qa"} == set(one.scores)
        assert one.latency
        assert one.throughput
        assert one.engine_kl is not None
        assert one.engine_kl < 1e-6
    variant = made.candidates[1]
    assert {"support_intent", "passage_qa"} == {v.eval_set for v in variant.verdicts}
    assert "invalid" not in {v.verdict for v in variant.verdicts}
    assert variant.perplexity is not None
    assert made.candidates[0].perplexity is not None
    assert variant.perplexity > made.candidates[0].perplexity


def test_everything_made_from_the_base_says_what_it_may_be_used_under(
    place: Place, finished: tuple[int, dict[str, Any]]
) -> None:
    """Stated once, it is in the manifest of every artifact, in the decision and in the report."""
    said = {"licence": "Apache-2.0", "licence_source": "stated"}
    kinds = ("checkpoint", "variant", "reference", "engine", "scores", "latency", "decision", "report")
    for kind in kinds:
        for made in (place.root / "store" / kind).iterdir():
            assert said == {name: manifest(made).facts.get(name) for name in said}, made
    assert ("Apache-2.0", "stated") == tuple(decision(finished[1]).base[n] for n in ("licence", "licence source"))
    assert "Apache-2.0" in Path(finished[1]["report"]).read_text()


def test_a_second_run_makes_nothing(place: Place, finished: tuple[int, dict[str, Any]]) -> None:
    """Everything is reused and the answer is the same."""
    code, document, _ = place.call("run")
    assert finished[0] == code
    assert 0 == document["steps"]["made"]
    assert finished[1]["decision"] == document["decision"]


def test_the_report_stands_alone(finished: tuple[int, dict[str, Any]]) -> None:
    """One HTML file that fetches nothing and names both candidates."""
    html = Path(finished[1]["report"]).read_text()
    assert "rtn_w4a16_g64" in html
    assert "<script src" not in html
    assert 'href="http' not in html


def test_verify_finds_a_changed_byte(place: Place, finished: tuple[int, dict[str, Any]]) -> None:
    """An untouched store verifies; one changed file is named with exit code 7."""
    assert 0 == place.call("verify")[0]
    victim = next((place.root / "store" / "scores").glob("*/items.parquet"))
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    code, document, _ = place.call("verify")
    victim.write_bytes(whole)
    assert 7 == code
    assert [["items.parquet"]] == list(document["differing"].values())


def test_only_a_decision_to_promote_promotes_unless_a_person_says_why(
    place: Place, finished: tuple[int, dict[str, Any]]
) -> None:
    """Without one, promotion is refused; with a reason and an actor it is done and written down."""
    if finished[1]["outcome"] != "promote":
        code, document, _ = place.call("promote")
        assert 7 == code
        assert "not promoted" in document["message"]
    code, document, _ = place.call(
        "promote", "--override", "drill", "--actor", "tester", "--candidate", "rtn_w4a16_g64"
    )
    assert (0, True, True) == (code, document["changed"], document["overridden"])
    entries = [json.loads(line) for line in (place.root / "ledger.jsonl").read_text().splitlines()]
    assert ["intent", "alias_set", "committed"] == [e["state"] for e in entries]
    assert {("tester", "drill")} == {(e["change"]["actor"], e["change"]["override_reason"]) for e in entries}
    told = entries[-1]["change"]["evidence"]
    assert "held-out tokens, its variant" in told["answered"] and told["run_id"] and told["report_uri"]
    code, document, _ = place.call("verify-ledger")
    assert (0, 1, []) == (code, document["promotions"], document["faults"])


def test_the_champion_is_bundled_unpacked_and_served(
    place: Place, finished: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    """What was packed verifies elsewhere, and its own script serves a model that an OpenAI client talks to."""
    if not (place.root / "ledger.jsonl").exists():
        place.call("promote", "--override", "drill", "--actor", "tester", "--candidate", "rtn_w4a16_g64")
    code, document, _ = place.call("bundle", "--out", str(tmp_path / "champion.tar"))
    assert (0, True, "rtn_w4a16_g64") == (code, document["promoted"], document["candidate"])
    with tarfile.open(tmp_path / "champion.tar") as tar:
        tar.extractall(tmp_path / "elsewhere", filter="data")
    where = tmp_path / "elsewhere" / "champion"
    subprocess.run(["sha256sum", "--quiet", "--strict", "-c", "SHA256SUMS"], cwd=where, check=True)
    assert decision(finished[1]) == Decision.model_validate_json((where / "evidence" / "decision.json").read_bytes())
    with served(where / "serve.sh", tmp_path / "log") as client:
        (model,) = client.models.list().data
        answer = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
        )
    assert document["model_id"] == model.id
    assert answer.choices[0].message.content and answer.usage and 0 < answer.usage.completion_tokens <= 8


@contextmanager
def served(script: Path, log: Path) -> Iterator[openai.OpenAI]:
    """Run a bundle's script until the block ends; a client of it, once it is healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "SERVE_PORT": str(port), "SERVE_THREADS": "2"}
    with log.open("wb") as out:
        server = subprocess.Popen([script], env=env, cwd="/", stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success:
                    break
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        http = httpx.Client(trust_env=False)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", http_client=http) as client:
            yield client
    finally:
        server.terminate()
        server.wait(20)


def test_what_nobody_promoted_is_bundled_only_when_asked_and_says_so(
    place: Place, finished: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    """With a ledger that knows no promotion the verb is refused with exit code 7, until it is told --unpromoted."""
    ledger = f"paths.ledger={tmp_path / 'empty.jsonl'}"
    code, document, _ = place.call("bundle", ledger, "--out", str(tmp_path / "out"))
    assert (7, True) == (code, "nothing was promoted yet" in document["message"])
    more = ("--unpromoted", "--candidate", "baseline")
    code, document, _ = place.call("bundle", ledger, "--out", str(tmp_path / "out"), *more)
    assert (0, False, None) == (code, document["promoted"], document["promotion"])
    assert "NOT PROMOTED" in (tmp_path / "out" / "README.md").read_text()


def test_gc_keeps_what_the_decision_reaches(place: Place, finished: tuple[int, dict[str, Any]]) -> None:
    """Everything was made for this decision, so nothing goes."""
    code, document, _ = place.call("gc", "--dry-run")
    assert (0, []) == (code, document["removed"])


def test_a_tracking_server_that_is_away_costs_no_result(place: Place, finished: tuple[int, dict[str, Any]]) -> None:
    """The decision stands, the failed recording is told with what to do, and nothing is made again but it.

    Somebody was promoted by now, so the decision is one that knows the champion; its scores were there.
    """
    decided, before, _ = place.call("decide")
    assert "compared with on the same items" in decision(before).conditions["champion"]
    code, document, stderr = place.call("run", "tracking.uri=http://127.0.0.1:9")
    assert decided == code
    assert (0, 1) == (document["steps"]["made"], document["steps"]["failed"])
    assert "127.0.0.1:9" in stderr
    assert before["decision"] == document["decision"]
