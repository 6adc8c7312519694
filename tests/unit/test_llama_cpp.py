"""llama.cpp: what is refused before work starts, what a GGUF file says of each layer, and how the server is told."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from pipelines.engine import llama_cpp
from pipelines.engine.llama_cpp import LlamaCppConfig, Record
from pipelines.engine.llama_preflight import cache_bytes
from pipelines.engine.pairing import Longest, Pairing, Workload
from pipelines.engine.table import TARGETS
from pipelines.errors import StageFailed
from pipelines.quantize.gguf import GgufConfig
from pipelines.quantize.gguf_convert import stage
from pipelines.quantize.gguf_saved import Held, Saved, other_types, rows
from pipelines.quantize.gguf_script import cuts_as_gpt2
from pipelines.quantize.scheme import misfit_problems, parse
from pipelines.quantize.table import QUANTIZERS

DEMO = {
    "architecture": "LlamaForCausalLM", "quant_method": "gguf", "scheme": "Q8_0", "parameters": 134_515_008,
    "max_positions": 8192, "hidden_size": 576, "layers": 30, "heads": 9, "kv_heads": 3,
}  # fmt: skip
SHAPES = {"model.layers.0.self_attn.q_proj": (576, 576), "model.layers.0.mlp.down_proj": (576, 1536)}
HEAD = {"lm_head": (49152, 576)}
ROW = TARGETS["llama_cpp"]


def mixed(scheme: str = "Q4_K_M", **options: bool) -> GgufConfig:
    return GgufConfig.model_validate({"scheme": scheme, "options": options})


def saved(**types: str) -> Saved:
    names = {
        "q": "model.layers.0.self_attn.q_proj",
        "down": "model.layers.0.mlp.down_proj",
        "table": "model.embed_tokens",
    }
    return Saved({f"{names[n]}.weight": Held(t, (1, 1), 1) for n, t in types.items()}, "Q4_K_M", ())


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"architecture": "GPTBigCodeForCausalLM"}, "GPTBigCodeForCausalLM"),
        ({"quant_method": "compressed-tensors"}, "would dequantize and quantize them again"),
        ({"max_positions": 1024}, "the model knows 1024 positions"),
        ({"parameters": 70_000_000_000}, "there are 24 GiB"),
    ],
)
def test_what_would_fail_is_said_before_work_starts(facts: dict[str, str | int], said: str) -> None:
    """Each fact that an engine could not live with is one problem with its reason."""
    (problem,) = ROW.preflight(LlamaCppConfig(), Pairing(DEMO | facts, device={"memory_gib": "24"}))
    assert said in str(problem)


def test_eval_sets_that_score_prompts_are_refused_by_name() -> None:
    """The server echoes no prompt, which the plan says instead of every item being a chance answer."""
    asked = Workload(scored=("support_intent", "heldout_text"), request=Longest(400, "the probe"))
    (problem,) = ROW.preflight(LlamaCppConfig(), Pairing(DEMO, workload=asked))
    assert ("evalset", ["support_intent", "heldout_text"]) == (problem.key, problem.value)
    assert "gives no log-probabilities of prompts" in problem.message
    assert [] == ROW.preflight(LlamaCppConfig(), Pairing(DEMO, workload=Workload(request=asked.request)))
    can = llama_cpp.capabilities(Path())
    assert (False, False, "/metrics") == (can.scores_prompts, can.keeps_connections, can.metrics)


def test_a_request_must_fit_its_slot() -> None:
    """2,049 tokens do not fit 2,048."""
    (problem,) = ROW.preflight(LlamaCppConfig(), Pairing(DEMO, workload=Workload(request=Longest(2049, "the probe"))))
    assert "engine.max_length=2048: the longest request, of the probe, takes 2049 tokens" in str(problem)


def test_caches_are_counted_for_every_slot() -> None:
    """4 slots x 2,048 tokens x 30 layers x keys and values of 3 heads of 64 numbers in 2 bytes: 188,743,680 bytes."""
    assert 188_743_680 == cache_bytes(LlamaCppConfig(), Pairing(DEMO))
    assert 0 == cache_bytes(LlamaCppConfig(), Pairing({}))


def test_the_server_gets_a_slot_of_full_length_for_each_request(tmp_path: Path) -> None:
    """--ctx-size is shared by all slots, so it is their number times the length; idle caches take no memory."""
    record = Record(model_id="llama-x", max_length=1024, parallel=8, cache_type="f16", cache_prompt=False)
    (tmp_path / llama_cpp.RECORD).write_text(record.model_dump_json())
    argv, _ = llama_cpp.serve(tmp_path, 8123, 2)
    given = dict(itertools.pairwise(argv))
    assert ("llama-server", "8192", "8") == (argv[0], given["--ctx-size"], given["--parallel"])
    assert ("127.0.0.1", "8123", "2", "0") == tuple(given[k] for k in ("--host", "--port", "--threads", "--cache-ram"))
    assert {"--no-cache-prompt", "--metrics"} <= set(argv)


def test_a_layer_in_another_type_than_the_mixture_says_why() -> None:
    """576 is no multiple of 256, so llama.cpp takes Q5_0 for Q4_K; 1,536 is six times 256."""
    first, second = rows(saved(q="Q5_0", down="Q4_K"), SHAPES, mixed())
    assert ("Q5_0", 5, 32) == (first.scheme, first.bits, first.group_size)
    assert "its width of 576 is no multiple of 256" in first.reason
    assert ("Q4_K", 4, 32, "") == (second.scheme, second.bits, second.group_size, second.reason)
    assert "Q5_0 x 1" == other_types([first, second])


def test_a_head_without_a_tensor_of_its_own_is_what_the_embedding_is() -> None:
    """The shared table is the head, quantized with it."""
    (head,) = rows(saved(table="Q8_0"), HEAD, mixed("Q8_0"))
    assert ("Q8_0", "shares the embedding's tensor") == (head.scheme, head.reason)


def test_a_layer_that_fits_and_was_left_out_fails_the_variant() -> None:
    """576 is 18 blocks of 32: nothing excuses 16-bit weights there. A width of 40 does, and is told."""
    with pytest.raises(StageFailed, match="left it as it was, though Q8_0 fits"):
        list(rows(saved(q="F16"), {"model.layers.0.self_attn.q_proj": (576, 576)}, mixed("Q8_0")))
    (kept,) = rows(saved(q="F16"), {"model.layers.0.self_attn.q_proj": (576, 40)}, mixed("Q4_K_M"))
    assert ("kept", 16) == (kept.scheme, kept.bits)
    assert "no multiple of 32" in kept.reason
    with pytest.raises(StageFailed, match=r"nothing in model\.gguf holds it"):
        list(rows(saved(), SHAPES, mixed()))


def test_a_head_may_be_spared_by_name_of_the_option_only() -> None:
    """quantize_output_tensor=false excuses lm_head and no other layer."""
    one = Saved({"lm_head.weight": Held("F16", (49152, 576), 1)}, "Q8_0", ())
    (head,) = rows(one, HEAD, mixed("Q8_0", quantize_output_tensor=False))
    assert ("kept", "quantize_output_tensor is false") == (head.scheme, head.reason)
    with pytest.raises(StageFailed):
        list(rows(one, HEAD, mixed("Q8_0")))


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({"type": "ByteLevel"}, False),
        ({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}, False),
        ({"type": "Metaspace"}, True),
        (None, True),
    ],
)
def test_the_converter_is_not_left_to_guess(tmp_path: Path, rules: dict[str, object] | None, left: bool) -> None:
    """A tokenizer of bytes loses the key by which it was taken for one of words; the end token is the checkpoint's."""
    base, staged = tmp_path / "base", tmp_path / "staged"
    for path in (base, staged):
        path.mkdir()
    tokenizer = {
        "model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}}, "pre_tokenizer": rules,
        "added_tokens": [{"id": 1, "content": "<start>"}, {"id": 2, "content": "<end>"}],
    }  # fmt: skip
    files = {
        "tokenizer.json": tokenizer, "tokenizer_config.json": {"eos_token": "<start>", "x": 1},
        "config.json": {"eos_token_id": 1}, "generation_config.json": {"eos_token_id": [2, 1]},
    }  # fmt: skip
    for name, data in files.items():
        (base / name).write_text(json.dumps(data))
    stage(base, staged)
    assert left == json.loads((staged / "tokenizer.json").read_text())["model"]["byte_fallback"]
    assert {"eos_token": "<end>", "x": 1} == json.loads((staged / "tokenizer_config.json").read_text())
    assert (staged / "config.json").is_symlink()
    assert files["tokenizer.json"] == json.loads((base / "tokenizer.json").read_text())


def test_only_a_plain_rule_is_called_gpt2s(tmp_path: Path) -> None:
    """GPT-2's expression alone has that name; with anything before it, it is another rule."""
    file, said = tmp_path / "tokenizer.json", []
    for rule in (
        {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False},
        {"type": "ByteLevel", "use_regex": False},
        {"type": "ByteLevel", "use_regex": True, "add_prefix_space": True},
        {"type": "Sequence", "pretokenizers": []},
        None,
    ):
        file.write_text(json.dumps({"pre_tokenizer": rule}))
        said.append(cuts_as_gpt2(file))
    assert [True, False, False, False, False] == said


class Speaking:
    """A loaded file that writes the ids as it was converted to."""

    def __init__(self, text: str) -> None:
        self.text = text

    def detokenize(self, ids: list[int], *, special: bool) -> bytes:
        return self.text.encode()


def test_a_file_that_speaks_nonsense_is_no_engine() -> None:
    """Undecoded byte symbols are another text; spaces at its ends are none."""

    class Words:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return " Paris is"

    refuse = llama_cpp._refuse_other_words
    refuse(Speaking("Paris is"), [1, 2], Words())  # type: ignore[arg-type]
    with pytest.raises(StageFailed, match="answers would be garbled"):
        refuse(Speaking("\u0120Paris\u0120is"), [1, 2], Words())  # type: ignore[arg-type]


def test_file_types_are_schemes() -> None:
    """They are read and printed by llama.cpp's names, and only those of one type must divide every width."""
    assert ("Q4_K_M", 4) == (str(parse("q4_k_m")), parse("Q4_K_M").weight_bits)
    assert [] == misfit_problems("scheme", parse("Q4_K_M"), {"x": (8, 40)})
    (problem,) = misfit_problems("scheme", parse("Q8_0"), {"x": (8, 40)})
    assert "blocks of 32 do not divide the width of 1 layers: x (40)" in problem.message
    assert "Q4_K_M" in problem.allowed


def test_a_model_that_cannot_be_read_back_is_refused(tmp_path: Path) -> None:
    """The quantizer says so before the converter is started, with the closest it knows."""

    class Base:
        model_type = "gpt_bigcode"

    (problem,) = QUANTIZERS["gguf"].preflight(mixed(), Base())  # type: ignore[arg-type]
    assert "'gpt_bigcode' cannot be written as GGUF and read back" in problem.message
