"""An engine asked once more before it is promoted; here it is served by a scripted host behind a gateway."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.engine import remote
from pipelines.errors import EnvironmentProblem, EvidenceError
from pipelines.flow.store import Store
from pipelines.quantize.reference import TOKENS
from pipelines.release.answering import ask
from tests.decisions import artifact
from tests.fake_gateway import MODEL, Gateway, running, variant

IDS = np.array([[1, 2, 3, 4], [5, 1, 2, 1]], np.int32)
KEY = "ab" * 32
Make = Callable[..., Path]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Holds the windows that engines were checked on; the host gives each token the log-probability of minus its id."""
    held_out = tmp_path / "store" / "reference" / KEY[:16]
    held_out.mkdir(parents=True)
    np.savez(held_out / TOKENS, ids=IDS, logprobs=-IDS[:, 1:].astype(np.float32))
    artifact(held_out, "reference", KEY, {"base_perplexity": 9.5})
    return Store(tmp_path / "store")


@pytest.fixture
def make(tmp_path: Path, store: Store) -> Iterator[Make]:
    """Start a gateway that says `reply`, and write the engine that it serves."""
    with ExitStack() as stack:

        def made(reply: str, text_only: bool = False, **given: Any) -> Path:
            gateway = stack.enter_context(running(Gateway(text_only=text_only), tmp_path, "yes"))
            known = {"url": gateway.url, "model": MODEL, "revision": "1", "max_length": 128, "timeout_s": 1}
            able = {"capabilities": {"token_prompts": False, "prompt_logprobs": False}} if text_only else {}
            out = store.path("engine", "cd" * 32)
            out.mkdir(parents=True)
            config = remote.RemoteConfig.model_validate(known | able | given)
            remote.build(config, out, variant=variant(tmp_path / "variant"), reference=store.path("reference", KEY))
            said = stack.enter_context(running(Gateway(text_only=text_only), tmp_path, reply))
            record = (out / remote.RECORD).read_text()
            (out / remote.RECORD).write_text(record.replace(gateway.url, said.url))
            return artifact(out, "engine", "cd" * 32, inputs={"reference": KEY})

        yield made


def test_an_engine_that_answers_as_its_variant_would_is_said_to(make: Make, store: Store) -> None:
    """What it said, and the perplexity of both: tokens 2, 3 and 4 at log-probability minus their id, e to the 3."""
    told = ask(make("yes"), store, ())
    assert "tokens in" in told and ": 'yes'; " in told
    assert told.endswith("perplexity 20.09 on 4 held-out tokens, its variant 20.09")


def test_a_server_of_texts_that_scores_nothing_is_only_heard(make: Make, store: Store) -> None:
    """The same windows go out as text; that its predictions were not compared is said."""
    told = ask(make("yes", text_only=True), store, ())
    assert ": 'yes'; it scores no prompts, so its predictions were not compared" in told


@pytest.mark.parametrize("reply", ["", "  \n"])
def test_an_engine_that_has_nothing_to_say_is_refused(make: Make, store: Store, reply: str) -> None:
    """It ends every text at once, or writes blanks."""
    with pytest.raises(EvidenceError, match=r"does not answer: .*nothing but empty answers to 2 prompts"):
        ask(make(reply), store, ())


def test_an_engine_to_which_held_out_text_is_noise_is_refused(make: Make, store: Store) -> None:
    """The variant gave every token e to the -2; of the same tokens the server makes a perplexity of e to the 3."""
    engine = make("yes")
    held_out = store.path("reference", KEY)
    np.savez(held_out / TOKENS, ids=IDS, logprobs=np.full((2, 3), -2.0, np.float32))
    with pytest.raises(EvidenceError, match=r"noise to it: perplexity 20\.09 on 4 tokens, its variant 7\.389"):
        ask(engine, store, ())


def test_a_server_that_is_gone_is_refused_within_its_time(make: Make, store: Store) -> None:
    """Its address answers nothing; the time is the engine's own, a second."""
    engine = make("yes")
    path = engine / remote.RECORD
    path.write_text(path.read_text().replace("127.0.0.1:", "127.0.0.1:1/"))
    with pytest.raises(EvidenceError, match="not promoted, it does not answer"):
        ask(engine, store, ())


def test_where_an_engine_cannot_run_nothing_is_known(make: Make, store: Store) -> None:
    """The key to its server is not in this environment: that is this machine's, not the engine's."""
    engine = make("yes")
    path = engine / remote.RECORD
    path.write_text(path.read_text().replace('"api_key_env": ""', '"api_key_env": "QUANTGATE_NO_SUCH_KEY"'))
    with pytest.raises(EnvironmentProblem, match=r"cannot be seen here: .*QUANTGATE_NO_SUCH_KEY"):
        ask(engine, store, ())


def test_what_it_was_checked_on_has_to_be_there(make: Make, store: Store) -> None:
    """Without the held-out windows nothing is asked; the engine has to be built again."""
    engine = make("yes")
    shutil.rmtree(store.path("reference", KEY))
    with pytest.raises(EvidenceError, match="held-out text it was checked on is gone"):
        ask(engine, store, ())
