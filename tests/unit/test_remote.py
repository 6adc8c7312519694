"""What is said against a remote server before anything is sent: its address, its key, lengths, and whose it is."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines import entries
from pipelines.decide.stage import doubts
from pipelines.engine.address import headers, key_problems, shown, url_problems
from pipelines.engine.pairing import Longest, Pairing, Workload
from pipelines.engine.remote import NOT_OURS, RemoteConfig, preflight
from pipelines.engine.wording import Wording
from pipelines.errors import EndpointError, Problem
from pipelines.flow.placement import Placement
from pipelines.flow.toolchain import CURRENT
from tests.byte_model import byte_tokenizer

SECRET = "sk-live-0123456789"


def config(**given: Any) -> RemoteConfig:
    known = {"url": "https://host/v1", "model": "m", "revision": "1", "max_length": 2048}
    return RemoteConfig.model_validate(known | given)


@pytest.mark.parametrize(
    "url",
    [
        "https://host/v1",
        "http://127.0.0.1:8000/v1",
        "https://gateway.acme.io/openai/v1/",
        "http://[::1]:80/v1",
        "https://host",
    ],
)
def test_an_address_of_an_api_is_taken(url: str) -> None:
    """Hosts, ports and paths of any kind."""
    assert [] == list(url_problems(url, "engine.url"))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "missing"),
        ("host:8000/v1", "neither http nor https"),
        ("ftp://host/v1", "neither http nor https"),
        ("https:///v1", "names no host"),
        ("https://host:99999/v1", "is no URL"),
        ("https://[::1/v1", "is no URL"),
        ("https://host:0/v1", "port 0"),
        ("https://host/v1?version=3", "a query or a fragment"),
        ("https://ho st/v1", "a space"),
        (f"https://me:{SECRET}@host/v1", "credentials"),
        (f"https://host/v1?key={SECRET}", "a query"),
        ("https://host/v1/chat/completions", "e.g. https://host/v1"),
        ("https://host/v1/completions/", "e.g. https://host/v1"),
        ("https://host/v1/models", "e.g. https://host/v1"),
    ],
)
def test_an_address_that_is_none_is_told(url: str, said: str) -> None:
    """Each with its reason; what may be secret in it is not repeated."""
    told = "\n".join(map(str, url_problems(url, "engine.url")))
    assert said in told
    assert SECRET not in told


def test_a_url_is_shown_without_its_secrets() -> None:
    """Neither user, nor password, nor query."""
    assert "https://***@host/v1?***" == shown(f"https://me:{SECRET}@host/v1?key={SECRET}")
    assert "https://host:8000/v1" == shown("https://host:8000/v1")


def test_a_key_is_named_not_given() -> None:
    """A variable that is set gives a header; unset, or with a line end in it, or no name at all, is a problem."""
    assert [] == list(key_problems("", "k", {})) == list(key_problems("ACME_KEY", "k", {"ACME_KEY": SECRET}))
    for variable, environment, said in (
        ("ACME_KEY", {}, "no such environment variable is set"),
        ("ACME_KEY", {"ACME_KEY": f"{SECRET}\n"}, "what no header may"),
        (SECRET, {}, "is no name of an environment variable"),
    ):
        (problem,) = key_problems(variable, "k", environment)
        assert said in str(problem)
        assert SECRET not in str(problem)


def test_a_key_goes_as_openais_clients_send_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bearer's token; without a name, nothing."""
    monkeypatch.setenv("ACME_KEY", SECRET)
    assert {"Authorization": f"Bearer {SECRET}"} == headers("ACME_KEY")
    assert {} == headers("")


def test_lengths_are_told_before_anything_is_sent() -> None:
    """2,049 tokens do not fit 2,048; and no deployment has more positions than its model."""
    asked = Workload(request=Longest(2049, "the probe"))
    (problem,) = preflight(config(), Pairing(workload=asked))
    assert "engine.max_length=2048: the longest request, of the probe, takes 2049 tokens" in str(problem)
    (problem,) = preflight(config(), Pairing({"max_positions": 1024}))
    assert "the model knows 1024 positions" in str(problem)
    assert [] == preflight(config(), Pairing({"max_positions": 8192}, workload=Workload(request=Longest(2048, "x"))))


def test_eval_sets_that_score_prompts_need_log_probabilities() -> None:
    """Declared absent, they are a problem now; unknown, they are asked for when it is built."""
    asked = Pairing(workload=Workload(scored=("passage_qa",)))
    assert [] == preflight(config(), asked)
    (problem,) = preflight(config(capabilities={"prompt_logprobs": False}), asked)
    assert "passage_qa ask for log-probabilities" in str(problem)


def engines(given: dict[str, Any]) -> tuple[list[entries.Engine], list[Problem]]:
    problems: list[Problem] = []
    known = {"url": "https://host/v1", "model": "m", "revision": "1", "max_length": 2048, "target": "remote"}
    placement = Placement({CURRENT.name: CURRENT}, {})
    return entries.engines({"far": known | given}, ["baseline", "awq"], placement, problems), problems


def test_a_remote_engine_serves_one_variant() -> None:
    """It is named; none, two or an unknown one is an error with the key to change."""
    found, problems = engines({"variants": ["awq"]})
    assert [] == problems
    assert [False, True] == [found[0].takes(name) for name in ("baseline", "awq")]
    for given, said in (
        ([], "is one variant"),
        (["baseline", "awq"], "is one variant"),
        (["awk"], "did you mean 'awq'"),
    ):
        _, problems = engines({"variants": given})
        assert any("engine.far.variants" == p.key and said in str(p) for p in problems)


def test_a_variant_that_asks_for_an_engine_of_another_is_told() -> None:
    """`engines` of a variant and `variants` of an engine must agree."""
    found, problems = engines({"variants": ["awq"]})
    given = {"baseline": {"quantizer": "baseline", "engines": ["far"]}, "awq": {"quantizer": "baseline"}}
    placed = entries.variants(given, found, ["far"], Placement({CURRENT.name: CURRENT}, {}), problems)
    assert ["variant.baseline.engines='far': engine.far.variants has only awq"] == [str(p) for p in problems]
    assert [(), ("far",)] == [one.engines for one in placed]


def test_text_is_sent_only_where_it_is_read_as_the_same_ids() -> None:
    """Whole characters go and come back; half of one does not, nor what lacks the token that a server puts first."""
    tokenizer = byte_tokenizer()
    ids = list(tokenizer.encode("é 漢").ids)
    assert "é 漢" == Wording(tokenizer).text_of(ids)
    with pytest.raises(EndpointError, match="no text is read as these 1 token ids"):
        Wording(tokenizer).text_of(ids[:1])
    assert "é 漢" == Wording(tokenizer, begins=0).text_of([0, *ids])
    with pytest.raises(EndpointError, match="begins every text with token 0"):
        Wording(tokenizer, begins=0).text_of(ids)


HERE, THERE = {"native": True, "native_note": ""}, {"native": True, "native_note": "", "served_on": "1x H100, eu-1"}


@pytest.mark.parametrize(
    ("reference", "candidate", "said"),
    [
        (HERE, HERE, []),
        (THERE, THERE, []),
        (HERE, THERE, ["a is served on this machine; b is served on 1x H100, eu-1"]),
        (THERE, {**THERE, "served_on": "1x L4"}, ["a is served on 1x H100, eu-1; b is served on 1x L4"]),
        (HERE, {"native": False, "native_note": NOT_OURS, "served_on": "not stated"}, [f"b is not ours ({NOT_OURS})"]),
        (HERE, {"native": False, "native_note": "fp32"}, ["b is emulated (fp32)"]),
    ],
)
def test_speeds_are_compared_only_on_one_device(
    reference: dict[str, Any], candidate: dict[str, Any], said: list[str]
) -> None:
    """A remote against this machine is no evidence, whatever is stated; two on the same stated device are."""
    assert said == doubts({"a": reference, "b": candidate})
