"""What a probe's rounds send: planned once for all engines, from prompts, buckets, lengths and traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import ConfigError, InputError
from pipelines.probe import rounds, sources
from pipelines.probe.preparation import prepare
from pipelines.probe.prompts import bucket
from pipelines.probe.rounds import Round
from pipelines.probe.search import most_visits

from .probe_configs import probe_config, write_tokenizer

CLOSED: dict[str, Any] = {"name": "c", "mode": "closed", "concurrency": 2, "requests": 4}


def planned(
    tmp_path: Path, *profiles: dict[str, Any], words: tuple[int, ...] = (3, 5), **changes: object
) -> tuple[Round, ...]:
    """Plan a probe whose prompts have these many words, a token each."""
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"id": f"p{n}", "text": "w1 " * n}) + "\n" for n in words))
    config = probe_config(**({"prompts": str(file), "profiles": profiles or (CLOSED,)} | changes))
    found = sources.read(config)
    lengths = [one.tokens if one.item is None else len((one.item.text or "").split()) for one in found.wanted]
    return rounds.plan(config, found, lengths, openings=100_000)


def refused(tmp_path: Path, *profiles: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, *profiles, **changes)
    return str(caught.value)


def trace(tmp_path: Path, *lines: dict[str, Any]) -> str:
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_serials_never_repeat(tmp_path: Path) -> None:
    """Warm-up, shared prefixes and requests of all rounds have serial numbers of their own, without gaps."""
    search = {"name": "s", "mode": "search", "low": 1, "high": 4, "requests": 3, "resolution": 1, "slo": {"e2e_ms": 9}}
    shared = CLOSED | {"name": "d", "prefix": "shared", "shared_tokens": 7}
    serials: list[int] = []
    for one in planned(tmp_path, CLOSED, search, shared, rounds=3):
        serials += one.warmup
        for load in one.loads:
            serials += [] if load.prefix_serial is None else [load.prefix_serial]
            serials += load.serials
    assert serials == list(range(3 * (2 + 4 + 3 * 3 + 1 + 4)))


def test_a_search_counts_the_rates_it_may_try_and_sends_them_apart(tmp_path: Path) -> None:
    """Seven rates take three visits at most; what is sent at one has its own serials."""
    search = {"name": "s", "mode": "search", "low": 1, "high": 64, "requests": 5, "resolution": 1, "slo": {"e2e_ms": 9}}
    one = planned(tmp_path, search, rounds=1)
    load = one[0].loads[0]
    assert (len(load.arrivals), load.most) == (35, 3 * 5)
    assert most_visits(7) == 3
    parts = [load.part(phase) for phase in range(7)]
    assert [arrival for part in parts for arrival in part.arrivals] == list(load.arrivals)
    assert [serial for part in parts for serial in part.serials] == list(load.serials)


def test_a_bucket_chooses_prompts_by_all_that_is_sent(tmp_path: Path) -> None:
    """127 words and an opening token are 128; one more, or a shared prefix of one token, is the next bucket."""
    short, long = (CLOSED | {"name": name, "bucket": name} for name in ("<=128", "128-1024"))
    short["name"], long["name"] = "short", "long"
    one = planned(tmp_path, short, long, words=(127, 128), rounds=1)
    assert [{a.prompt for a in load.arrivals} for load in one[0].loads] == [{0}, {1}]
    shared = long | {"prefix": "shared", "shared_tokens": 1}
    assert {a.prompt for a in planned(tmp_path, shared, words=(127, 128), rounds=1)[0].loads[0].arrivals} == {0, 1}


def test_a_bucket_without_prompts_says_which_have_some(tmp_path: Path) -> None:
    """The key to change, and where the prompts are."""
    said = refused(tmp_path, CLOSED, CLOSED | {"name": "d", "bucket": ">8192"}, words=(3, 200))
    assert "probe.profiles.1.bucket='>8192': profile d: no prompt has this length" in said
    assert "1 in <=128, 1 in 128-1024" in said


@pytest.mark.parametrize(("tokens", "shared"), [(2, 0), (700, 0), (3000, 64)])
def test_prompts_of_one_length_are_cut_to_it(tmp_path: Path, tokens: int, shared: int) -> None:
    """Every request has just the length asked for, each prompt beginning with another text."""
    prefix = {"prefix": "shared", "shared_tokens": shared} if shared else {}
    one = planned(tmp_path, CLOSED | {"input_tokens": tokens} | prefix, rounds=1)
    made = probe_config(prompts=str(tmp_path / "p.jsonl"), profiles=[CLOSED | {"input_tokens": tokens} | prefix])
    found = sources.read(made)
    sizes = [w.tokens if w.item is None else 1 for w in found.wanted]
    assert {need.input_tokens for need in rounds.needs(one, sizes)} == {tokens}
    assert [w.texts[0] for w in found.wanted if w.item is None] == [0, 1]


def test_output_lengths_come_from_the_trace_the_profile_and_the_probe(tmp_path: Path) -> None:
    """In this order: the line's, the profile's, the probe's."""
    lines = {"timestamp": 5, "output_length": 9}, {"timestamp": 6}
    replay = {"name": "r", "mode": "replay", "trace": trace(tmp_path, *lines), "max_tokens": 4}
    one = planned(tmp_path, CLOSED, CLOSED | {"name": "d", "max_tokens": 3}, replay, rounds=1)
    assert [{a.max_tokens for a in load.arrivals} for load in one[0].loads] == [{6}, {3}, {9, 4}]


def test_a_trace_brings_its_own_prompts_and_lengths(tmp_path: Path) -> None:
    """Its times count from its first request; the rest of what it says is in the plan as it was."""
    lines = {"timestamp": 100.0, "text": "w1 w1"}, {"timestamp": 101.5, "input_length": 40}, {"timestamp": 104.0}
    replay = {"name": "r", "mode": "replay", "trace": trace(tmp_path, *lines), "speed": 2.0}
    for one in planned(tmp_path, replay, words=(3,), rounds=2):
        load = one.loads[0]
        assert [a.due_s for a in load.arrivals] == [0.0, 0.75, 2.0]
        sizes = [3, 2, 39]
        assert [rounds.input_tokens(load.profile, sizes[a.prompt]) for a in load.arrivals] == [3, 40, 4]


def test_a_trace_too_short_for_a_shared_prefix(tmp_path: Path) -> None:
    """An input length that prefix and opening token alone exceed is a problem of its own."""
    given = trace(tmp_path, {"timestamp": 1, "input_length": 8})
    replay = {"name": "r", "mode": "replay", "trace": given, "prefix": "shared", "shared_tokens": 8}
    assert "input_length is below 10" in refused(tmp_path, replay)


def test_files_with_problems_are_all_told_at_once(tmp_path: Path) -> None:
    """Prompts that do not exist, and two traces with their mistakes."""
    bad = trace(tmp_path, {"timestamp": 3}, {"timestamp": 2})
    replays = [{"name": n, "mode": "replay", "trace": t} for n, t in (("r", "/nowhere.jsonl"), ("s", bad))]
    with pytest.raises(ConfigError) as caught:
        sources.read(probe_config(prompts="/nowhere/p.jsonl", profiles=replays))
    assert [p.key for p in caught.value.problems] == [
        "probe.prompts", "probe.profiles.0.trace", "probe.profiles.1.trace, line 2"
    ]  # fmt: skip


def test_a_step_in_which_nothing_happens_is_refused(tmp_path: Path) -> None:
    """It would have no figures; the step and the round are named."""
    steps = {"name": "s", "mode": "steps", "steps": [{"rate": 9, "seconds": 9}, {"rate": 0.001, "seconds": 1}]}
    said = refused(tmp_path, steps)
    assert "probe.profiles.0.steps.1='0.001/s for 1 s': no request falls into this step in round 0" in said


def test_more_requests_than_tokens(tmp_path: Path) -> None:
    """A vocabulary of 100 ordinary tokens cannot tell 105 requests apart, and the error says what to lower."""
    with pytest.raises(ConfigError, match=r"105 requests.*100 ordinary tokens.*lower probe\.rounds"):
        engine = tmp_path / "engine"
        write_tokenizer(engine)
        (tmp_path / "p.jsonl").write_text('{"text": "w1"}')
        config = probe_config(prompts=str(tmp_path / "p.jsonl"), profiles=[CLOSED | {"requests": 33}], rounds=3)
        prepare(config, [engine])


def test_every_engine_gets_the_same(tmp_path: Path) -> None:
    """The plan is made once; engines whose tokenizers differ are refused, for it would not be the same to them."""
    engines = [tmp_path / "a", tmp_path / "b"]
    for engine in engines:
        write_tokenizer(engine)
    (tmp_path / "p.jsonl").write_text('{"text": "w1 w2"}')
    config = probe_config(prompts=str(tmp_path / "p.jsonl"))
    assert prepare(config, engines) == prepare(config, engines[:1]) == prepare(config, engines[1:])
    other = (engines[1] / "tokenizer.json").read_text().replace('"w2"', '"x2"')
    (engines[1] / "tokenizer.json").write_text(other)
    with pytest.raises(InputError, match="engines a and b tokenize the prompts differently"):
        prepare(config, engines)


def test_warm_up_asks_what_will_be_asked(tmp_path: Path) -> None:
    """Prompts that no profile takes, for their length, warm nothing up."""
    one = planned(tmp_path, CLOSED | {"bucket": "128-1024"}, words=(3, 200, 300), rounds=1)
    assert set(one[0].warmup_prompts) == {1, 2}
    assert bucket(201) == "128-1024"
