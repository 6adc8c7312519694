"""What serving takes in memory, against figures known from elsewhere."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.engine.memory import GIB, WIDTHS, Storage, footprint, token_bytes, too_large, weight_bytes, weights_of
from pipelines.engine.pairing import Longest, Pairing, Workload
from pipelines.engine.table import TARGETS
from pipelines.flow.stage import resolve
from pipelines.intake.checkpoint import _kv_width
from pipelines.quantize.scheme import parse
from pipelines.verbs.memory import document, show

LLAMA_3_8B = {
    "layers": 32, "kv_width": 2 * 8 * 128, "parameters": 8_030_261_248, "scheme": "BF16",
}  # fmt: skip
ASKED = Workload(request=Longest(8192, "the probe"), in_flight=16)


@pytest.mark.parametrize(
    ("model", "layers", "each", "bytes_per_token"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, 32, 2, 131_072),  # Llama 3 8B
        ({"num_attention_heads": 32, "hidden_size": 4096}, 32, 2, 524_288),  # Llama 2 7B: no grouped queries
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}, 30, 4, 46_080),  # SmolLM2, float32
        # Qwen3 0.6B: 16 heads of 128 on 1024 hidden, so the heads' size is not hidden / heads
        ({"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024, "head_dim": 128}, 28, 2, 114_688),
        # DeepSeek-V3: a latent of 512 and a rotary part of 64 in each of 61 layers
        (
            {"num_attention_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            61, 2, 70_272,
        ),
        ({"hidden_size": 4096}, 32, 2, None),
    ],
)  # fmt: skip
def test_keys_and_values_of_a_token(model: dict[str, int], layers: int, each: float, bytes_per_token: int) -> None:
    """Of models whose figures are published: keys and values of every layer."""
    assert bytes_per_token == token_bytes(Pairing({"layers": layers, "kv_width": _kv_width(model) or None}), each)


def test_a_format_with_scales_takes_more_than_its_bits() -> None:
    """llama.cpp's q8_0 keeps 32 numbers in 34 bytes; FP8 halves two bytes."""
    assert 139_264 == token_bytes(Pairing({"layers": 32, "kv_width": 4096}), WIDTHS["q8_0"])
    assert 65_536 == token_bytes(Pairing(LLAMA_3_8B), WIDTHS["fp8"])


def test_weights_follow_their_scheme() -> None:
    """One layer of 128 x 128 in 4 bits with groups of 64 is 8192 bytes of codes and 512 of scales; 1000 others 2000."""
    made = Pairing({"parameters": 128 * 128 + 1000, "scheme": "W4A16_G64"}, {"a.q_proj": (128, 128)})
    assert 8192 + 512 + 2000 == weights_of(made, Storage("gpu"))
    assert (128 * 128 + 1000) * 2 == weight_bytes(128 * 128 + 1000, 128 * 128, None)
    assert 8192 + 1024 + 4000 == weights_of(made, Storage("host", other=4, scale=4))


def test_floats_that_an_engine_emulates_are_kept_wide() -> None:
    """FP8 weights are a byte each, unless the engine unpacks them to float32."""
    fp8 = parse("W8A8_FP8_DYNAMIC")
    assert 1000 == weight_bytes(1000, 1000, fp8)
    assert 4000 == weight_bytes(1000, 1000, fp8, other=4, floats=4)


def test_traffic_takes_the_longest_request_as_often_as_requests_are_under_way() -> None:
    """16 requests of 8,192 tokens of Llama 3 8B take 16 GiB, and its weights in 16 bits 15: more than 24."""
    pairing = Pairing(LLAMA_3_8B, device={"gpu_memory_gib": "24.0", "memory_gib": "64"}, workload=ASKED)
    found = footprint(pairing, Storage("gpu"))
    assert (131_072, 16, 8192, 16 * GIB) == (found.token, found.requests, found.tokens, found.cache)
    assert 2 * 8_030_261_248 == found.weights
    assert found.fits is False and footprint(pairing, Storage("host")).fits is True
    assert [] == list(too_large(found, "engine.tp", 1)), "one request fits, so the rest only waits"


def test_an_engine_may_take_fewer_at_once_or_share_or_keep_room() -> None:
    """Slots bound what is under way, ranks share it, and a cache of a given size is there whatever is asked."""
    pairing = Pairing(LLAMA_3_8B, device={"gpu_memory_gib": "24.0"}, workload=ASKED)
    assert 4 * GIB == footprint(pairing, Storage("gpu", slots=4)).cache
    shared = footprint(pairing, Storage("gpu", ranks=2))
    assert (2 * 8_030_261_248 + 16 * GIB) // 2 == shared.each and shared.fits
    kept = footprint(pairing, Storage("gpu", reserved=3 * GIB, ranks=2))
    assert (6 * GIB, (2 * 8_030_261_248 + 6 * GIB) // 2) == (kept.cache, kept.each)
    assert 80 * GIB == footprint(pairing, Storage("gpu", device_gib=80)).device


def test_what_cannot_answer_one_request_is_a_problem() -> None:
    """Weights that do not fit, or leave no room for one request; not what is unknown."""
    small = Pairing(LLAMA_3_8B, device={"gpu_memory_gib": "15.5"}, workload=ASKED)
    (problem,) = too_large(footprint(small, Storage("gpu")), "engine.tp", 1, "more ranks")
    assert "engine.tp=1: weights take about 15.0 GiB and one request 1.0; a GPU has 15.5 GiB (more ranks)" == str(
        problem
    )
    assert [] == list(too_large(footprint(small, Storage("gpu", ranks=2)), "engine.tp", 2))
    assert [] == list(too_large(footprint(Pairing(), Storage("gpu")), "engine.tp", 1))
    assert footprint(Pairing(), Storage("host")).fits is None


@pytest.mark.parametrize("name", [row.name for row in TARGETS.values() if row.stores])
def test_every_target_that_keeps_weights_here_says_how(name: str) -> None:
    """Each row's function can be imported; where a server is not ours or there is none, nothing is claimed."""
    assert callable(resolve(TARGETS[name].stores))
    assert {"remote", "tensorrt_rtx"} == {row.name for row in TARGETS.values() if not row.stores}


@pytest.mark.parametrize(
    ("target", "given", "place", "cache"),
    [
        ("ort_genai", {}, "host", 46_080 * 100 * 4),
        ("vllm", {"kv_cache_gib": 2}, "host", 2 * GIB),
        ("vllm", {"device": "cuda"}, "gpu", 23_040 * 100 * 4),
        ("vllm", {"device": "cuda", "kv_cache_dtype": "fp8", "max_num_seqs": 2}, "gpu", 11_520 * 100 * 2),
        ("llama_cpp", {"parallel": 2, "max_length": 1024}, "host", 23_040 * 1024 * 2),
        ("trtllm_pytorch", {"release": "1.2.1", "flags": ""}, "gpu", 23_040 * 100 * 4),
    ],
)
def test_targets_keep_their_caches_their_own_way(target: str, given: dict[str, Any], place: str, cache: int) -> None:
    """The small model's token is 23,040 bytes in 16 bits: twice that here, half in FP8, or room made beforehand."""
    row = TARGETS[target]
    config = resolve(row.config_type).model_validate(given)  # type: ignore[attr-defined]
    facts = {"layers": 30, "kv_width": 384, "parameters": 134_515_008, "scheme": "BF16"}
    found = row.footprint(config, Pairing(facts, workload=Workload(request=Longest(100, "x"), in_flight=4)))
    assert found is not None
    assert (place, cache) == (found.place, found.cache)


@pytest.mark.parametrize("target", ["vllm", "trtllm_pytorch"])
def test_a_scheme_that_stores_its_cache_in_fp8_halves_it(target: str) -> None:
    """Without a setting of the engine, the checkpoint's own format counts."""
    row, given = TARGETS[target], {"vllm": {"device": "cuda"}}.get(target, {})
    config = resolve(row.config_type).model_validate(given)  # type: ignore[attr-defined]
    facts = {"layers": 30, "kv_width": 384, "scheme": "W8A8_FP8_DYNAMIC_KVFP8"}
    found = row.footprint(config, Pairing(facts))
    assert found is not None and 11_520 == found.token


def test_the_width_of_a_cache_is_read_from_a_checkpoint(base_checkpoint: Path) -> None:
    """The small real model: 3 heads of 64 numbers, keys and values."""
    assert 384 == _kv_width(json.loads((base_checkpoint / "config.json").read_text()))


def test_plan_shows_who_takes_how_much_and_warns_of_too_much(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes for machines; for people a line each, and a warning where all requests at once would not fit."""
    pairing = Pairing(LLAMA_3_8B, device={"gpu_memory_gib": "24.0", "memory_gib": "64"}, workload=ASKED)
    found = {"here": footprint(pairing, Storage("host")), "there": footprint(pairing, Storage("gpu"))}
    told = json.loads(json.dumps(document(found)))
    assert [("here", 131_072, 16 * GIB, True), ("there", 131_072, 16 * GIB, False)] == [
        (one["candidate"], one["token"], one["cache"], one["fits"]) for one in told
    ]
    show(found)
    said = capsys.readouterr().out
    assert "16 x 8192" in said and "131,072 B" in said
    assert "warning: there may take 31.0 GiB of the 24.0 GiB there are" in said.replace("\n", " ")
    assert "warning: here" not in said
    show({})
    assert "" == capsys.readouterr().out


def test_of_very_many_plan_shows_those_that_take_most(capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred and one engines: the twenty largest and how many more; each of them where every line is asked for."""
    one = footprint(Pairing(LLAMA_3_8B, device={"memory_gib": "64"}, workload=ASKED), Storage("host"))
    assert one is not None
    found = {f"engine-{n:03}": replace(one, weights=one.weights + n * GIB) for n in range(101)}
    show(found, every=False)
    said = capsys.readouterr().out
    assert [f"engine-{n:03}" for n in range(100, 80, -1)] == re.findall(r"^ (engine-\d+)", said, re.MULTILINE)
    assert "and 81 that take no more (--all lists each)" in said
    show(found)
    assert 101 == len(re.findall(r"^ engine-\d+", capsys.readouterr().out, re.MULTILINE))
