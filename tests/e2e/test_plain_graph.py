"""Plain ONNX graphs of tiny models: what transformers computes, in standard operators, with and without cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.engine.plain_graph import MODEL, PlainGraphConfig, run
from pipelines.engine.plain_nodes import ARCHITECTURES
from pipelines.errors import StageFailed
from pipelines.flow.store import Fact
from tests import tiny_models
from tests.tiny_models import AWQ, FP8, GPTQ_SCATTERED, WIDE

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]  # the libraries' own

Graph = Callable[..., tuple[Path, dict[str, Fact]]]


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """Write a random model."""
    return lambda *given, **shape: tiny_models.write(
        tmp_path / f"model-{len(list(tmp_path.iterdir()))}", *given, **shape
    )


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    """Make the graph of a variant, held to it on 40 random tokens."""
    reference = tmp_path / "reference"
    reference.mkdir()
    ids = np.random.default_rng(3).integers(0, 96, (1, 40), dtype=np.int32)
    np.savez(reference / "tokens.npz", ids=ids, logprobs=np.zeros((1, 39), np.float32))

    def make(variant: Path, **config: Any) -> tuple[Path, dict[str, Fact]]:
        out = tmp_path / f"graph-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        return out, run(PlainGraphConfig.model_validate(config), out, variant=variant, reference=reference)

    return make


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_computes_what_transformers_does(
    architecture: str, tiny: Callable[..., Path], graph: Graph
) -> None:
    """Logits within 1e-4 in one call and in three, from operators of ONNX alone."""
    import onnx

    out, facts = graph(tiny(architecture), dtype="float16")
    assert float(facts["max_abs_dlogit"] or 1) < 1e-4
    nodes = onnx.load(str(out / MODEL), load_external_data=False).graph.node
    assert {""} == {node.domain for node in nodes}
    assert {1} == {len(node.output) for node in nodes if node.op_type == "Attention"}
    assert 2 == sum(node.op_type == "Attention" for node in nodes)


def test_a_table_that_is_input_and_head_is_stored_once(tiny: Callable[..., Path], graph: Graph) -> None:
    """A tied head is the same constant, turned when it is used."""
    _, facts = graph(tiny(tie_word_embeddings=True, vocab_size=4096))
    _, apart = graph(tiny(tie_word_embeddings=False, vocab_size=4096))
    assert float(facts["max_abs_dlogit"] or 1) < 1e-4
    saved = int(apart["size_bytes"] or 0) - int(facts["size_bytes"] or 0)
    assert saved == pytest.approx(4096 * WIDE * 2, rel=0.02)


def test_columns_out_of_order_are_gathered(tiny: Callable[..., Path], graph: Graph) -> None:
    """GPTQ with activation order: float16 scales in a bfloat16 graph are kept as they are, and cast afterwards."""
    out, facts = graph(tiny(layout=GPTQ_SCATTERED), dtype="bfloat16")
    assert (14, "int4 x bfloat16", True) == (facts["quantized_modules"], facts["precision"], facts["weights_equal"])
    assert float(facts["max_abs_dlogit"] or 1) < 1e-4
    assert {"INT4": 14, "FLOAT16": 14} == constants_of(out, "codes", "scales")


def constants_of(out: Path, *parts: str) -> dict[str, int]:
    """Count the constants with these last names by their type."""
    import onnx_ir as ir

    held = ir.load(str(out / MODEL)).graph.initializers
    kinds = [str(v.dtype) for name, v in held.items() if name.rpartition("/")[2] in parts]
    return {kind: kinds.count(kind) for kind in kinds}


def test_a_factor_of_the_inputs_is_multiplied_first(tiny: Callable[..., Path], graph: Graph) -> None:
    """AWQ as ModelOpt stores it: codes of the scaled weight, and the factor in front of the product."""
    _, facts = graph(tiny(layout=AWQ))
    assert (14, True) == (facts["quantized_modules"], facts["weights_equal"])
    assert float(facts["max_abs_dlogit"] or 1) < 1e-4


def test_inputs_are_rounded_where_the_checkpoint_says_so(tiny: Callable[..., Path], graph: Graph) -> None:
    """FP8 with fixed scales: QuantizeLinear before each product; it predicts what the checkpoint rounded does."""
    out, facts = graph(tiny(layout=FP8))
    assert (14, "float8 x float8", "") == (facts["rounded_modules"], facts["precision"], facts["native_note"])
    assert float(facts["kl_mean"] or 1) < 1e-3
    assert {"FLOAT8E4M3FN": 28} == constants_of(out, "codes", "input_zero")


def test_a_changed_code_fails_the_graph(
    tiny: Callable[..., Path], graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is read back and compared with the variant, bit by bit."""
    from pipelines.engine import plain_codes

    real = plain_codes._integers

    def wrong(layer: Any) -> Any:
        held = real(layer)
        held.codes[0, 0] = 1 if held.codes[0, 0] != 1 else 2
        return held

    monkeypatch.setattr(plain_codes, "_integers", wrong)
    with pytest.raises(StageFailed, match="14 tensors differ from the variant's"):
        graph(tiny(layout=AWQ))
